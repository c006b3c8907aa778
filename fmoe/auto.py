"""`auto`: a function that is captured, planned and compiled when it is called, and keeps what it made."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ._errors import SpecError
from ._recent import Recent
from .functional.combine import combine
from .functional.dispatch import dispatch
from .functional.experts import expert_apply
from .functional.gate import gate
from .functional.moe import moe
from .functional.tokens import Tokens
from .ops.processes import agree, check_world, this_rank
from .sharding import planner
from .sharding.plan import Plan
from .sharding.profile import Profile
from .sharding.spec import ShardingSpec
from .signature import Signature, plain_signature
from .stages import Compiled, Planned, Traced, plan_of, planner_of, slots_of, trace
from .text import explanation_text
from .trace import Call, runs_under_spec
from .values import Aux, MoEParams, RouterParams, Routing

_AGREED_AT_ONCE = 16


class Auto:
    """A function that runs under a spec's plan: see `auto`."""

    def __init__(self, fn: Callable[..., Any], spec: ShardingSpec, profile: Profile | None = None):
        self.fn, self.spec, self.profile = fn, spec, profile
        self._traced: Recent[Traced] = Recent()
        self._compiled: Recent[Compiled] = Recent()
        self._agreed: dict[int, list[int]] = {}
        self._called: Recent[Compiled] = Recent()
        self._state: planner.State | None = None
        self._planned_for: Any = None  # the layers that the state is about
        self._tokens = 0  # this rank's T in the last call
        self._seen = 0.0  # the largest T of a rank, lately
        self._began: float | None = None  # of the step that runs; None where it is not one to learn from
        self._ran = False  # whether there was a call since the last update

    def use(self, plan: Plan | str | Mapping[str, Plan | str] | None) -> None:
        """Runs under another plan from the next call on, or lets the planner choose again (None).

        Every rank must choose the same.

        Raises:
            PlanError: if the plan is not legal on the mesh.
        """
        self.spec = self.spec.replace(plan=plan)
        self._began = None
        self._called.clear()

    def planned(self, *args: Any, **kwargs: Any) -> Planned:
        """The program that a call with these arguments runs; every rank must ask."""
        planned = self._for(Signature.of((args, kwargs)), (args, kwargs)).planned
        (most,) = agree([max((layer.tokens for layer in planned.traced.layers), default=0)], "planned")
        return replace(planned, tokens=self.spec.max_tokens or most)

    def update(self, aux: Any, *, seconds: float | None = None) -> None:
        """Learns from the step that ended, and sets the plans of the next ones. Once per optimizer step.

        Every rank must call. Choices are added up over the ranks, and the time is the slowest rank's. A step in
        which a program was made first is not learned from. Does nothing where the plan is fixed. One `auto` should
        hold all layers of a step, as the time is the whole step's. A function under torch.compile must be called
        once outside of it after the plan has changed.

        Args:
            aux: what the function returned: any tree with the `Aux` of every layer, in their order, or with
                their counts ``[E]`` alone.
            seconds: what the step took on this rank; by default the time since the last update.

        Raises:
            ValueError: on every rank, if on any there is not one for each layer, or the counts or seconds do not
                fit; the plans stay.
        """
        if self.spec.plan is not None:
            return
        state, now = self._state, time.perf_counter()
        if state is None:
            raise ValueError("update: the function has not been called yet.")
        began, self._began = self._began, None
        took = seconds if seconds is not None else 0.0 if began is None else now - began
        load, problem = self._load_of(aux, state, took)
        new = int(began is None or not self._ran)
        slowest, new, tokens, wrong = agree(
            [0 if problem else round(1e6 * took), new, self._tokens, int(bool(problem))], "update"
        )
        if wrong:
            raise ValueError(problem or "update: another rank was given what does not fit; it says what.")
        counts = iter(agree([c for counts in load.values() for c in counts], "update", "sum"))
        load = {name: [next(counts) for _ in held] for name, held in load.items()}
        self._seen = max(tokens, 0.95 * self._seen + 0.05 * tokens)
        planned_for = state.model.tokens or 1
        if self.spec.max_tokens is None and not 1 / planner.STEP <= self._seen / planned_for <= planner.STEP:
            fresh = self._planner(state.model.traced, round(self._seen))
            state, new = replace(fresh, chosen=state.chosen, means=state.means, load=state.load), 1
        assert state.chosen is not None
        state = planner.observe(state, state.chosen, load, math.nan if new else max(slowest, 1) / 1e6)
        chosen = planner.choose(state, state.load)
        if chosen != state.chosen:
            self._called.clear()
        self._state, self._ran = replace(state, chosen=chosen), False
        self._began = time.perf_counter()

    def _load_of(self, aux: Any, state: planner.State, took: float) -> tuple[dict[str, list[int]], str]:
        """This rank's choices by layer, and what is wrong with them or with the time."""
        names = state.model.names
        leaves = pytree.tree_leaves(aux, is_leaf=lambda n: isinstance(n, Aux))
        counts = [leaf.counts if isinstance(leaf, Aux) else leaf for leaf in leaves]
        found = [one for one in counts if isinstance(one, Tensor)]
        if not (math.isfinite(took) and took >= 0):
            return {}, f"update: seconds={took}, but it must be a finite number of at least 0. The plan stays as it is."
        if len(found) != len(names):
            given = f"{len(found)} Aux were given, but the layers are {', '.join(names)}"
            return {}, f"update: {given}: give one for each."
        load = {name: [float(c) for c in one.tolist()] for name, one in zip(names, found, strict=True)}
        try:
            planner.check_load(state, load)
        except ValueError as error:
            return {}, f"update: {error}"
        return {name: [round(c) for c in counts] for name, counts in load.items()}, ""

    def explain(self) -> str:
        """Every candidate plan, its price, and why it runs or lost, as a table. One rank may ask alone."""
        if self.spec.plan is not None:
            return f"the plan is fixed by the user: {self.spec.plan}"
        if self._state is None:
            return "no plan is chosen yet: call the function once."
        return explanation_text(planner.explain(self._state, self._state.load))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function on this rank's tokens; every rank must call."""
        call = (args, kwargs)
        if torch.compiler.is_dynamo_compiling():
            return self._made_before(call).run_plain(call)
        self._ran = True
        signature = Signature.of(call)
        compiled = self._for(signature, call)
        self._tokens = max((layer.tokens for layer in compiled.planned.traced.layers), default=0)
        self._called.replace(plain_signature(call), compiled)
        return compiled.run(call, signature.marks)

    def _made_before(self, call: Call) -> Compiled:
        """Under torch.compile: the program of an earlier call with these types, as nothing can be planned there."""
        compiled = self._called.get(plain_signature(call))
        if compiled is not None:
            return compiled
        raise ValueError("no program is planned for these types yet: call the function once before it is compiled.")

    def _for(self, signature: Signature, call: Call) -> Compiled:
        traced = self._traced.find(signature, lambda: trace(self.fn)(*call[0], **call[1]))
        spec = self._spec(traced)
        widths = self._widths(traced, spec)
        key = (signature, spec, tuple(widths.items()))
        if key not in self._compiled:
            self._began = None
        return self._compiled.find(key, lambda: traced.plan(spec, widths=widths).compile())

    def _spec(self, traced: Traced) -> ShardingSpec:
        """The spec with the plans that run now."""
        if self.spec.plan is not None or not traced.layers:
            self._state = None
            return self.spec if self.spec.plan is not None else self.spec.replace(plan="dp")
        layers = [(layer.name, layer.num_experts, layer.k) for layer in traced.layers]
        if self._state is None or self._planned_for != layers:
            (most,) = agree([max(layer.tokens for layer in traced.layers)], _layers_text(traced))
            self._seen = float(self.spec.max_tokens or most)
            self._state, self._planned_for = self._planner(traced, round(self._seen)), layers
        return self.spec.replace(plan=dict(self._state.chosen or ()))

    def _planner(self, traced: Traced, tokens: int) -> planner.State:
        """A planner on agreed prices, within the memory that every rank has left."""
        where, spec = _layers_text(traced), self.spec
        free = _free_memory(traced)
        if spec.memory is None and free is not None:
            spec = spec.replace(memory=-agree([-free], where)[0])
        together = None if spec.mesh.world == 1 else partial(agree, where=where)
        return planner_of(traced, spec, self.profile, tokens, together)

    def _widths(self, traced: Traced, spec: ShardingSpec) -> dict[str, int]:
        """The slots of every layer, agreed between the ranks, which also find out if they differ."""
        padded = [plan_of(layer, spec).layout == "padded" for layer in traced.layers]
        slots = [slots_of(layer, spec) for layer in traced.layers]
        needed = [n if use else 0 for n, use in zip(slots, padded, strict=True)]
        names = [layer.name for layer in traced.layers]
        if spec.mesh.world == 1:
            return dict(zip(names, needed, strict=True))
        check_world(spec.mesh)
        mark = fingerprint(traced, spec)
        if spec.max_tokens is None or mark not in self._agreed:
            self._agreed[mark] = self._agree(traced, spec, mark, needed)
        agreed = self._agreed[mark]
        if any(mine > theirs for mine, theirs in zip(needed, agreed, strict=True)):
            raise SpecError(
                f"{_layers_text(traced)}: groups= need {needed} slots per expert, but with max_tokens the ranks agreed "
                f"on {agreed} at the first call: give the same kind of groups= at every call."
            )
        return dict(zip(names, agreed, strict=True))

    def _agree(self, traced: Traced, spec: ShardingSpec, mark: int, needed: list[int]) -> list[int]:
        """The most slots that any rank needs; first of all whether the ranks run the same program."""
        where, first = _layers_text(traced), _AGREED_AT_ONCE - 2
        head = [*needed[:first], *[0] * (first - len(needed))]  # one length, also where the functions differ
        high, low, *found = agree([mark, -mark, *head], where)
        if high != -low:
            raise SpecError(
                f"{where}: the ranks disagree. Rank {this_rank()} calls it with "
                f"{', '.join(str(t) for t in traced.in_types)} under {_plans_text(traced, spec)}, another rank "
                "with other dtypes, dims, plan or function; only the number of tokens may differ."
            )
        return [*found[: len(needed)], *agree(needed[first:], where)]


def _free_memory(traced: Traced) -> int | None:
    """Bytes that a step may take on this rank's GPU: 0.9 of it, less what is in use now; None without one."""
    on_gpu = any(isinstance(leaf, tuple) and "cuda" in str(leaf[2]) for leaf in traced.signature.leaves)
    if not on_gpu or not torch.cuda.is_available():
        return None
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return max(1, int(0.9 * total) - torch.cuda.memory_allocated())


def _layers_text(traced: Traced) -> str:
    layers = ", ".join(layer.name for layer in traced.layers)
    return f"{traced.program.name} ({layers})" if layers else traced.program.name


def _plans_text(traced: Traced, spec: ShardingSpec) -> str:
    return "; ".join(f"{layer.name}: {plan_of(layer, spec)}" for layer in traced.layers) or "no plan"


def fingerprint(traced: Traced, spec: ShardingSpec) -> int:
    """A number that is equal on ranks that run the same program, whatever their tokens."""
    parts = [_plans_text(traced, spec), str(spec.mesh), str(spec.max_tokens)]
    for eq in traced.program.equations:
        parts.append(eq.wiring)
        parts += [f"{name}={value!r}" for name, value in eq.params if name in ("router", "given", "activation")]
    parts += traced.program.outputs
    for layer in traced.layers:
        rows = layer.dispatch.outputs[0].type
        parts += [str(rows.dtype), str(rows.dims[-1]), str(layer.num_experts), str(layer.k)]
    for var, role in zip(traced.program.inputs, traced.captured.roles, strict=True):
        parts.append(str(var.type) if role != "value" else str(var.type.dtype))
    return int.from_bytes(hashlib.sha256("\n".join(parts).encode()).digest()[:7], "big")


def auto(layer: Callable[..., Any], spec: ShardingSpec, *, profile: Profile | None = None) -> Auto:
    """The layer under a spec: same signature, this rank's tokens in and out.

    The function is captured once for each set of types, and lowered once for each plan; a switch of
    plans between steps then costs nothing. Gradients are those of the sum over ranks of the local
    results; those of DTensors come back complete and in the home layout.

    Args:
        layer: a function of trees of tensors.
        spec: mesh, and the plan; without one the planner chooses, and `update` may change its choice.
        profile: the machine that the planner prices plans on; a preset by default.

    Returns:
        A callable with ``use(plan)``, which changes the plan from the next call on, ``update(aux)``, after
        which the planner may, ``explain()``, and ``planned(*args)``, the program that runs.

    Example:
        >>> import fmoe, torch
        >>> config = fmoe.MoEConfig(num_experts=2, model_dim=3, hidden_dim=5)
        >>> params, x = fmoe.init(config, seed=0), torch.ones(4, 3)
        >>> step = auto(lambda params, x: fmoe.moe(params, x, config), fmoe.ShardingSpec(fmoe.make_mesh(2)))
        >>> y, aux = step(params, x)
        >>> torch.testing.assert_close(y, fmoe.moe(params, x, config)[0])
    """
    return Auto(layer, spec, profile)


# --- the functions of the layer under a spec, called one by one --------------------------------------------

_eager: Recent[Auto] = Recent()


def _run(key: Any, fn: Callable[..., Any], spec: ShardingSpec, *args: Any) -> Any:
    """Runs `fn` as `auto` does; `key` tells it from other functions."""
    return _eager.find((key, spec), lambda: Auto(fn, spec))(*args)


def _sorted_out(arguments: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any], Any]:
    """Tensors, the rest, and the rest as a key."""
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    rest = {name: value for name, value in arguments.items() if not isinstance(value, Tensor)}
    key = tuple((name, tuple(v) if isinstance(v, list) else v) for name, v in sorted(rest.items()))
    return tensors, rest, key


@runs_under_spec("moe")
def _moe(params: MoEParams, x: Tensor, config: Any, *, spec: ShardingSpec, **arguments: Any) -> tuple[Tensor, Aux]:
    tensors, rest, key = _sorted_out(arguments)

    def layer(params: MoEParams, x: Tensor, tensors: dict[str, Tensor]) -> tuple[Tensor, Aux]:
        return moe(params, x, config, **rest, **tensors)

    result: tuple[Tensor, Aux] = _run(("moe", config, key), layer, spec, params, x, tensors)
    return result


@runs_under_spec("gate")
def _gate(params: RouterParams, x: Tensor, router: Any, *, spec: ShardingSpec, **arguments: Any) -> Routing:
    tensors, rest, key = _sorted_out(arguments)

    def layer(params: RouterParams, x: Tensor, tensors: dict[str, Tensor]) -> Routing:
        arguments: dict[str, Any] = {**rest, **tensors}
        return gate(params, x, router, **arguments)

    routing: Routing = _run(("gate", router, key), layer, spec, params, x, tensors)
    return routing


@runs_under_spec("combine")
def _combine(tokens: Tokens, routing: Routing, *, spec: ShardingSpec) -> Tensor:
    """Dispatch and expert_apply under a spec only note what to do: all of it runs here, as one program."""
    layout, activation, fn = tokens.layout or None, tokens.activation or "relu", tokens.fn
    sizes: dict[str, Any] = {"num_experts": routing.num_experts, "shape": routing.shape, "capacity": routing.capacity}

    def layer(params: MoEParams, x: Tensor, experts: Tensor, weights: Tensor, slots: Tensor) -> Tensor:
        given = Routing(experts, weights, slots, experts, **sizes)
        tokens = dispatch(x, given, layout=layout)
        return combine(expert_apply(params.experts, tokens, activation=activation, fn=fn), given)

    key = ("combine", layout, activation, fn, tuple(sizes.values()))
    held = MoEParams(RouterParams(routing.weights.new_empty(0)), tokens.experts)
    y: Tensor = _run(key, layer, spec, held, tokens.held, routing.experts, routing.weights, routing.slots)
    return y

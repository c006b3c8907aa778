"""Stages of a function on its way to many devices: Traced -> Planned -> Compiled.

    traced = fmoe.trace(layer)(params, x)      the logical program, no devices in it
    planned = traced.plan(spec)                one rank's program, with collectives
    compiled = planned.compile()               bound to the processes that run it
    compiled(params, x)

Each prints (`as_text`), is priced (`cost`) and knows the types it takes and returns.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ._axes import Axes
from ._errors import PlanError, SpecError
from .cost import ProgramCost, program_cost
from .functional import equations as _equations  # noqa: F401  registers the operations of programs
from .ops.processes import Processes, check_world, this_rank
from .ops.runtime import Column, run
from .ops.simulate import Simulated
from .program import Program, Type
from .sharding import planner
from .sharding.distribute import local_leaf
from .sharding.layers import Layer, name_layers
from .sharding.lower import lower
from .sharding.placement import Mark, local_part, marks_of
from .sharding.plan import Plan
from .sharding.presets import default_profile
from .sharding.profile import Profile
from .sharding.spec import ShardingSpec
from .signature import Signature, difference_of, paths_of, plain_signature
from .text import bound_text, plan_text, program_text
from .trace import Call, Captured, Output, capture


@dataclass(frozen=True)
class Traced:
    """A function captured as a logical program.

    Example:
        >>> import fmoe, torch
        >>> config = fmoe.MoEConfig(num_experts=2, model_dim=3, hidden_dim=5)
        >>> params = fmoe.init(config, seed=0)
        >>> traced = trace(lambda params, x: fmoe.moe(params, x, config))(params, torch.ones(4, 3))
        >>> [layer.name for layer in traced.layers]
        ['moe.0']
    """

    fn: Callable[..., Any]
    signature: Signature
    captured: Captured
    program: Program
    layers: tuple[Layer, ...]
    paths: tuple[str, ...] = ()
    plain: tuple[Any, ...] = ()

    def as_text(self) -> str:
        """The logical program."""
        return program_text(self.program)

    def cost(self) -> ProgramCost:
        """Its cost on one device."""
        return program_cost(self.program, {})

    @property
    def in_types(self) -> list[Type]:
        """Types of the arguments' tensors."""
        return [var.type for var in self.program.inputs]

    @property
    def out_types(self) -> list[Type]:
        """Types of the result's tensors."""
        types = self.program.types()
        return [types[name] for name in self.program.outputs]

    def plan(self, spec: ShardingSpec, *, widths: Mapping[str, int] | None = None) -> Planned:
        """The program of one rank under the spec's plan.

        Args:
            spec: mesh and plans.
            widths: for padded layers, by name, the slots per expert that suffice on every rank; by
                default those of ``spec.max_tokens``, or else of the tokens it was traced with.

        Raises:
            PlanError: if a plan is not legal for a layer.
        """
        spec = planned_spec(self, spec)
        unknown = spec.unknown_names([layer.name for layer in self.layers])
        if unknown:
            raise PlanError(unknown)
        plans = {layer.name: plan_of(layer, spec) for layer in self.layers}
        if widths is None:
            widths = {layer.name: slots_of(layer, spec) for layer in self.layers}
        program, axes = lower(self.program, self.layers, self.captured.roles, spec.mesh, plans, widths)
        alike = len({layer.tokens for layer in self.layers}) < 2
        return Planned(self, spec, plans, dict(widths), program, axes, spec.max_tokens if alike else None)


def planned_spec(traced: Traced, spec: ShardingSpec) -> ShardingSpec:
    """The spec with plans: its own, or those that the planner chooses for an even load."""
    if spec.plan is not None:
        return spec
    return spec.replace(plan=dict(planner_of(traced, spec, None).chosen or ()))


def planner_of(
    traced: Traced,
    spec: ShardingSpec,
    profile: Profile | None,
    tokens: int | None = None,
    agree: planner.Agree | None = None,
) -> planner.State:
    """A planner for a function, on the machine of its arguments by default."""
    if profile is None:
        devices = {leaf[2] for leaf in traced.signature.leaves if isinstance(leaf, tuple)}
        profile = default_profile(devices)
    if tokens is None:
        tokens = spec.max_tokens or max((layer.tokens for layer in traced.layers), default=0)
    widths = {layer.name: layer.slots(tokens) for layer in traced.layers}
    return planner.init(traced, spec, profile, widths, tokens, agree)


def plan_of(layer: Layer, spec: ShardingSpec) -> Plan:
    """The plan of a layer, in the layout that it asks for unless the plan says one."""
    own = layer.dispatch.param("spec")
    plan = (own or spec).plan_of(layer.name)
    if own is not None and own.mesh != spec.mesh:
        raise SpecError(f"{layer.name}: the function was given {own.mesh}, but it is planned for {spec.mesh}.")
    return layer.resolve(plan)


def slots_of(layer: Layer, spec: ShardingSpec) -> int:
    """Slots per expert that suffice for this rank's tokens, or for ``max_tokens``."""
    if spec.max_tokens is not None and layer.tokens > spec.max_tokens:
        raise SpecError(
            f"{layer.name}: {layer.tokens} tokens on a rank are more than max_tokens={spec.max_tokens} of the spec: "
            "raise it."
        )
    return layer.slots(layer.tokens if spec.max_tokens is None else spec.max_tokens)


@dataclass(frozen=True)
class Planned:
    """One rank's program: the same text on every rank.

    Attributes:
        tokens: the largest T of a rank, for which costs are given; None for the T it was traced with.
    """

    traced: Traced
    spec: ShardingSpec
    plans: Mapping[str, Plan]
    widths: Mapping[str, int]
    program: Program
    axes: Mapping[str, Axes]
    tokens: int | None = None

    def as_text(self) -> str:
        """Mesh, topology, strategy, specs, program and cost."""
        return plan_text(self)

    def cost(self) -> ProgramCost:
        """FLOPs, traffic and memory of one device, forward."""
        return program_cost(self.program, self.axes, self.tokens)

    @property
    def in_types(self) -> list[Type]:
        """Whole types of the arguments' tensors."""
        return self.traced.in_types

    @property
    def out_types(self) -> list[Type]:
        """Types of the result's tensors on a rank."""
        types = self.program.types()
        return [types[name] for name in self.program.outputs]

    def compile(self) -> Compiled:
        """Binds the program to this process.

        Raises:
            SpecError: if torch.distributed has another number of ranks than the mesh.
        """
        check_world(self.spec.mesh)
        return Compiled(self)


@dataclass(frozen=True)
class Compiled:
    """A program bound to this process: call it with the arguments it was planned for."""

    planned: Planned
    comm: Processes = field(default_factory=Processes)
    rank: int = field(default_factory=this_rank)

    def as_text(self) -> str:
        """The program, each line with what runs it."""
        return bound_text(self.planned)

    def cost(self) -> ProgramCost:
        """See `Planned.cost`."""
        return self.planned.cost()

    @property
    def in_types(self) -> list[Type]:
        """See `Planned.in_types`."""
        return self.planned.in_types

    @property
    def out_types(self) -> list[Type]:
        """See `Planned.out_types`."""
        return self.planned.out_types

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the program on this rank; every rank must call.

        Raises:
            ValueError: if the arguments are not those it was planned for.
        """
        name = self.planned.program.name
        if torch.compiler.is_dynamo_compiling():
            if plain_signature((args, kwargs)) != self.planned.traced.plain:
                raise ValueError(f"{name}: the arguments are not of the types it was planned for: plan it for these.")
            return self.run_plain((args, kwargs))
        signature = Signature.of((args, kwargs))
        if paths_of((args, kwargs)) != self.planned.traced.paths:
            raise ValueError(
                f"{name}: the arguments are another tree than those it was planned for, or in "
                "another order; plan it again for these."
            )
        difference = difference_of(name, self.planned.traced.signature, signature)
        if difference:
            raise ValueError(difference)
        return self.run((args, kwargs), signature.marks)

    def run(self, call: Call, marks: Sequence[Mark]) -> Any:
        """`__call__` without the check; `marks` of the tensors in `call`."""
        mesh = self.planned.spec.mesh
        leaves = [leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, Tensor)]
        return self._run([local_leaf(leaf, mark, mesh) for leaf, mark in zip(leaves, marks, strict=True)])

    def run_plain(self, call: Call) -> Any:
        """`run` for plain tensors, which torch.compile can follow."""
        mesh, rank = self.planned.spec.mesh, self.rank
        leaves = [leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, Tensor)]
        marks = self.planned.traced.signature.marks
        parts = [
            leaf if mark.sharded is not None else local_part(leaf, mark.role, mesh, rank)
            for leaf, mark in zip(leaves, marks, strict=True)
        ]
        return self._run(parts)

    def _run(self, parts: Sequence[Tensor]) -> Any:
        captured = self.planned.traced.captured
        columns = [[value] for value in (*parts, *captured.constants)]
        outputs = run([self.planned.program], columns, self.comm, [self.rank], self.planned.axes)
        return _assemble(captured, [column[0] for column in outputs])


def _assemble(captured: Captured, outputs: Sequence[Any]) -> Any:
    leaves = [outputs[leaf.place] if isinstance(leaf, Output) else leaf for leaf in captured.outputs]
    return pytree.tree_unflatten(leaves, captured.treespec)


def trace(fn: Callable[..., Any]) -> Callable[..., Traced]:
    """Captures a function: ``trace(fn)(*args)`` runs it once without data.

    Args:
        fn: a function of trees of tensors; calls fmoe's functions and torch in between.

    Returns:
        A function of the same arguments that returns a `Traced`. Parameters may be whole tensors, parts
        from `local`, or DTensors: the program is that of the whole.

    Raises:
        TraceError: if the function does what a program cannot hold, with the line and the way out.

    Example:
        >>> import torch
        >>> print(trace(lambda x: x.sin() + 1)(torch.ones(2)).as_text())
        lambda (x:f32[2]) {
          sin:f32[2] = torch.sin x
          add:f32[2] = torch.add[_, 1] sin
        } -> (add)
    """

    def traced(*args: Any, **kwargs: Any) -> Traced:
        signature = Signature.of((args, kwargs))
        roles = [mark.role for mark in signature.marks]
        captured = capture(fn, (args, kwargs), signature.types, roles)
        program, layers = name_layers(captured.program)
        call = (args, kwargs)
        return Traced(fn, signature, captured, program, tuple(layers), paths_of(call), plain_signature(call))

    return traced


def simulate(planned: Planned, params: Any, xs: Sequence[Any]) -> list[Any]:
    """Runs a planned program on all its ranks in this process, without process groups.

    Data moves as between processes, by plain torch operations, so this also is differentiable: its
    transforms are those of the sum over ranks of what each rank computes.

    Args:
        planned: of a function of two arguments, parameters and tokens (or a tree that holds them).
        params: the whole parameters.
        xs: the second argument of each rank; numbers of tokens may differ.

    Returns:
        The result of each rank.

    Raises:
        ValueError: if there is not one x for each rank.

    Example:
        >>> import fmoe, torch
        >>> config = fmoe.MoEConfig(num_experts=2, model_dim=3, hidden_dim=5)
        >>> params, x = fmoe.init(config, seed=0), torch.ones(4, 3)
        >>> layer = lambda params, x: fmoe.moe(params, x, config)[0]
        >>> spec = fmoe.ShardingSpec(fmoe.make_mesh(2, world=2), plan="ep layout=padded")
        >>> ys = simulate(trace(layer)(params, x).plan(spec), params, [x, 2 * x])
        >>> torch.testing.assert_close(ys[1], layer(params, 2 * x))
    """
    mesh = planned.spec.mesh
    if len(xs) != mesh.world:
        raise ValueError(f"simulate: {len(xs)} xs were given, but the mesh has {mesh.world} ranks: give one for each.")
    if any(mark.sharded is not None for mark in marks_of((params, list(xs)))):
        raise ValueError("simulate: params are one rank's part, as fmoe.local makes: give the whole ones.")
    every = _planned_alike(planned, params, xs)
    columns: list[Column] = []
    marks = marks_of((params,))
    for leaf, mark in zip(pytree.tree_leaves(params), marks, strict=True):
        if isinstance(leaf, Tensor):
            columns.append([local_part(leaf, mark.role, mesh, rank) for rank in range(mesh.world)])
    of_ranks = [[leaf for leaf in pytree.tree_leaves(x) if isinstance(leaf, Tensor)] for x in xs]
    columns += [list(column) for column in zip(*of_ranks, strict=True)]
    columns += [list(column) for column in zip(*(p.traced.captured.constants for p in every), strict=True)]
    outputs = run([p.program for p in every], columns, Simulated(), list(range(mesh.world)), planned.axes)
    return [_assemble(p.traced.captured, [column[rank] for column in outputs]) for rank, p in enumerate(every)]


def _planned_alike(planned: Planned, params: Any, xs: Sequence[Any]) -> list[Planned]:
    """For each rank the planned program, captured again where its x is of another size."""
    signatures = [Signature.of(((params, x), {})) for x in xs]
    if all(signature == planned.traced.signature for signature in signatures):
        return [planned] * len(xs)
    traced: dict[Signature, Traced] = {}
    for signature, x in zip(signatures, xs, strict=True):
        if signature not in traced:
            traced[signature] = trace(planned.traced.fn)(params, x)
    names = [layer.name for layer in planned.traced.layers]
    needed = [[slots_of(layer, planned.spec) for layer in t.layers] for t in traced.values()]
    widths = {
        name: max([planned.widths[name], *column])
        for name, column in zip(names, zip(*needed, strict=True), strict=True)
    }
    again = {signature: t.plan(planned.spec, widths=widths) for signature, t in traced.items()}
    for other in again.values():
        _check_wired_alike(planned, other)
    return [again[signature] for signature in signatures]


def _check_wired_alike(a: Planned, b: Planned) -> None:
    """Refuses programs that differ in more than the number of tokens: ranks would not run the same."""

    def wiring(p: Planned) -> list[str]:
        return [*(eq.wiring for eq in p.program.equations), f"outputs {' '.join(p.program.outputs)}"]

    for one, two in itertools.zip_longest(wiring(a), wiring(b), fillvalue="nothing"):
        if one != two:
            raise ValueError(
                f"simulate: the function is another program for another number of tokens: where one has {one!r}, the "
                f"other has {two!r}."
            )

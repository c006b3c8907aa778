"""How the four functions stand in programs, and how one rank runs its part of them.

Logical equations (``gate``, ``dispatch``, ``expert_apply``, ``combine``) are what a function was
captured as. A rewrite makes per-device equations of them: ``route`` and ``aux_loss`` are the two halves
of gate, before and after the sums over ranks; ``expert_ffn`` applies one rank's part of the experts to
the rows that came to it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .._autocast import autocast_dtype
from .._axes import Place
from .._errors import ProgramError, refuse
from .._typing import accumulation_dtype
from ..cost import Cost
from ..ops.ffn import ffn, gather_rows
from ..ops.kernels.steps import Sizes, backward_steps, forward_steps, total
from ..ops.ragged import Splits, chunk_receives, expert_order
from ..ops.rearrange import combine as gather_back
from ..ops.transfers import array_on
from ..program import Size, Type, at_run_time, operation
from ..values import ExpertParams, RouterParams, Routing, cast_leaves
from .combine import combine
from .dispatch import dispatch
from .experts import check_output, expert_apply
from .gate import _group_sizes, gate
from .losses import Sums, finish
from .route import route
from .tokens import Tokens, flat_experts

# --- gate --------------------------------------------------------------------------------------------------------


#: Leaves of `RouterParams` besides the weight; in an equation they stand among what is given.
_LEAVES = tuple(f.name for f in dataclasses.fields(RouterParams) if f.name != "weight")


def _routing_types(x: Type, weight: Type, rest: Sequence[Type], router: Any, given: Sequence[str]) -> list[Type]:
    extra = dict(zip(given, rest, strict=True))
    tokens = Size(math.prod(int(d) for d in x.dims[:-1]), "T")
    if x.dims[-1] != extra.get("projection", weight).dims[0]:
        raise ProgramError(f"{x} has another model dim than {extra.get('projection', weight)}")
    dtype, experts = accumulation_dtype(x.dtype, weight.dtype), weight.dims[1]
    pair = (tokens, extra["replay"].dims[1] if "replay" in extra else router.choices(int(experts)))
    return [Type(torch.int64, pair), Type(dtype, pair), Type(torch.int64, pair), Type(torch.int64, (experts,))]


def _params_and_given(
    weight: Tensor, names: Sequence[str], rest: Sequence[Tensor]
) -> tuple[RouterParams, dict[str, Any]]:
    extra = dict(zip(names, rest, strict=True))
    leaves = {name: extra.pop(name) for name in _LEAVES if name in extra}
    return RouterParams(weight, **leaves), extra


def _aux_types(dtype: torch.dtype, experts: int) -> list[Type]:
    scalar = Type(dtype, ())
    return [scalar, scalar, scalar, scalar, scalar, Type(torch.int64, (experts,)), Type(torch.int64, ())]


def _gate_types(x: Type, weight: Type, *rest: Type, router: Any, given: Any, **_: Any) -> list[Type]:
    routing = _routing_types(x, weight, rest, router, given)
    return [*routing, *_aux_types(routing[1].dtype, int(weight.dims[1]))]


@operation("gate", _gate_types, shown=("router", "capacity", "groups", "given"))
def _gate(
    place: Place,
    x: Tensor,
    weight: Tensor,
    *rest: Tensor,
    router: Any,
    capacity: Any,
    groups: Any,
    given: Any,
    spec: Any,
) -> tuple[Tensor, ...]:
    params, extra = _params_and_given(weight, given, rest)
    r = gate(params, x, router, capacity=capacity, groups=groups, **extra)
    a = r.aux
    assert a is not None
    return (
        r.experts, r.weights, r.slots, r.counts,
        a.balance, a.z, a.importance, a.load, a.entropy, a.counts, a.dropped,
    )  # fmt: skip


def _route_types(x: Type, weight: Type, *rest: Type, router: Any, given: Any, **_: Any) -> list[Type]:
    experts = int(weight.dims[1])
    by_expert = router.sums * experts if router.scope == "global" else 3
    return [*_routing_types(x, weight, rest, router, given), Type(torch.float64, (by_expert + experts + 4,))]


@operation("route", _route_types, shown=("router", "capacity", "groups", "given"))
def _route(
    place: Place, x: Tensor, weight: Tensor, *rest: Tensor, router: Any, capacity: Any, groups: Any, given: Any
) -> tuple[Tensor, ...]:
    params, extra = _params_and_given(weight, given, rest)
    sizes = _group_sizes(groups, math.prod(x.shape[:-1]))
    experts, weights, slots, counts, sums = route(params, x, router, capacity, sizes, **extra)
    return experts, weights, slots, counts, sums.packed()


@operation("aux_loss", lambda sums, *, router, num_experts, dtype: _aux_types(dtype, num_experts), shown=("router",))
def _aux_loss(place: Place, sums: Tensor, *, router: Any, num_experts: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    a = finish(Sums.unpacked(sums, num_experts, dtype, router.scope), router)
    return a.balance, a.z, a.importance, a.load, a.entropy, a.counts, a.dropped


# --- dispatch, expert_apply, combine on one device: what is moved is the weights -------------------------------------


def _dispatch_types(
    x: Type, experts: Type, slots: Type, *, layout: str | None, num_experts: int, capacity: int | None, **_: Any
) -> list[Type]:
    tokens, k = experts.dims
    if layout == "padded":
        width: int = at_run_time(tokens) if capacity is None else capacity
        return [x.with_dims(num_experts, width, x.dims[-1])]
    return [x.with_dims(at_run_time(tokens, int(k)), x.dims[-1])]


@operation("dispatch", _dispatch_types, shown=("layout", "capacity"))
def _dispatch(
    place: Place,
    x: Tensor,
    experts: Tensor,
    slots: Tensor,
    *,
    layout: str | None,
    num_experts: int,
    capacity: int | None,
    spec: Any = None,
) -> Tokens:
    routing = Routing(
        experts, experts, slots, experts, num_experts=num_experts, shape=tuple(x.shape[:-1]), capacity=capacity
    )
    return dispatch(x, routing, layout=layout)


def _apply_types(rows: Type, *leaves: Type, activation: str | None, fn: Any, tree: Any, spec: Any = None) -> list[Type]:
    width = rows.dims[-1] if fn is not None else pytree.tree_unflatten(list(leaves), tree).w_out.dims[-1]
    return [rows.with_dims(*rows.dims[:-1], width)]


def expert_cost(rows: Type, leaves: Sequence[Type], activation: str | None, tree: Any, choices: int = 1) -> Cost:
    """Cost of the built-in experts on the rows of tokens with `choices` rows each; a user's function is not priced."""
    if activation is None:
        return Cost()
    params = pytree.tree_unflatten(list(leaves), tree)
    count = math.prod(map(int, rows.dims[:-1]))
    weights = sum(math.prod(map(int, leaf.dims[1:])) for leaf in (params.w_in, params.w_out))
    experts, hidden, model_dim = map(int, params.w_out.dims)
    sizes = Sizes(
        -(-count // choices), choices, model_dim, hidden, math.prod(map(int, params.w_in.dims[2:])), experts,
        rows.dtype.itemsize, params.b_in is not None,
    )  # fmt: skip
    return Cost(flops=2.0 * count * weights, forward=total(forward_steps(sizes)), backward=total(backward_steps(sizes)))


def _apply_cost(
    axes: Any, operands: Sequence[Type], outputs: Sequence[Type], *, activation: Any, tree: Any, **_: Any
) -> Cost:
    choices = max(1, round(getattr(operands[0].dims[0], "per_token", 1.0)))  # slots count as a token each
    return expert_cost(operands[0], operands[1:], activation, tree, choices)


@operation("expert_apply", _apply_types, cost=_apply_cost, shown=("activation", "fn"))
def _expert_apply(
    place: Place, tokens: Tokens, *leaves: Tensor, activation: str | None, fn: Any, tree: Any, spec: Any = None
) -> Tokens:
    return expert_apply(pytree.tree_unflatten(list(leaves), tree), tokens, activation=activation or "relu", fn=fn)


@operation("combine", lambda rows, weights, *, shape, dtype, spec=None: [_combined(rows, shape, dtype)], shown=())
def _combine(
    place: Place, tokens: Tokens, weights: Tensor, *, shape: tuple[int, ...], dtype: torch.dtype, spec: Any = None
) -> Tensor:
    routing = Routing(weights, weights, weights, weights, num_experts=tokens.num_experts, shape=shape)
    return combine(tokens, routing)


def _combined(rows: Type, shape: Sequence[int], dtype: torch.dtype) -> Type:
    tokens = Size(int(shape[0]), "T") if len(shape) == 1 else None
    return Type(dtype, (*((tokens,) if tokens is not None else shape), rows.dims[-1]))


@operation("decode", lambda rows, index, weights, *, shape, dtype: [_combined(rows, shape, dtype)], shown=())
def _decode(
    place: Place, rows: Tensor, index: Tensor, weights: Tensor, *, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    flat = rows.flatten(0, -2) if rows.dim() > 2 else rows
    return gather_back(flat, index, weights).to(dtype).reshape(*shape, rows.shape[-1])


# --- the experts of one rank, on the rows that came to it ------------------------------------------------------------


def _ffn_types(
    recv: Type, *rest: Type, activation: str | None, fn: Any, tree: Any, mp: int, extra: int, chunk: Any = (0, 1)
) -> list[Type]:
    leaves = rest[: len(rest) - extra]
    width = recv.dims[-1] if fn is not None else pytree.tree_unflatten(list(leaves), tree).w_out.dims[-1]
    return [Type(recv.dtype, (*recv.dims[:-1], width), ("mp",) if mp > 1 else ())]


def _ffn_cost(
    axes: Any,
    operands: Sequence[Type],
    outputs: Sequence[Type],
    *,
    activation: Any,
    extra: int,
    tree: Any,
    **_: Any,
) -> Cost:
    return expert_cost(operands[0], operands[1 : len(operands) - extra], activation, tree)


@operation("expert_ffn", _ffn_types, cost=_ffn_cost, shown=("activation", "fn", "chunk"))
def _expert_ffn(
    place: Place,
    recv: Tensor,
    *rest: Any,
    activation: str | None,
    fn: Any,
    tree: Any,
    mp: int,
    extra: int,
    chunk: tuple[int, int] = (0, 1),
) -> Tensor:
    leaves = rest[: len(rest) - extra]
    params = pytree.tree_unflatten(list(leaves), tree)
    plan = rest[-1] if extra and isinstance(rest[-1], Splits) else None
    if plan is not None:
        receives = chunk_receives(plan.receives, *chunk)
        index, groups = (array_on(part, recv.device) for part in expert_order(receives))
        rows = recv
    else:
        rows = recv.flatten(0, 2)  # [W,e,c,M] -> [W*e*c,M]
        index, groups = _padded_order(recv)
    if fn is None:
        out = _built_in(place, rows, params, index, groups, activation or "")
    elif plan is not None:
        out = _function_ragged(fn, params, rows, index, receives.sum(0).tolist())
    else:
        out = _function_padded(fn, params, recv, rest[-1]).flatten(0, 2)
    return out if plan is not None else out.unflatten(0, recv.shape[:3])


def _padded_order(recv: Tensor) -> tuple[Tensor, Tensor]:
    """Places of the rows ``[W,e,c]`` by expert, and the experts' groups: sizes are known, so no number is read."""
    ranks, experts, slots = recv.shape[:3]
    device = recv.device
    place = torch.arange(ranks * experts * slots, device=device).view(experts, ranks, slots)
    numbers = torch.arange(experts, device=device)
    first = numbers * (ranks * slots)
    return place.transpose(0, 1).reshape(-1, 1), torch.stack([first, first + ranks * slots, numbers], dim=1)


def _built_in(
    place: Place, rows: Tensor, params: ExpertParams, index: Tensor, groups: Tensor, activation: str
) -> Tensor:
    dtype = autocast_dtype(rows)
    kept, p = rows.dtype, params
    if dtype is not None:
        rows, p = rows.to(dtype), cast_leaves(params, dtype)
    flat, form = flat_experts(p, activation)
    b_out = flat.b_out
    if b_out is not None and place.index("mp") > 0:  # added once; the others keep it in their graph, with gradient 0
        b_out = torch.where(torch.zeros((), dtype=torch.bool, device=b_out.device), b_out, 0)
    order = torch.empty_like(index.squeeze(1)).scatter(
        0, index.squeeze(1), torch.arange(index.shape[0], device=rows.device)
    )
    ones = torch.ones(index.shape, dtype=accumulation_dtype(rows.dtype), device=rows.device)
    out, _ = ffn(
        rows, ones, flat.w_in, flat.b_in, flat.w_out, b_out, index, order, groups, form, torch.is_grad_enabled()
    )
    return out.to(kept)


def _function_ragged(fn: Any, params: Any, rows: Tensor, index: Tensor, sizes: list[int]) -> Tensor:
    by_expert = gather_rows(rows, index, index.shape[0])
    leaves, tree = pytree.tree_flatten(params)
    each = zip(*(leaf.unbind(0) for leaf in leaves), strict=True)
    parts = zip(each, by_expert.split(sizes), strict=True)
    made = torch.cat([_checked(fn(pytree.tree_unflatten(list(one), tree), part), part) for one, part in parts])
    return gather_back(made, index, torch.ones_like(index, dtype=made.dtype))


def _checked(out: Any, rows: Tensor) -> Tensor:
    """What a user's function made, one row of the same width for each row."""
    check_output(out, rows)
    if out.shape[-1] != rows.shape[-1]:
        refuse(
            "expert_apply",
            [f"fn made rows of {out.shape[-1]} features of rows of {rows.shape[-1]}: under a plan it must keep them."],
        )
    made: Tensor = out
    return made


def _function_padded(fn: Any, params: Any, recv: Tensor, live: Tensor) -> Tensor:
    """Under vmap over the experts; an inert slot holds a real row meanwhile (see `experts._apply_function`)."""
    ranks, experts, slots, dim = recv.shape
    data = recv.transpose(0, 1).reshape(experts, ranks * slots, dim)
    used = (live > 0).transpose(0, 1).reshape(experts, ranks * slots, 1)
    flat, there = data.detach().flatten(0, 1), used.flatten()
    usable = (there & flat.isfinite().all(1)).to(torch.int64)
    first = usable.argmax(0, keepdim=True)
    stand_in = torch.where(usable.gather(0, first) > 0, flat.index_select(0, first), 1).squeeze(0)
    out = _checked(torch.func.vmap(fn)(params, torch.where(used, data, stand_in)), data)
    out = torch.where(used, out, 0)
    return out.unflatten(1, (ranks, slots)).transpose(0, 1)


@operation("live_slots", lambda experts, slots, **p: [_live_types(p)], shown=("copies", "cut"))
def _live_slots(
    place: Place, experts: Tensor, slots: Tensor, *, num_experts: int, capacity: int, ep: int, copies: int, cut: int
) -> Tensor:
    """``[W,e,c]`` uint8: which slots of what is sent hold a token."""
    chosen = torch.where(slots >= 0, experts, num_experts).flatten()
    sizes = chosen.new_zeros(num_experts + 1).scatter_add(0, chosen, torch.ones_like(chosen))[:num_experts]
    used = torch.arange(capacity, device=sizes.device) < sizes.unsqueeze(1)  # [E,C]
    pieces = used.view(ep, 1, num_experts // ep, cut, capacity // cut).movedim(3, 2)
    spread = pieces.expand(ep, copies, *pieces.shape[2:])
    return spread.reshape(ep * copies * cut, num_experts // ep, capacity // cut, 1).to(torch.uint8)


def _live_types(p: Any) -> Type:
    e = p["num_experts"] // p["ep"]
    return Type(torch.uint8, (p["ep"] * p["copies"] * p["cut"], e, p["capacity"] // p["cut"], 1))

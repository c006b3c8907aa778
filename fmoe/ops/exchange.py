"""Equations of per-device programs that move tokens and weights between ranks, padded layout and both.

With W ranks as ``ep x mp x dp``, e experts on each expert part, and c slots of one message:

    buf   [ep*e, C, M]    this rank's tokens by expert: C slots each
    send  [W, e, c, M]    what goes to each rank: cut along C into dp pieces, one copy for each mp
    recv  [W, e, c, M]    what came from each rank
    out   [W, e, c, M]    experts' results; a pending sum over mp where each slice holds a part of H

``fan_out`` makes send of buf; ``fan_in`` makes it back from what came home and takes the sum over mp.
Two ranks, one expert on each (ep=2), C=1: rank 0 holds buf = [a0, b0], rank 1 [a1, b1]; after the
exchange rank 0 holds recv = [a0, a1] and rank 1 [b0, b1]. The ragged counterparts are in `ragged`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .._axes import Place
from .._errors import ProgramError
from .._typing import accumulation_dtype
from ..cost import Cost, gathered, reduced, scattered, swapped
from ..program import Program, Type, at_run_time, operation
from .ragged import Splits, chunk_splits, fan_in_rows, fan_out_rows, join_rows, split_rows
from .rearrange import expand
from .routing import row_index
from .runtime import Column, Scope, run

# --- tokens to buffers and back --------------------------------------------------------------------------------


def _encode_types(
    x: Type, chosen: Type, slots: Type, *, layout: str, num_experts: int, capacity: int | None = None, **_: Any
) -> list[Type]:
    tokens, k = chosen.dims
    index = Type(torch.int64, (tokens, k))
    if layout == "padded":
        assert capacity is not None
        return [x.with_dims(num_experts, capacity, x.dims[-1]), index]
    rows = at_run_time(tokens, int(k))
    return [x.with_dims(rows, x.dims[-1]), index, Type(torch.int64, (num_experts,))]


@operation("encode", _encode_types, shown=("layout", "num_experts", "capacity"))
def _encode(
    place: Place,
    x: Tensor,
    chosen: Tensor,
    slots: Tensor,
    *,
    layout: str,
    num_experts: int,
    experts: int,
    capacity: int | None = None,
    **by_hand: Any,
) -> tuple[Tensor, ...]:
    """`num_experts` is that of the mesh, at least `experts`, which there are; a routing made by hand is checked."""
    rows = x.reshape(-1, x.shape[-1])
    ones = torch.ones(chosen.shape, dtype=x.dtype, device=x.device)
    most = by_hand.get("most")
    most = chosen.numel() if most is None else most
    if layout == "padded":
        assert capacity is not None
        if by_hand:
            row_index(chosen, slots, experts, most)  # refuses slots that are none
        index = torch.where(slots >= 0, chosen * capacity + slots, -1)
        buf = expand(rows, index, ones, num_experts * capacity)
        return buf.unflatten(0, (num_experts, capacity)), index
    index, order, groups = row_index(chosen, slots, experts, most)
    sizes = groups[:, 1] - groups[:, 0]
    sizes = torch.cat([sizes, sizes.new_zeros(num_experts - experts)])
    return expand(rows, index, ones, order.shape[0]), index, sizes


# --- buffers to messages and back --------------------------------------------------------------------------------


def _fan_out_types(buf: Type, *plan: Type, ep: int, copies: int, cut: int) -> list[Type]:
    if plan:
        return [buf.with_dims(at_run_time(buf.dims[0], copies), buf.dims[-1])]
    experts, capacity, dim = buf.dims
    if experts % ep or capacity % cut:
        raise ProgramError(f"{experts} experts over ep={ep} and {capacity} slots cut in {cut} do not divide")
    return [buf.with_dims(ep * copies * cut, experts // ep, capacity // cut, dim)]


@operation("fan_out", _fan_out_types)
def _fan_out(place: Place, buf: Tensor, plan: Splits | None = None, *, ep: int, copies: int, cut: int) -> Tensor:
    if plan is not None:
        return fan_out_rows(place, buf, plan)
    experts, capacity, dim = buf.shape
    pieces = buf.reshape(ep, 1, experts // ep, cut, capacity // cut, dim).movedim(3, 2)  # [ep,1,cut,e,c,M]
    spread = pieces.expand(ep, copies, cut, *pieces.shape[3:])
    return spread.reshape(ep * copies * cut, experts // ep, capacity // cut, dim)


def _fan_in_types(back: Type, *plan: Type, ep: int, copies: int, cut: int) -> list[Type]:
    if back.partial != (("mp",) if copies > 1 else ()):
        raise ProgramError(f"{back} is not a pending sum over the {copies} copies of each row")
    if plan:
        return [Type(back.dtype, (at_run_time(back.dims[0], 1 / copies), back.dims[-1]))]
    _, e, c, dim = back.dims
    return [Type(back.dtype, (ep * e, cut * c, dim))]


@operation("fan_in", _fan_in_types, partial=True)
def _fan_in(place: Place, back: Tensor, plan: Splits | None = None, *, ep: int, copies: int, cut: int) -> Tensor:
    if plan is not None:
        return fan_in_rows(place, back, plan)
    _, e, c, dim = back.shape
    pieces = back.reshape(ep, copies, cut, e, c, dim)
    total = pieces.squeeze(1)
    if copies > 1:
        total = pieces.sum(1, dtype=accumulation_dtype(back.dtype)).to(back.dtype)
    return total.movedim(1, 2).reshape(ep * e, cut * c, dim)


@operation(
    "split",
    lambda send, *plan, chunks: [_chunk(send, chunks, bool(plan))] * chunks,
    partial=True,
)
def _split(place: Place, send: Tensor, plan: Splits | None = None, *, chunks: int) -> tuple[Tensor, ...]:
    if plan is not None:
        return split_rows(send, plan.sends.sum(1), chunks)
    return tuple(part.contiguous() for part in send.chunk(chunks, dim=2))


def _chunk(send: Type, chunks: int, ragged: bool) -> Type:
    if ragged:
        return send.with_dims(at_run_time(send.dims[0], 1 / chunks), send.dims[1])
    ranks, e, c, dim = send.dims
    if c % chunks:
        raise ProgramError(f"{c} slots do not divide into {chunks} chunks")
    return send.with_dims(ranks, e, c // chunks, dim)


@operation("concat", lambda *parts, chunks: [_whole(parts, chunks)], partial=True)
def _concat(place: Place, *parts: Any, chunks: int) -> Tensor:
    if len(parts) > chunks:
        return join_rows(parts[:-1], parts[-1].sends.sum(1))
    return torch.cat(parts, dim=2)


def _whole(parts: Sequence[Type], chunks: int) -> Type:
    if len(parts) > chunks:
        return parts[0].with_dims(at_run_time(parts[0].dims[0], chunks), parts[0].dims[1])
    ranks, e, c, dim = parts[0].dims
    return parts[0].with_dims(ranks, e, c * chunks, dim)


# --- collectives -------------------------------------------------------------------------------------------------


def _exchange_types(
    x: Type, *plan: Type, axis: str, ranks: int, chunk: Any = None, back: bool = False, dim: Any = 0, keep: Any = ()
) -> list[Type]:
    if plan:
        return [x]
    if x.dims[0] % ranks:
        raise ProgramError(f"dim 0 of {x} does not divide over the {ranks} ranks of {axis}")
    return [x]


def _splits(plans: Sequence[Splits], chunk: tuple[int, int], back: bool) -> tuple[list[list[int]], list[list[int]]]:
    sends = [chunk_splits(plan.sends.sum(1), *chunk) for plan in plans]
    receives = [chunk_splits(plan.receives.sum(1), *chunk) for plan in plans]
    return (receives, sends) if back else (sends, receives)


@operation("all_to_all", _exchange_types, cost=swapped, collective=True, partial=True, shown=("axis",))
def _all_to_all(
    scope: Scope,
    column: Column,
    plans: Column | None = None,
    *,
    axis: str,
    ranks: int,
    chunk: Any = None,
    back: bool = False,
) -> Column:
    splits = () if plans is None else _splits(plans, chunk or (0, 1), back)
    return scope.comm.all_to_all(axis, column, *splits)


@operation("all_reduce", lambda x, *, axis, ranks: [x], cost=reduced, collective=True, shown=("axis",))
def _all_reduce(scope: Scope, column: Column, *, axis: str, ranks: int) -> Column:
    return scope.comm.all_reduce(axis, column)


def _gather_types(x: Type, *, axis: str, ranks: int, dim: Any, keep: Any = ()) -> list[Type]:
    dims = list(x.dims)
    for size, d in zip(_each(ranks), _each(dim), strict=True):
        dims[d] = dims[d] * size
    for d, size in keep:
        dims[d] = size
    return [x.with_dims(*dims)]


def _each(dim: Any) -> tuple[int, ...]:
    """One number or several, for one axis or several."""
    return dim if isinstance(dim, tuple) else (dim,)


def _gathered_rows(x: Tensor) -> Tensor:
    return x.unsqueeze(0).contiguous()  # the gathered dim in front


def _place_gathered(parts: Tensor, ranks: Any, dim: Any, keep: Any) -> Tensor:
    """``[ranks, ...]`` with each axis of ranks moved into its dim, outermost."""
    sizes, dims = _each(ranks), _each(dim)
    out = parts.unflatten(0, sizes)
    shape = list(parts.shape[1:])
    for i in range(len(sizes) - 1, -1, -1):  # the last axis first: its place is not moved by the others
        out = out.movedim(i, i + dims[i]) if dims[i] else out
        shape[dims[i]] *= sizes[i]
    out = out.reshape(shape)
    for d, size in keep:
        out = out.narrow(d, 0, size)  # without the zeros at the end
    return out


@operation("all_gather", _gather_types, cost=gathered, collective=True, shown=("axis", "dim", "keep"))
def _all_gather(scope: Scope, column: Column, *, axis: str, ranks: Any, dim: Any, keep: Any = ()) -> Column:
    parts = scope.comm.all_gather(axis, [_gathered_rows(x) for x in column])
    return [_place_gathered(part, ranks, dim, keep) for part in parts]


def _scatter_types(x: Type, *, axis: str, ranks: int, dim: int) -> list[Type]:
    dims = list(x.dims)
    if axis not in x.partial:
        raise ProgramError(f"{x} is not a pending sum over {axis}")
    if dims[dim] % ranks:
        raise ProgramError(f"dim {dim} of {x} does not divide over the {ranks} ranks of {axis}")
    dims[dim] //= ranks
    return [Type(x.dtype, tuple(dims), tuple(a for a in x.partial if a not in axis.split(",")))]


@operation("reduce_scatter", _scatter_types, cost=scattered, collective=True, partial=True, shown=("axis", "dim"))
def _reduce_scatter(scope: Scope, column: Column, *, axis: str, ranks: int, dim: int) -> Column:
    moved = [x.unflatten(dim, (ranks, x.shape[dim] // ranks)).movedim(dim, 0).flatten(0, 1) for x in column]
    return scope.comm.reduce_scatter(axis, moved)


# --- what is in flight ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Future:
    """An exchange in flight: the buffer it fills and what `done` has to know."""

    value: Any
    params: dict[str, Any]
    splits: tuple[Any, ...] = ()


def _start_types(x: Type, *plan: Type, fn: str, **params: Any) -> list[Type]:
    done = _gather_types(x, **params)[0] if fn == "all_gather" else x
    return [replace(done, kind="future")]


def _start_cost(axes: Any, operands: Sequence[Type], outputs: Sequence[Type], *, fn: str, **params: Any) -> Cost:
    if fn == "all_gather":
        return gathered(axes, operands, [replace(outputs[0], kind="tensor")], **params)
    if fn == "all_to_all":
        return swapped(axes, operands, outputs, **params)
    x = operands[0].bytes
    return Cost.of("all_to_all", "gpu", x, axes.gpu) + Cost.of("all_to_all", "node", x, axes.node)


@operation("start", _start_types, cost=_start_cost, collective=True, partial=True, shown=("fn", "axis", "dim", "keep"))
def _start(scope: Scope, column: Column, plans: Column | None = None, *, fn: str, **params: Any) -> Column:
    comm, axis = scope.comm, params.get("axis", "world")
    given: dict[str, Any] = {"fn": fn, **params}
    if fn == "all_gather":
        futures = comm.start(fn, axis, [_gathered_rows(x) for x in column])
        return [Future(f, given) for f in futures]
    if fn == "all_to_all":
        splits = () if plans is None else _splits(plans, params.get("chunk") or (0, 1), params.get("back", False))
        each = [tuple([part[i]] for part in splits) for i in range(len(column))] if splits else [()] * len(column)
        futures = comm.start(fn, axis, column, *splits)
        return [Future(f, given, s) for f, s in zip(futures, each, strict=True)]
    first, axis, _ = _halves(scope.lets[fn])
    middle = _run_part(scope, first, column)
    return [Future(f, {"fn": fn, "axis": axis}) for f in comm.start("all_to_all", axis, middle)]


@operation("done", lambda f: [replace(f, kind="tensor")], collective=True, partial=True)
def _done(scope: Scope, column: Column) -> Column:
    params = column[0].params
    fn, axis, values = params["fn"], params.get("axis", "world"), [f.value for f in column]
    if fn == "all_gather":
        parts = scope.comm.done(fn, axis, values)
        return [_place_gathered(part, params["ranks"], params["dim"], params.get("keep", ())) for part in parts]
    if fn == "all_to_all":
        splits = tuple([s[0] for s in part] for part in zip(*(f.splits for f in column), strict=True))
        return scope.comm.done(fn, axis, values, *splits)
    _, axis, last = _halves(scope.lets[fn])
    return _run_part(scope, last, scope.comm.done("all_to_all", axis, values))


@operation(
    "call", lambda x, *, fn: [x], cost=lambda a, i, o, *, fn: _start_cost(a, i, o, fn=fn), collective=True, partial=True
)
def _call(scope: Scope, column: Column, *, fn: str) -> Column:
    return _run_part(scope, scope.lets[fn], column)


def _halves(program: Program) -> tuple[Program, str, Program]:
    """A sub-program up to its last collective, the axis of that, and what follows: start begins the last one."""
    at = max(i for i, eq in enumerate(program.equations) if eq.op == "all_to_all")
    last = program.equations[at]
    name, lines = program.name, program.equations  # checked already, and this runs at every start and done
    before = Program(name, program.inputs, lines[:at], last.operands, checked=False)
    after = Program(name, last.outputs, lines[at + 1 :], program.outputs, checked=False)
    return before, last.param("axis"), after


def _run_part(scope: Scope, program: Program, column: Column) -> Column:
    axes = {"": scope.places[0].axes}
    ranks = [place.rank for place in scope.places]
    return run([program] * len(ranks), [column], scope.comm, ranks, axes)[0]


@operation("unflatten", lambda x, *, axes, sizes: [x.with_dims(*sizes, *x.dims[1:])], partial=True, shown=("axes",))
def _unflatten(place: Place, x: Tensor, *, axes: str, sizes: tuple[int, int]) -> Tensor:
    return x.unflatten(0, sizes)


@operation("stride_copy", lambda x: [x.with_dims(x.dims[1], x.dims[0], *x.dims[2:])], partial=True)
def _stride_copy(place: Place, x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous()


@operation("flatten", lambda x: [x.with_dims(x.dims[0] * x.dims[1], *x.dims[2:])], partial=True)
def _flatten(place: Place, x: Tensor) -> Tensor:
    return x.flatten(0, 1)


@operation("take_shard", lambda w, *, axis, ranks, dim: [_taken(w, ranks, dim)], shown=("axis", "dim"))
def _take_shard(place: Place, w: Tensor, *, axis: str, ranks: int, dim: int) -> Tensor:
    size = -(-w.shape[dim] // ranks)
    return shard_of(w, dim, size, place.index(axis))


def _taken(w: Type, ranks: int, dim: int) -> Type:
    dims = list(w.dims)
    dims[dim] = -(-dims[dim] // ranks)
    return w.with_dims(*dims)


def shard_of(w: Tensor, dim: int, size: int, index: int) -> Tensor:
    """Piece `index` of `size` along `dim`, with zeros where the tensor ends."""
    first = min(index * size, w.shape[dim])
    last = min(first + size, w.shape[dim])
    part = w.narrow(dim, first, last - first)
    if last - first == size:
        return part
    shape = list(w.shape)
    shape[dim] = size - (last - first)
    return torch.cat([part, part.new_zeros(shape)], dim)

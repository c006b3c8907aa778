"""Rewrites of a logical program into a per-device one: pure functions from program to program.

    localize           each rank's part of the experts' parameters in place of the whole
    sum_losses         gate -> route, all_reduce, aux_loss
    gather_weights     dp: weights are gathered, tokens stay
    exchange_tokens    ep: tokens are exchanged, part of the weights is gathered (`exchange`)
    pipeline           the exchanges and experts of one layer in d chunks that overlap (`pipeline`)
    hierarchical       all_to_all inside nodes, then between them (`pipeline`)
    overlap_gathers    weight gathers start first and are done just before use
    drop_unused        what no output needs is not run: losses that nobody returns are not summed over ranks

Each pass changes the equations of one layer (or one kind) and leaves the others as they are. No pass
changes what the program computes: `simulate` runs any of their results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from .._axes import Axes
from .._errors import PlanError
from ..program import Equation, Program, Type, Var
from .build import Builder
from .mesh import Mesh
from .placement import EXPERT_ROLES, hidden_dim, local_type
from .plan import Plan

#: torch calls that act on each element of an expert's parameters alone, so that parts may be taken before.
_ELEMENTWISE = {
    "to", "type", "type_as", "float", "double", "half", "bfloat16", "detach", "clone", "contiguous", "neg", "mul",
    "__mul__", "__rmul__", "__neg__", "alias",
}  # fmt: skip
_DIVISIONS = {"div", "__truediv__", "true_divide"}


class Part(NamedTuple):
    """A variable of which each rank holds a part: its role, and the dims of the whole."""

    role: str
    dims: tuple[int, ...]


def localize(program: Program, roles: Sequence[str], mesh: Mesh) -> tuple[Program, dict[str, Part]]:
    """Puts each rank's part of the experts' parameters in the place of the whole.

    Returns:
        The program, and what every variable is a part of.

    Raises:
        PlanError: if a torch call on such parameters is not elementwise.
    """
    inputs = [Var(v.name, local_type(v.type, role, mesh)) for v, role in zip(program.inputs, roles, strict=True)]
    parts = {
        v.name: Part(role, v.type.dims) for v, role in zip(program.inputs, roles, strict=True) if role in EXPERT_ROLES
    }
    builder = Builder(program, inputs)
    for eq in program.equations:
        split = [name for name in eq.operands if name in parts]
        if not eq.op.startswith("torch.") or not split:
            builder.copy(eq)
            continue
        name, whole = eq.op.removeprefix("torch."), parts[split[0]]
        scalars = all(not builder.types[o].dims for o in eq.operands if o not in parts)
        same = all(parts[o] == whole for o in split)
        divided = name in _DIVISIONS and (eq.operands[0] not in parts or len(split) > 1)  # by parts, which end in zeros
        if name not in _ELEMENTWISE | _DIVISIONS or divided or not scalars or not same or len(eq.outputs) != 1:
            raise PlanError(
                f"torch.{name} is called on {split[0]}, of which each rank holds a part. Between the arguments and "
                "expert_apply only elementwise calls are possible there (to, mul, ...): do the rest outside."
            )
        var = eq.outputs[0]
        parts[var.name] = whole
        part = Type(var.type.dtype, builder.types[split[0]].dims)
        builder.copy(replace(eq, outputs=(Var(var.name, part),)))
    returned = [name for name in program.outputs if name in parts]
    if returned:
        raise PlanError(
            f"the function returns {', '.join(returned)}, of which each rank holds a part: leave experts' parameters "
            "out of what it returns."
        )
    return builder.program(), parts


def sum_losses(program: Program, world: int) -> Program:
    """Takes every gate's sums over all ranks before its losses are made of them."""
    builder = Builder(program)
    for eq in program.equations:
        if eq.op != "gate":
            builder.copy(eq)
            continue
        names = [var.name for var in eq.outputs]
        params = {name: value for name, value in eq.params if name != "spec"}
        sums = builder.fresh("sums")
        builder.emit("route", eq.operands, [*names[:4], sums], like=eq, **params)
        if world > 1:
            sums = builder.one("all_reduce", [sums], "total", like=eq, axis="world", ranks=world)
        experts = int(eq.outputs[3].type.dims[0])
        dtype = eq.outputs[4].type.dtype
        builder.emit("aux_loss", [sums], names[4:], like=eq, router=params["router"], num_experts=experts, dtype=dtype)
    return builder.program()


def gather_weights(
    program: Program, layer: str, axes: Axes, plan: Plan, parts: Mapping[str, Part], width: int
) -> Program:
    """dp: gathers the whole experts on every rank, and keeps the tokens where they are.

    Args:
        program: from `localize`.
        layer: name of the layer.
        axes: of the plan.
        plan: its layout is read.
        parts: from `localize`.
        width: slots per expert that suffice on every rank (padded, with a capacity).
    """
    builder = Builder(program)
    for eq in program.equations:
        if eq.layer != layer or eq.op not in ("dispatch", "expert_apply", "combine"):
            builder.copy(eq)
            continue
        params: dict[str, Any] = {**dict(eq.params), "spec": None}
        if eq.op == "dispatch":
            params["layout"] = plan.layout
            if params["capacity"] is not None:  # this rank's own number
                params["capacity"] = width if plan.layout == "padded" else None
            builder.emit(eq.op, eq.operands, [eq.outputs[0].name], like=eq, **params)
        elif eq.op == "expert_apply":
            leaves = [_whole(builder, leaf, parts.get(leaf), axes, eq) for leaf in eq.operands[1:]]
            builder.emit(eq.op, [eq.operands[0], *leaves], [eq.outputs[0].name], like=eq, **params)
        else:
            builder.emit(eq.op, eq.operands, [eq.outputs[0].name], like=eq, **params)
    return builder.program()


def _whole(builder: Builder, leaf: str, part: Part | None, axes: Axes, like: Equation) -> str:
    """The whole of a leaf of which each rank holds a part."""
    if part is None:
        return leaf
    hidden = hidden_dim(part.role, len(part.dims))
    gathers = [("ep", axes.ep, 0)]
    if hidden is not None:
        gathers.append(("dp", axes.dp, hidden))
    gathers = [g for g in gathers if g[1] > 1]
    if not gathers:
        return leaf
    axis, ranks, dim = (tuple(items) for items in zip(*gathers, strict=True))
    single = len(gathers) == 1
    return builder.one(
        "all_gather",
        [leaf],
        f"{leaf}.all",
        like=like,
        note="backward: reduce_scatter",
        axis=",".join(axis),
        ranks=ranks[0] if single else ranks,
        dim=dim[0] if single else dim,
        **kept_sizes(builder.types[leaf], part, gathers),
    )


def kept_sizes(held: Type, part: Part, gathers: Sequence[tuple[str, int, int]]) -> dict[str, Any]:
    """The sizes to keep of gathered dims that would end in zeros, as a parameter of all_gather."""
    keep = tuple((d, int(part.dims[d])) for _, ranks, d in gathers if int(held.dims[d]) * ranks != int(part.dims[d]))
    return {"keep": keep} if keep else {}


def overlap_gathers(program: Program) -> Program:
    """Starts every gather of weights as soon as they are there, and waits for it just before its use."""
    waiting: dict[str, list[Equation]] = {}
    for eq in program.equations:
        if eq.op == "all_gather" and eq.note:
            waiting.setdefault(eq.operands[0], []).append(eq)
    builder = Builder(program)
    futures: dict[str, str] = {}

    def start(name: str) -> None:
        for gather in waiting.get(name, ()):
            future = builder.fresh(f"{gather.outputs[0].name}.f")
            builder.emit(
                "start", [name], [future], like=gather, note=gather.note, fn="all_gather", **dict(gather.params)
            )
            futures[gather.outputs[0].name] = future

    for var in program.inputs:
        start(var.name)
    for eq in program.equations:
        name = eq.outputs[0].name if eq.outputs else ""
        if name in futures:
            builder.emit("done", [futures[name]], [name], like=eq)
        else:
            builder.copy(eq)
            for var in eq.outputs:
                start(var.name)
    return builder.program()


def drop_unused(program: Program) -> Program:
    """Leaves out equations that no output needs."""
    needed, kept = set(program.outputs), []
    for eq in reversed(program.equations):
        if any(var.name in needed for var in eq.outputs):
            kept.append(eq)
            needed.update(eq.operands)
    return replace(program, equations=tuple(reversed(kept)), checked=True)

"""Rewrite `exchange_tokens`: tokens go to the ranks that hold their experts, and their results come home."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils import _pytree as pytree

from .._axes import Axes
from .._errors import PlanError
from ..program import Equation, Program
from .build import Builder
from .placement import hidden_dim
from .plan import Plan
from .rewrites import Part, kept_sizes


def exchange_tokens(
    program: Program,
    layer: str,
    axes: Axes,
    plan: Plan,
    parts: Mapping[str, Part],
    width: int,
    *,
    by_hand: bool = False,
) -> Program:
    """ep: sends tokens to the ranks that hold their experts, and gathers what those lack of the weights.

    Args:
        program: from `localize`.
        layer: name of the layer.
        axes: of the plan.
        plan: r, mp, layout and pipeline are read.
        parts: from `localize`.
        width: slots per expert that suffice on every rank (padded); widened to what divides.
        by_hand: whether the routing is not a gate's, so that its slots are to be checked when it runs.
    """
    expand = _Exchange(Builder(program), layer, axes, plan, parts, width)
    expand.by_hand = by_hand
    for eq in program.equations:
        if eq.layer == layer and eq.op in ("dispatch", "expert_apply", "combine"):
            getattr(expand, eq.op)(eq)
        else:
            expand.builder.copy(eq)
    return expand.builder.program()


class _Exchange:
    """The three equations of a layer, each as it runs under ep."""

    def __init__(self, builder: Builder, layer: str, axes: Axes, plan: Plan, parts: Mapping[str, Part], width: int):
        self.builder, self.axes, self.plan, self.parts = builder, axes, plan, parts
        self.ragged = plan.layout == "ragged"
        self.gather = plan.mp == "gather"
        self.copies = 1 if self.gather else axes.mp
        self.cut = axes.mp * axes.dp if self.gather else axes.dp
        step = self.cut * plan.pipeline
        self.width = -(-max(width, 1) // step) * step
        self.fan = {"ep": axes.ep, "copies": self.copies, "cut": self.cut}
        self.host: list[str] = []  # the sizes of ragged messages
        self.routed: tuple[str, ...] = ()
        self.num_experts = 0
        self.by_hand = False

    def _swap(self, like: Equation, operand: str, name: str, back: bool = False, **rest: Any) -> str:
        extra = {"chunk": (0, 1), "back": back} if self.host else {}
        if self.axes.world == 1:
            return operand
        return self.builder.one(
            "all_to_all", [operand, *self.host], name, like=like, axis="world", ranks=self.axes.world, **extra, **rest
        )

    def dispatch(self, eq: Equation) -> None:
        b, axes = self.builder, self.axes
        self.routed = eq.operands[1:]
        whole = int(eq.param("num_experts"))
        self.num_experts = -(-whole // axes.ep) * axes.ep
        shape: dict[str, Any] = {"layout": self.plan.layout, "num_experts": self.num_experts, "experts": whole}
        if self.by_hand:
            shape["most"] = eq.param("capacity")
        if self.ragged:
            rows, self.index, sizes = b.emit(
                "encode", eq.operands, [b.fresh(n) for n in ("rows", "index", "sizes")], like=eq, **shape
            )
            sent = b.one("cut_sizes", [sizes], "sent", like=eq, ep=axes.ep, mp=axes.mp, dp=axes.dp)
            received = self._swap(eq, sent, "received")
            self.host = [b.one("to_host", [sent, received], "rows_of", like=eq, note="the one synchronisation")]
            send = b.one("fan_out", [rows, *self.host], "send", like=eq, **self.fan)
        else:
            buf, self.index = b.emit(
                "encode", eq.operands, [b.fresh(n) for n in ("buf", "index")], like=eq, **shape, capacity=self.width
            )
            notes = ["copy per mp slice"] * (self.copies > 1) + ["cut per dp slice"] * (self.cut > 1)
            send = b.one("fan_out", [buf], "send", like=eq, note=", ".join(notes), **self.fan)
        self.recv = self._swap(eq, send, "recv")

    def expert_apply(self, eq: Equation) -> None:
        b, axes, params = self.builder, self.axes, dict(eq.params)
        leaves = [self._leaf(leaf, i, eq) for i, leaf in enumerate(eq.operands[1:])]
        recv, extra = self.recv, list(self.host)
        if params["fn"] is not None and not self.ragged:
            live = b.one(
                "live_slots",
                self.routed,
                "live",
                like=eq,
                num_experts=self.num_experts,
                capacity=self.width,
                **self.fan,
            )
            extra = [self._swap(eq, live, "live.recv")]
        if self.gather:
            across = {"axis": "mp", "ranks": axes.mp, "dim": 2}
            recv = b.one("all_gather", [recv], "recv.all", like=eq, **across)
            extra = [b.one("all_gather", [live], "live.all", like=eq, **across) for live in extra]
        self.out = b.one(
            "expert_ffn",
            [recv, *leaves, *extra],
            "out",
            like=eq,
            activation=params["activation"],
            fn=params["fn"],
            tree=params["tree"],
            mp=axes.mp,
            extra=len(extra),
        )
        if self.gather:
            self.out = b.one("reduce_scatter", [self.out], "out.sum", like=eq, axis="mp", ranks=axes.mp, dim=2)

    def combine(self, eq: Equation) -> None:
        b = self.builder
        back = self._swap(eq, self.out, "back", back=True)
        note = "takes the sum over mp" if self.copies > 1 else ""
        rows = b.one("fan_in", [back, *self.host], "home", like=eq, note=note, **self.fan)
        b.emit(
            "decode",
            [rows, self.index, eq.operands[1]],
            [eq.outputs[0].name],
            like=eq,
            shape=eq.param("shape"),
            dtype=eq.param("dtype"),
        )

    def _leaf(self, leaf: str, number: int, eq: Equation) -> str:
        """What this rank's slice of the experts needs of a leaf."""
        b, axes = self.builder, self.axes
        part, fn = self.parts.get(leaf), eq.param("fn")
        dims = len(b.types[leaf].dims)
        if fn is not None:
            return self._leaf_of_function(leaf, number, fn, part, eq)
        roles = pytree.tree_unflatten(list(range(len(eq.operands) - 1)), eq.param("tree"))
        name = next(n for n in ("w_in", "w_out", "b_in", "b_out") if getattr(roles, n) == number)
        hidden = hidden_dim(name, dims)
        if part is None:  # a whole leaf: take this rank's slice of it
            if axes.ep > 1:
                leaf = b.one("take_shard", [leaf], f"{leaf}.ep", like=eq, axis="ep", ranks=axes.ep, dim=0)
            if hidden is not None and axes.mp > 1:
                leaf = b.one("take_shard", [leaf], f"{leaf}.mp", like=eq, axis="mp", ranks=axes.mp, dim=hidden)
            return leaf
        if hidden is None or axes.dp == 1:
            return leaf
        return b.one(
            "all_gather",
            [leaf],
            f"{leaf}.mp" if axes.mp > 1 else f"{leaf}.all",
            like=eq,
            note="backward: reduce_scatter",
            axis="dp",
            ranks=axes.dp,
            dim=hidden,
        )

    def _leaf_of_function(self, leaf: str, number: int, fn: Any, part: Part | None, eq: Equation) -> str:
        b, axes = self.builder, self.axes
        if part is None and axes.ep > 1:
            leaf = b.one("take_shard", [leaf], f"{leaf}.ep", like=eq, axis="ep", ranks=axes.ep, dim=0)
        hidden = None if part is None else hidden_dim(part.role, len(part.dims))
        if part is not None and hidden is not None and axes.mp * axes.dp > 1:
            across = axes.mp * axes.dp
            kept = kept_sizes(b.types[leaf], part, [("mp,dp", across, hidden)])
            leaf = b.one("all_gather", [leaf], f"{leaf}.all", like=eq, axis="mp,dp", ranks=across, dim=hidden, **kept)
        if axes.mp == 1:
            return leaf
        dim = hidden_dim_of(fn, eq, number, len(b.types[leaf].dims) - 1) + 1
        return b.one("take_shard", [leaf], f"{leaf}.mp", like=eq, axis="mp", ranks=axes.mp, dim=dim)


def hidden_dim_of(fn: Any, eq: Equation, number: int, dims: int) -> int:
    """The hidden dim that a function names for a leaf of one expert with `dims` dims.

    Raises:
        PlanError: if it names none, or one that is not there.
    """
    tree = eq.param("tree")
    named = getattr(fn, "hidden", None)
    if named is None:
        raise PlanError(
            f"{eq.layer}: r > 1 splits the hidden dim of the experts, and fn does not say which dim that is: wrap it "
            "as fmoe.ExpertFunction(fn, hidden=...), or choose r=1 or dp."
        )
    wanted = pytree.tree_flatten_with_path(pytree.tree_unflatten(list(range(tree.num_leaves)), tree))[0]
    given = {pytree.keystr(path): dim for path, dim in pytree.tree_flatten_with_path(named)[0]}
    paths = [pytree.keystr(path) for path, _ in wanted]
    dim = given.get(paths[number])
    if sorted(given) != sorted(paths) or not isinstance(dim, int) or not -dims <= dim < dims:
        leaves = ", ".join(path or "the one leaf" for path in paths)
        raise PlanError(
            f"{eq.layer}: ExpertFunction(hidden={named!r}) must be a tree like the parameters of one expert, with a "
            f"dim of each leaf: {leaves}; {paths[number] or 'it'} has {dims} dims."
        )
    return dim % dims

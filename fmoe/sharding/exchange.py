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


def exchange_tokens(
    program: Program, layer: str, axes: Axes, plan: Plan, parts: Mapping[str, str], width: int
) -> Program:
    """ep: sends tokens to the ranks that hold their experts, and gathers what those lack of the weights.

    Args:
        program: from `localize`.
        layer: name of the layer.
        axes: of the plan.
        plan: r, mp, layout and pipeline are read.
        parts: from `localize`.
        width: slots per expert that suffice on every rank (padded); widened to what divides.
    """
    expand = _Exchange(Builder(program), layer, axes, plan, parts, width)
    for eq in program.equations:
        if eq.layer == layer and eq.op in ("dispatch", "expert_apply", "combine"):
            getattr(expand, eq.op)(eq)
        else:
            expand.builder.copy(eq)
    return expand.builder.program()


class _Exchange:
    """The three equations of a layer, each as it runs under ep."""

    def __init__(self, builder: Builder, layer: str, axes: Axes, plan: Plan, parts: Mapping[str, str], width: int):
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
        shape: dict[str, Any] = {"layout": self.plan.layout, "num_experts": self.num_experts}
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
        role, fn = self.parts.get(leaf), eq.param("fn")
        dims = len(b.types[leaf].dims)
        if fn is not None:
            return self._leaf_of_function(leaf, number, fn, role, eq)
        roles = pytree.tree_unflatten(list(range(len(eq.operands) - 1)), eq.param("tree"))
        name = next(n for n in ("w_in", "w_out", "b_in", "b_out") if getattr(roles, n) == number)
        hidden = hidden_dim(name, dims)
        if role is None:  # a whole leaf: take this rank's slice of it
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

    def _leaf_of_function(self, leaf: str, number: int, fn: Any, role: str | None, eq: Equation) -> str:
        b, axes = self.builder, self.axes
        if role is None and axes.ep > 1:
            leaf = b.one("take_shard", [leaf], f"{leaf}.ep", like=eq, axis="ep", ranks=axes.ep, dim=0)
        if role not in (None, "expert"):
            hidden = hidden_dim(str(role), len(b.types[leaf].dims))
            if hidden is not None and axes.mp * axes.dp > 1:
                leaf = b.one(
                    "all_gather", [leaf], f"{leaf}.all", like=eq, axis="mp,dp", ranks=axes.mp * axes.dp, dim=hidden
                )
        if axes.mp == 1:
            return leaf
        hidden_dims = getattr(fn, "hidden", None)
        dim = None if hidden_dims is None else pytree.tree_leaves(hidden_dims)[number]
        if dim is None:
            raise PlanError(
                f"{eq.layer}: r={axes.mp} splits the hidden dim of the experts, and fn does not say which dim that is: "
                "wrap it as fmoe.ExpertFunction(fn, hidden=...), or choose r=1 or dp."
            )
        return b.one("take_shard", [leaf], f"{leaf}.mp", like=eq, axis="mp", ranks=axes.mp, dim=dim + 1)

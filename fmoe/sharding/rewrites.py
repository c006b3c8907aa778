"""Rewrites of a logical program into a per-device one: pure functions from program to program.

    localize           each rank's part of the experts' parameters in place of the whole
    sum_losses         gate -> route, all_reduce, aux_loss
    gather_weights     dp: weights are gathered, tokens stay
    exchange_tokens    ep: tokens are exchanged, part of the weights is gathered
    pipeline           the exchanges and experts of one layer in d chunks that overlap
    hierarchical       all_to_all inside nodes, then between them
    overlap_gathers    weight gathers start first and are done just before use

Each pass changes the equations of one layer (or one kind) and leaves the others as they are. No pass
changes what the program computes: `simulate` runs any of their results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.utils import _pytree as pytree

from .._axes import Axes
from .._errors import PlanError
from ..program import Equation, Program, Type, Var
from .build import Builder
from .mesh import Mesh
from .placement import EXPERT_ROLES, hidden_dim, local_type
from .plan import Plan

#: torch calls that act on each element of an expert's parameters alone, so that parts may be taken before.
_ELEMENTWISE = {
    "to", "type", "type_as", "float", "double", "half", "bfloat16", "detach", "clone", "contiguous", "neg", "mul", "div",
    "__mul__", "__rmul__", "__neg__", "__truediv__", "true_divide", "alias",
}  # fmt: skip


def localize(program: Program, roles: Sequence[str], mesh: Mesh) -> tuple[Program, dict[str, str]]:
    """Puts each rank's part of the experts' parameters in the place of the whole.

    Returns:
        The program, and the role of every variable that is a part.

    Raises:
        PlanError: if a torch call on such parameters is not elementwise.
    """
    inputs = [Var(v.name, local_type(v.type, role, mesh)) for v, role in zip(program.inputs, roles, strict=True)]
    parts = {v.name: role for v, role in zip(inputs, roles, strict=True) if role in EXPERT_ROLES}
    builder = Builder(program, inputs)
    for eq in program.equations:
        split = [name for name in eq.operands if name in parts]
        if not eq.op.startswith("torch.") or not split:
            builder.copy(eq)
            continue
        name, role = eq.op.removeprefix("torch."), parts[split[0]]
        scalars = all(not builder.types[o].dims for o in eq.operands if o not in parts)
        same = all(parts[o] == role for o in split)
        if name not in _ELEMENTWISE or not scalars or not same or len(eq.outputs) != 1:
            raise PlanError(
                f"torch.{name} is called on {split[0]}, of which each rank holds a part. Between the arguments and "
                "expert_apply only elementwise calls are possible there (to, mul, ...): do the rest outside."
            )
        var = eq.outputs[0]
        parts[var.name] = role
        part = Type(var.type.dtype, builder.types[split[0]].dims)
        builder.copy(replace(eq, outputs=(Var(var.name, part),)))
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


def gather_weights(program: Program, layer: str, axes: Axes, plan: Plan, parts: Mapping[str, str]) -> Program:
    """dp: gathers the whole experts on every rank, and keeps the tokens where they are."""
    builder = Builder(program)
    num_experts = 0
    for eq in program.equations:
        if eq.layer != layer or eq.op not in ("dispatch", "expert_apply", "combine"):
            builder.copy(eq)
            continue
        params = dict(eq.params)
        if eq.op == "dispatch":
            num_experts = params["num_experts"]
            builder.emit(eq.op, eq.operands, [eq.outputs[0].name], like=eq, **{**params, "layout": plan.layout, "spec": None})
        elif eq.op == "expert_apply":
            leaves = [_whole(builder, leaf, parts.get(leaf), axes, num_experts, eq) for leaf in eq.operands[1:]]
            builder.emit(eq.op, [eq.operands[0], *leaves], [eq.outputs[0].name], like=eq, **{**params, "spec": None})
        else:
            builder.emit(eq.op, eq.operands, [eq.outputs[0].name], like=eq, **{**params, "spec": None})
    return builder.program()


def _whole(builder: Builder, leaf: str, role: str | None, axes: Axes, num_experts: int, like: Equation) -> str:
    """The whole of a leaf of which each rank holds a part."""
    if role is None:
        return leaf
    hidden = hidden_dim(role, len(builder.types[leaf].dims))
    gathers = [("ep", axes.ep, 0)]
    if hidden is not None:
        gathers.append(("dp", axes.dp, hidden))
    gathers = [g for g in gathers if g[1] > 1]
    whole = int(builder.types[leaf].dims[0]) * axes.ep
    keep = num_experts if whole != num_experts else None
    if not gathers:
        return leaf
    axis, ranks, dim = (tuple(part) for part in zip(*gathers, strict=True))
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
        **({} if keep is None else {"keep": keep}),
    )


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
        shape = {"layout": self.plan.layout, "num_experts": self.num_experts}
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
                "live_slots", self.routed, "live", like=eq, num_experts=self.num_experts, capacity=self.width, **self.fan
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


def pipeline(program: Program, layer: str, chunks: int) -> Program:
    """Cuts what one layer exchanges into chunks: while one is computed, others are on their way.

    All chunks start before the first is waited for; each result starts home when it is ready.
    """
    if chunks == 1:
        return program
    rewrite = _Pipeline(program, layer, chunks)
    return rewrite.run()


class _Pipeline:
    def __init__(self, program: Program, layer: str, chunks: int):
        self.builder, self.source, self.chunks = Builder(program), program, chunks
        made = {v.name: eq for eq in program.equations for v in eq.outputs}
        self.ffn = next(eq for eq in program.equations if eq.layer == layer and eq.op == "expert_ffn")
        chain = made[self.ffn.operands[0]]
        self.before = chain if chain.op == "all_gather" else None
        self.there = made[chain.operands[0]] if self.before else chain
        users = {name: eq for eq in program.equations for name in eq.operands}
        after = users[self.ffn.outputs[0].name]
        self.after = after if after.op == "reduce_scatter" else None
        self.home = users[after.outputs[0].name] if self.after else after
        self.live = self._live(made)

    def _live(self, made: Mapping[str, Equation]) -> list[Equation]:
        """How the live slots come here: the exchange, and the gather if there is one."""
        name = self.ffn.operands[-1]
        if not self.ffn.param("extra") or self.there.operands[1:]:
            return []
        last = made[name]
        return [made[last.operands[0]], last] if last.op == "all_gather" else [last]

    def _chunked(self, name: str) -> list[str]:
        return [f"{name}.{i}" for i in range(self.chunks)]

    def run(self) -> Program:
        """The rewritten program."""
        if self.there.op != "all_to_all":
            return self.source  # one rank: nothing is exchanged
        skipped = [eq for eq in (self.before, self.after, *self.live[1:]) if eq is not None]
        for eq in self.source.equations:
            if eq is self.there:
                self._start_there(eq)
            elif eq is self.ffn:
                self._compute(eq)
            elif eq is self.home:
                self._finish(eq)
            elif eq not in skipped:
                self.builder.copy(eq)
        return self.builder.program()

    def _exchange(self, eq: Equation, operand: str, name: str, chunk: int) -> str:
        params = {**dict(eq.params)}
        if len(eq.operands) > 1:
            params["chunk"] = (chunk, self.chunks)
        return self.builder.emit(
            "start", [operand, *eq.operands[1:]], [name], like=eq, fn="all_to_all", **params
        )[0]

    def _start_there(self, eq: Equation) -> None:
        b = self.builder
        sends = b.emit("split", eq.operands, self._chunked(eq.operands[0]), like=eq, chunks=self.chunks)
        prefix = b.fresh("f")
        self.futures = [self._exchange(eq, send, f"{prefix}.{i}", i) for i, send in enumerate(sends)]

    def _compute(self, eq: Equation) -> None:
        b, rest = self.builder, list(eq.operands[1:])
        lives: list[str] = []
        if self.live:
            lives = b.emit("split", [self.live[0].outputs[0].name], self._chunked(rest.pop()), like=eq, chunks=self.chunks)
        recv, out, prefix = self.there.outputs[0].name, eq.outputs[0].name, b.fresh("b")
        self.homeward = []
        for i in range(self.chunks):
            (rows,) = b.emit("done", [self.futures[i]], [f"{recv}.{i}"], like=eq)
            live = lives[i : i + 1]
            if self.before is not None:
                (rows,) = b.emit("all_gather", [rows], [f"{self.before.outputs[0].name}.{i}"], like=eq, **dict(self.before.params))
                if live:
                    gather = self.live[1]
                    live = b.emit("all_gather", live, [f"{gather.outputs[0].name}.all.{i}"], like=eq, **dict(gather.params))
            params = {**dict(eq.params), "chunk": (i, self.chunks)}
            (made,) = b.emit("expert_ffn", [rows, *rest, *live], [f"{out}.{i}"], like=eq, **params)
            if self.after is not None:
                (made,) = b.emit("reduce_scatter", [made], [f"{self.after.outputs[0].name}.{i}"], like=eq, **dict(self.after.params))
            self.homeward.append(self._exchange(self.home, made, f"{prefix}.{i}", i))

    def _finish(self, eq: Equation) -> None:
        b = self.builder
        (name,) = [v.name for v in eq.outputs]
        parts = [b.emit("done", [f], [f"{name}.{i}"], like=eq)[0] for i, f in enumerate(self.homeward)]
        b.emit("concat", [*parts, *eq.operands[1:]], [name], like=eq, chunks=self.chunks)


def hierarchical(program: Program, layer: str, axes: Axes) -> Program:
    """Exchanges the tokens of a layer inside nodes first and then between them, in fewer, larger messages."""
    builder = Builder(program)
    lets: dict[Type, str] = {}
    for eq in program.equations:
        operand = builder.types[eq.operands[0]] if eq.operands else None
        swaps = eq.op == "all_to_all" or (eq.op == "start" and eq.param("fn") == "all_to_all")
        if eq.layer != layer or not swaps or operand is None or len(operand.dims) != 4 or operand.dtype.itemsize == 1:
            builder.copy(eq)
            continue
        plain = Type(operand.dtype, operand.dims)
        if plain not in lets:
            lets[plain] = f"a2a_2dh{f'_{len(builder.lets)}' if builder.lets else ''}"
            builder.lets.append(_two_levels(lets[plain], plain, axes))
        names = [eq.outputs[0].name]
        builder.emit("call" if eq.op == "all_to_all" else "start", eq.operands, names, like=eq, fn=lets[plain])
    return builder.program()


def _two_levels(name: str, message: Type, axes: Axes) -> Program:
    b = Builder(Program(name, (Var("s", message),), (), ("s",)))
    b.emit("unflatten", ["s"], ["a"], axes="node,gpu", sizes=(axes.node, axes.gpu))
    b.emit("stride_copy", ["a"], ["b"], note="gpu-major, so each peer's data is contiguous")
    b.emit("all_to_all", ["b"], ["c"], axis="gpu", ranks=axes.gpu, note="intra-node")
    b.emit("stride_copy", ["c"], ["d"], note="node-major")
    b.emit("all_to_all", ["d"], ["e"], axis="node", ranks=axes.node, note="inter-node, one message per node")
    b.emit("flatten", ["e"], ["t"])
    return replace(b.program(), outputs=("t",))


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
            builder.emit("start", [name], [future], like=gather, note=gather.note, fn="all_gather", **dict(gather.params))
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

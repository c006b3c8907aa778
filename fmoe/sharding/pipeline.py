"""Rewrites of the exchanges of one layer: in chunks that overlap with compute, and in two levels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .._axes import Axes
from ..program import Equation, Program, Type, Var
from .build import Builder


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
        return self.builder.emit("start", [operand, *eq.operands[1:]], [name], like=eq, fn="all_to_all", **params)[0]

    def _start_there(self, eq: Equation) -> None:
        b = self.builder
        sends = b.emit("split", eq.operands, self._chunked(eq.operands[0]), like=eq, chunks=self.chunks)
        prefix = b.fresh("f")
        self.futures = [self._exchange(eq, send, f"{prefix}.{i}", i) for i, send in enumerate(sends)]

    def _compute(self, eq: Equation) -> None:
        b, rest = self.builder, list(eq.operands[1:])
        lives: list[str] = []
        if self.live:
            lives = b.emit(
                "split", [self.live[0].outputs[0].name], self._chunked(rest.pop()), like=eq, chunks=self.chunks
            )
        recv, out, prefix = self.there.outputs[0].name, eq.outputs[0].name, b.fresh("b")
        self.homeward = []
        for i in range(self.chunks):
            (rows,) = b.emit("done", [self.futures[i]], [f"{recv}.{i}"], like=eq)
            live = lives[i : i + 1]
            if self.before is not None:
                (rows,) = b.emit(
                    "all_gather", [rows], [f"{self.before.outputs[0].name}.{i}"], like=eq, **dict(self.before.params)
                )
                if live:
                    gather = self.live[1]
                    live = b.emit(
                        "all_gather", live, [f"{gather.outputs[0].name}.all.{i}"], like=eq, **dict(gather.params)
                    )
            params = {**dict(eq.params), "chunk": (i, self.chunks)}
            (made,) = b.emit("expert_ffn", [rows, *rest, *live], [f"{out}.{i}"], like=eq, **params)
            if self.after is not None:
                (made,) = b.emit(
                    "reduce_scatter", [made], [f"{self.after.outputs[0].name}.{i}"], like=eq, **dict(self.after.params)
                )
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
    return replace(b.program(), outputs=("t",), checked=True)

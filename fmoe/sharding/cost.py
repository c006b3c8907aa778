"""Seconds and bytes of a program on a machine, from its equations alone.

Each equation takes a time: matmuls by their flops and shape, everything else by the bytes it moves, and
collectives by level and size (`profile`). The program is then scheduled as it runs: local equations one
after another on the compute channel; ``start`` puts an exchange on the channel of its level, inside nodes
or between them, and ``done`` waits for it; what stands between overlaps. Backward is the same list from
the end, with ``done`` and ``start`` in each other's place, two matmuls for each one, and gathers as scatters.

All times are those of the rank that is latest: `load` says how many choices each expert got, and an expert
part takes the rows of the fullest one where rows are ragged. Padded buffers are as wide as they are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.utils import _pytree as pytree

from .._axes import Axes
from .._typing import dtype_text
from ..program import Equation, Program, Type
from .profile import Profile

COMPUTE = "compute"
#: Times the rows of the load seen, for which ragged buffers are given memory.
HEADROOM = 1.25
#: Equations that are views, or noted and run by `combine`.
_FREE = {"dispatch", "unflatten", "flatten", "to_host", "cut_sizes", "done"}
#: Equations without a gradient.
_WHOLE_NUMBERS = {"to_host", "cut_sizes", "live_slots"}
_TRANSPOSED = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}
#: Equations whose transposes need none of their operands.
_LINEAR = {"encode", "fan_out", "fan_in", "split", "concat", "take_shard", "start", "done", "call",
           "all_to_all", "all_gather", "reduce_scatter", "all_reduce"}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One equation on the timeline: a name, the channel, and when it runs, in seconds."""

    name: str
    channel: str
    begin: float
    end: float


@dataclass(frozen=True)
class Price:
    """What a program takes on a machine.

    Attributes:
        forward: seconds.
        backward: seconds.
        busy: seconds that each channel is at work, forward and backward.
        memory: bytes at most, forward and what backward keeps.
        timeline: of forward, then of backward.
    """

    forward: float
    backward: float
    busy: Mapping[str, float]
    memory: float
    timeline: tuple[Entry, ...]

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward

    @property
    def hidden(self) -> float:
        """Share of the exchange that ran beside compute."""
        exchanged = sum(time for channel, time in self.busy.items() if channel != COMPUTE)
        return max(0.0, sum(self.busy.values()) - self.seconds) / exchanged if exchanged else 0.0

    def as_text(self) -> str:
        """The timeline as a table, in milliseconds."""
        lines = [f"forward {1e3 * self.forward:.4g} ms, backward {1e3 * self.backward:.4g} ms, "
                 f"memory {self.memory / 2**20:.4g} MiB, {100 * self.hidden:.0f} % of the exchange hidden"]  # fmt: skip
        for entry in self.timeline:
            if entry.end > entry.begin:
                lines.append(f"  {1e3 * entry.begin:9.4f} to {1e3 * entry.end:9.4f}  {entry.channel:8} {entry.name}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Load:
    """How the choices of a layer are spread over experts.

    Attributes:
        counts: choices of each expert that are kept, over all ranks.
        total: choices made; those that are not kept were dropped. By default all are kept.
        ratio: instead of counts, what `fullest` is.
    """

    counts: tuple[float, ...]
    total: float | None = None
    ratio: float | None = None

    @classmethod
    def spread(cls, ratio: float) -> Load:
        """A load of which only the excess of the fullest part is known."""
        return cls((), ratio=ratio)

    def fullest(self, parts: int) -> float:
        """Rows of the fullest of `parts` groups of experts, over a part's share of all choices; 1 for no rows.

        Example:
            >>> Load((6, 0, 1, 1)).fullest(2), Load((2, 0, 1, 1), total=8).fullest(2)
            (1.5, 0.5)
        """
        if self.ratio is not None:
            return min(self.ratio, float(parts))
        total = sum(self.counts) if self.total is None else self.total
        if total <= 0 or sum(self.counts) <= 0:
            return 1.0
        each = -(-len(self.counts) // parts)
        groups = [sum(self.counts[i * each : (i + 1) * each]) for i in range(parts)]
        return max(groups) * parts / total


@functools.lru_cache(maxsize=4096)
def _nodes(axes: Axes, axis: str) -> int:
    """Over how many nodes an exchange goes."""
    return len({rank // axes.gpu for rank in axes.ranks(0, axis)})


@dataclass(frozen=True)
class _Step:
    """An equation, priced: the channel that works on it, and seconds forward and backward."""

    equation: Equation
    channel: str
    forward: float
    backward: float


class Pricer:
    """Prices the equations of one program."""

    def __init__(
        self,
        program: Program,
        axes: Mapping[str, Axes],
        profile: Profile,
        loads: Mapping[str, Load],
        tokens: int | None,
    ):
        self.program, self.axes, self.profile, self.loads = program, axes, profile, loads
        types = program.types()
        self.types = types if tokens is None else {name: kind.at(tokens) for name, kind in types.items()}
        self.letters, self.made = types, {var.name: eq for eq in program.equations for var in eq.outputs}
        self.choices = {  # T * K of each layer
            eq.layer: float(math.prod(map(int, self.types[eq.operands[1]].dims)))
            for eq in program.equations
            if eq.op == "dispatch"
        }

    def price(self) -> Price:
        """The price of the program."""
        steps = [self._step(eq) for eq in self.program.equations]
        forward = _Schedule(self.profile.shared)
        for step in steps:
            forward.forward(step)
        backward = _Schedule(self.profile.shared)
        for step in reversed(steps):
            backward.backward(step)
        busy = {c: forward.busy.get(c, 0.0) + backward.busy.get(c, 0.0) for c in {*forward.busy, *backward.busy}}
        return Price(forward.end, backward.end, busy, self._memory(), (*forward.entries, *backward.entries))

    # --- one equation ------------------------------------------------------------------------------------------

    def _step(self, eq: Equation) -> _Step:
        axes = self.axes.get(eq.layer, self.axes[""])
        if eq.op in ("all_to_all", "all_gather", "reduce_scatter", "all_reduce", "start", "call"):
            level, seconds = self._exchange(eq, axes)
            smooth = self.types[eq.operands[0]].dtype.is_floating_point and eq.op != "all_reduce"
            turned = smooth and (eq.param("fn") or eq.op) in _TRANSPOSED
            back = self._exchange(eq, axes, backward=True)[1] if turned else seconds
            return _Step(eq, level, seconds, back if smooth else 0.0)
        if eq.op in _FREE:
            return _Step(eq, COMPUTE, 0.0, 0.0)
        seconds = self._local(eq, axes)
        return _Step(eq, COMPUTE, seconds, 0.0 if eq.op in _WHOLE_NUMBERS else 2 * seconds)

    def _exchange(self, eq: Equation, axes: Axes, backward: bool = False) -> tuple[str, float]:
        op = eq.param("fn") or eq.op
        sub = [s for s in self.program.lets if s.name == op]
        if sub:
            whole = float(self.types[eq.operands[0]].bytes)
            inside = self._swap(whole, axes.gpu, axes.gpu, 1)
            between = self._swap(whole, axes.node, 1, axes.node)
            return "between", inside + between + 2 * self.profile.moved(2 * whole)
        axis = eq.param("axis")
        ranks = axes.size(axis)
        nodes = _nodes(axes, axis)
        local = max(1, ranks // nodes)
        size = float(self.types[eq.operands[0]].bytes)
        level = "between" if nodes > 1 else "inside"
        if op == "all_to_all":
            if len(eq.operands) > 1 and eq.layer in self.loads:  # ragged: the fullest rank waits for the most rows
                size *= self.loads[eq.layer].fullest(axes.ep)
            return level, self._swap(size, ranks, local, nodes)
        if op == "all_gather":
            size *= ranks
        return level, self._ring(_TRANSPOSED.get(op, op) if backward else op, size, ranks, local, nodes)

    def _swap(self, size: float, ranks: int, local: int, nodes: int) -> float:
        """all_to_all: what stays in the node and what leaves it go at once."""
        p = self.profile
        inside = p.collective("all_to_all", size * (local - 1) / ranks, local, "inside")
        if nodes == 1:
            return inside
        return max(inside, p.collective("all_to_all", size * (ranks - local) / ranks, ranks, "between", nodes))

    def _ring(self, op: str, size: float, ranks: int, local: int, nodes: int) -> float:
        """Gathers, scatters and reductions: between nodes all links of a node carry a part each."""
        p, times = self.profile, 2 if op == "all_reduce" else 1
        inside = p.collective(op, times * size * (ranks - 1) / ranks, local, "inside")
        if nodes == 1:
            return inside
        return max(inside, p.collective(op, times * size * (nodes - 1) / nodes / local, ranks, "between", nodes))

    def _local(self, eq: Equation, axes: Axes) -> float:
        p, types = self.profile, self.types
        operands = [types[name] for name in eq.operands]
        outputs = [types[var.name] for var in eq.outputs]
        moved = float(sum(t.bytes for t in [*operands, *outputs] if t.kind == "tensor"))
        if eq.op in ("expert_ffn", "expert_apply"):
            return p.launch + self._experts(eq, operands, outputs[0], axes)
        if eq.op in ("fan_out", "fan_in") and eq.param("copies") == eq.param("cut") == 1:
            return 0.0  # a view
        if eq.op == "route":
            x, weight = operands[:2]
            tokens = math.prod(map(int, x.dims[:-1]))
            flops = 2.0 * tokens * int(weight.dims[0]) * int(weight.dims[1])
            return 8 * p.launch + p.matmul(flops, 1, "f32") + p.moved(moved + 40.0 * tokens * int(weight.dims[1]))
        return p.launch + p.moved(moved)

    def _experts(self, eq: Equation, operands: Sequence[Type], out: Type, axes: Axes) -> float:
        p = self.profile
        rows = float(math.prod(map(int, operands[0].dims[:-1])))
        last = len(operands) - int(eq.param("extra", 0))
        leaves = operands[1:last]
        matrices = [leaf for leaf in leaves if len(leaf.dims) >= 3]
        ragged = last < len(operands) and operands[-1].kind == "host"
        if ragged and eq.layer in self.loads:
            rows *= self.loads[eq.layer].fullest(axes.ep)
        if eq.op == "expert_apply":  # of this rank's own tokens: slots that hold none cost nothing
            rows = min(rows, self.choices.get(eq.layer, math.inf))
        experts = max(1, int(matrices[0].dims[0])) if matrices else 1
        seconds = 0.0
        dtype = dtype_text(operands[0].dtype)
        hidden = 0.0
        for leaf in matrices:
            one = 2.0 * rows * math.prod(map(int, leaf.dims[1:]))
            seconds += p.matmul(one, experts, dtype)
            hidden += rows * int(leaf.dims[-1]) * out.dtype.itemsize
        weights = sum(leaf.bytes for leaf in leaves)
        traffic = weights + 2 * hidden + rows * int(operands[0].dims[-1]) * operands[0].dtype.itemsize
        return max(seconds, p.moved(traffic))

    # --- memory --------------------------------------------------------------------------------------------------

    def _memory(self) -> float:
        """Bytes at most: inputs, their gradients, what backward keeps, and the largest equation's buffers.

        Backward keeps the operands of every equation that is not linear, and the experts' pre-activations.
        """
        inputs = sum(self.types[var.name].bytes for var in self.program.inputs)
        kept: set[str] = set()
        largest, hidden = 0.0, 0.0
        for eq in self.program.equations:
            if eq.op in _WHOLE_NUMBERS or eq.op in ("done", "split", "concat", "start"):
                continue
            if eq.op not in _LINEAR:
                kept.update(eq.operands)
            largest = max(largest, float(sum(self._most(v.name) for v in eq.outputs)))
            if eq.op in ("expert_ffn", "expert_apply"):
                hidden += self._pre_activation(eq) * self._grows(eq.operands[0])
        tensors = {name for name in kept if self.types[name].kind == "tensor"}
        tensors -= {var.name for var in self.program.inputs}
        return 2.0 * inputs + sum(self._most(name) for name in tensors) + hidden + 2 * largest

    def _most(self, name: str) -> float:
        """Bytes of a variable on the rank that has the most of it."""
        return self.types[name].bytes * self._grows(name)

    def _grows(self, name: str) -> float:
        """How many times its expected rows a buffer has, where the load decides; with room for a load that grows."""
        eq = self.made.get(name)
        if eq is None or eq.layer not in self.axes or not eq.layer:
            return 1.0
        if not any(getattr(dim, "letter", "") == "R" for dim in self.letters[name].dims):
            return 1.0
        load = self.loads.get(eq.layer)
        return HEADROOM * (1.0 if load is None else load.fullest(self.axes[eq.layer].ep))

    def _pre_activation(self, eq: Equation) -> float:
        rows = math.prod(map(int, self.types[eq.operands[0]].dims[:-1]))
        tree = eq.param("tree")
        leaves = [self.types[name] for name in eq.operands[1 : 1 + tree.num_leaves]]
        if eq.param("fn") is not None:
            return 0.0
        w_in = pytree.tree_unflatten(leaves, tree).w_in
        return float(rows * math.prod(map(int, w_in.dims[2:])) * self.types[eq.operands[0]].dtype.itemsize)


class _Schedule:
    """List scheduling on one compute channel and one channel for each level of links."""

    def __init__(self, shared: float):
        self.shared = shared
        self.free: dict[str, float] = {}
        self.ready: dict[str, float] = {}
        self.busy: dict[str, float] = {}
        self.entries: list[Entry] = []
        self._began: dict[str, float] = {}  # when backward begins an exchange that forward waits for, by its future

    @property
    def end(self) -> float:
        """When everything is done."""
        return max([*self.free.values(), 0.0])

    def forward(self, step: _Step) -> None:
        """Schedules an equation after its operands."""
        eq = step.equation
        at = max([self.ready.get(name, 0.0) for name in eq.operands] or [0.0])
        end = self._place(step, at, step.forward, begins=eq.op == "start", waits=eq.op == "done")
        for var in eq.outputs:
            self.ready[var.name] = end

    def backward(self, step: _Step) -> None:
        """Schedules the transpose of an equation after the gradients of its outputs."""
        eq = step.equation
        at = max([self.ready.get(var.name, 0.0) for var in eq.outputs] or [0.0])
        if eq.op == "done":  # the exchange itself is priced at its start, which comes later here
            for name in eq.operands:
                self.ready[name] = max(self.ready.get(name, 0.0), at)
            self._began[eq.operands[0]] = at
            return
        if eq.op == "start":
            began = self._began.get(eq.outputs[0].name, at)
            end = self._place(step, began, step.backward, begins=True)
            self.free[COMPUTE] = max(self.free.get(COMPUTE, 0.0), end)
        else:
            end = self._place(step, at, step.backward)
        for name in eq.operands:
            self.ready[name] = max(self.ready.get(name, 0.0), end)

    def _place(self, step: _Step, at: float, seconds: float, *, begins: bool = False, waits: bool = False) -> float:
        compute = self.free.get(COMPUTE, 0.0)
        if waits:
            self.free[COMPUTE] = max(compute, at)
            return self.free[COMPUTE]
        channel = step.channel
        if channel == COMPUTE:
            begin = max(compute, at)
            beside = max([time for name, time in self.free.items() if name != COMPUTE] or [0.0]) - begin
            if beside > 0:  # work goes on at 1 - shared until the exchange has ended
                seconds = min(seconds / (1 - self.shared), seconds + self.shared * beside)
        elif begins:
            begin = max(self.free.get(channel, 0.0), at)
        else:
            begin = max(compute, self.free.get(channel, 0.0), at)
        end = begin + seconds
        self.free[channel] = end
        if channel != COMPUTE and not begins:
            self.free[COMPUTE] = end
        self.busy[channel] = self.busy.get(channel, 0.0) + seconds
        self.entries.append(Entry(step.equation.outputs[0].name, channel, begin, end))
        return end


def price(
    program: Program,
    axes: Mapping[str, Axes],
    profile: Profile,
    *,
    loads: Mapping[str, Load] | None = None,
    tokens: int | None = None,
) -> Price:
    """What a per-device program takes on a machine.

    Args:
        program: from a plan.
        axes: of its layers.
        profile: the machine.
        loads: by layer, how choices are spread over experts; evenly by default.
        tokens: T; by default that of the trace.
    """
    return Pricer(program, axes, profile, loads or {}, tokens).price()

"""What a program costs: arithmetic, traffic by collective and axis, memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ._axes import Axes
from .program import OPERATIONS, Program, Type


@dataclass(frozen=True)
class Work:
    """What kernels of the experts do on a GPU: how many are launched, and the bytes they read and write."""

    launches: int = 0
    moved: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.launches + other.launches, self.moved + other.moved)


@dataclass(frozen=True)
class Cost:
    """Cost of one equation or program on one device.

    Attributes:
        flops: of the experts' matmuls; a multiply-add counts 2.
        traffic: (collective, axis) -> (calls, bytes received from other ranks; for all_reduce the bytes added up).
        forward: kernels of the experts on a GPU; 0 for a user's function.
        backward: the same of their transposes.
    """

    flops: float = 0.0
    traffic: Mapping[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    forward: Work = Work()
    backward: Work = Work()

    @classmethod
    def of(cls, collective: str, axis: str, whole: int, ranks: int) -> Cost:
        """One exchange after which a rank holds `whole` bytes, its own share among them."""
        received = whole if collective == "all_reduce" else whole * (ranks - 1) // ranks
        return cls(traffic={(collective, axis): (1, received)})

    def __add__(self, other: Cost) -> Cost:
        traffic = dict(self.traffic)
        for key, (calls, size) in other.traffic.items():
            before = traffic.get(key, (0, 0))
            traffic[key] = (before[0] + calls, before[1] + size)
        forward, backward = self.forward + other.forward, self.backward + other.backward
        return Cost(self.flops + other.flops, traffic, forward, backward)

    @property
    def calls(self) -> int:
        """Collectives in all."""
        return sum(calls for calls, _ in self.traffic.values())

    @property
    def bytes(self) -> int:
        """Bytes in all."""
        return sum(size for _, size in self.traffic.values())


def swapped(axes: Axes, operands: Sequence[Type], outputs: Sequence[Type], *, axis: str, ranks: int, **_: Any) -> Cost:
    """An all_to_all."""
    return Cost.of("all_to_all", axis, operands[0].bytes, ranks)


def gathered(axes: Axes, operands: Sequence[Type], outputs: Sequence[Type], *, axis: str, ranks: Any, **_: Any) -> Cost:
    """An all_gather."""
    count = axes.size(axis)
    return Cost.of("all_gather", axis, operands[0].bytes * count, count)


def scattered(
    axes: Axes, operands: Sequence[Type], outputs: Sequence[Type], *, axis: str, ranks: int, **_: Any
) -> Cost:
    """A reduce_scatter: as many bytes as it keeps come from every other rank."""
    return Cost.of("reduce_scatter", axis, operands[0].bytes, ranks)


def reduced(axes: Axes, operands: Sequence[Type], outputs: Sequence[Type], *, axis: str, ranks: int, **_: Any) -> Cost:
    """An all_reduce."""
    return Cost.of("all_reduce", axis, operands[0].bytes, ranks)


@dataclass(frozen=True)
class ProgramCost(Cost):
    """Cost of a program on one device.

    Attributes:
        resident: bytes of the program's inputs on the device.
        peak: bytes alive at once, at most, inputs among them, without what backward keeps.
        run_time: whether rows known at run time only are priced as under an even load.
    """

    resident: int = 0
    peak: int = 0
    run_time: bool = False


def program_cost(program: Program, axes: Mapping[str, Axes], tokens: int | None = None) -> ProgramCost:
    """Cost of a program; `axes` by layer, empty for a logical one; for T = `tokens`, or as it was traced."""
    types = program.types()
    run_time = any(getattr(d, "letter", "") == "R" for t in types.values() for d in t.dims)
    if tokens is not None:
        types = {name: type.at(tokens) for name, type in types.items()}
    total = Cost()
    last: dict[str, int] = {name: len(program.equations) for name in program.outputs}
    for number, equation in enumerate(program.equations):
        for name in equation.operands:
            last[name] = max(last.get(name, 0), number)
        operation = OPERATIONS.get(equation.op)
        if operation is not None and operation.cost is not None:
            operands = [types[name] for name in equation.operands]
            outputs = [types[var.name] for var in equation.outputs]
            total = total + operation.cost(axes.get(equation.layer), operands, outputs, **dict(equation.params))
    inputs = {var.name for var in program.inputs}
    resident = sum(types[name].bytes for name in inputs)
    alive, peak = resident, resident
    for number, equation in enumerate(program.equations):
        alive += sum(types[var.name].bytes for var in equation.outputs)
        peak = max(peak, alive)
        names = {*equation.operands, *(v.name for v in equation.outputs)}
        alive -= sum(types[name].bytes for name in names - inputs if last.get(name, number) == number)
    return ProgramCost(total.flops, total.traffic, total.forward, total.backward, resident, peak, run_time)

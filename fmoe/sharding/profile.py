"""What a machine can do: matmul speed by size, memory, and each collective by level and size.

A `Profile` is data. Presets hold published figures, each with its source; ``python -m fmoe calibrate``
fits one to the machine and process group at hand. A time is, with S bytes received by a rank,

    collective   alpha + S / bandwidth         the segment of S, per level: inside a node, between nodes
    matmul       flops / (peak * efficiency)   efficiency by flops of one matmul, interpolated in logs
    memory       bytes / bandwidth             of everything that is read and written
    launch       a constant for each equation

Between nodes, bandwidth is divided by the congestion factor of the number of nodes. Units are bytes,
seconds and flops; a multiply-add counts 2.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .mesh import refuse_spec

LEVELS = ("inside", "between")
COLLECTIVES = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce")
DTYPES = ("f64", "f32", "bf16", "f16")


@dataclass(frozen=True)
class Segment:
    """Time of a collective for up to `most` bytes received: ``alpha + bytes / bandwidth``.

    `alpha` grows by `peer` for each other rank: messages to them are posted one by one.
    """

    most: float
    alpha: float
    bandwidth: float
    peer: float = 0.0


@dataclass(frozen=True)
class Profile:
    """A machine, as numbers.

    Attributes:
        name: of the preset or calibration.
        peak: dtype to flops per second of the largest matmul.
        efficiency: (flops of one matmul, share of the peak), ascending.
        memory_bandwidth: bytes per second, reads and writes together.
        memory: bytes of a device, or None where it is not limited.
        launch: seconds before an equation starts.
        links: ``"inside"`` and ``"between"`` (nodes) to collective to segments, ascending in size.
        congestion: (nodes, share of the bandwidth between nodes that is left), ascending.
        shared: share of compute that an exchange in flight takes away from what runs beside it.
        sources: where each number is from.
    """

    name: str
    peak: Mapping[str, float]
    efficiency: tuple[tuple[float, float], ...]
    memory_bandwidth: float
    launch: float
    links: Mapping[str, Mapping[str, tuple[Segment, ...]]]
    memory: float | None = None
    congestion: tuple[tuple[int, float], ...] = ((1, 1.0),)
    shared: float = 0.0
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        refuse_spec(f"Profile {self.name!r}", _problems(self), ValueError)

    def __hash__(self) -> int:
        return hash(self.as_json())

    # --- times ----------------------------------------------------------------------------------------------

    def matmul(self, flops: float, count: int, dtype: str) -> float:
        """Seconds of `count` equal matmuls of `flops` in all."""
        if flops <= 0:
            return 0.0
        return flops / (self.peak[dtype] * interpolate(self.efficiency, flops / max(count, 1)))

    def moved(self, size: float) -> float:
        """Seconds to read and write `size` bytes in all."""
        return size / self.memory_bandwidth

    def collective(self, name: str, size: float, ranks: int, level: str, nodes: int = 1) -> float:
        """Seconds of a collective of `ranks` that brings a rank `size` bytes."""
        if ranks == 1:
            return 0.0
        segments = self.links[level][name]
        segment = next((s for s in segments if size <= s.most), segments[-1])
        left = interpolate(tuple((float(n), share) for n, share in self.congestion), float(nodes))
        bandwidth = segment.bandwidth * (left if level == "between" else 1.0)
        return segment.alpha + segment.peer * (ranks - 1) + size / bandwidth

    # --- files ----------------------------------------------------------------------------------------------

    def as_json(self) -> str:
        """The profile as JSON, which `load` reads."""
        held = dataclasses.asdict(self)
        return json.dumps(_finite(held), indent=1, sort_keys=True)

    @classmethod
    def load(cls, source: str | Path) -> Profile:
        """A profile from a file that `as_json` wrote.

        Raises:
            ValueError: if a number is missing or absurd, naming each.
        """
        path = Path(source)
        if not path.is_file():
            raise ValueError(f"profile {path}: there is no such file.")
        wrong = f"profile {path}: not a profile, or one with parts missing"
        try:
            held = _from_json(json.loads(path.read_text()))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{wrong} ({error}).") from None
        try:
            return cls(**held)
        except (TypeError, AttributeError) as error:
            raise ValueError(f"{wrong} ({error}).") from None


def interpolate(points: Sequence[tuple[float, float]], x: float) -> float:
    """Piecewise linear in log x and log y, constant outside.

    A straight line in y itself would let an efficiency grow faster than the work: more work in less time.

    Example:
        >>> interpolate([(1.0, 0.1), (100.0, 0.4)], 10.0)
        0.2
    """
    if x <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if x <= x1:
            share = (math.log(x) - math.log(x0)) / (math.log(x1) - math.log(x0))
            return round(y0 * (y1 / y0) ** share, 12)
    return points[-1][1]


def _finite(held: Any) -> Any:
    """JSON has no infinity: the last segment's bound is written as null."""
    if isinstance(held, dict):
        return {key: _finite(value) for key, value in held.items()}
    if isinstance(held, (list, tuple)):
        return [_finite(value) for value in held]
    return None if isinstance(held, float) and math.isinf(held) else held


def _from_json(held: dict[str, Any]) -> dict[str, Any]:
    links = {
        level: {
            name: tuple(Segment(**{**s, "most": math.inf if s["most"] is None else s["most"]}) for s in segments)
            for name, segments in of_level.items()
        }
        for level, of_level in held["links"].items()
    }
    pairs = {name: tuple((x, y) for x, y in held[name]) for name in ("efficiency", "congestion")}
    return {**held, "links": links, **pairs}


def _problems(p: Profile) -> list[str]:
    found = []

    def check(name: str, value: Any, low: float, high: float) -> bool:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        fits = number and low <= value <= high
        if not fits:
            found.append(f"{name}={value!r}, but it must be a number from {low:g} to {high:g}.")
        return fits

    def ascend(name: str, values: Sequence[Any], low: float, high: float) -> None:
        fit = [check(name, value, low, high) for value in values]
        if all(fit) and any(b <= a for a, b in itertools.pairwise(values)):
            found.append(f"{name} {', '.join(f'{v:g}' for v in values)}: these must be ascending.")

    for dtype in DTYPES:
        check(f"peak[{dtype!r}]", p.peak.get(dtype), 1e6, 1e18)
    if not p.efficiency or not p.congestion:
        found.append("efficiency and congestion need at least one point each.")
    for name, low, high, least, most, unit in (
        ("efficiency", 1, 1e21, 1e-6, 1.5, "flops"),
        ("congestion", 1, 1e6, 1e-3, 1.0, "nodes"),
    ):
        points = getattr(p, name)
        ascend(f"{name} at", [x for x, _ in points], low, high)
        for x, share in points:
            check(f"{name} at {x} {unit}", share, least, most)
    check("memory_bandwidth", p.memory_bandwidth, 1e6, 1e15)
    check("launch", p.launch, 0, 1)
    check("shared", p.shared, 0, 0.9)
    if p.memory is not None:
        check("memory", p.memory, 1e6, 1e15)
    for level in LEVELS:
        for name in COLLECTIVES:
            segments = p.links.get(level, {}).get(name, ())
            if not segments:
                found.append(f"links[{level!r}][{name!r}] is missing.")
            where = f"links[{level!r}][{name!r}]"
            ascend(f"{where}.most", [s.most for s in segments], 1, math.inf)
            if segments and segments[-1].most != math.inf:
                found.append(f"{where}.most={segments[-1].most!r} is that of the last segment, so it must be null.")
            for s in segments:
                check(f"{where}.alpha", s.alpha, 0, 10)
                check(f"{where}.peer", s.peer, 0, 1)
                check(f"{where}.bandwidth", s.bandwidth, 1e3, 1e14)
    return found

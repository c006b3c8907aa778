"""Fits the segments of a `Profile` to measured times of a collective.

    t = alpha + S / bandwidth        S bytes received, in one or two segments of S

Least squares of relative errors: small messages count as much as large ones.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .profile import Segment


@dataclass(frozen=True)
class Fit:
    """Segments fitted to (bytes, seconds), and how well they fit.

    Attributes:
        segments: ascending in size.
        r2: share of the variance that they explain, points weighted by 1/seconds as in the fit.
        errors: predicted over measured, minus 1, of each point.
    """

    segments: tuple[Segment, ...]
    r2: float
    errors: tuple[float, ...]

    def as_text(self) -> str:
        """How well it fits."""
        sizes = [abs(e) for e in self.errors]
        return f"r2 {self.r2:.4f}, residuals median {statistics.median(sizes):.1%}, worst {max(sizes):.1%}"


def fit(points: Sequence[tuple[float, float]]) -> Fit:
    """Fits ``alpha + bytes / bandwidth`` by least squares of relative errors, in one or two segments.

    Two are taken where they explain the points better than chance (Bayes' information criterion) and time
    does not fall from one to the other.

    Args:
        points: (bytes, seconds), ascending in bytes, at least two.

    Returns:
        The fit.

    Raises:
        ValueError: if there are fewer points.

    Example:
        >>> found = fit([(1e3, 1.1e-4), (1e4, 2e-4), (1e5, 1.1e-3)])
        >>> [(round(s.alpha, 9), round(s.bandwidth)) for s in found.segments]
        [(0.0001, 100000000)]
    """
    if len(points) < 2:
        raise ValueError(f"fit: {len(points)} points were given, but a line needs at least 2.")
    best: tuple[Segment, ...] = (replace(_line(points), most=math.inf),)
    lowest = math.inf
    for first in (None, *range(3, len(points) - 2)):
        found = best if first is None else _two(points, first)
        if found is None:
            continue
        count, numbers = len(points), 2 if first is None else 5
        rest = sum(e**2 for e in _errors(found, points)) / count
        criterion = count * math.log(max(rest, 1e-8)) + numbers * math.log(count)
        if criterion < lowest:
            best, lowest = found, criterion
    errors = _errors(best, points)
    weights = [1 / t**2 for _, t in points]
    mean = sum(w * t for w, (_, t) in zip(weights, points, strict=True)) / sum(weights)
    spread = sum(w * (t - mean) ** 2 for w, (_, t) in zip(weights, points, strict=True))
    r2 = 1 - sum(e**2 for e in errors) / spread if spread > 0 else 1.0
    return Fit(best, r2, errors)


def _line(points: Sequence[tuple[float, float]]) -> Segment:
    """One segment: alpha and the slope are at least 0."""
    a, b, c = (sum(s**n / t**2 for s, t in points) for n in range(3))
    d, e = (sum(s**n / t for s, t in points) for n in range(2))
    determinant = a * c - b * b
    alpha, slope = ((d * c - e * b) / determinant, (a * e - b * d) / determinant) if determinant > 0 else (d / a, 0.0)
    if alpha < 0:
        alpha, slope = 0.0, e / c
    if slope <= 1e-14:
        alpha, slope = d / a, 1e-14
    return Segment(0.0, alpha, 1 / slope)


def _two(points: Sequence[tuple[float, float]], first: int) -> tuple[Segment, ...] | None:
    """Segments before and after a point; None where time would fall between them."""
    low, high = _line(points[:first]), _line(points[first:])
    begin, end = points[first - 1][0], points[first][0]
    most = math.sqrt(begin * end)
    bend = 1 / high.bandwidth - 1 / low.bandwidth
    if bend and begin <= (low.alpha - high.alpha) / bend <= end:
        most = (low.alpha - high.alpha) / bend
    elif high.alpha + most / high.bandwidth < low.alpha + most / low.bandwidth:
        return None
    return replace(low, most=most), replace(high, most=math.inf)


def _errors(segments: Sequence[Segment], points: Sequence[tuple[float, float]]) -> tuple[float, ...]:
    def seconds(size: float) -> float:
        segment = next(s for s in segments if size <= s.most)
        return segment.alpha + size / segment.bandwidth

    return tuple(seconds(size) / taken - 1 for size, taken in points)


def rising(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """The nearest efficiencies that do not fall with size: neighbours that do are given their geometric mean.

    Noise would otherwise make a matmul cut in two cheaper, or dearer, than it is.

    Args:
        points: (flops, efficiency), ascending in flops.

    Returns:
        The same flops, each with its efficiency.

    Example:
        >>> rising([(1.0, 0.2), (8.0, 0.9), (64.0, 0.4), (512.0, 1.0)])
        ((1.0, 0.2), (8.0, 0.6), (64.0, 0.6), (512.0, 1.0))
    """
    pools: list[list[float]] = []
    for _, share in points:
        pools.append([share])
        while len(pools) > 1 and statistics.geometric_mean(pools[-2]) > statistics.geometric_mean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    shares = [round(statistics.geometric_mean(pool), 6) for pool in pools for _ in pool]
    return tuple((size, share) for (size, _), share in zip(points, shares, strict=True))


def received(name: str, whole: float, ranks: int, nodes: int) -> float:
    """Bytes that a price hands to `Profile.collective`, for a tensor of `whole` bytes over ranks on nodes.

    Args:
        name: of the collective.
        whole: bytes of the tensor before a reduce_scatter or after an all_gather.
        ranks: that exchange.
        nodes: on which they stand.

    Returns:
        Bytes that a rank receives at the slowest level.

    Example:
        >>> received("all_to_all", 1600.0, 16, 2), received("all_gather", 1600.0, 16, 2)
        (800.0, 100.0)
    """
    local = ranks // nodes
    times = 2 if name == "all_reduce" else 1
    if nodes == 1:
        return times * whole * (ranks - 1) / ranks
    return whole * (ranks - local) / ranks if name == "all_to_all" else times * whole * (nodes - 1) / nodes / local

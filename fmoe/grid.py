"""A layer over a grid of clusters, loads, capacities and sizes: each point priced under every legal plan.

The planner's choice at a point is the fastest plan that fits in memory. A static plan is one that runs at all
points; the best of them is the one whose time is, in the geometric mean over the points, the least above the
planner's, among those that are legal and fit everywhere.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .sharding.cost import COMPUTE, Price
from .sharding.profile import Profile
from .workload import Workload, best

#: The most and the least capacity needed within one training, over each other (Tutel, arXiv 2206.03382, figure 1).
SWING = 4.38
LEVELS = 9
#: What one runs without a choice: tokens exchanged at once, by one linear exchange.
USUAL = "ep r=1 pipeline=1 a2a=linear"

Say = Callable[[int], None]


@dataclass(frozen=True)
class Point:
    """A workload, priced: seconds of each plan that fits in memory, and what the planner's choice is made of.

    Attributes:
        workload: what is priced.
        seconds: by plan.
        too_large: plans that do not fit in memory.
        chosen: the planner's choice; None where nothing fits.
        price: what it takes.
    """

    workload: Workload
    seconds: Mapping[str, float]
    too_large: tuple[str, ...]
    chosen: str | None
    price: Price | None

    @property
    def best(self) -> float:
        """Seconds of the planner's choice."""
        assert self.price is not None
        return self.price.seconds

    @property
    def size(self) -> str:
        """T, M and H."""
        return f"{self.workload.tokens}x{self.workload.model_dim}x{self.workload.hidden_dim}"

    def as_data(self) -> dict[str, Any]:
        """For JSON."""
        data: dict[str, Any] = {
            "workload": dataclasses.asdict(self.workload),
            "chosen": self.chosen,
            "too_large": list(self.too_large),
            "plans": dict(self.seconds),
        }
        if self.price is not None:
            data["seconds"] = self.price.seconds
            data["memory"] = self.price.memory
            data["busy"] = dict(self.price.busy)
            data["hidden"] = self.price.hidden
            data["exchange_share"] = exchange_share(self.price)
            data["exposed_share"] = exposed_share(self.price)
        return data


def exchange_share(price: Price) -> float:
    """Seconds of exchange over those of the layer; may be above what is waited for."""
    return sum(time for channel, time in price.busy.items() if channel != COMPUTE) / price.seconds


def exposed_share(price: Price) -> float:
    """Share of the layer's time in which nothing is computed."""
    return max(0.0, 1 - price.busy.get(COMPUTE, 0.0) / price.seconds)


def point(workload: Workload, profile: Profile, limit: float | None, like: Workload | None = None) -> Point:
    """Prices a workload; `like` as in `Workload.prices`."""
    prices = workload.prices(profile, like)
    fits = {plan: found for plan, found in prices.items() if limit is None or found.memory <= limit}
    chosen = best(fits, None) if fits else None
    return Point(
        workload,
        {str(plan): found.seconds for plan, found in fits.items()},
        tuple(str(plan) for plan in prices if plan not in fits),
        None if chosen is None else str(chosen),
        None if chosen is None else fits[chosen],
    )


def grid(
    base: Workload,
    profile: Profile,
    limit: float | None,
    *,
    worlds: Sequence[int],
    loads: Sequence[float],
    capacities: Sequence[float],
    sizes: Sequence[tuple[int, int, int]],
    done: Say = lambda count: None,
) -> list[Point]:
    """Prices every size on every world: every load without a capacity, and every capacity with a load that fills it.

    Args:
        base: all else.
        profile: the machine.
        limit: bytes of a device.
        worlds: numbers of ranks.
        loads: choices of the fullest expert over the mean, nothing dropped.
        capacities: factors; the fullest expert has as many choices as it keeps.
        sizes: (T, M, H).
        done: is called with the number of points that have been priced since.
    """
    points = []
    for tokens, dim, hidden in sizes:
        for world in worlds:
            node = min(base.node, world)
            here = replace(base, tokens=tokens, model_dim=dim, hidden_dim=hidden, world=world, node=node)
            ragged = replace(here, capacity=None, imbalance=1.0)
            for load in loads:
                points.append(point(replace(ragged, imbalance=load), profile, limit, ragged))
                done(1)
            for factor in capacities:
                points.append(point(filled(here, factor), profile, limit))
                done(1)
    return points


def filled(base: Workload, factor: float) -> Workload:
    """The workload with a capacity factor, and a load that fills the fullest expert up to it."""
    return replace(base, capacity=factor, imbalance=min(max(1.0, factor), base.experts / base.top_k))


@dataclass(frozen=True)
class Static:
    """A plan that runs at all points, against the planner's choice at each.

    Attributes:
        plan: its text.
        points: where it is legal and fits.
        everywhere: whether that is at all points.
        mean: its time over the planner's, geometric mean over its points.
        most: the greatest such ratio.
    """

    plan: str
    points: int
    everywhere: bool
    mean: float
    most: float


def statics(points: Iterable[Point]) -> list[Static]:
    """Every static plan: first those that can run everywhere, the best first."""
    usable = [p for p in points if p.chosen is not None]
    found = []
    for plan in dict.fromkeys(plan for p in usable for plan in p.seconds):
        ratios = [p.seconds[plan] / p.best for p in usable if plan in p.seconds]
        mean = statistics.geometric_mean(ratios)
        found.append(Static(plan, len(ratios), len(ratios) == len(usable), mean, max(ratios)))
    return sorted(found, key=lambda s: (not s.everywhere, s.mean, s.plan))


@dataclass(frozen=True)
class Swing:
    """A load that swings within one training, on one number of ranks, in some layouts.

    Attributes:
        layouts: of the plans that were compared: ``"padded"``, ``"ragged"`` or ``"both"``.
        size: T, M and H.
        world: W.
        levels: of the load and the capacity factor, each for equally many steps.
        plans: the planner's choice at each level.
        planner: its seconds a layer, mean over the levels.
        static: the best single plan, known only in hindsight.
        static_seconds: of that plan.
        usual_seconds: of `USUAL` in this layout (padded for both), where it fits at all levels.
        worst: slowest single plan's seconds.
    """

    layouts: str
    size: str
    world: int
    levels: tuple[float, ...]
    plans: tuple[str, ...]
    planner: float
    static: str
    static_seconds: float
    usual_seconds: float | None
    worst: float

    @property
    def speedup(self) -> float:
        """Of the planner over the best single plan."""
        return self.static_seconds / self.planner


def swing(
    base: Workload,
    profile: Profile,
    limit: float | None,
    *,
    ratio: float = SWING,
    levels: int = LEVELS,
    done: Say = lambda count: None,
) -> list[Swing]:
    """The planner against single plans while the load moves between even and `ratio` times that.

    The trace has `levels` levels from 1 to `ratio` in equal ratios, each for equally many steps: of the fullest
    expert's load, and of the capacity factor, which is as needed to drop nothing. The order of the levels does
    not matter: the planner knows a step's load, and a switch costs nothing, as parameters stay in place.

    Args:
        base: sizes and ranks.
        profile: the machine.
        limit: bytes of a device.
        ratio: greatest over least.
        levels: how many.
        done: as for `grid`.

    Returns:
        Plans of each layout against each other, and of both.

    Raises:
        ValueError: if no plan fits in memory at all levels.
    """
    heights = tuple(round(ratio ** (i / max(1, levels - 1)), 6) for i in range(levels))
    times: list[Mapping[str, float]] = []
    for height in heights:
        times.append(point(filled(base, height), profile, limit).seconds)
        done(1)
    size = f"{base.tokens}x{base.model_dim}x{base.hidden_dim}"
    found = []
    for layouts in ("padded", "ragged", "both"):
        kept = [{plan: t for plan, t in at.items() if layouts == "both" or plan.endswith(layouts)} for at in times]
        means = {p: statistics.fmean(at[p] for at in kept) for p in kept[0] if all(p in at for at in kept)}
        if not means:
            raise ValueError(
                f"no plan fits in memory={limit:.4g} bytes at loads up to {ratio:g} on {base.world} ranks."
            )
        chosen = tuple(min(at, key=lambda plan, at=at: (at[plan], plan)) for at in kept)  # type: ignore[misc]
        static = min(means, key=lambda plan: (means[plan], plan))
        usual = means.get(f"{USUAL} layout={'ragged' if layouts == 'ragged' else 'padded'}")
        mean = statistics.fmean(at[plan] for at, plan in zip(kept, chosen, strict=True))
        found.append(
            Swing(layouts, size, base.world, heights, chosen, mean, static, means[static], usual, max(means.values()))
        )
    return found

"""Chooses a plan for every layer, at every step, from what was agreed between the ranks.

Pure functions on a frozen state, as optax does it:

    state = init(traced, spec, profile)
    plans = choose(state, load)                        which plans to run
    state = observe(state, plans, load, seconds)       what that took
    explain(state, load)                               why

Every legal plan is priced first (`cost`); plans that do not fit in memory are out. Of the analytic order
only the best `TRIALS` of a kind of load are ever tried: each is run for `REPEATS` steps, and what it took
is remembered, for `STALE` steps. Afterwards the best one runs, and gives way to another only where that is
better by `MARGIN`. When `REPEATS` steps in a row take `CHANGED` times more or less than the same plan took
before, the machine has changed: all else that was measured is forgotten and tried anew, so a slow rank or link
is answered within ``REPEATS * (1 + TRIALS)`` steps. A kind of load is what the fullest part of the experts has
over its share of all choices, in steps of `STEP`, and choices follow a running mean of it, so that a load that
swings across a crossover does not make them swing. All inputs are numbers that the ranks have agreed on, so every
rank makes the same choice.

An assignment gives each layer a plan: the same for all, or for each layer the best one under its load.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .._errors import PlanError
from .cost import Load, Price, price
from .lower import lower
from .plan import Plan, legal_plans
from .profile import Profile
from .spec import ShardingSpec

TRIALS = 3
REPEATS = 2
MARGIN = 0.05
KEPT = 5
STALE = 200
CHANGED = 1.3
STEP = 1.25
#: Weight of the last step in the running mean of the load.
WEIGHT = 0.25
#: How far the mean must be from the kind of load that plans are chosen for, to choose for another.
LEFT_BEHIND = 0.75
#: Plans that are predicted to take this much longer than the best are not worth a trial.
HOPELESS = 2.0

Assignment = tuple[tuple[str, Plan], ...]


@dataclass(frozen=True)
class Model:
    """What a planner prices: a traced function on a mesh and a machine. Keeps the prices it has worked out."""

    traced: Any
    spec: ShardingSpec
    profile: Profile
    widths: Mapping[str, int]
    candidates: tuple[Plan, ...]
    tokens: int | None = None
    known: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def names(self) -> list[str]:
        """Layers."""
        return [layer.name for layer in self.traced.layers]

    @property
    def uniform(self) -> list[Assignment]:
        """Each candidate for all layers."""
        return [tuple((name, plan) for name in self.names) for plan in self.candidates]

    @property
    def limit(self) -> float | None:
        """Bytes that a device may use, if there is a limit."""
        return self.profile.memory if self.spec.memory is None else self.spec.memory

    def price(self, assignment: Assignment, load: Bucket) -> Price:
        """The price of an assignment."""
        key = (assignment, load)
        if key not in self.known:
            program, axes = self._lowered(assignment)
            loads = {name: Load.spread(STEP**level) for name, level in load.levels}
            self.known[key] = price(program, axes, self.profile, loads=loads, tokens=self.tokens)
        found: Price = self.known[key]
        return found

    def _lowered(self, assignment: Assignment) -> Any:
        key = ("lowered", assignment)
        if key not in self.known:
            t, steps = self.traced, self.known.setdefault("steps", {})
            self.known[key] = lower(
                t.program, t.layers, t.captured.roles, self.spec.mesh, dict(assignment), self.widths, steps
            )
        return self.known[key]

    def ranked(self, load: Bucket) -> list[tuple[Assignment, Price]]:
        """All assignments that fit in memory, the fastest first.

        Raises:
            PlanError: if none fits, with the smallest memory that would do.
        """
        key = ("ranked", load)
        if key not in self.known:
            self.known[key] = self._rank(load)
        found: list[tuple[Assignment, Price]] = self.known[key]
        return found

    def fitting(self, load: Bucket) -> frozenset[Assignment]:
        """The assignments that fit in memory."""
        key = ("fitting", load)
        if key not in self.known:
            self.known[key] = frozenset(assignment for assignment, _ in self.ranked(load))
        found: frozenset[Assignment] = self.known[key]
        return found

    def _rank(self, load: Bucket) -> list[tuple[Assignment, Price]]:
        uniform, limit = self.uniform, self.limit
        priced = [(assignment, self.price(assignment, load)) for assignment in uniform]
        if len(self.names) > 1:
            mixed = self._best_of_each(priced, load)
            if mixed not in uniform:
                priced.append((mixed, self.price(mixed, load)))
        fits = [item for item in priced if limit is None or item[1].memory <= limit]
        if not fits:
            least, best = min(priced, key=lambda item: item[1].memory)
            raise PlanError(
                f"no plan fits in memory={limit:.4g} bytes: the smallest, {least[0][1]}, takes {best.memory:.4g}. "
                "Raise memory= to that, give a rank fewer tokens, or use more ranks."
            )
        return sorted(fits, key=lambda item: (item[1].seconds, str(item[0])))

    def _best_of_each(self, priced: Sequence[tuple[Assignment, Price]], load: Bucket) -> Assignment:
        """For each layer the plan under which it takes the least time of all equations that are its own."""
        best: dict[str, tuple[float, str, Plan]] = {}
        for assignment, found in priced:
            program, _ = self._lowered(assignment)
            owner = {var.name: eq.layer for eq in program.equations for var in eq.outputs}
            for name, plan in assignment:
                own = sum(e.end - e.begin for e in found.timeline if owner[e.name] == name)
                best[name] = min(best.get(name, (math.inf, "", plan)), (own, str(plan), plan), key=lambda b: b[:2])
        return tuple((name, best[name][2]) for name in self.names)


@dataclass(frozen=True)
class Bucket:
    """A kind of load: by layer, the level of the fullest part of the experts, in powers of `STEP` of the mean."""

    levels: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, load: Loads, model: Model) -> Bucket:
        """The kind of a load; even where none is given."""
        if load is None:
            return cls()
        if isinstance(load, Bucket):
            return load
        return cls.at({name: round(_excess(model, name, load[name])) for name in model.names if name in load})

    @classmethod
    def at(cls, levels: Mapping[str, int]) -> Bucket:
        """The kind of load with these levels; 0 where none is given."""
        return cls(tuple((name, level) for name, level in sorted(levels.items()) if level))


Loads = Mapping[str, Sequence[float]] | Bucket | None


def _excess(model: Model, name: str, counts: Sequence[float]) -> float:
    """Rows of the fullest part of the experts, over its share of all choices, in powers of `STEP`.

    Below 0 where a capacity drops so many that even the fullest part has less than that.
    """
    layer = next(layer for layer in model.traced.layers if layer.name == name)
    rule = None if layer.gate is None else layer.gate.param("capacity")
    kept, total = list(counts), sum(counts)
    if rule is not None and rule.ratio is not None and total > 0:
        most = rule.ratio[0] / rule.ratio[1] * total / len(counts)
        kept = [min(c, most) for c in counts]
    return math.log(Load(tuple(kept), total).fullest(model.spec.mesh.expert)) / math.log(STEP)


@dataclass(frozen=True)
class State:
    """What a planner knows.

    Attributes:
        model: what it prices.
        measured: (bucket, assignment) to the last (step, seconds) it took.
        chosen: the assignment that runs.
        fixed: whether the user chose it.
        means: by layer, the running mean of the excess of the fullest part, in powers of `STEP`.
        load: the kind of load for which plans are chosen; it follows the means, and moves only when they have
            left it behind.
        step: how many steps were observed.
    """

    model: Model
    measured: Mapping[tuple[Bucket, Assignment], tuple[tuple[int, float], ...]] = field(default_factory=dict)
    chosen: Assignment | None = None
    fixed: bool = False
    means: Mapping[str, float] = field(default_factory=dict)
    load: Bucket | None = None
    step: int = 0

    def took(self, bucket: Bucket, assignment: Assignment) -> list[float]:
        """What an assignment took under a kind of load, as far as it is not stale."""
        return [t for step, t in self.measured.get((bucket, assignment), ()) if self.step - step < STALE]


def init(traced: Any, spec: ShardingSpec, profile: Profile, widths: Mapping[str, int], tokens: int | None) -> State:
    """A planner for a function.

    Args:
        traced: from `trace`.
        spec: mesh, memory, and plans that the user fixed.
        profile: the machine.
        widths: by layer, slots per expert that suffice on every rank.
        tokens: the largest T of a rank, agreed.

    Raises:
        PlanError: if no plan fits in memory.
    """
    layouts = {layer.dispatch.param("layout") for layer in traced.layers}
    layout = layouts.pop() if len(layouts) == 1 else None
    every = legal_plans(spec.mesh, layout=layout)
    model = Model(traced, spec, profile, widths, tuple(every), tokens)
    if spec.plan is not None:
        fixed = tuple((layer.name, layer.resolve(spec.plan_of(layer.name))) for layer in traced.layers)
        return State(model, chosen=fixed, fixed=True)
    state = State(model)
    return replace(state, chosen=model.ranked(Bucket())[0][0])


def choose(state: State, load: Loads) -> Assignment:
    """The plans to run under a load, by layer the choices of each expert: a trial, or the best as far as is known.

    Raises:
        ValueError: if the load is not one number of at least 0 for each expert of each layer.
    """
    assert state.chosen is not None
    if state.fixed:
        return state.chosen
    check_load(state, load)
    bucket = Bucket.of(load, state.model)
    trial = _trial(state, bucket)
    if trial is not None:
        return trial
    ranked = state.model.ranked(bucket)
    current = state.chosen
    # of those that were never tried, only the first ones of the ranking can be the best
    looked_at = {*(tried for _, tried in state.measured), *(a for a, _ in ranked[: TRIALS + 1]), current}
    fits = state.model.fitting(bucket)
    times = {a: _expected(state, bucket, a, state.model.price(a, bucket)) for a in looked_at if a in fits}
    best = min(times, key=lambda a: (times[a], str(a)))
    if current in times and times[best] > (1 - MARGIN) * times[current]:
        return current
    return best


def _candidates(state: State, bucket: Bucket) -> list[Assignment]:
    ranked = state.model.ranked(bucket)
    limit = HOPELESS * ranked[0][1].seconds
    return [assignment for assignment, found in ranked[:TRIALS] if found.seconds <= limit]


def _trial(state: State, bucket: Bucket) -> Assignment | None:
    """The next assignment to try under this kind of load, the one that runs first, or None when all were."""
    left = [a for a in _candidates(state, bucket) if len(state.took(bucket, a)) < REPEATS]
    return None if not left else state.chosen if state.chosen in left else left[0]


def _expected(state: State, bucket: Bucket, assignment: Assignment, found: Price) -> float:
    """Seconds of a step: as measured under this kind of load, or as predicted, corrected by what others took."""
    seen = state.took(bucket, assignment)
    if seen:
        return statistics.median(seen)
    others = [(tried, other, state.took(other, tried)) for other, tried in state.measured]
    known = [(tried, statistics.median(t), state.model.price(tried, other).seconds) for tried, other, t in others if t]
    same = [took / predicted for tried, took, predicted in known if tried == assignment]
    if same:
        return found.seconds * statistics.median(same)
    beside = [took - predicted for _, took, predicted in known]  # what a step does besides
    return found.seconds + (statistics.median(beside) if beside else 0.0)


def observe(state: State, plans: Assignment, load: Mapping[str, Sequence[float]] | None, seconds: float) -> State:
    """What a step took, on the slowest rank, and the load it had.

    Raises:
        ValueError: if the load does not fit; nothing has changed.
    """
    check_load(state, load)
    model, measured = state.model, dict(state.measured)
    if not state.fixed and math.isfinite(seconds) and seconds > 0:
        key = (Bucket.of(state.load, model), plans)  # the kind of load that the plans were chosen for
        taken = (*measured.get(key, ()), (state.step, seconds))
        if _changed([took for _, took in taken]):
            taken, measured = taken[-REPEATS:], {}
        measured[key] = taken[-KEPT:]
    means, levels = dict(state.means), dict(() if state.load is None else state.load.levels)
    for name, counts in (load or {}).items():
        excess = _excess(model, name, counts)
        means[name] = (1 - WEIGHT) * means.get(name, excess) + WEIGHT * excess
        if state.load is None or abs(means[name] - levels.get(name, 0)) > LEFT_BEHIND:
            levels[name] = round(means[name])
    kind = state.load if load is None else Bucket.at(levels)
    return replace(state, measured=measured, chosen=plans, means=means, load=kind, step=state.step + 1)


def _changed(taken: Sequence[float]) -> bool:
    """Whether the last steps all took much more, or all much less, than those before."""
    before, last = taken[:-REPEATS], taken[-REPEATS:]
    if len(before) < REPEATS:
        return False
    usual = statistics.median(before)
    return min(last) > CHANGED * usual or max(last) * CHANGED < usual


def check_load(state: State, load: Loads) -> None:
    """Checks a load.

    Raises:
        ValueError: naming what does not fit; nothing has changed.
    """
    for layer in state.model.traced.layers:
        counts = None if load is None or isinstance(load, Bucket) else load.get(layer.name)
        if counts is None:
            continue
        if len(counts) != layer.num_experts or not math.isfinite(sum(counts)) or min(counts) < 0:
            raise ValueError(
                f"load of {layer.name}: {list(counts)} must be {layer.num_experts} finite numbers of at least 0, the "
                "choices of each expert. The plan stays as it is."
            )


@dataclass(frozen=True)
class Row:
    """One line of an explanation."""

    plans: str
    predicted: float
    measured: float | None
    memory: float
    why: str


def explain(state: State, load: Loads) -> list[Row]:
    """Every candidate: its predicted and measured seconds, its memory, and why it runs or lost."""
    check_load(state, load)
    bucket, model = Bucket.of(load, state.model), state.model
    ranked = model.ranked(bucket)
    fits = {assignment for assignment, _ in ranked}
    rows = []
    best = ranked[0][1].seconds
    for assignment in [a for a, _ in ranked] + [a for a in model.uniform if a not in fits]:
        found = model.price(assignment, bucket)
        seen = state.took(bucket, assignment)
        if assignment == state.chosen:
            why = "fixed by the user" if state.fixed else "runs"
        elif assignment not in fits:
            why = f"takes {found.memory:.3g} of {model.limit:.3g} bytes"
        elif seen:
            why = "measured slower, or not faster by the margin"
        else:
            why = f"predicted {100 * (found.seconds / best - 1):.0f} % slower than the best"
        rows.append(Row(_text(assignment), found.seconds, statistics.median(seen) if seen else None, found.memory, why))
    return rows


def _text(assignment: Assignment) -> str:
    plans = {str(plan) for _, plan in assignment}
    return plans.pop() if len(plans) == 1 else "; ".join(f"{name}: {plan}" for name, plan in assignment)

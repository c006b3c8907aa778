"""Chooses a plan for every layer, at every step, from what was agreed between the ranks.

Pure functions on a frozen state, as optax does it:

    state = init(traced, spec, profile)
    plans = choose(state, load)                        which plans to run
    state = observe(state, plans, load, seconds)       what that took
    explain(state, load)                               why

Every legal plan is priced first (`ranking`); plans that do not fit in memory are out. Of the analytic order
only the best `TRIALS` of a kind of load are ever tried: each is run for `REPEATS` steps, and what it took
is remembered, for `STALE` steps. Then the fastest of them runs, and gives way to another only where that is
better by `MARGIN`. What a step took is set down as what it would have taken under the load that plans are chosen
for: that is the mean load, which moves when the running mean of the steps' loads has left it behind, so that a load
that swings across a crossover does not make the choice swing. Steps that are slow now and then do not count: of
several times the lower median does. When `CHANGED_STEPS` steps in a row all take `CHANGED` times more, or all less,
than each of the last ones of the same plan, the machine has changed: what was measured is forgotten and all is tried
anew, so a slow rank or link is answered within ``CHANGED_STEPS + REPEATS * TRIALS`` steps.

All inputs are numbers that the ranks have agreed on, so every rank makes the same choice. Times are of whole steps:
where several planners share one, each takes what another changes for its own.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .._errors import PlanError
from .cost import Price
from .plan import legal_plans
from .profile import Profile
from .ranking import MARGIN, STEP, Agree, Assignment, Bucket, Loads, Model
from .spec import ShardingSpec

__all__ = ["MARGIN", "STEP", "Assignment", "Bucket", "Loads", "Model", "Row", "State"]

TRIALS = 3
REPEATS = 2
KEPT = 8
STALE = 200
CHANGED, CHANGED_STEPS = 1.3, 4
#: Weight of the last step in the running mean of the load.
WEIGHT = 0.25
#: How far the mean must be from the kind of load that plans are chosen for, to choose for another.
LEFT_BEHIND = 0.75
#: Plans that are predicted to take this much longer than the best are not worth a trial.
HOPELESS = 2.0

#: (step, seconds, what was predicted) of each time that an assignment ran under a kind of load.
Taken = tuple[tuple[int, float, float], ...]


@dataclass(frozen=True)
class State:
    """What a planner knows.

    Attributes:
        model: what it prices.
        measured: (kind of load, assignment) to what the last steps took.
        chosen: the assignment that runs.
        fixed: whether the user chose it.
        means: by layer, the running mean of the excess of the fullest part, in powers of `STEP`.
        load: the kind of load for which plans are chosen; it follows the means, and moves only when they have
            left it behind.
        step: how many steps were observed.
    """

    model: Model
    measured: Mapping[tuple[int, Assignment], Taken] = field(default_factory=dict)
    chosen: Assignment | None = None
    fixed: bool = False
    means: Mapping[str, float] = field(default_factory=dict)
    load: Bucket | None = None
    step: int = 0

    def fresh(self, kind: int, assignment: Assignment) -> Taken:
        """What is known of an assignment under a kind of load and not stale."""
        return tuple(t for t in self.measured.get((kind, assignment), ()) if self.step - t[0] < STALE)

    def took(self, kind: int, assignment: Assignment) -> list[float]:
        """The seconds of that."""
        return [t for _, t, _ in self.fresh(kind, assignment)]


def init(
    traced: Any,
    spec: ShardingSpec,
    profile: Profile,
    widths: Mapping[str, int],
    tokens: int | None,
    agree: Agree | None = None,
) -> State:
    """A planner for a function.

    Args:
        traced: from `trace`.
        spec: mesh, memory, and plans that the user fixed.
        profile: the machine.
        widths: by layer, slots per expert that suffice on every rank.
        tokens: the largest T of a rank, agreed.
        agree: the largest of each number over the ranks, which then all ask; see `Model`.

    Raises:
        PlanError: if no plan fits in memory, with the smallest memory that would do.
    """
    layouts = {layer.dispatch.param("layout") for layer in traced.layers}
    layout = layouts.pop() if len(layouts) == 1 else None
    every = legal_plans(spec.mesh, layout=layout)
    model = Model(traced, spec, profile, widths, tuple(every), tokens, agree)
    if spec.plan is not None:
        fixed = tuple((layer.name, layer.resolve(spec.plan_of(layer.name))) for layer in traced.layers)
        return State(model, chosen=fixed, fixed=True)
    ranked = model.ranked(Bucket())
    if not ranked:
        priced = [(assignment, model.price(assignment, Bucket()).memory) for assignment in model.uniform]
        least, memory = min(priced, key=lambda item: item[1])
        raise PlanError(
            f"no plan fits in memory={model.limit:.4g} bytes: the smallest, {least[0][1]}, takes {memory:.4g}. "
            "Raise memory= to that, give a rank fewer tokens, or use more ranks."
        )
    return State(model, chosen=ranked[0][0])


def choose(state: State, load: Loads) -> Assignment:
    """The plans to run under a load, by layer the choices of each expert: a trial, or the best as far as is known.

    Where none fits in memory under this load, the plans that run go on.

    Raises:
        ValueError: if the load is not one number of at least 0 for each expert of each layer.
    """
    assert state.chosen is not None
    check_load(state, load)
    bucket, current, model = Bucket.of(load, state.model), state.chosen, state.model
    if state.fixed or not (ranked := model.ranked(bucket)):
        return current
    model.price(current, bucket)  # on all ranks: one of them may ask for an explanation later
    kind, best_price = model.kind(bucket), ranked[0][1].seconds
    candidates = [a for a, found in ranked[:TRIALS] if found.seconds <= HOPELESS * best_price]
    untried = [a for a in candidates if len(state.took(kind, a)) < REPEATS]
    if untried:
        return current if current in untried else untried[0]
    # of those that were never tried, only the first ones of the ranking can be the best
    looked_at = dict.fromkeys([*(a for a, _ in ranked[: TRIALS + 1]), current, *(tried for _, tried in state.measured)])
    fitting = [a for a in looked_at if model.fits(a, bucket)]  # in an order that is the same on every rank
    times = {a: _expected(state, kind, a, model.price(a, bucket)) for a in fitting}
    best = min(times, key=times.__getitem__)
    settled = len(state.took(kind, current)) > REPEATS  # it runs for what it took, not for a trial
    if settled and current in times and times[best] > (1 - MARGIN) * times[current]:
        return current
    return best


def _expected(state: State, kind: int, assignment: Assignment, found: Price) -> float:
    """Seconds of a step: as measured under this kind of load, or as predicted, corrected by what others took."""
    seen = state.took(kind, assignment)
    if seen:
        return statistics.median_low(seen)
    fresh = [(a, state.fresh(other, a)) for other, a in state.measured]
    known = [(a, statistics.median_low(t for _, t, _ in taken), taken[-1][2]) for a, taken in fresh if taken]
    same = [took / predicted for tried, took, predicted in known if tried == assignment]
    if same:
        return found.seconds * statistics.median(same)
    beside = [took - predicted for _, took, predicted in known]  # what a step does besides
    return found.seconds + (statistics.median(beside) if beside else 0.0)


def observe(state: State, plans: Assignment, load: Mapping[str, Sequence[float]] | None, seconds: float) -> State:
    """What a step took, on the slowest rank, and the load it had.

    Args:
        state: before the step.
        plans: that ran.
        load: by layer, the choices of each expert in this step.
        seconds: what it took; not a number, or not above 0, where nothing is to be learned from that.

    Raises:
        ValueError: if the load does not fit; nothing has changed.
    """
    check_load(state, load)
    model, measured = state.model, dict(state.measured)
    found = {name: model.excess(name, counts) for name, counts in (load or {}).items()}
    if not state.fixed and math.isfinite(seconds) and seconds > 0:
        had = state.load if load is None else Bucket.at({name: round(excess) for name, excess in found.items()})
        measured = _remembered(state, plans, had, seconds)
    means, levels = dict(state.means), dict(() if state.load is None else state.load.levels)
    for name, excess in found.items():
        means[name] = (1 - WEIGHT) * means.get(name, excess) + WEIGHT * excess
        if state.load is None or abs(means[name] - levels.get(name, 0)) > LEFT_BEHIND:
            levels[name] = round(means[name])
    moved = state.load if load is None else Bucket.at(levels)
    return replace(state, measured=measured, chosen=plans, means=means, load=moved, step=state.step + 1)


def _remembered(
    state: State, plans: Assignment, load: Bucket | None, seconds: float
) -> dict[tuple[int, Assignment], Taken]:
    """What is known after a step that had a load."""
    model = state.model
    kind, had = model.kind(state.load or Bucket()), model.kind(load or Bucket())
    predicted = model.price(plans, model.alike(kind)).seconds
    if had != kind:  # what it would have taken under the load that plans are chosen for
        seconds *= predicted / model.price(plans, model.alike(had)).seconds
    taken = (*state.fresh(kind, plans), (state.step, seconds, predicted))
    if _changed([t for _, t, _ in taken]):
        return {}
    measured = {**state.measured, (kind, plans): taken[-KEPT:]}
    if state.step % STALE == 0:
        measured = {key: known for key, known in measured.items() if state.step - known[-1][0] < STALE}
    return measured


def _changed(taken: Sequence[float]) -> bool:
    """Whether the last steps took much more than any before, or much less."""
    before, last = taken[:-CHANGED_STEPS], taken[-CHANGED_STEPS:]
    if len(before) < REPEATS:
        return False
    return min(last) > CHANGED * max(before) or max(last) * CHANGED < min(before)


def check_load(state: State, load: Loads) -> None:
    """Checks a load.

    Raises:
        ValueError: naming what does not fit; nothing has changed.
    """
    if load is None or isinstance(load, Bucket):
        return
    layers = {layer.name: layer.num_experts for layer in state.model.traced.layers}
    for name, counts in load.items():
        if name not in layers:
            raise ValueError(f"load of {name}: the layers are {', '.join(layers)}. The plan stays as it is.")
        if len(counts) != layers[name] or not math.isfinite(sum(counts)) or min(counts) < 0:
            raise ValueError(
                f"load of {name}: {list(counts)} must be {layers[name]} finite numbers of at least 0, the "
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
    fitting = [assignment for assignment, _ in model.ranked(bucket)]
    kind, rows = model.kind(bucket), []
    others = [a for a in model.uniform if a not in fitting]
    if state.chosen not in fitting and state.chosen not in others and state.chosen is not None:
        others.append(state.chosen)  # each layer's best under another load
    best = model.price((fitting or others)[0], bucket).seconds
    for assignment in fitting + others:
        found = model.price(assignment, bucket)
        seen = state.took(kind, assignment)
        if assignment == state.chosen:
            why = "fixed by the user" if state.fixed else "runs"
        elif model.limit is not None and found.memory > model.limit:
            why = f"takes {found.memory:.3g} of {model.limit:.3g} bytes"
        elif seen:
            why = "measured slower, or not faster by the margin"
        else:
            why = f"predicted {100 * (found.seconds / best - 1):.0f} % slower than the best"
        measured = statistics.median_low(seen) if seen else None
        rows.append(Row(_text(assignment), found.seconds, measured, found.memory, why))
    return rows


def _text(assignment: Assignment) -> str:
    plans = {str(plan) for _, plan in assignment}
    return plans.pop() if len(plans) == 1 else "; ".join(f"{name}: {plan}" for name, plan in assignment)

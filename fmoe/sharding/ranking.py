"""What a planner chooses among: every assignment of plans to layers, and its price under a kind of load."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .._recent import Recent
from .cost import Load, Price, price
from .lower import lower
from .plan import Plan
from .profile import Profile
from .spec import ShardingSpec

#: Loads whose fullest parts differ by less than this factor are of one kind.
STEP = 1.25
#: A plan must be this much better than another to be worth a switch, or a trial of its own.
MARGIN = 0.05
#: Kinds of load whose prices are kept, and programs.
_KEPT_KINDS, _KEPT_PROGRAMS = 32, 512

Assignment = tuple[tuple[str, Plan], ...]
Agree = Callable[[Sequence[int]], list[int]]


@dataclass(frozen=True)
class Bucket:
    """A kind of load: by layer, the level of the fullest part of the experts, in powers of `STEP`."""

    levels: tuple[tuple[str, int], ...] = ()

    @classmethod
    def at(cls, levels: Mapping[str, int]) -> Bucket:
        """The kind of load with these levels; 0, an even load, where none is given."""
        return cls(tuple((name, level) for name, level in sorted(levels.items()) if level))

    @classmethod
    def of(cls, load: Loads, model: Model) -> Bucket:
        """The kind of a load; even where none is given."""
        if load is None:
            return cls()
        if isinstance(load, Bucket):
            return load
        return cls.at({name: round(model.excess(name, load[name])) for name in model.names if name in load})


Loads = Mapping[str, Sequence[float]] | Bucket | None


@dataclass(frozen=True)
class Model:
    """What a planner prices: a traced function on a mesh and a machine. Keeps prices it has worked out.

    Attributes:
        traced: the function.
        spec: its mesh, and a limit of memory.
        profile: the machine.
        widths: by layer, slots per expert that suffice on every rank.
        candidates: the plans to choose among.
        tokens: T, the largest of a rank.
        agree: gives the largest over the ranks of each number; where there is one, every rank must ask for the
            same prices in the same order. What surrounds the layers may be of other sizes on other ranks.
    """

    traced: Any
    spec: ShardingSpec
    profile: Profile
    widths: Mapping[str, int]
    candidates: tuple[Plan, ...]
    tokens: int | None = None
    agree: Agree | None = None
    _programs: Recent[Any] = field(default_factory=lambda: Recent(_KEPT_PROGRAMS), compare=False, repr=False)
    _prices: Recent[dict[Any, Any]] = field(default_factory=lambda: Recent(_KEPT_KINDS), compare=False, repr=False)
    _steps: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

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

    # --- loads ------------------------------------------------------------------------------------------------

    def excess(self, name: str, counts: Sequence[float]) -> float:
        """Rows of the fullest part of the experts, over its share of all choices, in powers of `STEP`.

        Below 0 where a capacity drops so many that even the fullest part has less than that.
        """
        layer = next(layer for layer in self.traced.layers if layer.name == name)
        rule = None if layer.gate is None else layer.gate.param("capacity")
        kept, total = list(counts), sum(counts)
        if rule is not None and rule.ratio is not None and total > 0:
            most = rule.ratio[0] / rule.ratio[1] * total / len(counts)
            kept = [min(c, most) for c in counts]
        return math.log(Load(tuple(kept), total).fullest(self.spec.mesh.expert)) / math.log(STEP)

    def kind(self, bucket: Bucket) -> int:
        """The mean level of all layers: what steps take is compared between loads of one such kind."""
        return round(sum(level for _, level in bucket.levels) / max(1, len(self.names)))

    def alike(self, kind: int) -> Bucket:
        """The load of a kind that is the same for all layers."""
        return Bucket.at(dict.fromkeys(self.names, kind))

    # --- prices -----------------------------------------------------------------------------------------------

    def price(self, assignment: Assignment, load: Bucket) -> Price:
        """The price of an assignment, without its timeline; the highest of the ranks'."""
        known = self._known(load)
        if assignment not in known:
            self._price_all([assignment], load)
        found: Price = known[assignment]
        return found

    def ranked(self, load: Bucket) -> list[tuple[Assignment, Price]]:
        """All assignments that fit in memory, the fastest first: one plan for all layers, or each its best."""
        known = self._known(load)
        if "ranked" not in known:
            known["ranked"] = self._rank(load)
        found: list[tuple[Assignment, Price]] = known["ranked"]
        return found

    def fits(self, assignment: Assignment, load: Bucket) -> bool:
        """Whether an assignment fits in memory."""
        return self.limit is None or self.price(assignment, load).memory <= self.limit

    def _known(self, load: Bucket) -> dict[Any, Any]:
        return self._prices.find(load, dict)

    def _rank(self, load: Bucket) -> list[tuple[Assignment, Price]]:
        uniform = self.uniform
        own = self._price_all(uniform, load)
        priced = [(assignment, self.price(assignment, load)) for assignment in uniform]
        if len(self.names) > 1:
            mixed = tuple(
                (name, min(zip(own, self.candidates, strict=True), key=lambda c: (c[0][i], str(c[1])))[1])
                for i, name in enumerate(self.names)
            )
            found = self.price(mixed, load)
            if found.seconds < (1 - MARGIN) * min(other.seconds for _, other in priced):
                priced.append((mixed, found))
        return sorted(
            (item for item in priced if self.fits(item[0], load)), key=lambda item: (item[1].seconds, str(item[0]))
        )

    def _price_all(self, assignments: Sequence[Assignment], load: Bucket) -> list[list[float]]:
        """Prices assignments, all of them agreed at once; for each, the time of each layer's own equations."""
        loads = {name: Load.spread(STEP**level) for name, level in load.levels}
        prices, own = [], []
        for assignment in assignments:
            program, axes = self._lowered(assignment)
            found = price(program, axes, self.profile, loads=loads, tokens=self.tokens)
            layer_of = {var.name: eq.layer for eq in program.equations for var in eq.outputs}
            spent = dict.fromkeys(self.names, 0.0)
            for entry in found.timeline:
                if layer_of[entry.name] in spent:
                    spent[layer_of[entry.name]] += entry.end - entry.begin
            own.append(list(spent.values()))
            prices.append(replace(found, timeline=()))
        if self.agree is not None:
            prices, own = self._agreed(prices, own)
        self._known(load).update(zip(assignments, prices, strict=True))
        return own

    def _agreed(self, prices: list[Price], own: list[list[float]]) -> tuple[list[Price], list[list[float]]]:
        assert self.agree is not None
        rows = [
            [round(1e9 * p.forward), round(1e9 * p.backward), math.ceil(p.memory), *(round(1e9 * t) for t in spent)]
            for p, spent in zip(prices, own, strict=True)
        ]
        flat = iter(self.agree([number for row in rows for number in row]))
        rows = [[next(flat) for _ in row] for row in rows]
        made = [
            replace(p, forward=row[0] / 1e9, backward=row[1] / 1e9, memory=float(row[2]))
            for p, row in zip(prices, rows, strict=True)
        ]
        return made, [[t / 1e9 for t in row[3:]] for row in rows]

    def _lowered(self, assignment: Assignment) -> Any:
        t = self.traced
        args = (t.program, t.layers, t.captured.roles, self.spec.mesh, dict(assignment), self.widths, self._steps)
        return self._programs.find(assignment, lambda: lower(*args))

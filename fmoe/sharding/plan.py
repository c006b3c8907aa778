"""How one MoE layer runs on a mesh, and which ways are legal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from .._errors import PlanError, is_whole
from .mesh import Mesh, refuse_spec

DEGREES = (1, 2, 4, 8)
_CHOICES = {
    "parallelism": ("dp", "ep"),
    "mp": ("copies", "gather"),
    "pipeline": DEGREES,
    "a2a": ("linear", "2dh"),
    "layout": (None, "ragged", "padded"),
}


@dataclass(frozen=True)
class Plan:
    """How one MoE layer runs: which of weights and tokens move, and how.

    Args:
        parallelism: ``"dp"`` gathers all experts' weights and keeps the tokens; ``"ep"`` exchanges the
            tokens and gathers the part of an expert's weights that its slice needs.
        r: with ep, into how many slices an expert's hidden dim is split; every token visits all r.
            It divides the ranks per expert.
        mp: how a token reaches r slices: ``"copies"`` sends it r times, ``"gather"`` sends it once and
            gathers over the slices (padded only).
        pipeline: into how many chunks the exchanged rows are cut, so that exchanges overlap with compute.
        a2a: ``"linear"``, or ``"2dh"``: inside the node first, then between nodes (padded only).
        layout: ``"ragged"`` or ``"padded"``; None for the layout that the function asks for.

    Raises:
        PlanError: if a value is not one of the choices, or they exclude each other.

    Example:
        >>> plan = Plan("ep", r=2, pipeline=4, layout="padded")
        >>> str(plan)
        'ep r=2 mp=copies pipeline=4 a2a=linear layout=padded'
        >>> Plan.parse(str(plan)) == plan
        True
        >>> Plan.parse("dp")
        Plan(parallelism='dp', r=1, mp='copies', pipeline=1, a2a='linear', layout=None)

    References:
        Tutel (arXiv 2206.03382, section 3): dp is its r=0, ep its P2 with degree r.
    """

    parallelism: str = "ep"
    r: int = 1
    mp: str = "copies"
    pipeline: int = 1
    a2a: str = "linear"
    layout: str | None = None

    def __post_init__(self) -> None:
        problems = []
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if isinstance(value, (bool, float)) or value not in choices:
                problems.append(f"{name}={value!r}: choose one of {', '.join(map(repr, choices))}.")
        if not is_whole(self.r, 1):
            problems.append(f"r={self.r!r}, but it must be a whole number of at least 1.")
        if not problems:
            if self.parallelism == "dp" and (self.r, self.mp, self.pipeline, self.a2a) != (1, "copies", 1, "linear"):
                problems.append(f"{self!r}: dp exchanges no tokens, so it has no r, mp, pipeline or a2a.")
            if self.mp == "gather" and self.r == 1:
                problems.append("mp='gather' needs r of at least 2: with r=1 there is nothing to gather.")
            for name, value in (("mp", "gather"), ("a2a", "2dh")):
                if getattr(self, name) == value and self.layout == "ragged":
                    problems.append(f"{name}={value!r} needs layout='padded': its messages are of one size.")
        refuse_spec("Plan", problems, PlanError)

    def __str__(self) -> str:
        parts = [self.parallelism]
        if self.parallelism == "ep":
            parts.append(f"r={self.r}")
            if self.r > 1:
                parts.append(f"mp={self.mp}")
            parts += [f"pipeline={self.pipeline}", f"a2a={self.a2a}"]
        if self.layout is not None:
            parts.append(f"layout={self.layout}")
        return " ".join(parts)

    @classmethod
    def parse(cls, text: str) -> Plan:
        """A plan from its text, such as ``"ep r=2 pipeline=4"``; what is left out has its default.

        Raises:
            PlanError: if the text is not a plan.
        """
        words = text.split()
        known = {f.name for f in fields(cls)} - {"parallelism"}
        values: dict[str, Any] = {}
        problems = []
        if not words or words[0] not in _CHOICES["parallelism"]:
            problems.append(f"it must begin with one of {', '.join(map(str, _CHOICES['parallelism']))}.")
        for word in words[1:]:
            name, equals, value = word.partition("=")
            if name not in known or not equals or not value or name in values:
                problems.append(f"{word!r} must be one of {', '.join(f'{n}=' for n in sorted(known))}, each once.")
            elif name in ("r", "pipeline") and not value.isdecimal():
                problems.append(f"{word!r}: {name} must be a whole number.")
            else:
                values[name] = int(value) if name in ("r", "pipeline") else value
        refuse_spec(f"Plan.parse({text!r})", problems, PlanError)
        return cls(words[0], **values)


def as_plan(plan: Plan | str) -> Plan:
    """A plan, from itself or its text."""
    return Plan.parse(plan) if isinstance(plan, str) else plan


def legal_plans(mesh: Mesh, *, layout: str | None = None, pipelines: tuple[int, ...] = DEGREES) -> list[Plan]:
    """Every plan that is legal on `mesh`, dp first.

    Args:
        mesh: from `make_mesh`.
        layout: ``"ragged"`` or ``"padded"``; both by default.
        pipelines: pipeline degrees to include.

    Example:
        >>> from fmoe.sharding.mesh import Mesh
        >>> for plan in legal_plans(Mesh(2, 2), layout="padded", pipelines=(1,)):
        ...     print(plan)
        dp layout=padded
        ep r=1 pipeline=1 a2a=linear layout=padded
        ep r=2 mp=copies pipeline=1 a2a=linear layout=padded
        ep r=2 mp=gather pipeline=1 a2a=linear layout=padded
    """
    return list(_plans(mesh, (layout,) if layout else ("ragged", "padded"), pipelines))


def _plans(mesh: Mesh, layouts: tuple[str, ...], pipelines: tuple[int, ...]) -> Iterator[Plan]:
    for layout in layouts:
        yield Plan("dp", layout=layout)
    for layout in layouts:
        for r in range(1, mesh.shard + 1):
            for mp in ("copies", "gather"):
                for a2a in ("linear", "2dh"):
                    for pipeline in pipelines:
                        padded = layout == "padded"
                        if ((mp == "gather" or a2a == "2dh") and not padded) or (mp == "gather" and r == 1):
                            continue
                        plan = Plan("ep", r, mp, pipeline, a2a, layout)
                        if not why_illegal(plan, mesh):
                            yield plan


def why_illegal(plan: Plan, mesh: Mesh) -> str:
    """The rule that `plan` breaks on `mesh`, with the legal choices; empty if it is legal."""
    shard = mesh.shard
    if plan.parallelism == "ep" and shard % plan.r:
        choices = " or ".join(str(r) for r in range(1, shard + 1) if shard % r == 0)
        share = f"{shard} ranks share one part" if shard > 1 else "each part is on one rank"
        return (
            f"r={plan.r} is not available. {mesh.world} ranks hold the experts in {mesh.expert} parts, so {share}, "
            f"and r divides {shard}: choose {choices}, or dp."
        )
    if plan.a2a == "2dh" and not 1 < mesh.node < mesh.world:
        return (
            f"a2a=2dh is not available. It needs more than 1 rank on each of several nodes, but {mesh.world} ranks "
            f"stand on {mesh.nodes} node{'s' if mesh.nodes > 1 else ''} of {mesh.node}: choose a2a=linear."
        )
    return ""


def check_legal(plan: Plan, mesh: Mesh, layer: str = "") -> None:
    """Checks that `plan` is legal on `mesh`.

    Raises:
        PlanError: naming the rule and the legal choices.
    """
    problem = why_illegal(plan, mesh)
    if problem:
        raise PlanError(f"{layer + ': ' if layer else ''}{problem}")

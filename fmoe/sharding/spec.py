"""Where tokens and experts live, and how much they may take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .._errors import PlanError, TraceError, is_whole
from ..ops.processes import mean_share, total
from ..trace import recorder
from .mesh import Mesh, refuse_spec
from .plan import Plan, as_plan, check_legal


@dataclass(frozen=True)
class ShardingSpec:
    """Tokens and experts over a mesh: each rank holds tokens of its own and a part of the experts.

    Args:
        mesh: from `make_mesh`.
        plan: how the MoE layers run: a `Plan`, its text, or a mapping from layer name (``"moe.0"``) to
            either. By default the planner chooses, and `fmoe.auto` may change its choice between steps.
        max_tokens: the most tokens of a rank in one call. With it, padded plans need no agreement
            between the ranks at each call.
        memory: bytes that a device may use, for a planner.

    Raises:
        SpecError: if a value is out of range.
        PlanError: if a plan is not legal on the mesh.

    Example:
        >>> from fmoe.sharding.mesh import Mesh
        >>> spec = ShardingSpec(Mesh(expert=2, shard=2), plan="ep r=2")
        >>> spec.plan_of("moe.0").r
        2
    """

    mesh: Mesh
    plan: Plan | str | Mapping[str, Plan | str] | None = None
    max_tokens: int | None = None
    memory: int | None = None

    def __post_init__(self) -> None:
        problems = []
        if not isinstance(self.mesh, Mesh):
            problems.append(f"mesh={self.mesh!r}, but it must be a mesh, as fmoe.make_mesh makes.")
        if self.max_tokens is not None and not is_whole(self.max_tokens, 1):
            problems.append(f"max_tokens={self.max_tokens!r}, but it must be a whole number of at least 1, or None.")
        if self.memory is not None and not is_whole(self.memory, 1):
            problems.append(f"memory={self.memory!r}, but it must be whole bytes of at least 1, or None.")
        refuse_spec("ShardingSpec", problems)
        plans: Any = self.plan
        if isinstance(plans, Mapping) and (not plans or not all(isinstance(name, str) for name in plans)):
            raise PlanError(f"ShardingSpec: plan={plans!r}, but a mapping must name layers, such as 'moe.0'.")
        if isinstance(plans, (Mapping, _Plans)):
            plans = _Plans(tuple(sorted((name, as_plan(plan)) for name, plan in dict(plans).items())))
            each = list(dict(plans).items())
        else:
            plans = None if plans is None else as_plan(plans)
            each = [] if plans is None else [("", plans)]
        for name, plan in each:
            if not isinstance(plan, Plan):
                raise PlanError(f"ShardingSpec: plan={plan!r}, but it must be a Plan, its text, or a mapping to them.")
            check_legal(plan, self.mesh, name)
        object.__setattr__(self, "plan", plans)

    def plan_of(self, layer: str) -> Plan:
        """The plan of a layer.

        Raises:
            PlanError: if plans are given by name and this name is not among them.
        """
        if self.plan is None:
            raise PlanError(f"the spec has no plan for {layer}: the planner chooses one for the whole function.")
        if isinstance(self.plan, Plan):
            return self.plan
        held: Any = self.plan
        plans: dict[str, Plan] = dict(held)
        if layer not in plans:
            raise PlanError(f"there is no plan for {layer}: plan= names {', '.join(plans)}.")
        return plans[layer]

    def unknown_names(self, layers: Sequence[str]) -> str:
        """What is wrong if plans are given for layers that there are not; empty otherwise."""
        if self.plan is None or isinstance(self.plan, Plan):
            return ""
        named: Any = self.plan
        wrong = [name for name, _ in named if name not in layers]
        return f"plan= names {', '.join(wrong)}, but the layers are {', '.join(layers) or 'none'}." if wrong else ""

    def replace(self, **changes: Any) -> ShardingSpec:
        """A copy with some fields changed, checked again."""
        return replace(self, **changes)

    def mean(self, loss: Any, *, tokens: int) -> Any:
        """This rank's share of the mean over all tokens: ``loss * tokens / N``, N the sum over ranks.

        Shares add up to the global mean, so their gradients, which fmoe sums over ranks, are its gradients.

        Args:
            loss: this rank's mean loss, a scalar tensor.
            tokens: this rank's number of tokens; may be 0, then the share is 0.

        Raises:
            SpecError: if tokens is not a whole number of at least 0.
        """
        if recorder() is not None:
            raise TraceError("spec.mean is called inside a captured function: take the mean of what it returns.")
        return mean_share(loss, tokens, self.mesh)

    def total(self, share: Any) -> Any:
        """The sum over ranks of a tensor, the same on every rank and without gradient: for printing.

        Args:
            share: a tensor of the same shape on every rank.
        """
        if recorder() is not None:
            raise TraceError("spec.total is called inside a captured function: take the total of what it returns.")
        return total(share, self.mesh)


class _Plans(tuple[Any, ...]):
    """Plans by layer name, hashable."""

    def keys(self) -> list[str]:
        """The layers' names."""
        return [name for name, _ in self]

    def __getitem__(self, name: Any) -> Any:
        return dict(tuple(self))[name]

    def __repr__(self) -> str:
        return repr({name: str(plan) for name, plan in self})

"""Meshes as numbers: which ranks there are, and how a plan factors them into named axes.

A `Mesh` is the home of parameters: W ranks as ``expert x shard``, row-major. A plan with degree r
factors ``shard`` into ``mp = r`` and ``dp``, so that

    rank = (ep * r + mp) * dp_size + dp = node * ranks_per_node + gpu

Nothing here touches torch.distributed, so a laptop can plan for thousands of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .._errors import SpecError, is_whole


def expert_axis_size(num_experts: int, world: int) -> int:
    """Ranks along the expert axis: min(E', W), E' the least number >= E that divides W, or else a multiple of W.

    Example:
        >>> [expert_axis_size(e, 8) for e in (1, 3, 4, 8, 12)]
        [1, 4, 4, 8, 8]
    """
    return next((n for n in range(num_experts, world) if world % n == 0), world)


@dataclass(frozen=True)
class Mesh:
    """W ranks as ``expert x shard``, and how many of them share a node.

    Args:
        expert: ranks along which experts are split.
        shard: ranks along which the hidden dim of an expert is split.
        node: ranks per node; divides W. All ranks by default.

    Raises:
        SpecError: if a size is not a whole number of at least 1, or node does not divide W.

    Example:
        >>> mesh = Mesh(expert=4, shard=4, node=8)
        >>> mesh.world, mesh.nodes
        (16, 2)
    """

    expert: int
    shard: int
    node: int = 0

    def __post_init__(self) -> None:
        problems = [
            f"{name}={getattr(self, name)!r}, but it must be a whole number of at least 1."
            for name in ("expert", "shard")
            if not is_whole(getattr(self, name), 1)
        ]
        if not problems:
            if self.node == 0:
                object.__setattr__(self, "node", self.world)
            if not is_whole(self.node, 1) or self.world % self.node:
                problems.append(f"node={self.node!r}, but the ranks per node must divide the {self.world} ranks.")
        refuse_spec("Mesh", problems)

    @property
    def world(self) -> int:
        """W."""
        return self.expert * self.shard

    @property
    def nodes(self) -> int:
        """How many nodes there are."""
        return self.world // self.node

    def axes(self, r: int = 1) -> dict[str, int]:
        """Sizes of the axes ``ep``, ``mp`` and ``dp`` under degree r."""
        return {"ep": self.expert, "mp": r, "dp": self.shard // r}


def abstract_mesh(num_experts: int | Sequence[int], world: int, node: int | None = None) -> Mesh:
    """The mesh of `world` ranks for layers of `num_experts` experts each (see `make_mesh`)."""
    many = list(num_experts) if isinstance(num_experts, Sequence) else [num_experts]
    problems = []
    if not many or not all(is_whole(e, 1) for e in many):
        problems.append(f"num_experts={num_experts!r}, but it must be a whole number of at least 1, or a list of them.")
    if not is_whole(world, 1):
        problems.append(f"world={world!r}, but it must be a whole number of at least 1.")
    refuse_spec("make_mesh", problems)
    expert = min(expert_axis_size(e, world) for e in many)
    return Mesh(expert, world // expert, node or world)


def refuse_spec(call: str, problems: Sequence[str], error: type[ValueError] = SpecError) -> None:
    """Raises `error` listing `problems`, or returns if there are none."""
    if len(problems) == 1:
        raise error(f"{call}: {problems[0]}")
    if problems:
        raise error("\n  ".join([f"{call}: {len(problems)} things do not fit.", *problems]))

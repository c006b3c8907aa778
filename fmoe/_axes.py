"""The named axes over which the ranks of a mesh exchange, as arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Axes:
    """The ranks under one plan: sizes of ``ep``, ``mp``, ``dp``, and of ``node`` and ``gpu``.

    An axis may be one of these names, ``"world"``, or several joined by commas, outermost first.
    """

    ep: int
    mp: int
    dp: int
    gpu: int

    @property
    def world(self) -> int:
        """W."""
        return self.ep * self.mp * self.dp

    @property
    def node(self) -> int:
        """How many nodes there are."""
        return self.world // self.gpu

    def size(self, axis: str) -> int:
        """How many ranks exchange over `axis`."""
        return math.prod(getattr(self, name) for name in axis.split(","))

    def index(self, rank: int, axis: str) -> int:
        """Coordinate of `rank` along `axis`."""
        return self.ranks(rank, axis).index(rank)

    def ranks(self, rank: int, axis: str) -> list[int]:
        """The ranks that exchange with `rank` over `axis`, in order."""
        if axis == "world":
            return list(range(self.world))
        names = axis.split(",")
        sizes = {"ep": self.ep, "mp": self.mp, "dp": self.dp}
        if set(names) <= {"node", "gpu"}:
            sizes = {"node": self.node, "gpu": self.gpu}
        strides, stride = {}, self.world
        for name, size in sizes.items():
            stride //= size
            strides[name] = stride
        base = rank - sum(rank // strides[name] % sizes[name] * strides[name] for name in names)
        ranks = [base]
        for name in names:
            ranks = [start + i * strides[name] for start in ranks for i in range(sizes[name])]
        return ranks

    def spans_nodes(self, axis: str) -> bool:
        """Whether some exchange over `axis` crosses from one node to another."""
        ranks = self.ranks(0, axis)
        return len({r // self.gpu for r in ranks}) > 1


@dataclass(frozen=True)
class Place:
    """One rank under one plan."""

    axes: Axes
    rank: int

    def index(self, axis: str) -> int:
        """This rank's coordinate along `axis`."""
        return self.axes.index(self.rank, axis)

"""All ranks in one process: collectives as indexing, so that a laptop can run the program of a cluster.

Data moves exactly as between processes, and plain torch operations move it, so every transform of the
simulation is that of the SUM over ranks of what each rank computes: the reference for real processes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .._axes import Axes
from .runtime import Column, Splits


@dataclass(frozen=True)
class Simulated:
    """A communicator over columns that hold every rank's value (see `runtime.Communicator`)."""

    axes: Axes | None = None

    def at(self, where: str, axes: Axes) -> Simulated:
        """The same over the axes of a layer."""
        return replace(self, axes=axes)

    def _groups(self, axis: str, column: Column) -> list[list[int]]:
        assert self.axes is not None
        assert len(column) == self.axes.world
        return [self.axes.ranks(rank, axis) for rank in range(len(column))]

    def all_to_all(self, axis: str, column: Column, sends: Splits = None, receives: Splits = None) -> Column:
        """See `runtime.Communicator`."""
        groups = self._groups(axis, column)
        if sends is None:
            pieces = [x.chunk(len(group)) for x, group in zip(column, groups, strict=True)]
        else:
            pieces = [x.split(list(sizes)) for x, sizes in zip(column, sends, strict=True)]
        return [torch.cat([pieces[peer][group.index(rank)] for peer in group]) for rank, group in enumerate(groups)]

    def all_gather(self, axis: str, column: Column) -> Column:
        """See `runtime.Communicator`."""
        return [torch.cat([column[peer] for peer in group]) for group in self._groups(axis, column)]

    def reduce_scatter(self, axis: str, column: Column) -> Column:
        """See `runtime.Communicator`."""
        groups = self._groups(axis, column)
        return [_sum(column, group).chunk(len(group))[group.index(rank)] for rank, group in enumerate(groups)]

    def all_reduce(self, axis: str, column: Column) -> Column:
        """See `runtime.Communicator`."""
        return [_sum(column, group) for group in self._groups(axis, column)]

    def start(self, name: str, axis: str, column: Column, *splits: Splits) -> Column:
        """See `runtime.Communicator`; nothing is in flight here."""
        return list(getattr(self, name)(axis, column, *splits))

    def done(self, name: str, axis: str, column: Column, *splits: Splits) -> Column:
        """See `runtime.Communicator`."""
        return column


def _sum(column: Column, group: list[int]) -> Tensor:
    total = column[group[0]]
    for peer in group[1:]:
        total = total + column[peer]
    return total

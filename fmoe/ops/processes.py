"""One rank in each process: collectives through torch.distributed, over groups made on first use.

Every process makes every group, in one order, whether or not it is a member: a group that only its
members make hangs the others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from .._axes import Axes
from . import collectives
from .registry import OPS
from .runtime import Column, Splits



_state: tuple[Any, dict[Any, Any]] = (None, {})


def made_once() -> dict[Any, Any]:
    """What was made for the present default group (groups, meshes), by any key; empty after a new start."""
    global _state
    if _state[0] is not dist.group.WORLD:
        _state = (dist.group.WORLD, {})
    return _state[1]


def group_name(axes: Axes, axis: str) -> str:
    """Name of this rank's process group over `axis`; makes the groups of the axis on first use."""
    everyone = tuple(sorted({tuple(axes.ranks(rank, axis)) for rank in range(axes.world)}))
    made = made_once()
    if everyone not in made:
        made[everyone] = _make_group(everyone)
    return str(made[everyone])


def _make_group(everyone: tuple[tuple[int, ...], ...]) -> str:
    rank = dist.get_rank()
    if everyone == (tuple(range(dist.get_world_size())),):
        return str(dist.group.WORLD.group_name)  # type: ignore[union-attr]
    own = None
    for ranks in everyone:
        group = dist.new_group(list(ranks))
        if rank in ranks:
            own = group
    return str(own.group_name)  # type: ignore[union-attr]


@dataclass(frozen=True)
class Processes:
    """A communicator for columns of one value, this rank's (see `runtime.Communicator`)."""

    axes: Axes | None = None
    where: str = ""

    def at(self, where: str, axes: Axes) -> Processes:
        """The same over the axes of a layer, naming `where` in errors."""
        return replace(self, where=where, axes=axes)

    def group(self, axis: str) -> tuple[int, str]:
        """Size and name of this rank's group."""
        axes = self.axes
        assert axes is not None
        made = made_once()
        if (axes, axis) not in made:
            made[axes, axis] = group_name(axes, axis)
        return axes.size(axis), made[axes, axis]

    def all_to_all(self, axis: str, column: Column, sends: Splits = None, receives: Splits = None) -> Column:
        """See `runtime.Communicator`."""
        return self._exchange("all_to_all", axis, column, sends, receives)

    def all_gather(self, axis: str, column: Column) -> Column:
        """See `runtime.Communicator`."""
        return self._exchange("all_gather", axis, column)

    def reduce_scatter(self, axis: str, column: Column) -> Column:
        """See `runtime.Communicator`."""
        return self._exchange("reduce_scatter", axis, column)

    def all_reduce(self, axis: str, column: Column) -> Column:
        """See `runtime.Communicator`."""
        return [collectives.all_reduce(column[0], self.group(axis)[1], f"{self.where} over {axis}")]

    def start(self, name: str, axis: str, column: Column, *splits: Splits) -> Column:
        """See `runtime.Communicator`."""
        return self._exchange(name, axis, column, *splits, prefix="start_")

    def done(self, name: str, axis: str, column: Column, *splits: Splits) -> Column:
        """See `runtime.Communicator`."""
        return self._exchange(name, axis, column, *splits, prefix="done_")

    def _exchange(self, name: str, axis: str, column: Column, *splits: Splits, prefix: str = "") -> Column:
        ranks, group = self.group(axis)
        x: Tensor = column[0]
        where = f"{self.where} over {axis}"
        sizes: tuple[Any, ...] = (ranks,)
        if name == "all_to_all":
            even = [x.shape[0] // ranks] * ranks
            sends, receives = splits if splits and splits[0] is not None else ([even], [even])
            sizes = (list(receives[0]), list(sends[0]))  # type: ignore[index]
        return [OPS[prefix + name](x, *sizes, group, where)]

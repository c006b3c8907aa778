"""One rank in each process: collectives through torch.distributed, over groups made on first use.

Every process makes every group, in one order, whether or not it is a member: a group that only its
members make hangs the others.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from .._axes import Axes
from . import collectives
from .registry import OPS
from .runtime import Column, Splits



def group_name(axes: Axes, axis: str) -> str:
    """Name of this rank's process group over `axis`; makes the groups of the axis on first use."""
    everyone = sorted({tuple(axes.ranks(rank, axis)) for rank in range(axes.world)})
    rank, default = dist.get_rank(), dist.group.WORLD
    made: dict[Any, Any] = _groups_of(default)
    key = tuple(everyone)
    if key not in made:
        if len(everyone) == 1 and len(everyone[0]) == dist.get_world_size():
            made[key] = default.group_name
        else:
            own = None
            for ranks in everyone:
                group = dist.new_group(list(ranks))
                if rank in ranks:
                    own = group
            made[key] = own.group_name
    return str(made[key])


def _groups_of(default: Any) -> dict[Any, Any]:
    """The groups made since this default group was."""
    cache = getattr(default, "_fmoe_groups", None)
    if cache is None:
        cache = {}
        default._fmoe_groups = cache
    return cache


@dataclass(frozen=True)
class Processes:
    """A communicator for columns of one value, this rank's (see `runtime.Communicator`)."""

    axes: Axes | None = None
    where: str = ""
    names: dict[Any, str] = field(default_factory=dict, compare=False)

    def at(self, where: str, axes: Axes) -> Processes:
        """The same over the axes of a layer, naming `where` in errors."""
        return replace(self, where=where, axes=axes)

    def group(self, axis: str) -> tuple[int, str]:
        """Size and name of this rank's group."""
        axes = self.axes
        assert axes is not None
        if (axes, axis) not in self.names:
            self.names[axes, axis] = group_name(axes, axis)
        return axes.size(axis), self.names[axes, axis]

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

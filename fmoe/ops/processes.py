"""One rank in each process: collectives over groups made on first use, and agreement about numbers.

Every process makes every group, in one order, whether or not it is a member: a group that only its
members make hangs the others.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._axes import Axes
from .._errors import CollectiveError, SpecError, is_whole
from .collectives import all_reduce
from .registry import OPS
from .runtime import Column, Splits

_state: tuple[Callable[[], Any], dict[Any, Any]] = (lambda: None, {})
_within: Any = None


@contextmanager
def within(group: Any) -> Iterator[None]:
    """Makes the ranks of `group` the ranks of a mesh meanwhile; None for all. Only members may enter."""
    global _within
    before, _within = _within, group
    try:
        yield
    finally:
        _within = before


def everyone() -> Any:
    """The process group whose ranks are the mesh's: the default one, or that of `within`."""
    return dist.group.WORLD if _within is None else _within


def made_once() -> dict[Any, Any]:
    """What was made for the present ranks (groups, meshes), by any key; empty after a new start.

    The default group itself is not held: one that outlives destroy_process_group still has threads when the
    interpreter ends, and a thread that then lets go of a tensor aborts the process.
    """
    global _state
    if not is_up():
        return {}
    if _state[0]() is not dist.group.WORLD:
        fresh: dict[Any, Any] = {}
        _state = (weakref.ref(dist.group.WORLD, lambda _: fresh.clear()), fresh)
    made = _state[1]
    return made if _within is None else made.setdefault(("within", _within.group_name), {})


def group_name(axes: Axes, axis: str) -> str:
    """Name of this rank's process group over `axis`; makes the groups of the axis on first use."""
    parts = tuple(sorted({tuple(axes.ranks(rank, axis)) for rank in range(axes.world)}))
    made = made_once()
    if parts not in made:
        made[parts] = _make_groups(parts)
    return str(made[parts])


def _timeout() -> Any:
    """The default group's timeout, or None where it does not tell."""
    for device in ("cpu", "cuda"):
        try:
            return everyone()._get_backend(torch.device(device)).options._timeout
        except (AttributeError, RuntimeError):
            continue
    return None


def _make_groups(parts: tuple[tuple[int, ...], ...]) -> str:
    world = everyone()
    if parts == (tuple(range(world.size())),):
        return str(world.group_name)
    rank, own = world.rank(), None
    for ranks in parts:
        group = _new_group(ranks)
        if rank in ranks:
            own = group
    return str(own.group_name)  # type: ignore[union-attr]


def _new_group(ranks: Sequence[int], **options: Any) -> Any:
    """A group of some of the mesh's ranks; processes that are not the mesh's are not asked to take part."""
    world = everyone()
    of_all = dist.get_process_group_ranks(world)
    local = len(of_all) < dist.get_world_size()
    return dist.new_group(
        [of_all[rank] for rank in ranks], timeout=_timeout(), use_local_synchronization=local, **options
    )


def is_up() -> bool:
    """Whether there is a process group."""
    return dist.is_available() and dist.is_initialized()


def check_world(mesh: Any) -> None:
    """Checks that this process is one of the mesh's ranks.

    Raises:
        SpecError: if torch.distributed has another number of ranks.
    """
    found = everyone().size() if is_up() else 1
    if found != mesh.world:
        raise SpecError(
            f"the mesh has {mesh.world} ranks, but torch.distributed has {found}: make the mesh with "
            "fmoe.make_mesh(num_experts) under torchrun, or use fmoe.simulate to run it in one process."
        )


def this_rank() -> int:
    """This process's rank; 0 without torch.distributed."""
    return everyone().rank() if is_up() else 0


# --- agreement ------------------------------------------------------------------------------------------------------


def _control() -> Any:
    """The group on which ranks agree about numbers: of host tensors, apart from the exchanges of tokens."""
    world = everyone()
    if dist.get_backend(world) in ("gloo", "fake"):
        return world
    made = made_once()
    if "control" not in made:
        made["control"] = _new_group(range(world.size()), backend="gloo")
    return made["control"]


def agree(numbers: Sequence[int], where: str, operation: str = "max") -> list[int]:
    """The largest (or the sum) over ranks of each number; every rank must call."""
    if not is_up() or everyone().size() == 1 or not numbers:
        return list(numbers)
    held = torch.tensor(list(numbers), dtype=torch.int64)
    kind = dist.ReduceOp.MAX if operation == "max" else dist.ReduceOp.SUM
    try:
        dist.all_reduce(held, op=kind, group=_control())
    except RuntimeError as error:
        raise CollectiveError(
            f"{where}: rank {this_rank()} waited for the others, to agree on sizes (all_reduce over world). Every "
            f"rank must call, also with 0 tokens. torch.distributed says: {str(error).splitlines()[0]}"
        ) from error
    return [int(n) for n in held]


def mean_share(loss: Tensor, tokens: int, mesh: Any) -> Tensor:
    """See `ShardingSpec.mean`."""
    if not isinstance(loss, Tensor):
        raise SpecError(f"mean: loss={loss!r}, but it must be a tensor.")
    if not is_whole(tokens, 0):
        raise SpecError(f"mean: tokens={tokens!r}, but it must be a whole number of at least 0.")
    check_world(mesh)
    (of_all,) = agree([tokens], "spec.mean", "sum")
    if tokens == 0:
        return torch.where(torch.ones((), dtype=torch.bool, device=loss.device), 0.0, loss).to(loss.dtype)
    return loss * (tokens / of_all)


def total(share: Tensor, mesh: Any) -> Tensor:
    """See `ShardingSpec.total`."""
    check_world(mesh)
    share = share.detach()
    if mesh.world == 1:
        return share
    return all_reduce(share, everyone().group_name, "spec.total")


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
            made[axes, axis] = (axes.size(axis), group_name(axes, axis))
        found: tuple[int, str] = made[axes, axis]
        return found

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
        return [all_reduce(column[0], self.group(axis)[1], f"{self.where} over {axis}")]

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

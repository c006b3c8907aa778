"""The ranks of one layer's group: who they are, what they exchange outside of programs, and under which plan."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..._axes import Axes
from ..._errors import refuse
from ...ops.exchange import shard_of
from ...ops.processes import Processes, agree, is_up, within
from ...sharding.distribute import make_mesh
from ...sharding.mesh import Mesh
from ...sharding.plan import DEGREES


def world_of(group: Any) -> int:
    """How many ranks a group has; 1 without torch.distributed.

    Raises:
        ValueError: if this process is not a member.
    """
    if not is_up():
        return 1
    if dist.get_rank(group) < 0:
        refuse("moe_layer", ["this process is no member of group=: make the layer on the group's ranks only."])
    return dist.get_world_size(group)


class Ranks:
    """The ranks that share a layer's experts.

    Attributes:
        group: the process group; None for all ranks.
        world: how many they are.
        rank: this one's place among them.
        mesh: ``expert x shard``; shard ranks share an expert.
    """

    def __init__(self, group: Any, num_experts: int) -> None:
        self.world = world_of(group)
        everyone = is_up() and self.world == dist.get_world_size()
        self.group = None if everyone or not is_up() else group
        self.rank = dist.get_rank(group) if is_up() else 0
        # as many ranks per node as torchrun says, where they are all of them
        self.mesh: Mesh = make_mesh(num_experts) if everyone else make_mesh(num_experts, world=self.world)

    def __deepcopy__(self, memo: Any) -> Ranks:
        return self

    def __getstate__(self) -> dict[str, Any]:
        if self.group is not None:
            refuse(
                "moe_layer",
                ["a layer on a group= cannot be pickled, as a process group lives in this run alone: save its "
                 "state_dict(), and load that into a layer made on the group."],
            )  # fmt: skip
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        here = (dist.get_rank(), dist.get_world_size()) if is_up() else (self.rank, self.world)
        if self.world > 1 and here != (self.rank, self.world):
            refuse(
                "moe_layer",
                [f"the pickled layer holds the experts of rank {self.rank} of {self.world}, but this is rank {here[0]} "
                 f"of {here[1]}: make the layer here, and load files of all ranks by "
                 "fmoe.integrations.tutel.checkpoint.load."],
            )  # fmt: skip

    def active(self) -> AbstractContextManager[None]:
        """A context in which a mesh's ranks are these."""
        return within(self.group)

    @property
    def _processes(self) -> Processes:
        mesh = self.mesh
        return Processes(Axes(mesh.expert, 1, mesh.shard, mesh.node), "moe_layer")

    def exchanged(self, x: Tensor) -> Tensor:
        """``[W,...]``: entry i goes to rank i."""
        swapped: Tensor = self._processes.all_to_all("world", [x])[0]
        return swapped

    def whole(self, part: Tensor) -> Tensor:
        """``[n,...] -> [shard*n,...]``: the parts of all ranks that share this one's expert."""
        if self.mesh.shard == 1:
            return part
        gathered: Tensor = self._processes.all_gather("dp", [part])[0]
        return gathered

    def slice(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's part of the hidden dim, at the ceiling's size, filled with zeros."""
        size = -(-whole.shape[dim] // self.mesh.shard)
        return shard_of(whole, dim, size, self.rank % self.mesh.shard)

    def most(self, number: int) -> int:
        """The largest of a number over the ranks; every rank must ask."""
        return agree([number], "moe_layer")[0]


def plan_text(r: int, overlap: int, use_2dh: bool, mesh: Mesh) -> str:
    """The plan of a degree of parallelism, an overlap degree and an all-to-all.

    Example:
        >>> plan_text(2, 3, True, Mesh(expert=2, shard=4, node=4)), plan_text(0, 2, False, Mesh(expert=2, shard=2))
        ('ep r=2 pipeline=2 a2a=2dh layout=padded', 'dp')
    """
    if r == 0:
        return "dp"
    pipeline = max(d for d in DEGREES if d <= overlap)
    text = f"ep r={r} pipeline={pipeline}"
    return text + " a2a=2dh layout=padded" if use_2dh and 1 < mesh.node < mesh.world else text

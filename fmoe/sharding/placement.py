"""The home layout: which dims of a leaf are split over which axis of the mesh.

Experts are split over ``expert`` along dim 0 and over ``shard`` along their hidden dim; everything else
is on every rank. Parts have the ceiling's size, and the last ones are filled with zeros: an expert that
nobody chooses and hidden units that contribute 0, so results are exact for any E, H and W.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from .._axes import Axes
from ..ops.exchange import shard_of
from ..program import Type
from ..values import ExpertParams, MoEParams
from .mesh import Mesh


@dataclass(frozen=True)
class Mark:
    """What a leaf of the arguments is.

    Attributes:
        role: ``w_in``, ``w_out``, ``b_in``, ``b_out``, ``expert`` (of a user's function) or ``value``.
        sharded: (E, H), or (E,) for ``expert``, if it is one rank's part of the whole.
    """

    role: str
    sharded: tuple[int, ...] | None = None

    def whole(self, part: Type) -> Type:
        """The type of the whole leaf, from that of a part."""
        if self.sharded is None or self.role == "value":
            return part
        dims = [self.sharded[0], *part.dims[1:]]
        if self.role in ("w_in", "b_in"):
            dims[-1] = self.sharded[1]
        if self.role == "w_out":
            dims[1] = self.sharded[1]
        return part.with_dims(*dims)


def marks_of(tree: Any) -> list[Mark]:
    """For each leaf of a tree of arguments, what it is.

    Leaves under an `ExpertParams`, and under the `experts` of an `MoEParams`, belong to experts.
    """

    def mark(node: Any) -> Any:
        if isinstance(node, ExpertParams):
            names = ("w_in", "w_out", "b_in", "b_out")
            marked: Any = [None if getattr(node, n) is None else Mark(n, node.sharded) for n in names]
            return ExpertParams(*marked)
        if isinstance(node, MoEParams):
            part = Mark("expert", None if node.sharded is None else (node.sharded,))
            own = isinstance(node.experts, ExpertParams)
            experts = mark(node.experts) if own else pytree.tree_map(lambda _: part, node.experts)
            return MoEParams(pytree.tree_map(lambda _: Mark("value"), node.router), experts)
        return Mark("value")

    marked = pytree.tree_map(mark, tree, is_leaf=lambda n: isinstance(n, (ExpertParams, MoEParams)))
    return [leaf if isinstance(leaf, Mark) else Mark("value") for leaf in pytree.tree_leaves(marked)]


#: Roles of leaves that belong to experts.
EXPERT_ROLES = ("w_in", "w_out", "b_in", "b_out", "expert")


def hidden_dim(role: str, dims: int) -> int | None:
    """The dim of a leaf that is split over ``shard``, if any; the leaf has `dims` dims."""
    return {"w_in": dims - 1, "b_in": dims - 1, "w_out": 1}.get(role)


def split_dims(role: str, dims: int, mesh: Mesh) -> list[tuple[int, str, int]]:
    """(dim, mesh axis, ranks) of every split of a leaf."""
    if role not in EXPERT_ROLES:
        return []
    hidden = hidden_dim(role, dims)
    splits = [(0, "expert", mesh.expert)]
    return splits if hidden is None else [*splits, (hidden, "shard", mesh.shard)]


def local_type(type: Type, role: str, mesh: Mesh) -> Type:
    """Type of this rank's part of a leaf."""
    dims = list(type.dims)
    for dim, _, ranks in split_dims(role, len(dims), mesh):
        dims[dim] = -(-dims[dim] // ranks)
    return type.with_dims(*dims)


def local_part(leaf: Tensor, role: str, mesh: Mesh, rank: int) -> Tensor:
    """A rank's part of a whole leaf."""
    place = {"expert": rank // mesh.shard, "shard": rank % mesh.shard}
    for dim, axis, ranks in split_dims(role, leaf.dim(), mesh):
        leaf = shard_of(leaf, dim, -(-leaf.shape[dim] // ranks), place[axis])
    return leaf


def placed_text(type: Type, role: str, axes: Axes) -> str:
    """A global type with the axes its dims are split over, such as ``f32[4@ep,8,16@(mp,dp)]``."""
    mesh = Mesh(axes.ep, axes.mp * axes.dp)
    names = {"expert": "ep", "shard": "(mp,dp)" if axes.mp > 1 and axes.dp > 1 else "mp" if axes.mp > 1 else "dp"}
    dims = [str(d) for d in type.dims]
    for dim, axis, ranks in split_dims(role, len(dims), mesh):
        if ranks > 1:
            dims[dim] += f"@{names[axis]}"
    return str(type).split("[")[0] + f"[{','.join(dims)}]"

"""Crossing between a DTensor and this rank's tensor, as operations of torch.func.

`DTensor.to_local` raises under `torch.func.grad`. Here the transpose of the crossing in is the crossing
out: the sum over the ranks that hold copies of the leaf, then this rank's part of it. So gradients are
complete, and come back as DTensors in the layout of the parameter, to any order. Forward mode over a
DTensor fails inside torch; it takes local tensors.

`layout` names where the leaf lives: a key of `LAYOUTS`, as an operator takes no objects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._typing import type_text
from .differentiable import FuncOp, Saved
from .registry import OPS, define


@dataclass(frozen=True)
class Layout:
    """A leaf's DeviceMesh, placements, whole shape, and the dims that are split: (dim, mesh axis, ranks)."""

    mesh: Any
    placements: tuple[Any, ...]
    shape: tuple[int, ...]
    splits: tuple[tuple[int, int, int], ...]

    def padded(self) -> list[int]:
        """Shape of a rank's part, at the ceiling."""
        shape = list(self.shape)
        for dim, _, ranks in self.splits:
            shape[dim] = -(-shape[dim] // ranks)
        return shape

    def exact(self) -> list[int]:
        """Shape of this rank's part as DTensor holds it."""
        place = self.mesh.get_coordinate()
        shape = list(self.shape)
        for dim, axis, ranks in self.splits:
            size = -(-shape[dim] // ranks)
            shape[dim] = max(0, min(size, self.shape[dim] - place[axis] * size))
        return shape


LAYOUTS: dict[str, Layout] = {}


def layout_key(layout: Layout) -> str:
    """The key of a layout, the same for equal ones."""
    for key, known in LAYOUTS.items():
        if known == layout:
            return key
    key = f"layout{len(LAYOUTS)}"
    LAYOUTS[key] = layout
    return key


def _narrowed(x: Tensor, shape: list[int]) -> Tensor:
    for dim, size in enumerate(shape):
        x = x.narrow(dim, 0, size)
    return x


def _in_of_dtensor(x: Any, layout: str) -> Tensor:
    local, shape = x._local_tensor, LAYOUTS[layout].padded()
    if list(local.shape) == shape:
        return local.view_as(local)
    out = local.new_zeros(shape)
    _narrowed(out, list(local.shape)).copy_(local)
    return out


def _out(x: Tensor, layout: str) -> Any:
    from torch.distributed.tensor import DTensor

    home = LAYOUTS[layout]
    part = _narrowed(x, home.exact()).contiguous().clone()
    sharded = {axis for _, axis, _ in home.splits}
    for axis in range(home.mesh.ndim):
        if axis not in sharded and home.mesh.size(axis) > 1:
            dist.all_reduce(part, group=home.mesh.get_group(axis))
    stride = torch.empty(home.shape, device="meta").stride()
    return DTensor.from_local(
        part, home.mesh, home.placements, run_check=False, shape=torch.Size(home.shape), stride=stride
    )


def _refuse(x: Tensor, layout: str) -> Tensor:
    raise RuntimeError(f"to_local got {type_text(x)}, which is not a DTensor.")


def _moved(name: str) -> Any:
    def backward(saved: Saved, grad: Tensor) -> tuple[Any, None]:
        return OPS[name](grad, saved.args[1]), None

    return backward


def _no_batch(batch: int, dims: tuple[Any, ...], x: Tensor, layout: str) -> Any:
    raise RuntimeError("a DTensor has no batch: call fmoe.local on the parameters outside vmap.")


to_local: FuncOp = define(
    "to_local(Tensor x, str layout) -> Tensor",
    reference=_refuse,
    fake=lambda x, layout: x.new_empty(LAYOUTS[layout].padded()),
    backward=_moved("from_local"),
    jvp=lambda saved, tangent, _: to_local(tangent, saved.args[1]),
    vmap=_no_batch,
    dtensor=_in_of_dtensor,
)
from_local: FuncOp = define(
    "from_local(Tensor x, str layout) -> Tensor",
    reference=_out,
    fake=lambda x, layout: x.new_empty(LAYOUTS[layout].shape),
    backward=_moved("to_local"),
    jvp=lambda saved, tangent, _: from_local(tangent, saved.args[1]),
    vmap=_no_batch,
)

"""Between a program and the processes that run it: meshes of real ranks, DTensors, agreement, norms.

The only file of this package that touches torch.distributed. DTensors live at the edges: parameters,
gradients, checkpoints. Inside a program are local tensors.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from .._errors import SpecError, refuse
from .._typing import type_text
from ..ops.differentiable import innermost
from ..ops.edge import Layout, layout_key, to_local
from ..ops.processes import check_world, is_up, made_once, this_rank
from ..program import Type
from ..values import ExpertParams, MoEParams
from .mesh import Mesh, abstract_mesh
from .placement import Mark, local_part, local_type, marks_of, split_dims
from .spec import ShardingSpec


def make_mesh(num_experts: int | Sequence[int], *, world: int | None = None, node: int | None = None) -> Mesh:
    """The mesh for layers of `num_experts` experts.

    With E experts and W ranks, E' is the smallest number of at least E that divides W, or else the next
    multiple of W. Experts are split over ``min(E', W)`` ranks, and each expert's hidden dim over the
    ``W / E'`` ranks that share it. Layers with other numbers of experts use the same mesh.

    Args:
        num_experts: E, or the E of every layer; the fewest decide.
        world: W; by default the size of torch.distributed's group, or 1 without one. Any number may be
            planned for and simulated.
        node: ranks per node; by default LOCAL_WORLD_SIZE, which torchrun sets, or W.

    Raises:
        SpecError: if a number is out of range.

    Example:
        >>> make_mesh(4, world=16, node=8)
        Mesh(expert=4, shard=4, node=8)
        >>> make_mesh(3, world=4)
        Mesh(expert=4, shard=1, node=4)
    """
    if world is None:
        world = dist.get_world_size() if is_up() else 1
        local = os.environ.get("LOCAL_WORLD_SIZE", "")
        if node is None and local.isdecimal() and int(local) and world % int(local) == 0:
            node = int(local)
    return abstract_mesh(num_experts, world, node)


# --- DTensors --------------------------------------------------------------------------------------------


def _device_mesh(mesh: Mesh, device: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    check_world(mesh)
    made, shape = made_once(), (mesh.expert, mesh.shard)
    if (shape, device) not in made:
        made[shape, device] = init_device_mesh(device, shape, mesh_dim_names=("expert", "shard"))
    return made[shape, device]


def is_dtensor(leaf: Any) -> bool:
    """Whether a leaf is a DTensor, also inside a transform."""
    if not isinstance(leaf, Tensor) or type(leaf := innermost(leaf)) is Tensor:
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(leaf, DTensor)


def distribute(params: Any, spec: ShardingSpec) -> Any:
    """The same parameters as DTensors in the home layout, which is the same for every plan.

    Leaves under an `ExpertParams`, and under the `experts` of an `MoEParams`, are split: experts over
    the mesh axis ``expert``, their hidden dim over ``shard``. Every other leaf is on every rank. No
    data is exchanged: every rank gives the same whole parameters, as `init` with one seed makes.

    Args:
        params: any tree of tensors.
        spec: where they go.

    Returns:
        The same tree of DTensors of the same global shapes.

    Raises:
        SpecError: if torch.distributed has another number of ranks than the mesh.
        ValueError: if a leaf is not a whole tensor.

    Example:
        >>> import fmoe
        >>> spec = fmoe.ShardingSpec(fmoe.make_mesh(4))
        >>> params = {"w": torch.ones(2)}
        >>> distribute(params, spec)["w"].full_tensor()  # doctest: +SKIP
        tensor([1., 1.])
    """
    check_world(spec.mesh)
    marks = marks_of(params)
    leaves, tree = pytree.tree_flatten(params)
    wrong = [type_text(x) for x, m in zip(leaves, marks, strict=True) if is_dtensor(x) or m.sharded is not None]
    if wrong:
        refuse("distribute", [f"params has {', '.join(wrong)}, which is a DTensor or a part: give whole tensors."])
    made = [
        _distributed(leaf, mark, spec.mesh) if isinstance(leaf, Tensor) else leaf
        for leaf, mark in zip(leaves, marks, strict=True)
    ]
    return pytree.tree_unflatten(made, tree)


def _distributed(leaf: Tensor, mark: Mark, mesh: Mesh) -> Tensor:
    from torch.distributed.tensor import DTensor

    layout = _layout(tuple(leaf.shape), mark, mesh, leaf.device.type)
    part = local_part(leaf.detach(), mark.role, mesh, this_rank())
    for dim, size in enumerate(layout.exact()):
        part = part.narrow(dim, 0, size)
    stride = torch.empty(leaf.shape, device="meta").stride()
    return DTensor.from_local(
        part.clone(memory_format=torch.contiguous_format),
        layout.mesh,
        layout.placements,
        run_check=False,
        shape=leaf.shape,
        stride=stride,
    ).requires_grad_(leaf.requires_grad)


def _layout(shape: tuple[int, ...], mark: Mark, mesh: Mesh, device: str) -> Layout:
    from torch.distributed.tensor import Replicate, Shard

    placements: list[Any] = [Replicate(), Replicate()]
    splits = []
    for dim, axis, ranks in split_dims(mark.role, len(shape), mesh):
        number = ("expert", "shard").index(axis)
        placements[number] = Shard(dim)
        splits.append((dim, number, ranks))
    return Layout(_device_mesh(mesh, device), tuple(placements), shape, tuple(splits))


def cross(leaf: Any, mark: Mark, mesh: Mesh) -> Tensor:
    """This rank's part of a DTensor in the home layout.

    Raises:
        SpecError: if it lives elsewhere.
    """
    layout = _layout(tuple(leaf.shape), mark, mesh, leaf.device.type)
    held: Any = innermost(leaf)
    if tuple(held.placements) != layout.placements or held.device_mesh != layout.mesh:
        raise SpecError(
            f"a DTensor {type_text(leaf)} is placed {tuple(held.placements)} on {held.device_mesh}, but this spec "
            f"needs {layout.placements} on {layout.mesh}: make it with fmoe.distribute(params, spec)."
        )
    from torch.distributed.tensor import DTensor

    to_local.know_dtensors_once(DTensor)
    return to_local(leaf, layout_key(layout))


def local(params: Any, spec: ShardingSpec) -> Any:
    """This rank's part of parameters in the home layout, as plain tensors that the layer's functions take.

    Goes through `torch.func.grad`: gradients of the DTensors are complete, summed over the ranks that
    hold copies. Parts have the ceiling's size; the last ones are filled with zeros.

    Args:
        params: DTensors from `distribute`; plain whole tensors are cut.
        spec: the one they were distributed with.

    Returns:
        The same tree of tensors; an `ExpertParams` in it remembers the whole sizes in `sharded`.

    Raises:
        SpecError: if a leaf lives elsewhere.

    Example:
        >>> import fmoe
        >>> params = fmoe.init(fmoe.MoEConfig(num_experts=2, model_dim=3, hidden_dim=5), seed=0)
        >>> local(params, fmoe.ShardingSpec(fmoe.make_mesh(2))).experts.sharded
        (2, 5)
    """
    check_world(spec.mesh)
    leaves, tree = pytree.tree_flatten(params)
    parts = [
        local_leaf(leaf, mark, spec.mesh) if isinstance(leaf, Tensor) else leaf
        for leaf, mark in zip(leaves, marks_of(params), strict=True)
    ]
    return _remember(params, pytree.tree_unflatten(parts, tree))


def local_leaf(leaf: Tensor, mark: Mark, mesh: Mesh) -> Tensor:
    """This rank's part of one leaf: a DTensor, a whole tensor, or a part already."""
    if is_dtensor(leaf):
        return cross(leaf, mark, mesh)
    if mark.sharded is not None:
        whole = mark.whole(Type(leaf.dtype, tuple(leaf.shape)))
        if local_type(whole, mark.role, mesh).dims != tuple(leaf.shape):
            raise SpecError(
                f"{type_text(leaf)} is a part of {whole} on another mesh: make it by fmoe.local with this spec."
            )
        return leaf
    return local_part(leaf, mark.role, mesh, this_rank())


def _remember(whole: Any, parts: Any) -> Any:
    """`parts` with the sizes of `whole` in every ExpertParams and MoEParams."""
    import dataclasses

    def is_params(node: Any) -> bool:
        return isinstance(node, (ExpertParams, MoEParams))

    def pair(a: Any, b: Any) -> Any:
        if isinstance(a, ExpertParams):
            sizes = a.sharded or (a.w_out.shape[0], a.w_out.shape[1])
            return dataclasses.replace(b, sharded=tuple(int(n) for n in sizes))
        if isinstance(a, MoEParams):
            experts = pair(a.experts, b.experts) if is_params(a.experts) else b.experts
            if is_params(a.experts):
                return dataclasses.replace(b, experts=experts)
            leaves = pytree.tree_leaves(a.experts)
            return dataclasses.replace(b, sharded=a.sharded or (int(leaves[0].shape[0]) if leaves else None))
        return b

    nodes_a, tree = pytree.tree_flatten(whole, is_leaf=is_params)
    nodes_b = pytree.tree_leaves(parts, is_leaf=is_params)
    return pytree.tree_unflatten([pair(a, b) for a, b in zip(nodes_a, nodes_b, strict=True)], tree)


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[Tensor] | Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scales gradients in place so that their norm is at most `max_norm`, as torch's function of that name.

    The norm is that of all gradients together, each element once: over the shards of all ranks, over
    several meshes, and over DTensors and plain tensors side by side, which torch's own refuses. Every
    rank gets the same number, and every rank must call.

    Args:
        parameters: tensors with ``.grad``, or any tree of them. Those without gradients are left out.
        max_norm: the largest norm allowed.
        norm_type: p of the p-norm; may be ``inf``.

    Returns:
        The norm before clipping, a scalar tensor.

    Raises:
        ValueError: if max_norm or norm_type is not a number above 0, or a gradient is a pending sum.

    Example:
        >>> p = torch.zeros(2, requires_grad=True)
        >>> p.grad = torch.tensor([3.0, 4.0])
        >>> clip_grad_norm_([p], 1.0), p.grad
        (tensor(5.), tensor([0.6000, 0.8000]))
    """
    problems = [
        f"{name}={value!r}, but it must be a number above 0."
        for name, value in (("max_norm", max_norm), ("norm_type", norm_type))
        if not isinstance(value, (int, float)) or not value > 0
    ]
    refuse("clip_grad_norm_", problems)
    if isinstance(parameters, torch.nn.Module):
        parameters = list(parameters.parameters())
    leaves = pytree.tree_leaves(parameters)
    if leaves == [parameters] and not isinstance(parameters, Tensor):  # not a tree: an iterator, a view, a set, ...
        leaves = list(parameters)
    wrong = sorted({type(p).__name__ for p in leaves if not isinstance(p, Tensor) and p is not None})
    refuse("clip_grad_norm_", [f"parameters holds a {name}: give tensors." for name in wrong])
    grads: list[Any] = [p.grad for p in leaves if p is not None and p.grad is not None]
    sums: dict[Any, list[Tensor]] = {}
    for grad in grads:
        where: Any = (grad.device_mesh, tuple(grad.placements)) if is_dtensor(grad) else None
        held = grad.to_local() if is_dtensor(grad) else grad
        sums.setdefault(where, []).append(_power(held, norm_type))
    powers = [_over_shards(torch.stack(parts), where, norm_type) for where, parts in sums.items()]
    if not powers:
        return torch.zeros(())
    device = powers[0].device
    stacked = torch.stack([power.to(device) for power in powers])
    norm = stacked.max() if math.isinf(norm_type) else stacked.sum() ** (1.0 / norm_type)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for grad in grads:
        held = grad.to_local() if is_dtensor(grad) else grad
        held.mul_(scale.to(device=held.device, dtype=held.dtype))
    return norm


def _power(grad: Tensor, p: float) -> Tensor:
    wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
    if math.isinf(p):
        return wide.abs().max() if wide.numel() else wide.new_zeros(())
    return wide.abs().pow(p).sum()


def _over_shards(parts: Tensor, where: Any, p: float) -> Tensor:
    """The power of one kind of gradients over all ranks that hold shards of them."""
    power = parts.max() if math.isinf(p) else parts.sum()
    if where is None:
        return power
    mesh, placements = where
    kind = dist.ReduceOp.MAX if math.isinf(p) else dist.ReduceOp.SUM
    for axis, placement in enumerate(placements):
        if placement.is_partial():
            refuse("clip_grad_norm_", ["a gradient is a pending sum: redistribute it before clipping."])
        if placement.is_shard():
            dist.all_reduce(power, op=kind, group=mesh.get_group(axis))
    return power

"""Integer operations of routing: which experts, which slots, which rows.

None has a derivative. All are deterministic, break ties to the lowest expert id, and read no number
on the host that a caller would have to wait for, so they pass through every transform.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._errors import refuse
from .differentiable import batch_first
from .kernels.cuda_routing import assign_slots_cuda, row_index_cuda, top_k_cuda
from .registry import define
from .transfers import numbers_on


def _top_k_reference(scores: Tensor, k: int) -> Tensor:
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :k].contiguous()


def _top_k_cpu(scores: Tensor, k: int) -> Tensor:
    """`torch.topk` is 2 to 3 times faster than a sort, and differs only in rows with a tie at the cut."""
    rows, experts = scores.shape
    if k == experts or not rows:
        return _top_k_reference(scores, k)
    best, ids = scores.topk(k + 1)
    ids = ids[:, :k].contiguous()
    distinct = best[:, :-1] > best[:, 1:]  # false for a tie and for NaN
    if not distinct.all():
        unsure = ~distinct.all(1)
        ids[unsure] = _top_k_reference(scores[unsure], k)
    return ids


def _top_k_rule(batch: int, dims: tuple[Any, ...], scores: Tensor, k: int) -> tuple[Tensor, int]:
    scores = batch_first(scores, dims[0], batch)
    return top_k(scores.flatten(0, 1), k).unflatten(0, scores.shape[:2]), 0


def _assign_slots_reference(
    experts: Tensor, capacity: Tensor, groups: list[int], num_experts: int
) -> tuple[Tensor, Tensor]:
    """Ranks of equal keys from one stable sort; the key is (batch, group, expert).

    Within a group the queue of an expert holds all first choices before any second choice, each in
    token order. An expert keeps the first `capacity` of each group, numbered on from group to group.
    """
    batch, _, k = experts.shape
    size, count = num_experts + 1, len(groups)  # one more expert takes the choices of no expert
    device = experts.device
    by_choice = experts.transpose(1, 2)  # [B,K,T]: first choices first
    flat = torch.cat([part.flatten(1) for part in by_choice.split(groups, dim=2)], dim=1)  # queue order
    base = torch.arange(batch * count, device=device).mul(size).view(batch, count)
    queues = [k * g for g in groups]
    base = base.repeat_interleave(numbers_on(queues, device), dim=1, output_size=sum(queues))
    key = (torch.where(flat >= 0, flat, num_experts) + base).flatten()
    order = key.argsort(stable=True)
    sizes = key.new_zeros(batch * count * size).scatter_add(0, key, torch.ones_like(key))  # bincount reads a number
    rank = torch.empty_like(key)
    rank[order] = torch.arange(key.numel(), device=device) - (sizes.cumsum(0) - sizes)[key[order]]
    sizes = sizes.view(batch, count, size)
    limit = capacity.unsqueeze(2).expand(-1, -1, size)
    kept = torch.minimum(sizes, limit)
    before = kept.cumsum(1) - kept  # kept by earlier groups
    taken = (rank < limit.flatten()[key]) & (flat.flatten() >= 0)
    slots = torch.where(taken, rank + before.flatten()[key], -1).view(flat.shape)
    pieces = [part.view(batch, k, g) for part, g in zip(slots.split([k * g for g in groups], 1), groups, strict=True)]
    return torch.cat(pieces, dim=2).transpose(1, 2).contiguous(), sizes[:, :, :num_experts].sum(1)


def _assign_slots_cpu(experts: Tensor, capacity: Tensor, groups: list[int], num_experts: int) -> tuple[Tensor, Tensor]:
    """One group, nothing masked: numpy's radix sort, and a tenth of the calls."""
    batch, tokens, k = experts.shape
    ids = experts.numpy()
    if batch != 1 or len(groups) != 1 or num_experts >= 2**15 or (ids.size and ids.min() < 0):
        return _assign_slots_reference(experts, capacity, groups, num_experts)
    key = ids[0].T.ravel()
    order = np.argsort(key.astype(np.int16), kind="stable")
    sizes = np.bincount(key, minlength=num_experts)
    rank = np.empty_like(key)
    rank[order] = np.arange(key.size) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    if sizes.max(initial=0) > (limit := int(capacity)):
        rank[rank >= limit] = -1
    slots = np.ascontiguousarray(rank.reshape(k, tokens).T)
    return torch.from_numpy(slots).unsqueeze(0), torch.from_numpy(sizes).unsqueeze(0)


def _assign_slots_rule(batch: int, dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    experts, capacity = (batch_first(arg, dim, batch) for arg, dim in zip(args[:2], dims[:2], strict=True))
    slots, counts = assign_slots(experts.flatten(0, 1), capacity.flatten(0, 1), *args[2:])
    return (slots.view(experts.shape), counts.view(*experts.shape[:2], counts.shape[1])), (0, 0)


def _row_index_reference(experts: Tensor, slots: Tensor, num_experts: int, most: int) -> tuple[Tensor, Tensor, Tensor]:
    flat, slot = experts.flatten(), slots.flatten()
    kept = slot >= 0
    (choice,) = kept.nonzero(as_tuple=True)
    ids, slot = flat[choice], slot[choice]
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < num_experts:
        _refuse_ids(int(ids.min()), int(ids.max()), num_experts)
    sizes = torch.bincount(ids, minlength=num_experts)
    last = sizes.cumsum(0)
    first = last - sizes
    row = first[ids] + slot
    order = torch.full_like(flat, -1)
    if bool((slot < sizes[ids]).all()):
        order[row] = choice
    if int((order >= 0).sum()) != choice.numel():
        _refuse_slots()
    if sizes.numel() and int(sizes.max()) > most:
        _refuse_load(int(sizes.max()), most)
    index = torch.full_like(flat, -1)
    index[choice] = row
    groups = torch.stack([first, last, torch.arange(num_experts, device=flat.device)], dim=1)
    return index.view(experts.shape), order, groups


def _row_index_cpu(experts: Tensor, slots: Tensor, num_experts: int, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Nothing dropped: numpy on whole arrays, a third of the calls."""
    ids, slot = experts.numpy().ravel(), slots.numpy().ravel()
    if not ids.size or slot.min() < 0 or ids.min() < 0 or ids.max() >= num_experts:
        return _row_index_reference(experts, slots, num_experts, most)
    sizes = np.bincount(ids, minlength=num_experts)
    last = np.cumsum(sizes)
    index = (last - sizes)[ids] + slot
    order = np.full_like(ids, -1)
    if (slot < sizes[ids]).all():
        order[index] = np.arange(ids.size)
    if order.min() < 0:
        _refuse_slots()
    if sizes.max() > most:
        _refuse_load(int(sizes.max()), most)
    groups = np.stack([last - sizes, last, np.arange(num_experts)], axis=1)
    return torch.from_numpy(index).view(experts.shape), torch.from_numpy(order), torch.from_numpy(groups)


def _refuse_ids(low: int, high: int, num_experts: int) -> None:
    refuse(
        "dispatch",
        [
            f"routing.experts has ids from {low} to {high} with slots, but an id is at least 0 and below "
            f"num_experts={num_experts}; a choice of no expert has slot -1."
        ],
    )


def _refuse_slots() -> None:
    refuse("dispatch", ["routing.slots must number the rows kept by each expert 0, 1, 2, ... without gaps or repeats."])


def _refuse_load(load: int, most: int) -> None:
    refuse("dispatch", [f"routing.slots gives an expert {load} rows, but routing.capacity is {most}."])


def _row_index_rule(batch: int, dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    experts, slots = (batch_first(arg, dim, batch) for arg, dim in zip(args[:2], dims[:2], strict=True))
    if not batch:
        shapes = experts.shape, (0, experts.shape[1] * experts.shape[2]), (0, args[2], 3)
        return tuple(experts.new_empty(shape) for shape in shapes), (0, 0, 0)
    each = [row_index(e, s, *args[2:]) for e, s in zip(experts, slots, strict=True)]
    return tuple(torch.stack(parts) for parts in zip(*each, strict=True)), (0, 0, 0)


top_k = define(
    "top_k(Tensor scores, SymInt k) -> Tensor",
    reference=_top_k_reference,
    cpu=_top_k_cpu,
    cuda=top_k_cuda,
    fake=lambda scores, k: scores.new_empty(scores.shape[0], k, dtype=torch.int64),
    vmap=_top_k_rule,
)
"""``[T,E] -> [T,K]``: ids of the k largest scores of each row, largest first, ties to the lowest id."""

assign_slots = define(
    "assign_slots(Tensor experts, Tensor capacity, SymInt[] groups, SymInt num_experts) -> (Tensor, Tensor)",
    reference=_assign_slots_reference,
    cpu=_assign_slots_cpu,
    cuda=assign_slots_cuda,
    fake=lambda experts, capacity, groups, num_experts: (
        experts.new_empty(experts.shape),
        experts.new_empty(experts.shape[0], num_experts),
    ),
    vmap=_assign_slots_rule,
)
"""``[B,T,K], [B,G] -> [B,T,K], [B,E]``: place of each choice in its expert's queue, and the loads."""

row_index = define(
    "row_index(Tensor experts, Tensor slots, SymInt num_experts, SymInt most) -> (Tensor, Tensor, Tensor)",
    reference=_row_index_reference,
    cpu=_row_index_cpu,
    cuda=row_index_cuda,
    fake=lambda experts, slots, num_experts, most: (
        experts.new_empty(experts.shape),
        experts.new_empty(experts.numel()),
        experts.new_empty(num_experts, 3),
    ),
    vmap=_row_index_rule,
)
"""``[T,K], [T,K] -> [T,K], [N], [E,3]``: row of each choice, choice of each row (-1 past the last), groups.

Refuses ids out of range, slots that are not 0, 1, 2, ... and more than `most` rows of an expert.
"""

"""Integer operations of routing: which experts, which slots, which rows.

None has a derivative. All are deterministic, break ties to the lowest expert id, and read no number
on the host that a caller would have to wait for, so they pass through every transform.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._errors import refuse
from .differentiable import batch_first
from .registry import define


def _top_k_reference(scores: Tensor, k: int) -> Tensor:
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :k].contiguous()


def _top_k_cpu(scores: Tensor, k: int) -> Tensor:
    """`torch.topk` is 2 to 3 times faster than a sort, and differs only in rows with a tie at the cut."""
    rows, experts = scores.shape
    if k == experts or not rows:
        return _top_k_reference(scores, k)
    best, ids = scores.topk(k + 1)
    unsure = ((best[:, 1:] == best[:, :-1]) | best[:, 1:].isnan()).any(1) | best[:, 0].isnan()
    ids = ids[:, :k].contiguous()
    if unsure.any():
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
    batch, tokens, k = experts.shape
    size, count = num_experts + 1, len(groups)  # one more expert takes the choices of no expert
    device = experts.device
    by_choice = experts.transpose(1, 2)  # [B,K,T]: first choices first
    pieces = [part.reshape(batch, -1) for part in by_choice.split(groups, dim=2)]
    flat = torch.cat(pieces, dim=1) if count > 1 else pieces[0]  # [B,N] in queue order
    first_key = torch.arange(batch * count, device=device).mul(size).view(batch, count)
    first_key = first_key.repeat_interleave(torch.tensor([k * g for g in groups], device=device), dim=1)
    key = (torch.where(flat >= 0, flat, num_experts) + first_key).flatten()
    small = torch.int16 if batch * count * size < 2**15 else torch.int32  # a short sort key halves the time
    order = key.to(small).argsort(stable=True)
    sizes = torch.bincount(key, minlength=batch * count * size)
    starts = sizes.cumsum(0) - sizes
    rank = torch.empty_like(key)
    rank[order] = torch.arange(key.numel(), device=device) - starts[key[order]]

    sizes = sizes.view(batch, count, size)
    limit = capacity.view(batch, count, 1)
    kept = torch.minimum(sizes, limit)
    before = (kept.cumsum(1) - kept).flatten()  # kept by earlier groups
    taken = (rank.view(batch, -1) < limit.expand(-1, -1, size).flatten()[key].view(batch, -1)) & (flat >= 0)
    slots = torch.where(taken, rank.view(batch, -1) + before[key].view(batch, -1), -1)
    pieces = [part.view(batch, k, -1) for part in slots.split([k * g for g in groups], dim=1)]
    by_choice = torch.cat(pieces, dim=2) if count > 1 else pieces[0]
    return by_choice.transpose(1, 2).contiguous(), sizes[:, :, :num_experts].sum(1)


def _assign_slots_rule(batch: int, dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    experts, capacity = (batch_first(arg, dim, batch) for arg, dim in zip(args[:2], dims[:2], strict=True))
    slots, counts = assign_slots(experts.flatten(0, 1), capacity.flatten(0, 1), *args[2:])
    return (slots.unflatten(0, (batch, -1)), counts.unflatten(0, (batch, -1))), (0, 0)


def _row_index_reference(experts: Tensor, slots: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens, k = experts.shape
    flat, slot = experts.flatten(), slots.flatten()
    kept = slot >= 0
    everything = bool(kept.all())
    if flat.numel() and (int(flat.max()) >= num_experts or int(flat.min()) < (0 if everything else -1)):
        refuse("dispatch", [f"routing.experts has ids from {int(flat.min())} to {int(flat.max())}: "
                            f"an id is at least 0 and below num_experts={num_experts}, or -1 with slot -1 for none."])  # fmt: skip
    key = flat if everything else torch.where(kept, flat, num_experts)
    sizes = torch.bincount(key, minlength=num_experts + 1)[:num_experts]
    last = sizes.cumsum(0)
    first = last - sizes
    row = first[flat] + slot if everything else torch.where(kept, first[flat.clamp(min=0)] + slot, -1)
    order = torch.full_like(flat, -1)
    choice = torch.arange(flat.numel(), device=flat.device)
    fits = slot < sizes[flat.clamp(min=0)]
    if not bool(fits.all()):
        _refuse_slots()
    order[row if everything else row[kept]] = choice if everything else choice[kept]
    if int((order >= 0).sum()) != int(sizes.sum()):
        _refuse_slots()
    groups = torch.stack([first, last, torch.arange(num_experts, device=flat.device)], dim=1)
    return row.view(tokens, k), order, groups


def _refuse_slots() -> None:
    refuse("dispatch", ["routing.slots must number the rows kept by each expert 0, 1, 2, ... without gaps or repeats."])


def _row_index_rule(batch: int, dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    experts, slots = (batch_first(arg, dim, batch) for arg, dim in zip(args[:2], dims[:2], strict=True))
    each = [row_index(e, s, args[2]) for e, s in zip(experts, slots, strict=True)]
    return tuple(torch.stack(parts) for parts in zip(*each, strict=True)), (0, 0, 0)


top_k = define(
    "top_k(Tensor scores, SymInt k) -> Tensor",
    reference=_top_k_reference,
    cpu=_top_k_cpu,
    fake=lambda scores, k: scores.new_empty(scores.shape[0], k, dtype=torch.int64),
    vmap=_top_k_rule,
)
"""``[T,E] -> [T,K]``: ids of the k largest scores of each row, largest first, ties to the lowest id."""

assign_slots = define(
    "assign_slots(Tensor experts, Tensor capacity, SymInt[] groups, SymInt num_experts) -> (Tensor, Tensor)",
    reference=_assign_slots_reference,
    fake=lambda experts, capacity, groups, num_experts: (
        experts.new_empty(experts.shape),
        experts.new_empty(experts.shape[0], num_experts),
    ),
    vmap=_assign_slots_rule,
)
"""``[B,T,K], [B,G] -> [B,T,K], [B,E]``: place of each choice in its expert's queue, and the loads."""

row_index = define(
    "row_index(Tensor experts, Tensor slots, SymInt num_experts) -> (Tensor, Tensor, Tensor)",
    reference=_row_index_reference,
    fake=lambda experts, slots, num_experts: (
        experts.new_empty(experts.shape),
        experts.new_empty(experts.numel()),
        experts.new_empty(num_experts, 3),
    ),
    vmap=_row_index_rule,
)
"""``[T,K], [T,K] -> [T,K], [N], [E,3]``: row of each choice, choice of each row (-1 past the last), groups."""

"""Integer operations of routing on a GPU, without a sort, an atomic or a number read on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .choice import is_checked, target
from .launch import cdiv, launch, power_of_two

#: Choices that one program counts, `SUB` times `BLOCK`; larger blocks of one-hot counts spill registers.
SUB, BLOCK, BLOCK_E = 8, 256, 32
#: Most experts and choices for which repeated maxima beat a sort.
MOST_EXPERTS, MOST_CHOICES = 2048, 64


def why_not_best(experts: int, k: int) -> str:
    """Why the kernel of `top_k` does not take that many, or ""."""
    if experts > MOST_EXPERTS or k > MOST_CHOICES:
        return f"no kernel for {k} of {experts}, only up to {MOST_CHOICES} of {MOST_EXPERTS}"
    return ""


def why_not_places(groups: Sequence[int]) -> str:
    """Why the kernels of `assign_slots` do not take groups of these sizes, or ""."""
    return "" if len(set(groups)) == 1 else "no kernel for groups of different sizes"


def top_k_cuda(scores: Tensor, k: int) -> Any:
    """``[T,k]``; NotImplemented where the reference is to run."""
    tokens, experts = scores.shape
    if scores.dtype != torch.float32 or target(scores.device)[0] is None:
        return NotImplemented
    if why_not_best(experts, k) or not tokens or not k:
        return NotImplemented
    scores = scores if scores.stride(1) == 1 or experts == 1 else scores.contiguous()
    out = torch.empty(tokens, k, dtype=torch.int64, device=scores.device)
    block_e = power_of_two(experts, 2, MOST_EXPERTS)
    block_t = max(1, min(64, MOST_EXPERTS // block_e))
    launch(
        "routing.best_experts", (cdiv(tokens, block_t),), scores, out, tokens, experts, k, scores.stride(0),
        BLOCK_T=block_t, BLOCK_E=block_e, warps=4,
    )  # fmt: skip
    return out


def _count(
    experts: Tensor, slots: Tensor, before: Tensor, capacity: Tensor, batch: int, groups: int, size: int,
    num_experts: int, kept: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Choices of each expert before each block of its run, and in all."""
    choices = experts.shape[-1]
    blocks = cdiv(size * choices, SUB * BLOCK)
    runs = batch * groups
    counts = torch.empty(runs, blocks, num_experts, dtype=torch.int32, device=experts.device)
    loads = torch.empty(batch, num_experts, dtype=torch.int64, device=experts.device)
    launch(
        "routing.count_choices", (runs * blocks,), experts, slots, counts, size, choices, num_experts, blocks,
        KEPT=kept, SUB=SUB, BLOCK=BLOCK, BLOCK_E=BLOCK_E, warps=8,
    )  # fmt: skip
    launch(
        "routing.scan_blocks", (batch, cdiv(num_experts, BLOCK_E)), counts, before, capacity, loads, groups, blocks,
        num_experts, LIMITED=not kept, BLOCK_B=64, BLOCK_E=BLOCK_E, warps=4,
    )  # fmt: skip
    return counts, loads


def assign_slots_cuda(experts: Tensor, capacity: Tensor, groups: list[int], num_experts: int) -> Any:
    """``[B,T,K]`` and ``[B,E]``; NotImplemented where the reference is to run."""
    batch, _, choices = experts.shape
    if target(experts.device)[0] is None or why_not_places(groups) or not (experts.numel() and num_experts):
        return NotImplemented
    experts, capacity, size = experts.contiguous(), capacity.contiguous(), groups[0]
    slots = torch.empty_like(experts)
    before = experts.new_empty(batch, len(groups), num_experts)
    counts, loads = _count(experts, experts, before, capacity, batch, len(groups), size, num_experts, False)
    blocks = counts.shape[1]
    launch(
        "routing.place_slots", (counts.shape[0] * blocks,), experts, counts, before, capacity, slots,
        size, choices, num_experts, blocks, SUB=SUB, BLOCK=BLOCK, BLOCK_E=BLOCK_E, warps=8,
    )  # fmt: skip
    return slots, loads


def row_index_cuda(experts: Tensor, slots: Tensor, num_experts: int, most: int) -> Any:
    """``[T,K]``, ``[N]``, ``[E,3]``; NotImplemented where the reference is to run, as in checked mode."""
    if target(experts.device)[0] is None or is_checked() or not (experts.numel() and num_experts):
        return NotImplemented
    experts, slots, count = experts.contiguous(), slots.contiguous(), experts.numel()
    _, sizes = _count(experts, slots, experts, experts, 1, 1, experts.shape[0], num_experts, True)
    index = torch.empty_like(experts)
    order = experts.new_empty(count)
    groups = experts.new_empty(num_experts, 3)
    launch(
        "routing.place_rows", (cdiv(count, SUB * BLOCK),),
        experts, slots, sizes, index, order, groups, count, num_experts,
        SUB=SUB, BLOCK=BLOCK, BLOCK_E=BLOCK_E, warps=8,
    )  # fmt: skip
    return index, order, groups


def groups_from_sizes_cuda(sizes: Tensor, rows: int) -> Any:
    """``[E,3]``; sizes below 0 count as 0 and rows past the last are in no group. NotImplemented in checked mode."""
    if is_checked():
        return NotImplemented
    sizes = sizes.to(torch.int64).clamp(min=0)
    last = sizes.cumsum(0)
    first = (last - sizes).clamp(max=rows)
    return torch.stack([first, last.clamp(max=rows), torch.arange(sizes.shape[0], device=sizes.device)], dim=1)

"""Routing in Triton: the k best experts, places in queues, rows. Counting, no sort and no atomics.

Choices are counted in blocks of ``SUB * BLOCK``: how many of a block go to each expert (`count_choices`);
the exclusive sums of that over the blocks (`scan_blocks`); then the rank of each choice inside its block
on top (`place_slots`). The rank is a count of earlier equal ids, so places are those of a stable sort.

An id outside 0 <= id < E matches no expert, so it is counted nowhere and gets no place; no store depends
on an id or a slot that was not compared with the size of what is stored to.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["tokens", "k"])
def best_experts(scores, out, tokens, num_experts, k, stride_t, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr):
    """Ids of the k largest fp32 scores of each row, largest first, ties to the lowest id; NaN counts as largest.

    A score and its id make one 64-bit key: the bits of the score in the order of integers, then the id.
    """
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, BLOCK_E)
    inside = (t < tokens)[:, None] & (e < num_experts)[None, :]
    score = tl.load(scores + t[:, None].to(tl.int64) * stride_t + e[None, :], mask=inside, other=0.0)
    score = tl.where(score == 0, 0.0, score)  # -0 is 0
    bits = score.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    bits = tl.where(score != score, 0x7FFFFFFF, bits)
    lowest = -0x7FFFFFFFFFFFFFFF
    key = tl.where(inside, bits.to(tl.int64) * 4294967296 + (BLOCK_E - 1 - e)[None, :], lowest)
    for i in range(0, k):
        best = tl.max(key, 1)
        chosen = BLOCK_E - 1 - (best & 0xFFFFFFFF)
        tl.store(out + t.to(tl.int64) * k + i, chosen, mask=t < tokens)
        key = tl.where(key == best[:, None], lowest, key)


@triton.jit
def _queue(run, block, size, choices, BLOCK: tl.constexpr):
    """Where the choices of a block stand in ``[runs*size,K]``, in queue order: all first choices, then all second."""
    q = block * BLOCK + tl.arange(0, BLOCK)
    inside = q < size * choices
    return (run.to(tl.int64) * size + q % size) * choices + q // size, inside


@triton.jit
def _ids(experts, slots, at, inside, KEPT: tl.constexpr):
    """The chosen experts; -1 outside, and with KEPT for a choice without a slot."""
    ids = tl.load(experts + at, mask=inside, other=-1)
    if KEPT:
        ids = tl.where(tl.load(slots + at, mask=inside, other=-1) >= 0, ids, -1)
    return ids


@triton.jit(do_not_specialize=["size", "blocks", "choices"])
def count_choices(
    experts, slots, counts, size, choices, num_experts, blocks,
    KEPT: tl.constexpr, SUB: tl.constexpr, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """``counts [runs,blocks,E]``: choices of each expert in each block of each run (a group of a batch)."""
    run, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    for e0 in range(0, num_experts, BLOCK_E):
        e = e0 + tl.arange(0, BLOCK_E)
        count = tl.zeros([BLOCK_E], tl.int32)
        for sub in range(0, SUB):
            at, inside = _queue(run, block * SUB + sub, size, choices, BLOCK)
            ids = _ids(experts, slots, at, inside, KEPT)
            count += tl.sum((ids[:, None] == e[None, :]).to(tl.int32), 0)
        tl.store(counts + tl.program_id(0).to(tl.int64) * num_experts + e, count, mask=e < num_experts)


@triton.jit(do_not_specialize=["blocks"])
def scan_blocks(
    counts, before, capacity, loads, groups, blocks, num_experts,
    LIMITED: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Turns counts into their exclusive sums over the blocks of a run, and adds up ``loads [B,E]``.

    With LIMITED, ``before [B,G,E]`` gets what earlier groups keep of at most ``capacity [B,G]`` each.
    """
    batch, e = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    load = tl.zeros([BLOCK_E], tl.int64)
    kept = tl.zeros([BLOCK_E], tl.int64)
    for g in range(0, groups):
        run = batch * groups + g
        sofar = tl.zeros([BLOCK_E], tl.int32)
        for b0 in range(0, blocks, BLOCK_B):
            b = b0 + tl.arange(0, BLOCK_B)
            at = counts + (run * blocks + b)[:, None] * num_experts + e[None, :]
            inside = (b < blocks)[:, None] & (e < num_experts)[None, :]
            count = tl.load(at, mask=inside, other=0)
            tl.store(at, sofar[None, :] + tl.cumsum(count, 0) - count, mask=inside)
            sofar += tl.sum(count, 0)
        load += sofar
        if LIMITED:
            tl.store(before + run * num_experts + e, kept, mask=e < num_experts)
            kept += tl.minimum(sofar.to(tl.int64), tl.maximum(tl.load(capacity + run), 0))
    tl.store(loads + batch * num_experts + e, load, mask=e < num_experts)


@triton.jit(do_not_specialize=["size", "blocks", "choices"])
def place_slots(
    experts, bases, before, capacity, slots, size, choices, num_experts, blocks,
    SUB: tl.constexpr, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """The place of each choice in its expert's queue, -1 past the capacity of its group or for no expert."""
    run, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    limit = tl.minimum(tl.load(capacity + run), 0x7FFFFFFF).to(tl.int32)
    for e0 in range(0, num_experts, BLOCK_E):
        e = e0 + tl.arange(0, BLOCK_E)
        known = e < num_experts
        base = tl.load(bases + tl.program_id(0).to(tl.int64) * num_experts + e, mask=known, other=0)
        start = tl.load(before + run.to(tl.int64) * num_experts + e, mask=known, other=0).to(tl.int32)
        for sub in range(0, SUB):
            at, inside = _queue(run, block * SUB + sub, size, choices, BLOCK)
            ids = tl.load(experts + at, mask=inside, other=-1)
            hit = ((ids[:, None] == e[None, :]) & known[None, :]).to(tl.int32)
            rank = base[None, :] + tl.cumsum(hit, 0) - 1
            place = tl.where(rank < limit, rank + start[None, :], -1)
            mine = tl.sum(hit, 1) > 0
            nowhere = (e0 == 0) & ((ids < 0) | (ids >= num_experts))
            slot = tl.where(mine, tl.sum(tl.where(hit > 0, place, 0), 1), -1)
            tl.store(slots + at, slot.to(tl.int64), mask=inside & (mine | nowhere))
            base += tl.sum(hit, 0)


@triton.jit(do_not_specialize=["count"])
def place_rows(
    experts, slots, sizes, index, order, groups, count, num_experts,
    SUB: tl.constexpr, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Row of each choice, choice of each row and the experts' rows, from the slots and the sizes.

    A slot is compared with its expert's size, so a row is below the sum of sizes, which is at most `count`.
    """
    sofar = tl.zeros([1], tl.int64)
    for e0 in range(0, num_experts, BLOCK_E):
        e = e0 + tl.arange(0, BLOCK_E)
        known = e < num_experts
        size = tl.load(sizes + e, mask=known, other=0)
        last = sofar + tl.cumsum(size, 0)
        first = last - size
        if tl.program_id(0) == 0:
            tl.store(groups + 3 * e, first, mask=known)
            tl.store(groups + 3 * e + 1, last, mask=known)
            tl.store(groups + 3 * e + 2, e.to(tl.int64), mask=known)
        sofar += tl.sum(size, 0)
        for sub in range(0, SUB):
            i = (tl.program_id(0) * SUB + sub) * BLOCK + tl.arange(0, BLOCK)
            ids = tl.load(experts + i, mask=i < count, other=-1)
            slot = tl.load(slots + i, mask=i < count, other=-1)
            hit = (ids[:, None] == e[None, :]) & known[None, :]
            limit = tl.sum(tl.where(hit, size[None, :], 0), 1)
            row = tl.sum(tl.where(hit, first[None, :], 0), 1) + slot
            mine = tl.sum(hit.to(tl.int32), 1) > 0
            fits = mine & (slot >= 0) & (slot < limit) & (row < count)
            nowhere = (e0 == 0) & ((ids < 0) | (ids >= num_experts))
            tl.store(index + i, tl.where(fits, row, -1), mask=(i < count) & (mine | nowhere))
            tl.store(order + row, i.to(tl.int64), mask=fits)
    for sub in range(0, SUB):
        i = (tl.program_id(0) * SUB + sub) * BLOCK + tl.arange(0, BLOCK)
        tl.store(order + i, tl.full([BLOCK], -1, tl.int64), mask=(i < count) & (i >= sofar))

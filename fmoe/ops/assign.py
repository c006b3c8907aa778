"""Balanced assignment of tokens to experts, exactly: the routing problem of BASE layers.

Tokens enter one by one, each along the best augmenting path (successive shortest paths): it takes a place
at an expert, whose worst-off token may move on to another, and so on to an expert with room. The graph has
a node for each expert, and one for the T mod E places that any expert may have beyond floor(T/E), one
each. An edge costs what moving the best token along it loses, so no path needs more than E + 1 steps, and
the result is optimal after each token, to a part in 2^40 of the largest score. O(T * (T + E^3)) at worst, on
the host.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .differentiable import batch_first
from .registry import define


def _assign(scores: np.ndarray) -> np.ndarray:
    """``[T,E] -> [T]``: one group."""
    tokens, experts = scores.shape
    base, extra = divmod(tokens, experts)
    owner = np.full(tokens, -1)
    load = np.zeros(experts, dtype=np.int64)
    cost = np.full((experts + 1, experts + 1), np.inf)  # cost[a, b] of moving on from a to b; the last node is extra
    cost[:experts, experts] = np.inf if base else 0.0
    mover = np.zeros((experts, experts), dtype=np.int64)
    # whole numbers of at most 2^bits, whose sums along any path are exact: no rounding can make a cycle of steps
    bits = 49 - (experts + 2).bit_length()
    largest = np.abs(scores).max(initial=0.0)
    scores = np.rint(np.ldexp(scores, bits - int(np.frexp(largest)[1]))) if largest > 0 else scores
    for token in range(tokens):
        distance = np.append(-scores[token], np.inf)
        before = np.full(experts + 1, -1)
        for _ in range(experts + 1):
            through = distance[:, None] + cost
            best = through.argmin(0)
            shorter = through[best, np.arange(experts + 1)] < distance
            if not shorter.any():
                break
            distance = np.where(shorter, through[best, np.arange(experts + 1)], distance)
            before = np.where(shorter, best, before)
        room = np.append(load < base, (load > base).sum() < extra)
        node = int(np.where(room, distance, np.inf).argmin())
        path = [node]
        while before[node] >= 0:
            node = int(before[node])
            path.append(node)
        path.reverse()
        steps = itertools.pairwise(path)
        owner_of = [token] + [int(mover[a, b]) if a < experts and b < experts else -1 for a, b in steps]
        changed = [node for node in path if node < experts]
        for node, moved in zip(path, owner_of, strict=True):
            if moved >= 0:
                owner[moved] = node
        load = np.bincount(owner[owner >= 0], minlength=experts)
        for a in changed:
            mine = np.flatnonzero(owner == a)
            loss = scores[mine, a][:, None] - scores[mine]
            cost[a, :experts] = loss.min(0) if mine.size else np.inf
            if mine.size:
                mover[a] = mine[loss.argmin(0)]
            cost[a, a] = np.inf
            cost[a, experts] = 0.0 if load[a] == base else np.inf  # takes one of the places beyond
            cost[experts, a] = 0.0 if load[a] > base else np.inf  # gives it back
    return owner


def _balanced_reference(scores: Tensor, keep: Tensor, groups: list[int]) -> Tensor:
    numbers = scores.detach().to("cpu", torch.float64).numpy()
    kept = keep.to("cpu").numpy()
    made = np.full(kept.shape, -1, dtype=np.int64)
    for sample in range(numbers.shape[0]):
        first = 0
        for size in groups:
            rows = first + np.flatnonzero(kept[sample, first : first + size])
            part = numbers[sample, rows]
            finite = part[np.isfinite(part)]
            low, high = (finite.min(), finite.max()) if finite.size else (0.0, 0.0)
            made[sample, rows] = _assign(np.nan_to_num(part, nan=low, posinf=high, neginf=low))
            first += size
    return torch.from_numpy(made).to(scores.device)


def _balanced_rule(batch: int, dims: tuple[Any, ...], scores: Tensor, keep: Tensor, groups: list[int]) -> Any:
    scores, keep = batch_first(scores, dims[0], batch), batch_first(keep, dims[1], batch)
    made = balanced_assignment(scores.flatten(0, 1), keep.flatten(0, 1), groups)
    return made.unflatten(0, keep.shape[:2]), 0


balanced_assignment = define(
    "balanced_assignment(Tensor scores, Tensor keep, SymInt[] groups) -> Tensor",
    reference=_balanced_reference,
    fake=lambda scores, keep, groups: scores.new_empty(scores.shape[:2], dtype=torch.int64),
    vmap=_balanced_rule,
)
"""``[B,T,E], [B,T] -> [B,T]``: one expert for each kept token, -1 for the others; see the top of the file."""

"""The choices of one rank's tokens, and the sums over them of which the losses are made."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..ops.routing import assign_slots
from ..ops.transfers import numbers_on
from ..values import RouterParams
from .capacity import Capacity, slots_bound
from .losses import Sums, entropy_of, squared_variation, sum_over_tokens
from .routers.base import Given, Router, Scores, chosen, pick


def route(
    params: RouterParams,
    x: Tensor,
    router: Router,
    rule: Capacity | None,
    sizes: list[int],
    *,
    noise: Tensor | None = None,
    mask: Tensor | None = None,
    token_ids: Tensor | None = None,
    bias: Tensor | None = None,
    replay: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Sums]:
    """The choices of these tokens alone, and the sums over them of which the losses are made."""
    num_experts = params.weight.shape[1]
    tokens = math.prod(x.shape[:-1])
    keep = None if mask is None else mask.reshape(tokens)
    rows = x.reshape(tokens, x.shape[-1])
    if noise is not None:
        noise = noise.reshape(tokens, num_experts)
    if keep is not None:
        rows = torch.where(keep[:, None], rows, 0)  # before the product: 0 * NaN would reach the weight's gradient
        noise = None if noise is None else torch.where(keep[:, None], noise, 0)
    ids = None if token_ids is None else token_ids.reshape(tokens)
    given = Given(rows, sizes, noise, keep, ids, bias)
    scores = router.scores(params, given)
    picked = router.select(scores, given) if replay is None else replay
    weights = router.weigh(scores, picked)
    experts = picked
    if keep is not None:
        experts = torch.where(keep[:, None], picked, -1)
    if keep is not None or replay is not None or not router.fills:
        weights = torch.where(experts >= 0, weights, 0)
    limit = _limits(rule, router, sizes, keep, experts, num_experts)
    slots, counts = _queue(rule, scores, experts, limit, sizes)
    return experts, weights, slots, counts, _sums(router, scores, picked, experts, slots, counts, sizes, keep)


def slots_of(
    router: Router, rule: Capacity | None, sizes: list[int], num_experts: int, replay: Tensor | None
) -> int | None:
    """Slots per expert that suffice for groups of these sizes, or None if the data decides."""
    if rule is None and replay is None:
        return router.slots(sizes, num_experts)
    k = router.choices(num_experts) if replay is None else replay.shape[1]
    return slots_bound(rule, sizes)(k, num_experts)


def _limits(
    rule: Capacity | None, router: Router, sizes: list[int], keep: Tensor | None, experts: Tensor, num_experts: int
) -> Tensor:
    """The limit of each group ``[G]``."""
    k = experts.shape[1]
    if rule is None:
        return numbers_on(sizes, experts.device)
    if router.variable:
        present = torch.stack([(part >= 0).sum((0, 1)) for part in experts.split(sizes)])
        limit = rule.of_counts(present, k=1, num_experts=num_experts)
        return torch.minimum(limit, numbers_on(sizes, experts.device))
    if keep is None:
        limits = [rule.of(tokens=size, k=k, num_experts=num_experts) for size in sizes]
        return numbers_on(limits, experts.device)
    present = torch.stack([part.sum() for part in keep.split(sizes)])
    return rule.of_counts(present, k=k, num_experts=num_experts)


def _queue(
    rule: Capacity | None, scores: Scores, experts: Tensor, limit: Tensor, sizes: list[int]
) -> tuple[Tensor, Tensor]:
    """Slots ``[T,K]`` and loads ``[E]``, in the order of the rule's priority."""
    num_experts = scores.logits.shape[1]
    order = None
    if rule is not None and rule.priority == "batch":
        best = torch.where(experts >= 0, pick(scores.gates.detach(), experts), -torch.inf).amax(1)
        first, parts = 0, []
        for part in best.split(sizes):
            parts.append(part.sort(descending=True, stable=True).indices + first)
            first += part.shape[0]
        order = torch.cat(parts).unsqueeze(1).expand(experts.shape)
        experts = experts.gather(0, order)
    slots, counts = assign_slots(experts.unsqueeze(0), limit.unsqueeze(0), sizes, num_experts)
    slots, counts = slots.squeeze(0), counts.squeeze(0)
    if order is not None:
        slots = torch.zeros_like(slots).scatter(0, order, slots)
    return slots, counts


def _sums(
    router: Router,
    scores: Scores,
    picked: Tensor,
    experts: Tensor,
    slots: Tensor,
    counts: Tensor,
    sizes: list[int],
    keep: Tensor | None,
) -> Sums:
    logits = scores.logits
    tokens = (
        torch.full((), logits.shape[0], dtype=logits.dtype, device=logits.device)
        if keep is None
        else keep.sum().to(logits.dtype)
    )
    mass = router.mass(scores, picked)
    rows = [mass, router.chance(scores, picked)]
    rows += [first.to(mass.dtype) for first in router.firsts(picked, logits.shape[1])]
    parts: tuple[Tensor, ...]
    if router.scope == "global":
        parts = tuple(sum_over_tokens(row, keep) for row in rows)
    else:
        sizes = [logits.shape[0]] if router.scope == "local" else sizes
        parts = (_sum_over_groups(router, rows, experts, sizes, keep),)
    return Sums(
        parts=parts,
        z=sum_over_tokens(torch.logsumexp(logits, dim=-1).square(), keep),
        entropy=sum_over_tokens(entropy_of(router.odds(mass)), keep),
        tokens=tokens,
        counts=counts,
        dropped=((slots < 0) & (experts >= 0)).sum((0, 1)),
    )


def _sum_over_groups(
    router: Router, rows: Sequence[Tensor], experts: Tensor, sizes: list[int], keep: Tensor | None
) -> Tensor:
    """``[3]``: balance, importance and load of each group by itself, times its unmasked tokens, added up."""
    num_experts = rows[0].shape[1]
    masks: Sequence[Tensor | None] = [None] * len(sizes) if keep is None else keep.split(sizes)
    split = zip(*(row.split(sizes) for row in rows), strict=True)
    total = rows[0].new_zeros(3)
    for (mass, chance, *firsts), ids, mask in zip(split, experts.split(sizes), masks, strict=True):
        counts = chosen(ids, num_experts).sum(0)
        tokens = (
            torch.full((), mass.shape[0], dtype=mass.dtype, device=mass.device)
            if mask is None
            else mask.sum().to(mass.dtype)
        )
        mean = sum_over_tokens(mass, mask) / tokens.clamp(min=1)
        balance = router.balance(mean, counts, tokens, *(sum_over_tokens(first, mask) for first in firsts))
        losses = [balance, squared_variation(mean), squared_variation(sum_over_tokens(chance, mask))]
        total = total + torch.stack(losses) * tokens
    return total

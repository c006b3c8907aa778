"""Affinities of tokens and experts without a softmax, and a bias in place of a balance loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..._errors import refuse
from ..._typing import type_text
from ...ops.routing import top_k
from ...values import RouterParams
from .base import (
    Given,
    Router,
    Scope,
    Scores,
    adds_up,
    k_misfits,
    k_problems,
    linear,
    option,
    pick,
    positive,
    shares,
    whole,
)  # fmt: skip


@dataclass(frozen=True)
class Sigmoid(Router):
    """Top-k of sigmoids, with a selection bias and limits on groups of experts.

        s = sigmoid(x @ weight)           S = top-k of s + bias, inside the best groups
        weight of e in S = route_scale * s_e / sum_{j in S} s_j

    The bias (an argument of `gate`, ``[E]``, fp32 or wider) chooses and never weighs: it has no
    gradient, and it is no parameter, which weight decay would move. `bias_update` moves it once per
    optimizer step. With ``expert_groups=G``, the experts are G groups of E/G in a row; a group counts as
    much as the sum of its ``max(1, k // top_groups)`` best ``s + bias``, and only experts of the best
    `top_groups` groups can be chosen. The losses use ``s / sum_e s_e``. DeepSeek-V3's sequence-wise loss
    is ``aux.balance`` with ``scope="group"`` and one group for each sequence.

    Args:
        k: experts per token, from 1 to ``top_groups * E / expert_groups``.
        expert_groups: groups of experts; divides E.
        top_groups: groups that a token may use; by default all.
        route_scale: multiplies the weights.
        normalize: whether weights add up to `route_scale`; by default True if k > 1.
        scope: as in `TopK`.

    Raises:
        ValueError: if a value is out of range.

    Example:
        >>> import fmoe
        >>> logit = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).logit()
        >>> bias = torch.tensor([0.0, 0.0, 5.0, 5.0])
        >>> routing = fmoe.functional.gate(fmoe.RouterParams(logit), torch.ones(1, 1), Sigmoid(2), bias=bias)
        >>> routing.experts, routing.weights
        (tensor([[2, 3]]), tensor([[0.6667, 0.3333]]))

    References:
        DeepSeek-V3 (arXiv 2412.19437, section 2.1.2); Wang et al. (arXiv 2408.15664) for the bias.
    """

    k: int
    expert_groups: int = 1
    top_groups: int | None = None
    route_scale: float = 1.0
    normalize: bool | None = None
    scope: Scope = "global"

    takes: ClassVar[tuple[str, ...]] = ("bias",)

    def __post_init__(self) -> None:
        problems = k_problems(self.k) + whole("expert_groups", self.expert_groups)
        if self.top_groups is not None:
            problems += whole("top_groups", self.top_groups)
        if not problems and self.limit > self.expert_groups:
            problems.append(
                f"top_groups={self.top_groups} > expert_groups={self.expert_groups}: choose top_groups from 1 to "
                f"{self.expert_groups}."
            )
        problems += positive("route_scale", self.route_scale) + option("scope", self.scope, Scope)
        if self.normalize not in (True, False, None):
            problems.append(f"normalize={self.normalize!r}: choose True, False or None.")
        refuse(type(self).__name__, problems)

    @property
    def limit(self) -> int:
        """Groups that a token may use."""
        return self.expert_groups if self.top_groups is None else self.top_groups

    def choices(self, num_experts: int) -> int:
        """K."""
        return self.k

    def misfits(self, num_experts: int) -> list[str]:
        """That groups are equal, and those that a token may use have k experts."""
        if num_experts % self.expert_groups:
            return [
                f"expert_groups={self.expert_groups} does not divide num_experts={num_experts}: groups have equally "
                "many experts."
            ]
        allowed = self.limit * (num_experts // self.expert_groups)
        if self.k <= num_experts and self.k > allowed:
            return [
                f"k={self.k}, but top_groups={self.limit} of {num_experts // self.expert_groups} experts allow "
                f"{allowed}: choose a smaller k or more groups."
            ]
        return k_misfits(self.k, num_experts)

    def affinity(self, logits: Tensor) -> Tensor:
        """How well each token and expert fit."""
        return logits.sigmoid()

    def scores(self, params: RouterParams, given: Given) -> Scores:
        """Affinities, with the bias where they are ranked."""
        logits = linear(given.x, params.weight)
        s = self.affinity(logits)
        ranking = s.detach()
        if given.bias is not None:
            ranking = ranking + given.bias.detach().to(s.dtype)
        return Scores(logits, ranking, s, shares(s))

    def select(self, scores: Scores, given: Given) -> Tensor:
        """The best of the best groups."""
        ranking = scores.ranking
        tokens = ranking.shape[0]
        if self.limit < self.expert_groups:
            parts = ranking.unflatten(1, (self.expert_groups, -1))  # [T,G,E/G]
            each = min(max(1, self.k // self.limit), parts.shape[2])
            best = top_k(parts.flatten(0, 1), each)
            totals = parts.flatten(0, 1).gather(1, best).sum(1).view(tokens, self.expert_groups)
            groups = top_k(totals, self.limit)
            allowed = torch.zeros_like(totals).scatter(1, groups, torch.ones_like(totals)) > 0
            ranking = torch.where(allowed.unsqueeze(2), parts, -torch.inf).flatten(1)  # not 0: s + bias may be below
        return top_k(ranking, self.k)

    def weigh(self, scores: Scores, experts: Tensor) -> Tensor:
        """Affinities without the bias."""
        weights = pick(scores.gates, experts)
        return (shares(weights, experts) if adds_up(self.normalize, self.k) else weights) * self.route_scale


@dataclass(frozen=True)
class SqrtSoftplus(Sigmoid):
    """`Sigmoid` with another affinity: ``s = sqrt(softplus(x @ weight))``, which has no upper end.

    Example:
        >>> import fmoe
        >>> params = fmoe.RouterParams(torch.tensor([[4.0, 9.0, -1.0]]))
        >>> fmoe.functional.gate(params, torch.ones(1, 1), SqrtSoftplus(2)).weights
        tensor([[0.5995, 0.4005]])

    References:
        DeepSeek-V4 (the affinity of its report); otherwise as `Sigmoid`.
    """

    def affinity(self, logits: Tensor) -> Tensor:
        """``sqrt(softplus(z))``, which is ``exp(z / 2)`` far below 0."""
        low = logits < -30
        root = torch.nn.functional.softplus(torch.where(low, 0, logits), 1.0, 40.0).sqrt()
        return torch.where(low, (torch.where(low, logits, 0) / 2).exp(), root)


def bias_update(bias: Tensor, counts: Tensor, *, rate: float = 1e-3, center: bool = False) -> Tensor:
    """The selection bias for the next step: up for experts with less than their share, down for more.

        bias_e + rate * sign(mean(counts) - counts_e)

    Call it once per optimizer step, with the counts of all its tokens: added up over micro-batches; over
    ranks they already are in ``routing.aux.counts``.

    Args:
        bias: ``[E]``, fp32 or wider.
        counts: ``[E]`` whole numbers, as in ``aux.counts``.
        rate: the step.
        center: whether to take the mean out of the step.

    Returns:
        The new bias. Nothing is changed in place.

    Raises:
        ValueError: if the bias is narrower than fp32, or counts are not whole numbers of its shape.

    Example:
        >>> bias_update(torch.zeros(4), torch.tensor([4, 4, 0, 0]))
        tensor([-0.0010, -0.0010,  0.0010,  0.0010])

    References:
        Wang et al., "Auxiliary-loss-free load balancing" (arXiv 2408.15664, algorithm 1).
    """
    problems = bias_problems(bias)
    if counts.is_floating_point() or counts.shape != bias.shape:
        problems.append(
            f"counts is {type_text(counts)}, but it must be whole numbers {list(bias.shape)}, as aux.counts."
        )
    refuse("bias_update", problems)
    step = (counts.sum() - counts * counts.shape[0]).sign().to(bias.dtype)
    return bias + rate * (step - step.mean() if center else step)


def bias_problems(bias: Tensor, num_experts: int | None = None) -> list[str]:
    """What is wrong with a selection bias."""
    if bias.dtype in (torch.float32, torch.float64) and bias.dim() == 1 and num_experts in (None, bias.shape[0]):
        return []
    size = "E" if num_experts is None else f"E={num_experts}"
    return [f"bias is {type_text(bias)}, but it must be [{size}] in fp32 or fp64: steps of 1e-3 are lost in less."]

"""Routers whose tokens choose as many experts as they need, up to a static `max_k`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..._errors import refuse
from ...ops.routing import top_k
from ...values import RouterParams
from ..losses import balance_of
from .base import (
    Given,
    Router,
    Scope,
    Scores,
    flag,
    is_number,
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
class TopP(Router):
    """The fewest experts whose probabilities add up to at least p.

    With ``p_e = softmax(x @ weight)_e`` in falling order (ties to the lowest id), expert number j is
    chosen if those before it add up to less than p; the first one always is. Weights are the p_e. At
    most `max_k` are chosen. ``aux.entropy`` is the loss that keeps the number low.

    Args:
        p: above 0, at most 1.
        max_k: the most experts per token, from 1 to E; by default E.
        normalize: whether the weights of a token add up to 1.
        scope: as in `TopK`.

    Raises:
        ValueError: if a value is out of range.

    Example:
        >>> import fmoe
        >>> params = fmoe.RouterParams(torch.tensor([[0.5, 0.3, 0.2]]).log())
        >>> fmoe.functional.gate(params, torch.ones(1, 1), TopP(0.7)).experts
        tensor([[ 0,  1, -1]])

    References:
        Huang et al., "Harder tasks need more experts" (arXiv 2403.07652, section 3.2).
    """

    p: float
    max_k: int | None = None
    normalize: bool = False
    scope: Scope = "global"

    variable: ClassVar[bool] = True
    fills: ClassVar[bool] = False

    def __post_init__(self) -> None:
        problems = [] if self.max_k is None else whole("max_k", self.max_k)
        if not is_number(self.p) or not 0 < self.p <= 1:
            problems.append(f"p={self.p!r}, but it must be above 0 and at most 1.")
        refuse("TopP", problems + flag("normalize", self.normalize) + option("scope", self.scope, Scope))

    def choices(self, num_experts: int) -> int:
        """``max_k``."""
        return num_experts if self.max_k is None else self.max_k

    def misfits(self, num_experts: int) -> list[str]:
        """That there are max_k experts."""
        return k_misfits(self.choices(num_experts), num_experts, "max_k")

    def scores(self, params: RouterParams, given: Given) -> Scores:
        """The logits and their softmax."""
        logits = linear(given.x, params.weight)
        probs = logits.softmax(dim=-1)
        return Scores(logits, logits, probs, probs)

    def select(self, scores: Scores, given: Given) -> Tensor:
        """The smallest prefix that reaches p."""
        experts = top_k(scores.ranking.detach(), self.choices(scores.ranking.shape[1]))
        sums = pick(scores.probs.detach(), experts).cumsum(1)
        rest = torch.where(sums[:, :-1] < self.p, experts[:, 1:], -1)
        return torch.cat([experts[:, :1], rest], dim=1)

    def weigh(self, scores: Scores, experts: Tensor) -> Tensor:
        """The softmax of the chosen."""
        weights = pick(scores.gates, experts)
        return shares(weights, experts) if self.normalize else weights


@dataclass(frozen=True)
class ReLU(Router):
    """Every expert with a logit above 0, weighed by it: fully differentiable, sparse by an L1 loss.

        weight_e = relu(x @ weight)_e         aux.balance = sum_e f_e * mean_t weight[t,e]

    with ``f_e = E * counts_e / (k * T)``: the L1 norm of the weights, weighed by load. Add
    ``coefficient * aux.balance`` to the loss, and let `l1_update` drive the coefficient until k experts
    per token are active on average. ``aux.entropy`` is that of the weights divided by their sum.

    Args:
        k: the number of active experts to aim at.
        max_k: the most experts per token, from k to E, the largest weights first; by default E.
        scope: as in `TopK`.

    Raises:
        ValueError: if a value is out of range.

    Example:
        >>> import fmoe
        >>> params = fmoe.RouterParams(torch.tensor([[-1.0, 0.5, 2.0]]))
        >>> routing = fmoe.functional.gate(params, torch.ones(1, 1), ReLU(1, max_k=2))
        >>> routing.experts, routing.weights
        (tensor([[2, 1]]), tensor([[2.0000, 0.5000]]))

    References:
        ReMoE (arXiv 2412.14711, section 3).
    """

    k: int
    max_k: int | None = None
    scope: Scope = "global"

    variable: ClassVar[bool] = True
    fills: ClassVar[bool] = False

    def __post_init__(self) -> None:
        problems = k_problems(self.k) + ([] if self.max_k is None else whole("max_k", self.max_k))
        if not problems and self.max_k is not None and self.max_k < self.k:
            problems.append(f"max_k={self.max_k} < k={self.k}: choose a max_k of at least k.")
        refuse("ReLU", problems + option("scope", self.scope, Scope))

    def choices(self, num_experts: int) -> int:
        """``max_k``."""
        return num_experts if self.max_k is None else self.max_k

    def misfits(self, num_experts: int) -> list[str]:
        """That there are k and max_k experts."""
        found = k_misfits(self.k, num_experts)
        return found or k_misfits(self.choices(num_experts), num_experts, "max_k")

    def scores(self, params: RouterParams, given: Given) -> Scores:
        """The logits above 0."""
        logits = linear(given.x, params.weight)
        gates = logits.relu()
        return Scores(logits, gates, gates, gates)

    def select(self, scores: Scores, given: Given) -> Tensor:
        """The largest, as far as they are above 0."""
        experts = top_k(scores.ranking.detach(), self.choices(scores.ranking.shape[1]))
        return torch.where(pick(scores.ranking.detach(), experts) <= 0, -1, experts)  # NaN stays

    def balance(self, mean: Tensor, counts: Tensor, tokens: Tensor, *firsts: Tensor) -> Tensor:
        """The L1 norm, weighed by load."""
        return balance_of(mean, counts, total=self.k * tokens)

    def odds(self, mass: Tensor) -> Tensor:
        """Weights divided by their sum."""
        return shares(mass)


def l1_update(coefficient: Tensor, counts: Tensor, *, k: int, tokens: Tensor | int, rate: float = 1.2) -> Tensor:
    """The coefficient of `ReLU`'s loss for the next step: up if more than k experts per token were active.

        coefficient * rate^sign(sum(counts) - k * tokens)

    ReMoE starts from 1e-8.

    Args:
        coefficient: scalar.
        counts: ``[E]`` active experts, as in ``aux.counts``.
        k: the number to aim at.
        tokens: unmasked tokens that the counts are of, on all ranks.
        rate: above 1.

    Returns:
        The new coefficient.

    Raises:
        ValueError: if the rate is not above 1.

    Example:
        >>> l1_update(torch.tensor(1.0), torch.tensor([5, 4]), k=1, tokens=8)
        tensor(1.2000)

    References:
        ReMoE (arXiv 2412.14711, equation 9).
    """
    problems = positive("rate", rate)
    if not problems and rate <= 1:
        problems.append(f"rate={rate!r}, but it must be above 1.")
    refuse("l1_update", problems)
    return coefficient * rate ** (counts.sum() - k * tokens).sign().to(coefficient.dtype)

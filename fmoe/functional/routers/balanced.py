"""Routers that look at a whole group of tokens to share them out; none is causal but by accident.

Under a spec the tokens of each rank are groups of their own, so every rank shares out its own tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from ..._errors import refuse
from ...ops.assign import balanced_assignment
from ...ops.routing import top_k
from ...values import RouterParams
from ..capacity import Capacity
from .base import (
    Given,
    Router,
    Scope,
    Scores,
    flag,
    k_misfits,
    k_problems,
    linear,
    option,
    positive,
    whole,
)  # fmt: skip


@dataclass(frozen=True)
class ExpertChoice(Router):
    """Each expert takes the tokens that want it most: all experts get equally many, some tokens none.

    With ``p = softmax(x @ weight)`` over experts, expert e takes the n tokens with the largest p[:, e]
    of each group (ties to the first), ``n = min(T_g, ceil(factor * T_g / E))`` for T_g unmasked tokens.
    Weights are the p. K is E: column e of the choices is expert e, or -1. There is nothing to drop, so
    `gate` takes no capacity. Not causal: a token's experts depend on the others.

    Args:
        factor: mean number of experts per token.
        scope: as in `TopK`.

    Raises:
        ValueError: if a value is out of range.

    Example:
        >>> import fmoe
        >>> x = torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, 2.0], [0.0, 1.0]])
        >>> fmoe.functional.gate(fmoe.RouterParams(torch.eye(2)), x, ExpertChoice(1.0)).experts
        tensor([[ 0, -1],
                [ 0, -1],
                [-1,  1],
                [-1,  1]])

    References:
        Zhou et al., "Mixture-of-experts with expert choice routing" (arXiv 2202.09368, section 3.2).
    """

    factor: float = 2.0
    scope: Scope = "global"
    rule: Capacity = field(init=False, repr=False, compare=False)

    whole_batch: ClassVar[bool] = True
    causal: ClassVar[bool] = False
    fills: ClassVar[bool] = False
    takes_capacity: ClassVar[bool] = False

    def __post_init__(self) -> None:
        refuse("ExpertChoice", positive("factor", self.factor) + option("scope", self.scope, Scope))
        object.__setattr__(self, "rule", Capacity(self.factor))

    def choices(self, num_experts: int) -> int:
        """E: a token may be taken by all experts."""
        return num_experts

    def slots(self, sizes: list[int], num_experts: int) -> int:
        """What each expert takes."""
        return sum(self.rule.of(tokens=size, k=1, num_experts=num_experts) for size in sizes)

    def scores(self, params: RouterParams, given: Given) -> Scores:
        """The logits and their softmax."""
        logits = linear(given.x, params.weight)
        probs = logits.softmax(dim=-1)
        return Scores(logits, probs, probs, probs)

    def select(self, scores: Scores, given: Given) -> Tensor:
        """The best tokens of each expert, group by group."""
        rule, num_experts = self.rule, scores.ranking.shape[1]
        ranking = scores.ranking.detach()
        if given.keep is not None:
            ranking = torch.where(given.keep[:, None], ranking, -torch.inf)
        keeps = [None] * len(given.sizes) if given.keep is None else given.keep.split(given.sizes)
        taken = []
        for part, keep in zip(ranking.split(given.sizes), keeps, strict=True):
            most = rule.of(tokens=part.shape[0], k=1, num_experts=num_experts)
            best = top_k(part.t().contiguous(), most)  # [E,n]
            ones = torch.ones_like(best)
            if keep is not None:
                limit = rule.of_counts(keep.sum(), k=1, num_experts=num_experts)
                ones = torch.where(torch.arange(most, device=best.device) < limit, ones, 0)
            taken.append(torch.zeros_like(part.t(), dtype=torch.int64).scatter(1, best, ones).t())
        ids = torch.arange(num_experts, device=ranking.device)
        return torch.where(torch.cat(taken) > 0, ids, -1)


@dataclass(frozen=True)
class Base(Router):
    """A balanced assignment: one expert per token, equally many tokens per expert, the best total score.

    Of all ways to give each token of a group one expert, and each expert floor(T_g/E) or ceil(T_g/E)
    tokens, takes one with the largest sum of ``z[t, e(t)]``, ``z = x @ weight``, exactly. The weight is
    ``alpha = sigmoid(z)``. The layer of the paper is ``alpha * expert(x) + (1 - alpha) * x``: add
    ``(1 - routing.weights) * x`` yourself. Not causal: use ``balanced=False``, the best expert of each
    token by itself, to generate text.

    A score that is NaN or infinite counts as the smallest or largest of the group.

    Args:
        balanced: whether tokens are shared out, or each goes to its best expert.
        scope: as in `TopK`.

    Raises:
        ValueError: if a value is out of range.

    Example:
        >>> import fmoe
        >>> x = torch.tensor([[3.0, 2.0], [3.0, 0.0]])
        >>> fmoe.functional.gate(fmoe.RouterParams(torch.eye(2)), x, Base()).experts.flatten()
        tensor([1, 0])

    References:
        Lewis et al., "BASE layers" (arXiv 2103.16716, section 3).
    """

    balanced: bool = True
    scope: Scope = "global"

    def __post_init__(self) -> None:
        refuse("Base", flag("balanced", self.balanced) + option("scope", self.scope, Scope))

    @property
    def whole_batch(self) -> bool:  # type: ignore[override]
        """Whether tokens are shared out."""
        return self.balanced

    @property
    def causal(self) -> bool:  # type: ignore[override]
        """Whether each token goes its own way."""
        return not self.balanced

    def choices(self, num_experts: int) -> int:
        """One."""
        return 1

    def scores(self, params: RouterParams, given: Given) -> Scores:
        """The logits; weights by a sigmoid, losses by a softmax."""
        logits = linear(given.x, params.weight)
        return Scores(logits, logits, logits.sigmoid(), logits.softmax(dim=-1))

    def select(self, scores: Scores, given: Given) -> Tensor:
        """The best balanced assignment of each group."""
        ranking = scores.ranking.detach()
        if not self.balanced:
            return top_k(ranking, 1)
        keep = torch.ones_like(ranking[:, 0], dtype=torch.bool) if given.keep is None else given.keep
        return balanced_assignment(ranking.unsqueeze(0), keep.unsqueeze(0), given.sizes).squeeze(0).unsqueeze(1)


@dataclass(frozen=True)
class Sinkhorn(Router):
    """Top-k of logits after Sinkhorn's scaling, which evens out what experts get.

    In each group, ``iterations`` times: rows of ``exp(z + u_t + v_e)`` are scaled to sum to 1, then columns
    to sum to T_g/E. The K largest ``z + v`` of each token are chosen; the scaling has no gradient. Weights
    are plain: ``sigmoid(z)`` for k = 1, ``softmax(z)`` for more. Not causal.

    Args:
        k: experts per token, from 1 to E.
        iterations: at least 1.
        scope: as in `TopK`.

    Raises:
        ValueError: if a value is out of range.

    Example:
        >>> import fmoe
        >>> x = torch.tensor([[3.0, 2.5], [3.0, 0.0]])
        >>> fmoe.functional.gate(fmoe.RouterParams(torch.eye(2)), x, Sinkhorn()).experts.flatten()
        tensor([1, 0])

    References:
        Clark et al., "Unified scaling laws for routed language models" (arXiv 2202.01169, appendix B).
    """

    k: int = 1
    iterations: int = 16
    scope: Scope = "global"

    whole_batch: ClassVar[bool] = True
    causal: ClassVar[bool] = False

    def __post_init__(self) -> None:
        refuse(
            "Sinkhorn", k_problems(self.k) + whole("iterations", self.iterations) + option("scope", self.scope, Scope)
        )

    def choices(self, num_experts: int) -> int:
        """K."""
        return self.k

    def misfits(self, num_experts: int) -> list[str]:
        """That there are k experts."""
        return k_misfits(self.k, num_experts)

    def scores(self, params: RouterParams, given: Given) -> Scores:
        """The logits, and the same evened out for the ranking."""
        logits = linear(given.x, params.weight)
        keeps = [None] * len(given.sizes) if given.keep is None else given.keep.split(given.sizes)
        parts = zip(logits.detach().split(given.sizes), keeps, strict=True)
        ranking = torch.cat([z + self._prices(z, keep) for z, keep in parts])
        probs = logits.softmax(dim=-1)
        return Scores(logits, ranking, logits.sigmoid() if self.k == 1 else probs, probs)

    def _prices(self, z: Tensor, keep: Tensor | None) -> Tensor:
        """``[E]``: v, in logarithms, so that logits may be of any size."""
        if not z.shape[0]:
            return z.new_zeros(z.shape[1])
        z = z.nan_to_num()
        each = torch.ones_like(z[:, 0]) if keep is None else keep.to(z.dtype)
        share = (each.sum() / z.shape[1]).log()
        prices = torch.zeros_like(z[0])
        for _ in range(self.iterations):
            rows = (z + prices).logsumexp(1, keepdim=True)
            scaled = z - rows if keep is None else torch.where(keep[:, None], z - rows, -torch.inf)
            prices = (share - scaled.logsumexp(0)).nan_to_num()
        return prices

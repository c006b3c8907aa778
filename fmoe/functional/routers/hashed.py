"""Experts by token id."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..._errors import refuse
from ...values import RouterParams
from .base import Given, Router, Scope, Scores, chosen, k_misfits, k_problems, linear, option, whole

_MASK = 2**31 - 1


@dataclass(frozen=True)
class Hash(Router):
    """A token's experts are a fixed function of its id: ``(hash(id, seed) + j) mod E`` for j < k.

    All weights are 1/k, and nothing is learned. ``aux.balance`` is ``E * sum_e f_e^2`` with f the share
    of choices, without gradient. With ``h = (id + seed * 40503) mod 2^31``, the hash is two rounds of
    ``h = (h xor h // 2^16) * 73244475 mod 2^31`` and a last ``h xor h // 2^16``.

    Args:
        k: experts per token, from 1 to E.
        seed: of the hash, a whole number of at least 0; give each layer its own.
        scope: as in `TopK`.

    Raises:
        ValueError: if a value is out of range.

    Example:
        >>> import fmoe
        >>> params, ids = fmoe.RouterParams(torch.zeros(3, 4)), torch.tensor([5, 7, 5])
        >>> fmoe.functional.gate(params, torch.ones(3, 3), Hash(1), token_ids=ids).experts.flatten()
        tensor([2, 3, 2])

    References:
        Roller et al., "Hash layers for large sparse models" (arXiv 2106.04426, section 3).
    """

    k: int = 1
    seed: int = 0
    scope: Scope = "global"

    takes: ClassVar[tuple[str, ...]] = ("token_ids",)
    needs: ClassVar[tuple[str, ...]] = ("token_ids",)

    def __post_init__(self) -> None:
        refuse("Hash", k_problems(self.k) + whole("seed", self.seed, 0) + option("scope", self.scope, Scope))

    def choices(self, num_experts: int) -> int:
        """K."""
        return self.k

    def misfits(self, num_experts: int) -> list[str]:
        """That there are k experts."""
        return k_misfits(self.k, num_experts)

    def scores(self, params: RouterParams, given: Given) -> Scores:
        """The same for all experts; the parameters are in its graph, with a gradient of 0."""
        logits = linear(given.x, params.weight)
        flat = torch.where(torch.ones((), dtype=torch.bool, device=logits.device), 0, logits)
        return Scores(flat, flat, flat + 1 / self.k, flat)

    def select(self, scores: Scores, given: Given) -> Tensor:
        """By hash."""
        assert given.token_ids is not None
        h = (given.token_ids.to(torch.int64) + self.seed % _MASK * 40503) & _MASK
        for _ in range(2):
            h = ((h ^ (h >> 16)) * 73244475) & _MASK
        h = h ^ (h >> 16)
        return (h.unsqueeze(1) + torch.arange(self.k, device=h.device)) % scores.ranking.shape[1]

    def mass(self, scores: Scores, experts: Tensor) -> Tensor:
        """The choices themselves."""
        return chosen(experts, scores.logits.shape[1]).to(scores.probs.dtype) / self.k

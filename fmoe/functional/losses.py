"""Auxiliary losses of a router, as pure functions of its logits, probabilities and counts.

Every function takes the softmax (`probs`) or the `logits` by name, never either. `mask` leaves tokens
out; over no tokens a loss is 0. All are scalars in the dtype of their input.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..values import Aux


class Sums(NamedTuple):
    """What the losses of a gate are made of: sums over tokens, which ranks can add up.

    Attributes:
        parts: with ``scope="global"`` some of ``[E]``: the router's mass (softmax, as a rule), chance to be
            chosen, and what else its balance loss is made of; otherwise one of ``[3]``, the losses of
            each group times its tokens.
        z: scalar, squared logsumexp.
        entropy: scalar.
        tokens: scalar, how many.
        counts: ``[E]`` int64.
        dropped: scalar int64.
    """

    parts: tuple[Tensor, ...]
    z: Tensor
    entropy: Tensor
    tokens: Tensor
    counts: Tensor
    dropped: Tensor

    def packed(self) -> Tensor:
        """All in one float64 tensor, in which whole numbers are exact up to 2^53."""
        scalars = torch.stack([self.z, self.entropy, self.tokens])
        parts = [*self.parts, scalars, self.counts, self.dropped.unsqueeze(0)]
        return torch.cat([part.to(torch.float64) for part in parts])

    @classmethod
    def unpacked(cls, packed: Tensor, num_experts: int, dtype: torch.dtype, scope: str) -> Sums:
        """The sums that were `packed`."""
        first, scalars, counts, dropped = packed.split([packed.shape[0] - num_experts - 4, 3, num_experts, 1])
        z, entropy, tokens = scalars.to(dtype).unbind(0)
        whole = [part.round().to(torch.int64) for part in (counts, dropped)]
        parts = first.to(dtype).split(num_experts if scope == "global" else 3)
        return cls(tuple(parts), z, entropy, tokens, whole[0], whole[1].squeeze(0))


def finish(sums: Sums, router: Any) -> Aux:
    """The losses and statistics that a gate returns."""
    n = sums.tokens.clamp(min=1)
    if router.scope == "global":
        mass, chance, *firsts = sums.parts
        balance = router.balance(mass / n, sums.counts, sums.tokens, *firsts)
        losses = [balance, squared_variation(mass), squared_variation(chance)]
    else:
        losses = list((sums.parts[0] / n).unbind(0))
    z, entropy = (torch.stack([sums.z, sums.entropy]) / n).unbind(0)
    return Aux(losses[0], z, losses[1], losses[2], entropy, sums.counts, sums.dropped)


def sum_over_tokens(rows: Tensor, mask: Tensor | None) -> Tensor:
    """Sum over dim 0 of the unmasked rows."""
    if mask is None:
        return rows.sum(0)
    return torch.where(mask.view(-1, *[1] * (rows.dim() - 1)), rows, 0).sum(0)


def mean_over_tokens(rows: Tensor, mask: Tensor | None) -> Tensor:
    """Mean over dim 0 of the unmasked rows; 0 if there are none."""
    count = max(rows.shape[0], 1) if mask is None else mask.sum(0).clamp(min=1)
    return sum_over_tokens(rows, mask) / count


def squared_variation(mass: Tensor) -> Tensor:
    """Squared coefficient of variation over experts, ``var(mass) / mean(mass)^2``; 0 for no mass.

    Example:
        >>> squared_variation(torch.tensor([3.0, 1.0]))
        tensor(0.2500)
    """
    mean = mass.mean(0, keepdim=True)
    return ((mass - mean) / torch.where(mean > 0, mean, 1)).square().mean(0)


def balance_loss(probs: Tensor, counts: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """``E * sum_e f_e * P_e``: 1 at perfect balance, E when one expert gets everything, for any K.

    f is the share of choices (all K of them, before drops) that went to e and has no gradient; P is
    the mean over tokens of the full softmax.

    Args:
        probs: ``[T,E]`` softmax of the logits.
        counts: ``[E]`` choices per expert.
        mask: ``[T]`` bool, True for tokens that count.

    Example:
        >>> balance_loss(torch.full((8, 4), 0.25), torch.tensor([4, 4, 4, 4]))
        tensor(1.)

    References:
        Switch Transformer (arXiv 2101.03961, equations 4 to 6, without alpha).
    """
    return balance_of(mean_over_tokens(probs, mask), counts)


def balance_of(mean: Tensor, counts: Tensor, *, total: Tensor | None = None) -> Tensor:
    """`balance_loss` from the mean softmax ``[E]``; `total` is what counts are shares of, if not their sum."""
    total = counts.sum(0) if total is None else total
    return (counts * (mean * mean.shape[0])).sum(0) / total.clamp(min=1)


def z_loss(logits: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """``mean_t logsumexp(logits[t])^2``; keeps logits small.

    Args:
        logits: ``[T,E]``.
        mask: ``[T]`` bool.

    Example:
        >>> z_loss(torch.zeros(3, 1))
        tensor(0.)

    References:
        ST-MoE (arXiv 2202.08906, equation 5, without its coefficient of 1e-3).
    """
    return mean_over_tokens(torch.logsumexp(logits, dim=-1).square(), mask)


def importance_loss(probs: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Squared coefficient of variation of ``sum_t probs[t,e]``.

    Args:
        probs: ``[T,E]`` softmax of the logits.
        mask: ``[T]`` bool.

    Example:
        >>> importance_loss(torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
        tensor(1.)

    References:
        V-MoE (arXiv 2106.05974, appendix A.2).
    """
    return squared_variation(mean_over_tokens(probs, mask))


def load_loss(logits: Tensor, threshold: Tensor, *, noise_std: float = 1.0, mask: Tensor | None = None) -> Tensor:
    """Squared coefficient of variation of each expert's chance to be chosen under fresh noise.

    With ``s = noise_std / E``,  ``load_e = mean_t Phi((logits[t,e] - threshold[t]) / s)``.

    Args:
        logits: ``[T,E]`` without noise.
        threshold: ``[T,1]``, the K-th largest noisy logit of each token.
        noise_std: as in `TopK`.
        mask: ``[T]`` bool.

    Example:
        >>> load_loss(torch.zeros(4, 2), torch.zeros(4, 1))
        tensor(0.)

    References:
        V-MoE (arXiv 2106.05974, appendix A.2).
    """
    return squared_variation(mean_over_tokens(load_chance(logits, threshold, noise_std=noise_std), mask))


def load_chance(logits: Tensor, threshold: Tensor, *, noise_std: float) -> Tensor:
    """``[T,E]``: each expert's chance to be chosen by each token under fresh noise."""
    return torch.special.ndtr((logits - threshold) / (noise_std / logits.shape[1]))


def router_entropy(probs: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Mean entropy of the router's softmax, in nats.

    Args:
        probs: ``[T,E]`` softmax of the logits.
        mask: ``[T]`` bool.

    Example:
        >>> router_entropy(torch.full((3, 4), 0.25))
        tensor(1.3863)
    """
    return mean_over_tokens(entropy_of(probs), mask)


def entropy_of(probs: Tensor) -> Tensor:
    """``[T]``: entropy of each token's softmax."""
    tiny = torch.finfo(probs.dtype).tiny  # log(0) has no gradient
    return -(probs * probs.clamp(min=tiny).log()).sum(-1)


def gshard_loss(probs: Tensor, experts: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """``E * sum_e c_e * m_e``: `balance_loss` with the share c of first choices alone.

    Args:
        probs: ``[T,E]`` softmax of the logits.
        experts: ``[T,K]`` choices, the first one in column 0.
        mask: ``[T]`` bool.

    Example:
        >>> gshard_loss(torch.full((2, 4), 0.25), torch.tensor([[0, 1], [0, 2]]))
        tensor(1.)

    References:
        GShard (arXiv 2006.16668, section 2.2), which divides by E where this multiplies.
    """
    return balance_loss(probs, choice_counts(experts[:, :1], probs.shape[1], mask=mask), mask=mask)


def sequence_loss(probs: Tensor, experts: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """`balance_loss` of each sequence by itself, then the mean over sequences weighted by their tokens.

    The same as ``aux.balance`` of a router with ``scope="group"`` and one group for each sequence.

    Args:
        probs: ``[B,L,E]``, rows that add up to 1 (of `Sigmoid`: affinities divided by their sum).
        experts: ``[B,L,K]`` choices.
        mask: ``[B,L]`` bool.

    Example:
        >>> ids = torch.tensor([[[0], [0]], [[1], [1]]])
        >>> sequence_loss(torch.nn.functional.one_hot(ids[..., 0], 2).double(), ids)
        tensor(2., dtype=torch.float64)

    References:
        DeepSeek-V3 (arXiv 2412.19437, equations 17 to 20, without alpha).
    """
    keep = torch.ones_like(experts[..., 0], dtype=torch.bool) if mask is None else mask
    losses = [
        balance_loss(p, choice_counts(ids, p.shape[1], mask=m), mask=m) * m.sum()
        for p, ids, m in zip(probs.unbind(0), experts.unbind(0), keep.unbind(0), strict=True)
    ]
    total: Tensor = sum(losses, probs.new_zeros(()))
    return total / keep.sum().clamp(min=1)


# --- statistics ----------------------------------------------------------------------------------------------


def choice_counts(experts: Tensor, num_experts: int, *, mask: Tensor | None = None) -> Tensor:
    """``[E]`` int64: how many choices each expert has.

    Args:
        experts: ``[T,K]``; -1 for no expert.
        num_experts: E.
        mask: ``[T]`` bool.

    Example:
        >>> choice_counts(torch.tensor([[0, 2], [2, -1]]), 4)
        tensor([1, 0, 2, 0])
    """
    if mask is not None:
        experts = torch.where(mask[:, None], experts, -1)
    ids = torch.where(experts >= 0, experts, num_experts).flatten()
    return ids.new_zeros(num_experts + 1).scatter_add(0, ids, torch.ones_like(ids))[:num_experts]


def max_violation(counts: Tensor) -> Tensor:
    """How far the fullest expert is above the mean, as a share of it: 0 at perfect balance, E - 1 at collapse.

    Args:
        counts: ``[E]`` choices per expert, as in ``aux.counts``.

    Example:
        >>> max_violation(torch.tensor([4, 2, 2, 0]))
        tensor(1.)

    References:
        Wang et al. (arXiv 2408.15664, section 4.1), as MaxVio.
    """
    mean = counts.sum(-1).clamp(min=1) / counts.shape[-1]
    return torch.where(counts.sum(-1) > 0, counts.amax(-1) / mean - 1, 0)


def dead_experts(counts: Tensor) -> Tensor:
    """How many experts nobody chose.

    Args:
        counts: ``[E]`` choices per expert, as in ``aux.counts``.

    Example:
        >>> dead_experts(torch.tensor([4, 0, 2, 0]))
        tensor(2)
    """
    return (counts == 0).sum(-1)

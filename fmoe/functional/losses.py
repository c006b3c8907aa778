"""Auxiliary losses of a router, as pure functions of its logits, probabilities and counts.

Every function takes the softmax (`probs`) or the `logits` by name, never either. `mask` leaves tokens
out; over no tokens a loss is 0. All are scalars in the dtype of their input.
"""

from __future__ import annotations

import torch
from torch import Tensor


def mean_over_tokens(rows: Tensor, mask: Tensor | None) -> Tensor:
    """Mean over dim 0 of the unmasked rows; 0 if there are none."""
    if mask is None:
        return rows.mean(0) if rows.shape[0] else rows.sum(0)
    keep = mask.view(-1, *[1] * (rows.dim() - 1))
    return torch.where(keep, rows, 0).sum(0) / mask.sum(0).clamp(min=1)


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


def balance_of(mean: Tensor, counts: Tensor) -> Tensor:
    """`balance_loss` from the mean softmax ``[E]``."""
    return (counts * (mean * mean.shape[0])).sum(0) / counts.sum(0).clamp(min=1)


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
    width = noise_std / logits.shape[1]
    return squared_variation(mean_over_tokens(torch.special.ndtr((logits - threshold) / width), mask))


def router_entropy(probs: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Mean entropy of the router's softmax, in nats.

    Args:
        probs: ``[T,E]`` softmax of the logits.
        mask: ``[T]`` bool.

    Example:
        >>> router_entropy(torch.full((3, 4), 0.25))
        tensor(1.3863)
    """
    tiny = torch.finfo(probs.dtype).tiny  # log(0) has no gradient
    return mean_over_tokens(-(probs * probs.clamp(min=tiny).log()).sum(-1), mask)

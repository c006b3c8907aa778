"""Routers as frozen data: what a gate selects by, and how it weighs the selected experts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from .._errors import is_whole, refuse

Order = Literal["softmax_topk", "topk_softmax"]
Scope = Literal["global", "group"]


@dataclass(frozen=True)
class TopK:
    """Softmax top-k routing.

    With logits ``z = x @ weight`` and S the K largest of them (ties to the lowest expert id), the
    weight of expert e in S is

        softmax_topk, normalize=False    softmax(z)_e                          Switch, GShard
        softmax_topk, normalize=True     softmax(z)_e / sum_{j in S} softmax(z)_j
        topk_softmax                     softmax over S of z                   Mixtral

    The last two are the same function. A single normalized expert always has weight 1, so its router
    would get no gradient from the output: with ``k=1``, `normalize` is False unless you say otherwise.

    Args:
        k: experts per token, from 1 to E. A router is an argument of every call, so k may change
            from call to call.
        order: ``"softmax_topk"`` or ``"topk_softmax"``.
        normalize: whether the weights of a token add up to 1; by default True if k > 1.
        noise_std: scale of the noise given to `gate`, over E; also the width of `load_loss`. With
            noise drawn from N(0, 1) and ``noise_std=1`` this is V-MoE's noise of 1/E.
        scope: tokens over which the balance, importance and load losses are taken: ``"global"``, all
            tokens of the call, or ``"group"``, each group by itself, then the mean over groups
            weighted by their tokens.

    Raises:
        ValueError: if a value is out of range.

    Example:
        >>> TopK(2)
        TopK(k=2, order='softmax_topk', normalize=None, noise_std=1.0, scope='global')

    References:
        Switch Transformer (arXiv 2101.03961, section 2.1); GShard (arXiv 2006.16668, section 2.2);
        Mixtral (arXiv 2401.04088, section 2.1); V-MoE (arXiv 2106.05974, section 2).
    """

    k: int
    order: Order = "softmax_topk"
    normalize: bool | None = None
    noise_std: float = 1.0
    scope: Scope = "global"

    def __post_init__(self) -> None:
        problems = []
        if not is_whole(self.k, 1):
            problems.append(f"k={self.k!r}, but k must be a whole number of at least 1.")
        if self.order not in get_args(Order):
            problems.append(f"order={self.order!r}: choose one of {', '.join(map(repr, get_args(Order)))}.")
        if self.order == "topk_softmax" and self.normalize is False:
            problems.append('normalize=False, but order="topk_softmax" adds up to 1: choose order="softmax_topk".')
        if self.normalize not in (True, False, None):
            problems.append(f"normalize={self.normalize!r}: choose True, False or None.")
        if not (isinstance(self.noise_std, (int, float)) and math.isfinite(self.noise_std) and self.noise_std > 0):
            problems.append(f"noise_std={self.noise_std!r}, but it must be a finite number above 0.")
        if self.scope not in get_args(Scope):
            problems.append(f"scope={self.scope!r}: choose one of {', '.join(map(repr, get_args(Scope)))}.")
        refuse("TopK", problems)
        object.__setattr__(self, "k", int(self.k))

    @property
    def normalized(self) -> bool:
        """Whether the weights of a token add up to 1."""
        if self.normalize is None:
            return self.order == "topk_softmax" or self.k > 1
        return self.normalize

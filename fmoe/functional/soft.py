"""The layer without choices: slots that are mixtures of tokens, and tokens that are mixtures of slots."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .._errors import refuse
from .._typing import ExpertFn, accumulation_dtype, type_text
from ..values import Aux, MoEParams, Routing, cast_leaves
from .combine import combine
from .dispatch import dispatch
from .experts import expert_apply
from .losses import entropy_of, mean_over_tokens, squared_variation, sum_over_tokens
from .routers.base import linear, unit
from .routers.soft import SoftMoE


def soft_moe(
    params: MoEParams,
    x: Tensor,
    router: SoftMoE,
    *,
    activation: str = "swiglu",
    fn: ExpertFn | None = None,
    mask: Tensor | None = None,
    layout: str | None = None,
    dtype: torch.dtype | None = None,
    spec: Any = None,
) -> tuple[Tensor, Aux]:
    """A layer of soft slots (`SoftMoE` has the equation).

    The slots go through `dispatch`, `expert_apply` and `combine` as tokens with one fixed expert each, so
    every plan runs them; a rank's tokens are mixed on that rank. Mixtures are taken in fp32 or wider.

    Args:
        params: ``router.weight [M,E,p]``, ``router.scale``, and the experts.
        x: ``[..., L, M]`` sequences of L tokens, each mixed by itself.
        router: its slots.
        activation: of the built-in experts.
        fn: your own expert function, as in `expert_apply`.
        mask: ``[..., L]`` bool; False for tokens that go nowhere.
        layout: as in `dispatch`.
        dtype: dtype the experts compute in; by default that of x.
        spec: a sharding spec; None for one device.

    Returns:
        y, of x's shape and dtype, and statistics of this rank's tokens: counts (slots per expert),
        z, entropy (of a token's mixture) and importance (of what tokens take from each expert); balance is 1.

    Raises:
        ValueError: if shapes do not fit.

    Example:
        >>> import fmoe
        >>> config = fmoe.MoEConfig(num_experts=2, model_dim=3, hidden_dim=4, router=fmoe.SoftMoE(1))
        >>> y, _ = soft_moe(fmoe.init(config, seed=0), torch.ones(5, 3), config.router)
        >>> y.shape
        torch.Size([5, 3])

    References:
        Puigcerver et al. (arXiv 2308.00951, section 2.1).
    """
    _check(params, x, router, mask)
    weight, scale = params.router.weight, params.router.scale
    assert scale is not None
    lead, length, dim = x.shape[:-2], x.shape[-2], x.shape[-1]
    sequences, experts, slots = math.prod(lead), weight.shape[1], weight.shape[2]
    wide = accumulation_dtype(x.dtype, weight.dtype)
    keep = None if mask is None else mask.reshape(sequences, length, 1)
    rows = x.reshape(sequences, length, dim).to(wide)
    if keep is not None:
        rows = torch.where(keep, rows, 0)
    logits = linear(unit(rows, -1), unit(weight.to(wide), 0).flatten(1)) * scale.to(wide)  # [B,L,E*p]
    over_tokens = logits if keep is None else torch.where(keep, logits, torch.finfo(wide).min)
    mixed = linear(over_tokens.softmax(dim=1).mT, rows)  # [B,E*p,M]
    routing = _fixed(sequences, experts, slots, mixed)
    leaves, held = params.experts, mixed.flatten(0, 1).to(x.dtype if dtype is None else dtype)
    if dtype is not None:
        leaves = cast_leaves(leaves, dtype)
    tokens = dispatch(held, routing, layout=layout, spec=spec)
    tokens = expert_apply(leaves, tokens, activation=activation, fn=fn, spec=spec)
    made = combine(tokens, routing, spec=spec).unflatten(0, (sequences, experts * slots))
    shares = logits.softmax(dim=2)
    y = linear(shares, made.to(wide))
    if keep is not None:
        y = torch.where(keep, y, 0)
    aux = _statistics(logits.flatten(0, 1), shares.flatten(0, 1), routing.counts, mask)
    return y.to(x.dtype).reshape(*lead, length, y.shape[-1]), aux


def _fixed(sequences: int, experts: int, slots: int, like: Tensor) -> Routing:
    """Slot i of expert e in sequence b is row ``b*p + i`` of its expert, with weight 1."""
    device = like.device
    ids = torch.arange(experts, device=device).view(1, experts, 1).expand(sequences, experts, slots).reshape(-1, 1)
    place = torch.arange(sequences * slots, device=device).view(sequences, 1, slots)
    place = place.expand(sequences, experts, slots).reshape(-1, 1)
    counts = torch.full((experts,), sequences * slots, dtype=torch.int64, device=device)
    ones = torch.ones(ids.shape, dtype=accumulation_dtype(like.dtype), device=device)
    total = sequences * experts * slots
    return Routing(ids, ones, place, counts, num_experts=experts, shape=(total,), capacity=sequences * slots)


def _statistics(logits: Tensor, shares: Tensor, counts: Tensor, mask: Tensor | None) -> Aux:
    keep = None if mask is None else mask.flatten()
    mass = sum_over_tokens(shares, keep).unflatten(0, (counts.shape[0], -1)).sum(1)
    one = torch.ones_like(mass.sum())
    return Aux(
        balance=one,
        z=mean_over_tokens(torch.logsumexp(logits, dim=-1).square(), keep),
        importance=squared_variation(mass),
        load=torch.zeros_like(one),
        entropy=mean_over_tokens(entropy_of(shares), keep),
        counts=counts,
        dropped=torch.zeros_like(counts.sum()),
    )


def _check(params: MoEParams, x: Tensor, router: SoftMoE, mask: Tensor | None) -> None:
    if not isinstance(router, SoftMoE):
        refuse("soft_moe", [f"router={router!r}, but it must be an fmoe.SoftMoE."])
    weight, scale = params.router.weight, params.router.scale
    problems = []
    if x.dim() < 2 or not x.is_floating_point():
        problems.append(f"x is {type_text(x)}, but it must be floating sequences [..., L, M].")
    elif weight.dim() != 3 or weight.shape[0] != x.shape[-1] or weight.shape[2] != router.slots_per_expert:
        problems.append(
            f"params.router.weight is {type_text(weight)}, but M={x.shape[-1]} and "
            f"slots_per_expert={router.slots_per_expert} make it [M,E,p]."
        )
    if scale is None or scale.dim():
        found = "None" if scale is None else type_text(scale)
        problems.append(f"params.router.scale is {found}, but SoftMoE needs a scalar.")
    if mask is not None and not (mask.dtype == torch.bool and mask.shape == x.shape[:-1]):
        problems.append(
            f"mask is {type_text(mask)}, but it must be bool of x's leading shape {list(x.shape[:-1])}, True to keep."
        )
    refuse("soft_moe", problems)

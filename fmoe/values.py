"""What the functions of fmoe take and return: parameters, routings and auxiliary values.

All are frozen and are pytrees of tensors, so `torch.func`, `torch.utils._pytree` and optree go
through them. Shapes use the letters of `fmoe._typing`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ._value import static, value


def cast_leaves(tree: Any, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Any:
    """The same tree on `device`, with its floating leaves in `dtype`."""

    def cast(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf  # None in a user's tree
        return leaf.to(device=device, dtype=dtype if leaf.is_floating_point() else None)

    return pytree.tree_map(cast, tree)


@value
class RouterParams:
    """Parameters of a router.

    Attributes:
        weight: ``[M,E]``, so that ``logits = x @ weight``; ``[P,E]`` behind a projection.
        noise_weight: ``[M,E]``, of `NoisyTopK`.
        projection: ``[M,P]``, of `Cosine`.
        log_scale: scalar, of `Cosine`.
        scale: scalar, of `SoftMoE`, whose weight is ``[M,E,p]``.
        logit_bias: ``[E]``, added to the logits, of ``TopK(logit_bias=True)``.
    """

    weight: Tensor
    noise_weight: Tensor | None = None
    projection: Tensor | None = None
    log_scale: Tensor | None = None
    scale: Tensor | None = None
    logit_bias: Tensor | None = None


@value
class ExpertParams:
    """Parameters of E stacked feed-forward experts.

    ======== =================== ========================== ====================================
    leaf     plain activation    gated activation           meaning
    ======== =================== ========================== ====================================
    w_in     ``[E,M,H]``         ``[E,M,2,H]``, gate first  up projection
    w_out    ``[E,H,M]``         ``[E,H,M]``                down projection
    b_in     ``[E,H]`` or None   ``[E,2,H]`` or None        added after ``w_in``
    b_out    ``[E,M]`` or None   ``[E,M]`` or None          added once after ``w_out``
    ======== =================== ========================== ====================================

    The hidden dim is the last one of ``w_in``: a slice of a gated expert along it has both halves.
    `sharded` is None for whole experts, or (E, H) where the leaves are one rank's part of them, as
    `fmoe.local` makes.
    """

    w_in: Tensor
    w_out: Tensor
    b_in: Tensor | None = None
    b_out: Tensor | None = None
    sharded: tuple[int, int] | None = static(default=None)


@value
class MoEParams:
    """All parameters of one MoE layer.

    `experts` is an `ExpertParams`, or any pytree of stacked leaves ``[E,...]`` for a user's own
    expert function; then `sharded` is E where its leaves are one rank's part, as `fmoe.local` makes.

    Example:
        >>> import fmoe
        >>> config = fmoe.MoEConfig(num_experts=4, model_dim=8, hidden_dim=16)
        >>> fmoe.init(config, seed=0)
        MoEParams(router=RouterParams(weight=f32[8,4]), experts=ExpertParams(w_in=f32[4,8,2,16], w_out=f32[4,16,8]))
    """

    router: RouterParams
    experts: Any
    sharded: int | None = static(default=None)

    def to(self, dtype: torch.dtype | None = None, *, device: torch.device | str | None = None) -> MoEParams:
        """The same parameters on `device`, with floating leaves in `dtype`."""
        return cast_leaves(self, dtype, device)


@value
class Aux:
    """Auxiliary losses and statistics of one gate call. All are values; nothing is stored anywhere.

    Attributes:
        balance: scalar; 1 at perfect balance, E at collapse, whatever K is (`balance_loss`).
        z: scalar; mean squared logsumexp of the logits (`z_loss`).
        importance: scalar; squared coefficient of variation of the experts' probability mass.
        load: scalar; the same of the experts' smooth load (`load_loss`).
        entropy: scalar, nats; mean entropy of the router's softmax.
        counts: ``[E]`` int64, choices per expert, before any is dropped.
        dropped: scalar int64, choices that found no slot.
    """

    balance: Tensor
    z: Tensor
    importance: Tensor
    load: Tensor
    entropy: Tensor
    counts: Tensor
    dropped: Tensor


@value
class Routing:
    """Which experts each token goes to, with which weights, and where it stands in their queues.

    Attributes:
        experts: ``[T,K]`` int64; -1 for no expert (a masked token).
        weights: ``[T,K]`` fp32 or wider.
        slots: ``[T,K]`` int64; place among the rows its expert keeps, 0 first; -1 if dropped.
        counts: ``[E]`` int64; choices per expert before any is dropped.
        aux: losses and statistics, or None for a routing made by hand.
        num_experts: E.
        shape: the leading shape of the tokens, whose product is T.
        capacity: slots per expert that always suffice, or None when that depends on the data.
    """

    experts: Tensor
    weights: Tensor
    slots: Tensor
    counts: Tensor
    aux: Aux | None = None
    num_experts: int = static(default=0)
    shape: tuple[int, ...] = static(default=())
    capacity: int | None = static(default=None)


# torch.load(..., weights_only=True) reads them: tensors and plain numbers in a frozen record
torch.serialization.add_safe_globals([RouterParams, ExpertParams, MoEParams, Aux, Routing])

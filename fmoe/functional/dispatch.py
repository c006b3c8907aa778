"""Sends each token to the rows of its experts."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from .._errors import refuse
from .._typing import dtype_text, type_text
from ..ops.routing import row_index
from ..values import Routing
from .tokens import Tokens

LAYOUTS = ("ragged", "padded")


def dispatch(x: Tensor, routing: Routing, *, layout: str | None = None, spec: Any = None) -> Tokens:
    """Sends each token to the rows of the experts it was routed to; dropped choices go nowhere.

    Args:
        x: ``[..., M]`` tokens of the leading shape that was routed.
        routing: from `gate`.
        layout: ``"ragged"`` (rows sorted by expert, no padding) or ``"padded"`` (a fixed number of
            slots per expert); ragged by default. The result of the layer is the same.
        spec: a sharding spec; None for one device.

    Returns:
        `Tokens`, for `expert_apply`.

    Raises:
        ValueError: if x does not have the tokens that were routed, or the routing is not valid.

    Example:
        >>> import fmoe, torch
        >>> x = torch.tensor([[1.0], [2.0]])
        >>> routing = fmoe.functional.gate(fmoe.RouterParams(torch.tensor([[-1.0, 1.0]])), x, fmoe.TopK(1))
        >>> tokens = dispatch(x, routing)
        >>> tokens.data.flatten(), tokens.group_sizes
        (tensor([1., 2.]), tensor([0, 2]))

    References:
        GShard (arXiv 2006.16668, section 2.2); MegaBlocks (arXiv 2211.15841, section 4) for ragged.
    """
    problems = []
    if x.dim() < 1 or tuple(x.shape[:-1]) != routing.shape:
        problems.append(f"x is {type_text(x)}, but tokens of leading shape {list(routing.shape)} were routed.")
    if not x.is_floating_point():
        problems.append(f"x is {dtype_text(x.dtype)}, but it must be floating.")
    if layout is not None and layout not in LAYOUTS:
        problems.append(f"layout={layout!r}: choose one of {', '.join(map(repr, LAYOUTS))}.")
    if spec is not None:
        problems.append(f"spec={spec!r}: this version runs on one device, so spec must be None.")
    tokens, k = math.prod(routing.shape), routing.experts.shape[-1]
    for name in ("experts", "weights", "slots"):
        part = getattr(routing, name)
        if tuple(part.shape) != (tokens, k):
            problems.append(f"routing.{name} is {type_text(part)}, but T={tokens} and K={k} make it {[tokens, k]}.")
    refuse("dispatch", problems)
    most = tokens * k if routing.capacity is None else routing.capacity
    index, order, groups = row_index(routing.experts, routing.slots, routing.num_experts, most)
    return Tokens(
        index,
        order,
        groups,
        x=x.reshape(tokens, x.shape[-1]),
        layout=layout or "ragged",
        capacity=routing.capacity,
        dtype=x.dtype,
    )

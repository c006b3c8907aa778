"""Sends each token to the rows of its experts."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .._errors import refuse
from .._typing import dtype_text, type_text
from ..ops.routing import row_index
from ..trace import Recorder, recorder
from ..values import Routing
from .specs import spec_problems
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
        ValueError: if x does not have the tokens that were routed, or the routing is not valid (on a GPU ids and
            slots are looked at under `checked` only).

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
    problems += spec_problems(spec)
    tokens, k = math.prod(routing.shape), routing.experts.shape[-1]
    for name in ("experts", "weights", "slots"):
        part = getattr(routing, name)
        if tuple(part.shape) != (tokens, k):
            problems.append(f"routing.{name} is {type_text(part)}, but T={tokens} and K={k} make it {[tokens, k]}.")
    refuse("dispatch", problems)
    writer = recorder()
    if writer is not None:
        return _record(writer, x, routing, layout, spec)
    if spec is not None:
        nothing = routing.experts.new_empty(routing.num_experts, 3)
        return Tokens(
            routing.experts,
            nothing,
            nothing,
            x=x,
            layout=layout or "",
            capacity=routing.capacity,
            dtype=x.dtype,
            spec=spec,
        )
    most = tokens * k if routing.capacity is None else routing.capacity
    index, order, groups = row_index(routing.experts, routing.slots, routing.num_experts, most)
    if k == routing.num_experts and routing.capacity is not None:  # expert choice: K = E, of which few are used
        order = order[: max(1, routing.num_experts * routing.capacity)]
    return Tokens(
        index,
        order,
        groups,
        x=x.reshape(tokens, x.shape[-1]),
        layout=layout or "ragged",
        capacity=routing.capacity,
        dtype=x.dtype,
    )


def _record(writer: Recorder, x: Tensor, routing: Routing, layout: str | None, spec: Any) -> Tokens:
    params = (
        ("layout", layout),
        ("num_experts", routing.num_experts),
        ("capacity", routing.capacity),
        ("spec", spec),
    )
    (rows,) = writer.record("dispatch", [x, routing.experts, routing.slots], params, ["tokens"])
    with writer.paused():
        index = torch.empty_like(routing.experts)
        order = index.new_empty(index.numel())
        groups = index.new_empty(routing.num_experts, 3)
    writer.hide(rows, index, order, groups)
    return Tokens(index, order, groups, rows=rows, layout="ragged", capacity=routing.capacity, dtype=x.dtype)

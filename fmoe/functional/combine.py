"""Brings the experts' rows back to their tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._errors import refuse
from ..ops import rearrange
from ..ops.ffn import ffn
from ..trace import recorder, under_spec
from ..values import Routing
from .specs import spec_problems
from .tokens import Tokens, flat_experts


def combine(tokens: Tokens, routing: Routing, *, spec: Any = None) -> Tensor:
    """Adds up the experts' rows of each token: ``y[t] = sum_k weights[t,k] * row(t,k)``.

    Sums are taken in fp32 or wider, in a fixed order, and rounded once. Dropped and masked choices
    contribute exactly 0, whatever their weight.

    Args:
        tokens: from `expert_apply`.
        routing: the one given to `dispatch`.
        spec: a sharding spec; None for one device.

    Returns:
        y ``[..., M]``, of the leading shape and dtype that were dispatched.

    Raises:
        ValueError: if the tokens were dispatched by a routing of another size.

    Example:
        >>> import fmoe, torch
        >>> x = torch.tensor([[1.0], [2.0]])
        >>> routing = fmoe.functional.gate(fmoe.RouterParams(torch.tensor([[-1.0, 1.0]])), x, fmoe.TopK(1))
        >>> combine(fmoe.functional.dispatch(x, routing), routing) / x
        tensor([[0.8808],
                [0.9820]])

    References:
        Shazeer et al. (arXiv 1701.06538, equation 1).
    """
    problems = []
    if tokens.index.shape != routing.weights.shape or tokens.num_experts != routing.num_experts:
        problems.append(
            f"tokens were dispatched with T,K={list(tokens.index.shape)} and E={tokens.num_experts}, but routing has "
            f"T,K={list(routing.weights.shape)} and E={routing.num_experts}: give the same routing to both."
        )
    problems += spec_problems(spec)
    refuse("combine", problems)
    writer = recorder()
    if writer is not None:
        params = (("shape", routing.shape), ("dtype", tokens.dtype), ("spec", spec))
        return writer.record("combine", [tokens.held, routing.weights], params, ["y"])[0]
    if spec is not None:
        if tokens.spec != spec or tokens.x is None or tokens.experts is None:
            refuse("combine", ["spec= was given: give the same spec to dispatch and expert_apply."])
        exchanged: Tensor = under_spec("combine")(tokens, routing, spec=spec)
        return exchanged
    if tokens.spec is not None:
        refuse("combine", ["tokens were dispatched under a spec: give combine the same spec=."])
    if tokens.x is not None and tokens.experts is not None:
        assert tokens.activation is not None
        p, activation = flat_experts(tokens.experts, tokens.activation)
        keep = torch.is_grad_enabled()  # the pre-activation, for backward
        y, _ = ffn(
            tokens.x, routing.weights, p.w_in, p.b_in, p.w_out, p.b_out,
            tokens.index, tokens.order, tokens.groups, activation, keep,
        )  # fmt: skip
    else:
        y = rearrange.combine(tokens.ragged_rows(), tokens.index, routing.weights)
    return y.to(tokens.dtype).reshape(*routing.shape, y.shape[-1])

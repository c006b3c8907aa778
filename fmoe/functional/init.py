"""Initial parameters: the same numbers on any device, in any dtype and at any world size."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .._errors import refuse
from ..ops.activations import ACTIVATIONS
from ..values import ExpertParams, MoEParams, RouterParams
from .config import MoEConfig


def init(
    config: MoEConfig,
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> MoEParams:
    """Makes the parameters of a layer.

    Weights are normal with mean 0 and variance 1 / fan_in (M for the router and ``w_in``, H for
    ``w_out``); biases and scales of noise are 0. Each expert of each leaf has a random stream of its own,
    drawn on the CPU in fp32 and then cast and moved, so an expert's numbers depend on `seed`, the leaf and
    the expert's id alone.

    Args:
        config: sizes and activation.
        seed: a whole number of at least 0.
        dtype: of every leaf.
        device: of every leaf.

    Returns:
        `MoEParams`; with ``config.fn`` the `experts` are an empty tuple for you to replace.

    Raises:
        ValueError: if the seed or dtype is not valid.

    Example:
        >>> import fmoe
        >>> params = init(fmoe.MoEConfig(num_experts=2, model_dim=3, hidden_dim=5, activation="relu"), seed=0)
        >>> params.experts
        ExpertParams(w_in=f32[2,3,5], w_out=f32[2,5,3])

    References:
        LeCun et al., "Efficient BackProp" (1998), section 4.6.
    """
    problems = []
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        problems.append(f"seed={seed!r}, but it must be a whole number of at least 0.")
    if not dtype.is_floating_point:
        problems.append(f"dtype={dtype}, but it must be a floating dtype.")
    refuse("init", problems)
    experts, dim, hidden = config.num_experts, config.model_dim, config.hidden_dim

    def normal(leaf: int, stream: int, *shape: int, fan_in: int) -> Tensor:
        state = int(np.random.SeedSequence([seed, leaf, stream]).generate_state(1, np.uint64)[0])
        generator = torch.Generator().manual_seed(state >> 1)
        numbers = torch.randn(shape, generator=generator, dtype=torch.float32) * fan_in**-0.5
        return numbers.to(dtype=dtype, device=device)

    constants, leaves = config.router.initial(), {}
    for stream, (name, shape) in enumerate(config.router.parameters(dim, experts).items()):
        if name in constants:
            leaves[name] = torch.full(shape, constants[name], dtype=dtype, device=device)
        else:
            leaves[name] = normal(0, stream, *shape, fan_in=shape[0])
    router = RouterParams(**leaves)
    if config.fn is not None:
        return MoEParams(router, ())
    halves = (2,) if ACTIVATIONS[config.activation].gated else ()
    b_in = torch.zeros(experts, *halves, hidden, dtype=dtype, device=device) if config.bias else None
    b_out = torch.zeros(experts, dim, dtype=dtype, device=device) if config.bias else None
    w_in = torch.stack([normal(1, e, dim, *halves, hidden, fan_in=dim) for e in range(experts)])
    w_out = torch.stack([normal(2, e, hidden, dim, fan_in=hidden) for e in range(experts)])
    return MoEParams(router, ExpertParams(w_in, w_out, b_in, b_out))

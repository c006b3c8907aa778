"""The MoE layer: gate, dispatch, expert_apply, combine."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._errors import refuse
from .._typing import type_text
from ..trace import recorder, under_spec
from ..values import Aux, ExpertParams, MoEParams, cast_leaves
from .combine import combine
from .config import MoEConfig
from .dispatch import dispatch
from .experts import expert_apply
from .gate import gate, replay_ids
from .routers.soft import SoftMoE
from .soft import soft_moe
from .specs import spec_problems


def moe(
    params: MoEParams, x: Tensor, config: MoEConfig, *, spec: Any = None, **gate_arguments: Any
) -> tuple[Tensor, Aux]:
    """One MoE layer: ``y[t] = sum_k w[t,k] * expert_{e[t,k]}(x[t])``.

    Args:
        params: from `init`.
        x: ``[..., M]`` tokens, any leading shape.
        config: sizes and choices.
        spec: a sharding spec; None for one device.
        **gate_arguments: keyword arguments of `gate`: capacity (in place of the config's), groups, noise, mask,
            token_ids, bias, replay.

    Returns:
        y, of x's shape and dtype, and the auxiliary losses and statistics.

    Raises:
        ValueError: if an argument does not fit; see the four functions.

    Example:
        >>> import fmoe, torch
        >>> config = fmoe.MoEConfig(num_experts=4, model_dim=8, hidden_dim=16)
        >>> params = fmoe.init(config, seed=0)
        >>> y, aux = moe(params, torch.ones(2, 3, 8), config)
        >>> y.shape, int(aux.counts.sum())
        (torch.Size([2, 3, 8]), 12)
        >>> grads = torch.func.grad(lambda p: moe(p, torch.ones(3, 8), config)[0].sum())(params)

    References:
        Shazeer et al., "Outrageously large neural networks" (arXiv 1701.06538).
    """
    _check(params, config)
    if "replay" in gate_arguments:
        gate_arguments["replay"] = replay_ids(gate_arguments["replay"])
    if spec is not None and recorder() is None:
        refuse("moe", spec_problems(spec))
        result: tuple[Tensor, Aux] = under_spec("moe")(params, x, config, spec=spec, **gate_arguments)
        return result
    if isinstance(config.router, SoftMoE):
        return _soft(params, x, config, config.router, spec, gate_arguments)
    capacity = gate_arguments.setdefault("capacity", config.capacity)
    layout = config.layout
    if layout is None and recorder() is None:  # a program leaves it to its plan
        layout = "ragged" if capacity is None else "padded"
    routing = gate(params.router, x, config.router, spec=spec, **gate_arguments)
    experts, h = params.experts, x
    if config.dtype is not None:
        h, experts = x.to(config.dtype), cast_leaves(experts, config.dtype)
    tokens = dispatch(h, routing, layout=layout, spec=spec)
    tokens = expert_apply(experts, tokens, activation=config.activation, fn=config.fn, spec=spec)
    y = combine(tokens, routing, spec=spec)
    assert routing.aux is not None
    return y.to(x.dtype), routing.aux


def _soft(
    params: MoEParams, x: Tensor, config: MoEConfig, router: SoftMoE, spec: Any, arguments: dict[str, Any]
) -> tuple[Tensor, Aux]:
    unused = [name for name, given in arguments.items() if name != "mask" and given is not None]
    refuse("moe", [f"{name} was given, but SoftMoE does not use it: leave it out." for name in unused])
    return soft_moe(
        params, x, router, activation=config.activation, fn=config.fn, mask=arguments.get("mask"),
        layout=config.layout, dtype=config.dtype, spec=spec,
    )  # fmt: skip


def _check(params: MoEParams, config: MoEConfig) -> None:
    if not isinstance(params, MoEParams):
        refuse("moe", [f"params is a {type(params).__name__}: give an fmoe.MoEParams, as fmoe.init makes."])
    problems, weight = [], params.router.weight
    if tuple(weight.shape) != config.router.parameters(config.model_dim, config.num_experts)["weight"]:
        problems.append(
            f"params.router.weight is {type_text(weight)}, but config has model_dim={config.model_dim} and "
            f"num_experts={config.num_experts}."
        )
    if config.fn is None and isinstance(params.experts, ExpertParams):
        w_out = params.experts.w_out
        hidden = w_out.shape[1] if w_out.dim() == 3 else config.hidden_dim
        if (params.experts.sharded or (0, hidden))[1] != config.hidden_dim:
            problems.append(
                f"params.experts.w_out is {type_text(w_out)}, but config has hidden_dim={config.hidden_dim}."
            )
    refuse("moe", problems)

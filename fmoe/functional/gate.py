"""Which experts each token goes to, with which weights, and which choices are dropped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from .._errors import is_whole, refuse
from .._typing import dtype_text, type_text
from ..trace import Recorder, recorder, under_spec
from ..values import Aux, RouterParams, Routing
from .capacity import Capacity, as_capacity
from .losses import finish
from .route import route, slots_of
from .routers.affinity import bias_problems
from .routers.base import Router
from .specs import spec_problems


def gate(
    router_params: RouterParams,
    x: Tensor,
    router: Router,
    *,
    capacity: Capacity | float | Fraction | str | None = None,
    groups: int | Sequence[int] = 1,
    noise: Tensor | None = None,
    mask: Tensor | None = None,
    token_ids: Tensor | None = None,
    bias: Tensor | None = None,
    replay: Routing | Tensor | None = None,
    spec: Any = None,
) -> Routing:
    """Routes every token of x to experts.

    Everything is computed in fp32, or wider if x or the weight is wider, also under autocast. Ties go
    to the lowest expert id. Queues are served by group, then first choices before second choices,
    then in token order (or by score: `Capacity`); the first `capacity` choices of each group are kept.

    Args:
        router_params: ``weight [M,E]``, and what else the router reads.
        x: ``[..., M]`` tokens, any leading shape; T is its product.
        router: how to select and weigh, for example ``TopK(2)``.
        capacity: the most rows of a group that an expert keeps: None for no limit, a capacity factor,
            ``"as_needed"``, or a `Capacity`.
        groups: groups of consecutive tokens with capacities of their own: how many (it divides T) or
            their sizes (they add up to T).
        noise: ``[..., E]`` standard normal samples, for routers that use noise; `TopK` adds them to the
            logits times ``router.noise_std / E``.
        mask: ``[...]`` bool; False for tokens that go nowhere: no expert, no loss, no gradient.
        token_ids: ``[...]`` whole numbers, for `Hash`.
        bias: ``[E]`` selection bias in fp32 or wider, for `Sigmoid` and `SqrtSoftplus`; no gradient.
        replay: a `Routing` of these tokens (or its ``experts [T,K]``) whose experts are taken in place of the
            router's choices: weights and losses are computed anew for them, and queues are served
            under the capacity given here.
        spec: a sharding spec; None for one device.

    Returns:
        A `Routing`, with the auxiliary losses and statistics in ``routing.aux``.

    Raises:
        ValueError: if shapes, dtypes, k, capacity, groups or mask do not fit, or the router does not use
            an argument, or needs one that is missing.

    Example:
        >>> import fmoe
        >>> weight = torch.tensor([[1.0, 0.0, 0.5]])
        >>> routing = gate(fmoe.RouterParams(weight), torch.tensor([[2.0], [-2.0]]), fmoe.TopK(2))
        >>> routing.experts
        tensor([[0, 2],
                [1, 2]])
        >>> routing.counts
        tensor([1, 1, 2])

    References:
        Shazeer et al. (arXiv 1701.06538, section 2.1); GShard (arXiv 2006.16668, algorithm 1).
    """
    if not isinstance(router_params, RouterParams):
        refuse("gate", [f"router_params is a {type(router_params).__name__}: give an fmoe.RouterParams(weight)."])
    if not isinstance(x, Tensor):
        refuse("gate", [f"x is a {type(x).__name__}, but it must be a tensor [..., M]."])
    given = {"noise": noise, "mask": mask, "token_ids": token_ids, "bias": bias, "replay": replay_ids(replay)}
    _check(router_params, x, router, given, spec)
    rule = as_capacity(capacity)
    if rule is not None and not router.takes_capacity:
        refuse("gate", [no_capacity(capacity, router)])
    sizes = _group_sizes(groups, math.prod(x.shape[:-1]))
    num_experts, shape = router_params.weight.shape[1], tuple(x.shape[:-1])
    bound = slots_of(router, rule, sizes, num_experts, given["replay"])
    writer = recorder()
    if writer is None and spec is not None:
        return under_spec("gate")(router_params, x, router, capacity=rule, groups=groups, spec=spec, **given)
    if writer is None:
        experts, weights, slots, counts, sums = route(router_params, x, router, rule, sizes, **given)
        aux = finish(sums, router)
    else:
        groups = tuple(map(int, groups)) if isinstance(groups, Sequence) else int(groups)
        params = (("router", router), ("capacity", rule), ("groups", groups))
        experts, weights, slots, counts, aux = _record(writer, router_params, x, params, given, spec)
    return Routing(experts, weights, slots, counts, aux, num_experts=num_experts, shape=shape, capacity=bound)


#: Outputs of a gate equation, in order: those of `Routing`, then those of `Aux`.
GATE_OUTPUTS = (
    "experts", "weights", "slots", "counts",
    "balance", "z", "importance", "load", "entropy", "total_counts", "dropped",
)  # fmt: skip


def _record(
    writer: Recorder,
    router_params: RouterParams,
    x: Tensor,
    params: tuple[tuple[str, Any], ...],
    given: dict[str, Tensor | None],
    spec: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Aux]:
    weight, router = router_params.weight, params[0][1]
    leaves = router.parameters(x.shape[-1], weight.shape[1])
    extra = {name: getattr(router_params, name) for name in leaves if name != "weight"} | given
    present = {name: tensor for name, tensor in extra.items() if tensor is not None}
    params = (*params, ("given", tuple(present)), ("spec", spec))
    experts, weights, slots, counts, *aux = writer.record("gate", [x, weight, *present.values()], params, GATE_OUTPUTS)
    return experts, weights, slots, counts, Aux(*aux)


def replay_ids(replay: Routing | Tensor | None) -> Tensor | None:
    """The experts of a routing to replay."""
    return replay.experts if isinstance(replay, Routing) else replay


def no_capacity(capacity: Any, router: Router) -> str:
    """Why a router takes no capacity."""
    return f"capacity={capacity!r}, but {type(router).__name__} gives every expert its number of tokens: leave it out."


def unused_bias(params: RouterParams, router: Router) -> list[str]:
    """That a bias was given which the router would not add."""
    if params.logit_bias is None or getattr(router, "logit_bias", False):
        return []
    name = type(router).__name__
    way = f"choose {name}(..., logit_bias=True)" if hasattr(router, "logit_bias") else "route by TopK(logit_bias=True)"
    found = type_text(params.logit_bias)
    return [f"router_params.logit_bias is {found}, but {router!r} does not add it: {way}, or leave it out."]


def _group_sizes(groups: int | Sequence[int], tokens: int) -> list[int]:
    if isinstance(groups, Sequence):
        if not groups or not all(is_whole(size, 0) for size in groups) or sum(groups) != tokens:
            refuse("gate", [f"groups={groups!r}, but sizes must be whole, at least 0 and add up to T={tokens}."])
        return [int(size) for size in groups]
    if not is_whole(groups, 1) or tokens % groups:
        refuse("gate", [f"groups={groups!r}, but it must be at least 1 and divide T={tokens}; or give sizes."])
    return [tokens // int(groups)] * int(groups)


def _check(router_params: RouterParams, x: Tensor, router: Router, given: dict[str, Any], spec: Any) -> None:
    if isinstance(router, Router) and not router.routes:
        refuse("gate", [f"router={router!r} mixes tokens and chooses no experts: give it to moe or soft_moe."])
    weight = router_params.weight
    problems = []
    matrix = weight.dim() == 2 and weight.shape[1] >= 1
    leaves: dict[str, tuple[int, ...]] = {}
    if matrix and x.dim() >= 1 and isinstance(router, Router):
        leaves = router.parameters(x.shape[-1], weight.shape[1])
    if not matrix:
        problems.append(f"router_params.weight is {type_text(weight)}, but it must be [M,E] with E at least 1.")
    elif x.dim() < 1 or (x.shape[-1] != weight.shape[0] and "projection" not in leaves):
        problems.append(
            f"x is {type_text(x)} and router_params.weight is {type_text(weight)}: the last dim of x must be "
            f"M={weight.shape[0]}, the first of the weight."
        )
    else:
        problems += _leaf_problems(router_params, router, leaves)
        if isinstance(router, Router):
            problems += unused_bias(router_params, router)
    if not x.is_floating_point() or not weight.is_floating_point():
        problems.append(
            f"x is {dtype_text(x.dtype)} and router_params.weight {dtype_text(weight.dtype)}: both must be floating."
        )
    if not isinstance(router, Router):
        problems.append(f"router={router!r}, but it must be a router, such as fmoe.TopK(2).")
    elif matrix:
        problems += router.misfits(weight.shape[1])
    takes = router.takes if isinstance(router, Router) else ()
    problems += _given_problems(x, weight.shape[1] if matrix else None, given, takes)
    if isinstance(router, Router):
        name = type(router).__name__
        for argument in ("token_ids", "bias", "noise"):
            if given[argument] is not None and argument not in takes:
                problems.append(f"{argument} was given, but {name} does not use it: leave it out.")
            if given[argument] is None and argument in router.needs and given["replay"] is None:
                problems.append(f"{argument}=None, but {name} routes by it: give {argument}= of x's leading shape.")
    problems += spec_problems(spec)
    refuse("gate", problems)


def _leaf_problems(params: RouterParams, router: Any, leaves: dict[str, tuple[int, ...]]) -> list[str]:
    problems = []
    for name, shape in leaves.items():
        leaf = getattr(params, name)
        if leaf is None or tuple(leaf.shape) != shape:
            found = "None" if leaf is None else type_text(leaf)
            problems.append(f"router_params.{name} is {found}, but {type(router).__name__} needs {list(shape)}.")
    return problems


def _given_problems(x: Tensor, num_experts: int | None, given: dict[str, Any], takes: Sequence[str]) -> list[str]:
    problems = []
    noise, mask, token_ids, bias, replay = given.values()
    shape = list(x.shape[:-1])
    if noise is not None and num_experts is not None and list(noise.shape) != [*shape, num_experts]:
        problems.append(
            f"noise is {type_text(noise)}, but it must be x's leading shape and E: {[*shape, num_experts]}."
        )
    if mask is not None and not (isinstance(mask, Tensor) and mask.dtype == torch.bool and list(mask.shape) == shape):
        found = type_text(mask) if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
        problems.append(f"mask is {found}, but it must be bool of x's leading shape {shape}, True to keep.")
    if token_ids is not None and "token_ids" in takes:
        found = type_text(token_ids) if isinstance(token_ids, Tensor) else f"a {type(token_ids).__name__}"
        if not isinstance(token_ids, Tensor) or _not_whole(token_ids) or list(token_ids.shape) != shape:
            problems.append(f"token_ids is {found}, but it must be whole numbers of x's leading shape {shape}.")
    if bias is not None and num_experts is not None and "bias" in takes:
        problems += bias_problems(bias, num_experts)
    if replay is not None and num_experts is not None:
        tokens = math.prod(shape)
        if not isinstance(replay, Tensor):
            problems.append(f"replay is a {type(replay).__name__}, but it must be a Routing, or its experts [T,K].")
        elif replay.dtype != torch.int64 or replay.dim() != 2 or replay.shape[0] != tokens:
            problems.append(f"replay has experts {type_text(replay)}, but T={tokens} tokens make it i64[{tokens},K].")
    return problems


def _not_whole(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool

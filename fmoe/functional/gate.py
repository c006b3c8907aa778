"""Which experts each token goes to, with which weights, and which choices are dropped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from .._autocast import without_autocast
from .._errors import is_whole, refuse
from .._typing import accumulation_dtype, dtype_text, type_text
from ..ops.routing import assign_slots, top_k
from ..trace import Recorder, recorder, under_spec
from ..values import Aux, RouterParams, Routing
from .capacity import Capacity, as_capacity, slots_bound
from .losses import Sums, balance_of, entropy_of, finish, load_chance, squared_variation, sum_over_tokens
from .routers import TopK
from .specs import spec_problems


def gate(
    router_params: RouterParams,
    x: Tensor,
    router: TopK,
    *,
    capacity: Capacity | float | Fraction | str | None = None,
    groups: int | Sequence[int] = 1,
    noise: Tensor | None = None,
    mask: Tensor | None = None,
    token_ids: Tensor | None = None,
    bias: Tensor | None = None,
    spec: Any = None,
) -> Routing:
    """Routes every token of x to experts.

    Everything is computed in fp32, or wider if x or the weight is wider, also under autocast. Ties go
    to the lowest expert id. Queues are served by group, then first choices before second choices,
    then in token order; the first `capacity` choices of each group are kept.

    Args:
        router_params: ``weight [M,E]``.
        x: ``[..., M]`` tokens, any leading shape; T is its product.
        router: how to select and weigh, for example ``TopK(2)``.
        capacity: the most rows of a group that an expert keeps: None for no limit, a capacity factor,
            ``"as_needed"``, or a `Capacity`.
        groups: groups of consecutive tokens with capacities of their own: how many (it divides T) or
            their sizes (they add up to T).
        noise: ``[..., E]`` standard normal samples, added to the logits times ``router.noise_std / E``.
        mask: ``[...]`` bool; False for tokens that go nowhere: no expert, no loss, no gradient.
        token_ids: for routers that use them; `TopK` does not.
        bias: for routers that use one; `TopK` does not.
        spec: a sharding spec; None for one device.

    Returns:
        A `Routing`, with the auxiliary losses and statistics in ``routing.aux``.

    Raises:
        ValueError: if shapes, dtypes, k, capacity, groups or mask do not fit.

    Example:
        >>> import fmoe
        >>> weight = torch.tensor([[1.0, 0.0, 0.5]])
        >>> routing = gate(fmoe.RouterParams(weight), torch.tensor([[2.0], [-2.0]]), TopK(2))
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
    weight = router_params.weight
    _check(weight, x, router, noise=noise, mask=mask, token_ids=token_ids, bias=bias, spec=spec)
    rule = as_capacity(capacity)
    sizes = _group_sizes(groups, math.prod(x.shape[:-1]))
    given = {"noise": noise, "mask": mask}
    writer = recorder()
    if writer is not None:
        return _record(writer, weight, x, router, rule, groups, given, spec)
    if spec is not None:
        return under_spec("gate")(router_params, x, router, capacity=rule, groups=groups, spec=spec, **given)
    bound = slots_bound(rule, sizes)(router.k, weight.shape[1])
    experts, weights, slots, counts, sums = route(weight, x, router, rule, sizes, noise, mask)
    aux = finish(sums, router)
    return Routing(
        experts, weights, slots, counts, aux, num_experts=weight.shape[1], shape=tuple(x.shape[:-1]), capacity=bound
    )


#: Outputs of a gate equation, in order: those of `Routing`, then those of `Aux`.
GATE_OUTPUTS = (
    "experts", "weights", "slots", "counts",
    "balance", "z", "importance", "load", "entropy", "total_counts", "dropped",
)  # fmt: skip


def _record(
    writer: Recorder,
    weight: Tensor,
    x: Tensor,
    router: TopK,
    rule: Capacity | None,
    groups: int | Sequence[int],
    given: dict[str, Tensor | None],
    spec: Any,
) -> Routing:
    names = tuple(name for name, tensor in given.items() if tensor is not None)
    groups = tuple(map(int, groups)) if isinstance(groups, Sequence) else int(groups)
    params = (("router", router), ("capacity", rule), ("groups", groups), ("given", names), ("spec", spec))
    extra = [tensor for tensor in given.values() if tensor is not None]
    experts, weights, slots, counts, *aux = writer.record("gate", [x, weight, *extra], params, GATE_OUTPUTS)
    shape, num_experts = tuple(x.shape[:-1]), weight.shape[1]
    bound = slots_bound(rule, _group_sizes(groups, math.prod(shape)))(router.k, num_experts)
    return Routing(experts, weights, slots, counts, Aux(*aux), num_experts=num_experts, shape=shape, capacity=bound)


def route(
    weight: Tensor,
    x: Tensor,
    router: TopK,
    rule: Capacity | None,
    sizes: list[int],
    noise: Tensor | None,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Sums]:
    """The choices of these tokens alone, and the sums over them of which the losses are made."""
    num_experts = weight.shape[1]
    tokens = math.prod(x.shape[:-1])
    keep = None if mask is None else mask.reshape(tokens)
    logits = _logits(x.reshape(tokens, x.shape[-1]), weight, keep)
    noisy = logits
    if noise is not None:
        noise = noise.reshape(tokens, num_experts).to(logits.dtype) * (router.noise_std / num_experts)
        noisy = logits + (noise if keep is None else torch.where(keep[:, None], noise, 0))
    probs = noisy.softmax(dim=-1)
    experts = top_k(noisy.detach(), router.k)
    weights = _weights(router, noisy, probs, experts)
    threshold = noisy.gather(1, experts[:, -1:])
    if keep is not None:
        experts = torch.where(keep[:, None], experts, -1)
        weights = torch.where(keep[:, None], weights, 0)
    limit = _capacity(rule, sizes, keep, router.k, num_experts, x.device)
    slots, counts = assign_slots(experts.unsqueeze(0), limit.unsqueeze(0), sizes, num_experts)
    slots, counts = slots.squeeze(0), counts.squeeze(0)
    sums = _sums(router, logits, threshold, probs, experts, slots, counts, sizes, keep)
    return experts, weights, slots, counts, sums


def _logits(x: Tensor, weight: Tensor, keep: Tensor | None) -> Tensor:
    dtype = accumulation_dtype(x.dtype, weight.dtype)
    if keep is not None:
        x = torch.where(keep[:, None], x, 0)  # before the product: 0 * NaN would reach the weight's gradient
    with without_autocast(x.device.type):
        return x.to(dtype) @ weight.to(dtype)


def _weights(router: TopK, logits: Tensor, probs: Tensor, experts: Tensor) -> Tensor:
    if router.order == "topk_softmax":
        return logits.gather(1, experts).softmax(dim=-1)
    weights = probs.gather(1, experts)
    return weights / weights.sum(dim=-1, keepdim=True) if router.normalized else weights


def _capacity(
    rule: Capacity | None, sizes: list[int], keep: Tensor | None, k: int, num_experts: int, device: torch.device
) -> Tensor:
    """The limit of each group ``[G]``."""
    if rule is None:
        return torch.tensor(sizes, device=device)
    if keep is None:
        return torch.tensor([rule.of(tokens=size, k=k, num_experts=num_experts) for size in sizes], device=device)
    present = torch.stack([part.sum() for part in keep.split(sizes)])
    return rule.of_counts(present, k=k, num_experts=num_experts)


def _sums(
    router: TopK,
    logits: Tensor,
    threshold: Tensor,
    probs: Tensor,
    experts: Tensor,
    slots: Tensor,
    counts: Tensor,
    sizes: list[int],
    keep: Tensor | None,
) -> Sums:
    tokens = logits.new_tensor(logits.shape[0]) if keep is None else keep.sum().to(logits.dtype)
    chance = load_chance(logits, threshold, noise_std=router.noise_std)
    parts: tuple[Tensor, ...]
    if router.scope == "global":
        parts = (sum_over_tokens(probs, keep), sum_over_tokens(chance, keep))
    else:
        parts = (_sum_over_groups(probs, chance, experts, sizes, keep),)
    return Sums(
        parts=parts,
        z=sum_over_tokens(torch.logsumexp(logits, dim=-1).square(), keep),
        entropy=sum_over_tokens(entropy_of(probs), keep),
        tokens=tokens,
        counts=counts,
        dropped=((slots < 0) & (experts >= 0)).sum((0, 1)),
    )


def _sum_over_groups(probs: Tensor, chance: Tensor, experts: Tensor, sizes: list[int], keep: Tensor | None) -> Tensor:
    """``[3]``: balance, importance and load of each group by itself, times its unmasked tokens, added up."""
    num_experts = probs.shape[1]
    masks: Sequence[Tensor | None] = [None] * len(sizes) if keep is None else keep.split(sizes)
    chosen = torch.where(experts >= 0, experts, num_experts)
    total = probs.new_zeros(3)
    for p, c, ids, mask in zip(probs.split(sizes), chance.split(sizes), chosen.split(sizes), masks, strict=True):
        ones = torch.ones_like(ids.flatten())
        counts = ones.new_zeros(num_experts + 1).scatter_add(0, ids.flatten(), ones)[:num_experts]
        tokens = p.new_tensor(p.shape[0]) if mask is None else mask.sum().to(p.dtype)
        mean = sum_over_tokens(p, mask) / tokens.clamp(min=1)
        losses = [balance_of(mean, counts), squared_variation(mean), squared_variation(sum_over_tokens(c, mask))]
        total = total + torch.stack(losses) * tokens
    return total


def _group_sizes(groups: int | Sequence[int], tokens: int) -> list[int]:
    if isinstance(groups, Sequence):
        if not groups or not all(is_whole(size, 0) for size in groups) or sum(groups) != tokens:
            refuse("gate", [f"groups={groups!r}, but sizes must be whole, at least 0 and add up to T={tokens}."])
        return [int(size) for size in groups]
    if not is_whole(groups, 1) or tokens % groups:
        refuse("gate", [f"groups={groups!r}, but it must be at least 1 and divide T={tokens}; or give sizes."])
    return [tokens // int(groups)] * int(groups)


def _check(
    weight: Tensor,
    x: Tensor,
    router: TopK,
    *,
    noise: Tensor | None,
    mask: Tensor | None,
    token_ids: Tensor | None,
    bias: Tensor | None,
    spec: Any,
) -> None:
    problems = []
    if weight.dim() != 2 or weight.shape[1] < 1:
        problems.append(f"router_params.weight is {type_text(weight)}, but it must be [M,E] with E at least 1.")
    elif x.dim() < 1 or x.shape[-1] != weight.shape[0]:
        problems.append(
            f"x is {type_text(x)} and router_params.weight is {type_text(weight)}: the last dim of x must be "
            f"M={weight.shape[0]}, the first of the weight."
        )
    if not x.is_floating_point() or not weight.is_floating_point():
        problems.append(
            f"x is {dtype_text(x.dtype)} and router_params.weight {dtype_text(weight.dtype)}: both must be floating."
        )
    if not isinstance(router, TopK):
        problems.append(f"router={router!r}, but it must be a router, such as fmoe.TopK(2).")
    elif weight.dim() == 2 and router.k > weight.shape[1] >= 1:
        problems.append(f"k={router.k} > num_experts={weight.shape[1]}: choose k from 1 to {weight.shape[1]}.")
    if noise is not None and weight.dim() == 2 and noise.shape != (*x.shape[:-1], weight.shape[1]):
        problems.append(
            f"noise is {type_text(noise)}, but it must be x's leading shape and E: {[*x.shape[:-1], weight.shape[1]]}."
        )
    if mask is not None and not (isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.shape == x.shape[:-1]):
        found = type_text(mask) if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
        problems.append(
            f"mask is {found}, but it must be bool of x's leading shape {list(x.shape[:-1])}, True to keep."
        )
    for name, given in (("token_ids", token_ids), ("bias", bias)):
        if given is not None:
            problems.append(f"{name} was given, but {type(router).__name__} does not use it: leave it out.")
    problems += spec_problems(spec)
    refuse("gate", problems)

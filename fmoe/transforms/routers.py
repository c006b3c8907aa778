"""Every router beside the same in plain torch, for the transform table.

A subject is the gate alone: the weights it gives, as ``[T,E]`` with 0 where an expert is not chosen, and
its losses. The references share no code with the routers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..functional.gate import gate
from ..functional.routers import (
    Base,
    Cosine,
    ExpertChoice,
    GShard,
    Hash,
    NoisyTopK,
    Prototypes,
    ReLU,
    Router,
    Sigmoid,
    Sinkhorn,
    SoftMoE,
    SqrtSoftplus,
    TopK,
    TopP,
)
from ..functional.soft import soft_moe
from ..ops.assign import balanced_assignment
from ..values import ExpertParams, MoEParams, RouterParams
from .subjects import E, K, M, Subject, T, _best, _rand, one_hot

NOISE = _rand(T, E, seed=40)
BIAS = _rand(E, seed=41) / 5
IDS = torch.tensor([3, 1, 4, 1])
P = 3  # of the projection

#: The leaves of the parameters after the weight, by router.
_MORE: dict[str, dict[str, Tensor]] = {
    "TopK": {"logit_bias": _rand(E, seed=44)},
    "NoisyTopK": {"noise_weight": _rand(M, E, seed=42)},
    "Cosine": {"projection": _rand(M, P, seed=43), "log_scale": torch.tensor(0.3, dtype=torch.float64)},
}
#: What a router makes of the logits: chosen ``[T,E]``, weights where chosen, mass, chance (None: the choices).
Restated = tuple[Tensor, Tensor, Tensor, Tensor | None]


def _top(scores: Tensor, k: int) -> Tensor:
    return one_hot(_best(scores, k), scores.shape[-1]).sum(-2)


def _biased(z: Tensor, x: Tensor, more: dict[str, Tensor]) -> Restated:
    p, picked = z.softmax(-1), _top(z, K)
    least = torch.where(picked > 0, z, torch.inf).amin(-1, keepdim=True)
    return picked, p / (p * picked).sum(-1, keepdim=True), p, 0.5 * (1 + torch.erf((z - least) * E / math.sqrt(2)))


def _noisy(z: Tensor, x: Tensor, more: dict[str, Tensor]) -> Restated:
    s = (1 + (x @ more["noise_weight"]).exp()).log() + 0.01
    h = z + NOISE * s
    picked = _top(h, K)
    others = torch.where(torch.eye(E, dtype=torch.bool), -torch.inf, h.unsqueeze(1))  # [T,E,E] without e
    threshold = others.gather(2, _best(others.flatten(0, 1), K)[:, -1:].unflatten(0, (T, E))).squeeze(2)
    chance = 0.5 * (1 + torch.erf((z - threshold) / s / math.sqrt(2)))
    p = h.softmax(-1)
    return picked, p / (p * picked).sum(-1, keepdim=True), p, chance


def _gshard(z: Tensor, x: Tensor, more: dict[str, Tensor]) -> Restated:
    p, both, first = z.softmax(-1), _top(z, 2), _top(z, 1)
    share = p / (p * both).sum(-1, keepdim=True)
    second = (both - first) * (0.5 * (1 + torch.erf(NOISE / math.sqrt(2))) < 2 * share)
    return first + second, share, p, None


def _cosine(z: Tensor, x: Tensor, more: dict[str, Tensor]) -> Restated:
    p = z.softmax(-1)
    picked = _top(z, K)
    return picked, p / (p * picked).sum(-1, keepdim=True), p, None


def _affinity(s: Tensor) -> Restated:
    ranked = s + BIAS
    pairs = ranked.unflatten(-1, (2, 2))
    group = _top(pairs.sum(-1), 1).repeat_interleave(2, -1)
    picked = _top(torch.where(group > 0, ranked, -torch.inf), K)
    return picked, 2.5 * s / (s * picked).sum(-1, keepdim=True), s / s.sum(-1, keepdim=True), None


def _top_p(z: Tensor, x: Tensor, more: dict[str, Tensor]) -> Restated:
    p = z.softmax(-1)
    ahead = (p.unsqueeze(-1) < p.unsqueeze(-2)) * p.unsqueeze(-2)  # [T,e,j]: j stands before e
    return (ahead.sum(-1) < 0.8).to(p.dtype) * _top(p, 3), p, p, None


def _relu(z: Tensor, x: Tensor, more: dict[str, Tensor]) -> Restated:
    gates = z.clamp(min=0)
    return _top(gates, 3) * (gates > 0), gates, gates, None


def _hash(z: Tensor, x: Tensor, more: dict[str, Tensor]) -> Restated:
    h = IDS
    for _ in range(2):
        h = ((h ^ (h >> 16)) * 73244475) & (2**31 - 1)
    h = h ^ (h >> 16)
    picked = one_hot(h % E, E) + one_hot((h + 1) % E, E) + 0 * z
    return picked, picked / K, picked / K, None


def _expert_choice(z: Tensor, x: Tensor, more: dict[str, Tensor]) -> Restated:
    p = z.softmax(-1)
    return _top(p.mT, 2).mT, p, p, None


def _assigned(z: Tensor) -> Tensor:
    """The best of all ways to give four experts one of four tokens each."""
    ways = torch.tensor(list(itertools.permutations(range(E))))  # [24,T]
    each = one_hot(ways, E)  # [24,T,E]
    best = (each * z).sum((-1, -2)).argmax(0, keepdim=True)
    return each.index_select(0, best).squeeze(0)


def _base(z: Tensor, x: Tensor, more: dict[str, Tensor]) -> Restated:
    return _assigned(z), z.sigmoid(), z.softmax(-1), None


def _sinkhorn(z: Tensor, x: Tensor, more: dict[str, Tensor]) -> Restated:
    m = z.exp()
    for _ in range(16):
        m = m / m.sum(1, keepdim=True)
        m = m / m.sum(0, keepdim=True) * (T / E)
    return _top(z + (m / z.exp())[:1].log() - (m / z.exp())[:1, :1].log(), 1), z.sigmoid(), z.softmax(-1), None


def _prototypes(z: Tensor, x: Tensor, more: dict[str, Tensor]) -> Restated:
    left, right = z.unflatten(-1, (2, 2)).unbind(-2)
    gates = torch.cat([left.softmax(-1), right.softmax(-1)], -1)
    return torch.cat([_top(left, 1), _top(right, 1)], -1), gates, gates / 2, None


_SIGMOID: dict[str, Any] = {"expert_groups": 2, "top_groups": 1, "route_scale": 2.5}
#: Each router, what gate is given, and the router restated.
ROUTERS: dict[str, tuple[Router, dict[str, Tensor], Callable[..., Restated]]] = {
    "TopK": (TopK(K, order="topk_softmax", logit_bias=True), {}, _biased),
    "NoisyTopK": (NoisyTopK(K), {"noise": NOISE}, _noisy),
    "GShard": (GShard(), {"noise": NOISE}, _gshard),
    "Cosine": (Cosine(K, dim=P), {}, _cosine),
    "Sigmoid": (Sigmoid(K, **_SIGMOID), {"bias": BIAS}, lambda z, x, more: _affinity(1 / (1 + (-z).exp()))),
    "SqrtSoftplus": (
        SqrtSoftplus(K, **_SIGMOID),
        {"bias": BIAS},
        lambda z, x, more: _affinity((1 + z.exp()).log().sqrt()),
    ),
    "TopP": (TopP(0.8, max_k=3), {}, _top_p),
    "ReLU": (ReLU(K, max_k=3), {}, _relu),
    "Hash": (Hash(K), {"token_ids": IDS}, _hash),
    "ExpertChoice": (ExpertChoice(2.0), {}, _expert_choice),
    "Base": (Base(), {}, _base),
    "Sinkhorn": (Sinkhorn(), {}, _sinkhorn),
    "Prototypes": (Prototypes(2), {}, _prototypes),
}


def _losses(name: str, z: Tensor, restated: Restated) -> tuple[Tensor, ...]:
    picked, _, mass, chance = restated
    counts, mean = picked.sum(0), mass.mean(0)
    if name == "GShard":
        counts = _top(z, 1).sum(0)
    total = K * T if name == "ReLU" else counts.sum()
    odds = mass / mass.sum(-1, keepdim=True).clamp(min=1e-300)
    chance = picked if chance is None else chance
    if name == "Hash":
        z = 0 * z
    return (
        E * (counts / total * mean).sum(),
        z.logsumexp(-1).square().mean(),
        mean.var(correction=0) / mean.mean().square(),
        chance.mean(0).var(correction=0) / chance.mean().square(),
        -(odds * odds.clamp(min=1e-300).log()).sum(-1).mean(),
    )


def _subject(name: str) -> Subject:
    router, given, restate = ROUTERS[name]
    more = _MORE.get(name, {})
    rows = P if name == "Cosine" else M

    def gated(x: Tensor, weight: Tensor, *leaves: Tensor) -> Any:
        routing = gate(RouterParams(weight, **dict(zip(more, leaves, strict=True))), x, router, **given)  # type: ignore[arg-type]
        aux = routing.aux
        assert aux is not None
        chosen = one_hot(routing.experts, E)  # [T,K,E]
        weights = torch.einsum("tk,tke->te", routing.weights, chosen)
        return weights, aux.balance, aux.z, aux.importance, aux.load, aux.entropy

    def plain(x: Tensor, weight: Tensor, *leaves: Tensor) -> Any:
        held = dict(zip(more, leaves, strict=True))
        z = x @ weight + held.get("logit_bias", 0)
        if name == "Cosine":
            q = x @ held["projection"]
            norms = q.square().sum(-1, keepdim=True).sqrt() * weight.square().sum(0).sqrt()
            z = q @ weight / norms * held["log_scale"].exp()
        restated = restate(z, x, held)
        return torch.where(restated[0] > 0, restated[1], 0.0), *_losses(name, z, restated)

    return Subject(f"gate {name}", gated, plain, (_rand(T, M, seed=50), _rand(rows, E, seed=51), *more.values()))


def _assignment_subject() -> Subject:
    keep = torch.ones(1, T, dtype=torch.bool)

    def assigned(scores: Tensor) -> Tensor:
        return scores.gather(1, balanced_assignment(scores.unsqueeze(0), keep, [T]).squeeze(0).unsqueeze(1))

    scores = _rand(T, E, seed=52)
    return Subject("balanced_assignment", assigned, lambda z: (z * _assigned(z)).sum(-1, keepdim=True), (scores,))


def _soft_subject() -> Subject:
    router = SoftMoE(2)
    w_in, w_out = _rand(E, M, 2, seed=53), _rand(E, 2, M, seed=54)

    def soft(x: Tensor, weight: Tensor, scale: Tensor, w_in: Tensor, w_out: Tensor) -> Any:
        params = MoEParams(RouterParams(weight, scale=scale), ExpertParams(w_in, w_out))
        y, aux = soft_moe(params, x, router, activation="silu")
        return y, aux.z, aux.importance, aux.entropy

    def plain(x: Tensor, weight: Tensor, scale: Tensor, w_in: Tensor, w_out: Tensor) -> Any:
        phi = weight.flatten(1)
        norms = x.square().sum(1, keepdim=True).sqrt() * phi.square().sum(0).sqrt()
        logits = scale * (x @ phi) / norms
        slots = (logits.softmax(0).mT @ x).unflatten(0, (E, 2))
        hidden = slots @ w_in
        made = ((hidden / (1 + (-hidden).exp())) @ w_out).flatten(0, 1)
        c = logits.softmax(1)
        mass = c.sum(0).unflatten(0, (E, 2)).sum(1)
        spread = mass.var(correction=0) / mass.mean().square()
        return c @ made, logits.logsumexp(1).square().mean(), spread, -(c * c.log()).sum(1).mean()

    args = (_rand(T, M, seed=50), _rand(M, E, 2, seed=55), torch.tensor(1.3, dtype=torch.float64), w_in, w_out)
    return Subject("soft_moe", soft, plain, args)


def router_subjects() -> dict[str, Subject]:
    """All routers (plain `TopK` is in the whole layer), and the operation that they add."""
    every = [_assignment_subject(), *map(_subject, ROUTERS), _soft_subject()]
    return {subject.name: subject for subject in every}

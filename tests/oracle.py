"""The one oracle: a slow loop over tokens in float64, written from the definition of the layer.

Every result and every gradient of fmoe is compared with it. It shares no code with fmoe: capacity,
queues, drops, losses and experts are restated here from the equations in the plainest form.
"""

from __future__ import annotations

import math
from collections import defaultdict
from fractions import Fraction

import torch
from torch import Tensor

#: Tolerances (rtol, atol) on values and gradients, scaled by the caller's largest entry.
TOLERANCE = {
    torch.float64: (1e-10, 1e-10),
    torch.float32: (2e-5, 2e-5),
    torch.bfloat16: (3e-2, 3e-2),
    torch.float16: (4e-3, 4e-3),
}


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype = torch.float64, what: str = "") -> None:
    """Compares in float64 with the tolerance of `dtype`, relative to the largest expected entry."""
    rtol, atol = TOLERANCE[dtype]
    a, b = actual.detach().to(torch.float64), expected.detach().to(torch.float64)
    scale = float(b.abs().max()) if b.numel() else 0.0
    torch.testing.assert_close(
        a, b, rtol=rtol, atol=atol * max(scale, 1.0), msg=lambda text: f"{what}: {text}", check_dtype=False
    )


def one_expert(experts: dict[str, Tensor], e: int, row: Tensor, activation: str) -> Tensor:
    """One expert on one row."""
    plain = {
        "relu": torch.relu,
        "gelu": lambda z: 0.5 * z * (1 + torch.erf(z / math.sqrt(2))),
        "silu": lambda z: z / (1 + torch.exp(-z)),
    }
    w_in, w_out = experts["w_in"][e], experts["w_out"][e]
    b_in = experts["b_in"][e] if "b_in" in experts else 0
    if activation in ("swiglu", "geglu"):
        act = plain["silu" if activation == "swiglu" else "gelu"]
        z = torch.einsum("m,mgh->gh", row, w_in) + b_in
        h = act(z[0]) * z[1]
    elif activation == "swiglu_oss":
        gate, value = torch.einsum("m,mgh->gh", row, w_in) + b_in
        gate = torch.where(gate > 7, 7, gate)
        h = (torch.where(value.abs() > 7, 7 * value.sign(), value) + 1) * gate / (1 + torch.exp(-1.702 * gate))
    else:
        h = plain[activation](row @ w_in + b_in)
    y = h @ w_out
    return y + experts["b_out"][e] if "b_out" in experts else y


def choose(scores: list[float], k: int) -> list[int]:
    """The k best, ties to the lowest id."""
    return sorted(range(len(scores)), key=lambda e: (-scores[e], e))[:k]


def capacity_of(factor, minimum, tokens: int, k: int, experts: int) -> int:
    """C_g in exact rationals."""
    exact = Fraction(str(factor))
    return min(tokens, max(minimum, math.ceil(exact * k * tokens / experts)))


def layer(
    x: Tensor,
    weight: Tensor,
    experts: dict[str, Tensor],
    *,
    k: int,
    activation: str = "swiglu",
    order: str = "softmax_topk",
    normalize: bool = True,
    factor=None,
    minimum: int = 0,
    groups: list[int] | None = None,
    mask: Tensor | None = None,
    noise: Tensor | None = None,
    noise_std: float = 1.0,
) -> tuple[Tensor, dict[str, Tensor], dict[str, object]]:
    """y, the auxiliary losses and what was chosen, token by token. x is [T,M] in float64."""
    tokens, num_experts = x.shape[0], weight.shape[1]
    groups = [tokens] if groups is None else groups
    valid = [t for t in range(tokens) if mask is None or bool(mask[t])]
    clean = {t: x[t] @ weight for t in valid}
    noisy = {t: clean[t] + (0 if noise is None else noise[t] * noise_std / num_experts) for t in valid}
    chosen = {t: choose(noisy[t].tolist(), k) for t in valid}
    gates = {}
    for t in valid:
        picked = noisy[t][chosen[t]]
        if order == "topk_softmax":
            gates[t] = torch.softmax(picked, 0)
        else:
            p = torch.softmax(noisy[t], 0)[chosen[t]]
            gates[t] = p / p.sum() if normalize else p

    kept: dict[tuple[int, int], bool] = {}
    first = 0
    for size in groups:
        here = [t for t in range(first, first + size) if t in chosen]
        limit = math.inf if factor is None else capacity_of(factor, minimum, len(here), k, num_experts)
        used: dict[int, int] = defaultdict(int)
        for j in range(k):
            for t in here:
                kept[t, j] = used[chosen[t][j]] < limit
                used[chosen[t][j]] += 1
        first += size

    rows = []
    for t in range(tokens):
        y = x.new_zeros(experts["w_out"].shape[2])
        if t in chosen:
            for j, e in enumerate(chosen[t]):
                if kept[t, j]:
                    y = y + gates[t][j] * one_expert(experts, e, x[t], activation)
        rows.append(y)
    y = torch.stack(rows) if rows else x.new_zeros(0, experts["w_out"].shape[2])
    counts = [sum(chosen[t].count(e) for t in valid) for e in range(num_experts)]
    aux = losses(clean, noisy, chosen, counts, num_experts, k, noise_std, x)
    return y, aux, {"chosen": chosen, "kept": kept, "counts": counts, "dropped": sum(not v for v in kept.values())}


def losses(clean, noisy, chosen, counts, num_experts, k, noise_std, like) -> dict[str, Tensor]:
    """Balance, z, importance, load and entropy of the tokens given."""
    n = len(clean)
    if n == 0:
        zero = like.new_zeros(())
        return dict.fromkeys(("balance", "z", "importance", "load", "entropy"), zero)
    probs = [torch.softmax(noisy[t], 0) for t in noisy]
    mean = sum(probs) / n
    balance = num_experts * sum(counts[e] / (n * k) * mean[e] for e in range(num_experts))
    z = sum(torch.logsumexp(clean[t], 0) ** 2 for t in clean) / n
    width = noise_std / num_experts
    chance = sum(0.5 * (1 + torch.erf((clean[t] - noisy[t][chosen[t][-1]]) / width / math.sqrt(2))) for t in clean)
    entropy = sum(-(p * torch.log(p)).sum() for p in probs) / n

    def variation(v: Tensor) -> Tensor:
        return ((v - v.mean()) ** 2).mean() / v.mean() ** 2

    return {"balance": balance, "z": z, "importance": variation(mean), "load": variation(chance), "entropy": entropy}

"""Tutel's layer restated: a loop over tokens in float64, from its public definition, sharing no code with fmoe."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as nnf
from torch import Tensor


def logits_of(gate, x: Tensor) -> Tensor:
    """Linear or cosine logits, from a gate's parameters."""
    if hasattr(gate, "wg"):
        return x @ gate.wg.weight.to(x.dtype).t()
    token = nnf.normalize(x @ gate.cosine_projector.weight.t() + gate.cosine_projector.bias, dim=1)
    return token @ nnf.normalize(gate.sim_matrix, dim=0) * gate.temperature.clamp(max=math.log(100)).exp()


def layer(
    x: Tensor,
    logits: Tensor,
    experts: list,
    *,
    k: int,
    factor: float = 1.0,
    noise: Tensor | None = None,
    gate_noise: float = 0.0,
    postscore: bool = True,
    priority: bool = False,
    normalize: bool = True,
    gshard: bool = True,
    samples: int | None = None,
) -> tuple[Tensor, Tensor]:
    """y ``[T,O]`` and l_aux. `experts` are functions of one row."""
    tokens, num_experts = logits.shape
    k = min(k, num_experts)
    noisy = logits if noise is None else logits + gate_noise * noise / num_experts
    scores = noisy.softmax(1)
    table = scores.tolist()
    chosen = [sorted(range(num_experts), key=lambda e: (-table[t][e], e))[:k] for t in range(tokens)]
    limit = math.inf
    if factor:
        limit = k * int(abs(factor) * math.ceil((samples or tokens) / num_experts))
    order = list(range(tokens))
    if priority:
        order.sort(key=lambda t: -max(table[t]))
    kept, used = {}, [0] * num_experts
    for j in range(k):
        for t in order:
            kept[t, j] = used[chosen[t][j]] < limit
            used[chosen[t][j]] += 1
    rows = []
    for t in range(tokens):
        gates = scores[t][chosen[t]]
        if normalize and k > 1:
            gates = gates / gates.sum()
        y = experts[0](x[t]) * 0
        for j, e in enumerate(chosen[t]):
            if kept[t, j]:
                y = y + (gates[j] * experts[e](x[t]) if postscore else experts[e](gates[j] * x[t]))
        rows.append(y)
    return torch.stack(rows), loss(logits, noisy, scores, chosen, gate_noise, gshard)


def loss(logits, noisy, scores, chosen, gate_noise: float, gshard: bool) -> Tensor:
    """GShard's loss, or the importance and load losses."""
    tokens, num_experts = logits.shape
    if gshard:
        first = [sum(ids[0] == e for ids in chosen) / tokens for e in range(num_experts)]
        return num_experts * sum(first[e] * scores[:, e].mean() for e in range(num_experts))
    clean = logits.softmax(1)
    width = gate_noise / num_experts
    load = sum(
        0.5 * (1 + torch.erf((clean[t] - noisy[t, chosen[t][-1]]) / (width * math.sqrt(2)))) for t in range(tokens)
    )

    def variation(v: Tensor) -> Tensor:
        return ((v - v.mean()) ** 2).sum() / (num_experts - 1) / (v.mean() ** 2 + 1e-10)

    return (variation(clean.sum(0)) + variation(load)) / 2


def ffn(state: dict[str, Tensor], activation=torch.relu, prefix: str = "experts.") -> list:
    """One function for each expert of a whole ``"ffn"`` state."""

    def one(e: int):
        w1, w2 = state[f"{prefix}batched_fc1_w"][e], state[f"{prefix}batched_fc2_w"][e]
        b1, b2 = (state.get(f"{prefix}batched_fc{i}_bias") for i in (1, 2))
        return lambda row: activation(w1 @ row + (0 if b1 is None else b1[e])) @ w2 + (0 if b2 is None else b2[e])

    return [one(e) for e in range(state[f"{prefix}batched_fc1_w"].shape[0])]


def llama(state: dict[str, Tensor], num_experts: int, dim: int, activation=nnf.silu, prefix: str = "experts.") -> list:
    """The same of a whole ``"llama_ffn"`` state."""
    w1, w2 = (state[f"{prefix}W_fc{i}"].view(num_experts, dim, -1) for i in (1, 2))
    w3 = state[f"{prefix}W_fc3"].view(num_experts, -1, dim)
    return [lambda row, e=e: (activation(row @ w1[e]) * (row @ w2[e])) @ w3[e] for e in range(num_experts)]

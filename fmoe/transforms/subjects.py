"""What the transform table runs on: every operation and the layer, beside the same in plain torch.

The references use ordinary torch operations alone. Routing and rows are written as one-hot products,
so they cost E times the work and hold for any transform.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..functional.config import MoEConfig
from ..functional.moe import moe
from ..functional.routers import TopK
from ..ops.activations import ACTIVATIONS
from ..ops.ffn import ffn, ffn_backward
from ..ops.grouped import gmm, gmm_dw, gmm_t, grouped_matmul
from ..ops.rearrange import combine, expand, rowdot
from ..ops.routing import assign_slots, row_index, top_k
from ..ops.wide import wide_linear
from ..values import ExpertParams, MoEParams, RouterParams

Function = Callable[..., Any]
BATCH = 3
T, M, H, E, K = 4, 3, 2, 4, 2
CAPACITY = 0.75


@dataclass(frozen=True)
class Subject:
    """A function of float64 tensors, its reference in plain torch, and arguments to try it on.

    The first argument is the data, the others are the parameters. `batched` holds `BATCH` slightly
    different copies of each argument in dim 0, `tangents` a direction for forward mode.
    """

    name: str
    function: Function
    reference: Function
    args: tuple[Tensor, ...]

    batched: tuple[Tensor, ...] = field(init=False)
    tangents: tuple[Tensor, ...] = field(init=False)

    def __post_init__(self) -> None:
        batched = [a + 0.05 * _rand(BATCH, *a.shape, seed=20 + i) for i, a in enumerate(self.args)]
        tangents = [_rand(*a.shape, seed=30 + i) for i, a in enumerate(self.args)]
        object.__setattr__(self, "batched", tuple(batched))
        object.__setattr__(self, "tangents", tuple(tangents))


def one_hot(ids: Tensor, size: int) -> Tensor:
    """``[...] -> [...,size]`` float64; all 0 where the id is -1."""
    return (ids.unsqueeze(-1) == torch.arange(size)).to(torch.float64)


def _rand(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _rearrange_subjects() -> list[Subject]:
    rows = 6
    index = torch.tensor([[0, 3], [5, -1], [1, 4], [-1, 2]])
    place = one_hot(index, rows)  # [T,K,R]
    x, y, w = _rand(T, M, seed=1), _rand(rows, M, seed=2), _rand(T, K, seed=3)
    return [
        Subject(
            "combine",
            lambda y, w: combine(y, index, w),
            lambda y, w: torch.einsum("tkr,tk,rm->tm", place, w, y),
            (y, w),
        ),
        Subject(
            "expand",
            lambda x, w: expand(x, index, w, rows),
            lambda x, w: torch.einsum("tkr,tk,tm->rm", place, w, x),
            (x, w),
        ),
        Subject(
            "rowdot",
            lambda x, y: rowdot(x, y, index),
            lambda x, y: torch.einsum("tkr,tm,rm->tk", place, x, y),
            (x, y),
        ),
    ]


def _grouped_subjects() -> list[Subject]:
    rows = 6
    sizes = torch.tensor([2, 0, 3, 0])
    last = sizes.cumsum(0)
    groups = torch.stack([last - sizes, last, torch.tensor([1, 0, 3, 2])], 1)
    owner = one_hot(torch.tensor([1, 1, 3, 3, 3, -1]), E)  # [R,E], the matrix of each row
    plain = one_hot(torch.tensor([0, 0, 2, 2, 2, -1]), E)
    x, dy, w = _rand(rows, M, seed=4), _rand(rows, H, seed=5), _rand(E, M, H, seed=6)
    return [
        Subject(
            "gmm",
            lambda x, w: gmm(x, w, groups),
            lambda x, w: torch.einsum("re,rm,emh->rh", owner, x, w),
            (x, w),
        ),
        Subject(
            "gmm_t",
            lambda dy, w: gmm_t(dy, w, groups),
            lambda dy, w: torch.einsum("re,rh,emh->rm", owner, dy, w),
            (dy, w),
        ),
        Subject(
            "gmm_dw",
            lambda x, dy: gmm_dw(x, dy, groups, E),
            lambda x, dy: torch.einsum("re,rm,rh->emh", owner, x, dy),
            (x, dy),
        ),
        Subject(
            "grouped_matmul",
            lambda x, w: grouped_matmul(x, w, sizes),
            lambda x, w: torch.einsum("re,rm,emh->rh", plain, x, w),
            (x, w),
        ),
        Subject("wide_linear", wide_linear, lambda x, w: x @ w, (x, w[0])),
    ]


def _best(scores: Tensor, k: int) -> Tensor:
    """The k best of each row in plain torch; the subjects' scores have no ties."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :k]


def _slots(experts: Tensor, capacity: int) -> Tensor:
    """Place of each choice in its expert's queue, first choices first, in plain torch; -1 if dropped."""
    chosen = one_hot(experts, E)  # [T,K,E]
    queue = chosen.transpose(0, 1).flatten(0, 1).cumsum(0).unflatten(0, (experts.shape[1], -1)).transpose(0, 1)
    slot = (queue * chosen).sum(-1) - 1
    return torch.where(slot < capacity, slot, -1.0)


def _plain_rows(scores: Tensor) -> Tensor:
    """What `row_index` returns, flattened, in plain torch."""
    experts = _best(scores, K)
    slot = _slots(experts, 2)
    kept = one_hot(experts, E) * (slot >= 0).unsqueeze(-1)
    sizes = kept.sum((0, 1))
    first = sizes.cumsum(0) - sizes
    index = torch.where(slot >= 0, (kept * first).sum(-1) + slot, -1.0)
    at = index.flatten().unsqueeze(-1) == torch.arange(T * K)  # [choices, rows]
    order = torch.where(at.any(0), (at * torch.arange(T * K).unsqueeze(-1)).sum(0), -1)
    groups = torch.stack([first, first + sizes, torch.arange(E, dtype=scores.dtype)], 1)
    return torch.cat([index.flatten(), order.to(scores.dtype), groups.flatten()])


def _routing_subjects() -> list[Subject]:
    """Integer results weigh the scores, so that every transform has something to do."""
    scores = _rand(T, E, seed=9)

    def slots(scores: Tensor) -> Tensor:
        experts = top_k(scores, K)
        return assign_slots(experts.unsqueeze(0), torch.full((1, 1), 2), [T], E)[0].squeeze(0)

    def rows(scores: Tensor) -> Tensor:
        index, order, groups = row_index(top_k(scores, K), slots(scores), E, T * K)
        return torch.cat([index.flatten(), order, groups.flatten()]).to(scores.dtype)

    return [
        Subject(
            "top_k",
            lambda scores: scores.gather(1, top_k(scores, K)),
            lambda scores: scores.gather(1, _best(scores, K)),
            (scores,),
        ),
        Subject(
            "assign_slots",
            lambda scores: slots(scores).to(scores.dtype) * scores[:, :K],
            lambda scores: _slots(_best(scores, K), 2) * scores[:, :K],
            (scores,),
        ),
        Subject(
            "row_index",
            lambda scores: rows(scores) * scores.sum(),
            lambda scores: _plain_rows(scores) * scores.sum(),
            (scores,),
        ),
    ]


def _layer_args(gated: bool) -> tuple[Tensor, ...]:
    half = (2,) if gated else ()
    return (
        _rand(T, M, seed=10),
        _rand(M, E, seed=11),
        _rand(E, M, *half, H, seed=12) / 2,
        _rand(E, *half, H, seed=13),
        _rand(E, H, M, seed=14) / 2,
        _rand(E, M, seed=15),
    )


def _plain_experts(name: str, x: Tensor, w_in: Tensor, b_in: Tensor, w_out: Tensor, b_out: Tensor) -> Tensor:
    """``[T,M] -> [T,E,M]``: every token through every expert."""
    z = torch.einsum("tm,emd->ted", x, w_in.flatten(2)) + b_in.flatten(1)
    return torch.einsum("teh,ehm->tem", ACTIVATIONS[name](z), w_out) + b_out


_INDEX = torch.tensor([[0, 3], [-1, 1], [4, 2], [-1, -1]])
_ORDER = torch.tensor([0, 3, 5, 1, 4, -1, -1, -1])
_GROUPS = torch.tensor([[0, 2, 0], [2, 2, 1], [2, 4, 2], [4, 5, 3]])
_EXPERTS = torch.tensor([[0, 2], [-1, 0], [3, 2], [-1, -1]])


def _ffn_subject(name: str) -> Subject:
    x, _, w_in, b_in, w_out, b_out = _layer_args(ACTIVATIONS[name].gated)
    chosen = one_hot(_EXPERTS, E)  # [T,K,E]

    def fused(x: Tensor, w: Tensor, w_in: Tensor, b_in: Tensor, w_out: Tensor, b_out: Tensor) -> Tensor:
        up, bias = (w_in.flatten(2), b_in.flatten(1)) if ACTIVATIONS[name].gated else (w_in, b_in)
        return ffn(x, w, up, bias, w_out, b_out, _INDEX, _ORDER, _GROUPS, name, torch.is_grad_enabled())[0]

    def plain(x: Tensor, w: Tensor, *parameters: Tensor) -> Tensor:
        return torch.einsum("tke,tk,tem->tm", chosen, w, _plain_experts(name, x, *parameters))

    return Subject(f"ffn {name}", fused, plain, (x, _rand(T, K, seed=16), w_in, b_in, w_out, b_out))


def _ffn_backward_subject() -> Subject:
    x, w, w_in, _, w_out, _ = _ffn_subject("swiglu").args
    chosen = one_hot(_EXPERTS, E)

    def fused(grad: Tensor, x: Tensor, w: Tensor, w_in: Tensor, w_out: Tensor) -> Any:
        z = gmm(expand(x, _INDEX, torch.ones_like(w), T * K), w_in.flatten(2), _GROUPS)
        parameters = (w_in.flatten(2), None, w_out, None)
        routing = (_INDEX, _ORDER, _GROUPS, _GROUPS[:, 2])
        needs = [True, True, True, False, True, False]
        dx, dw, dw_in, _, dw_out, _ = ffn_backward(grad, x, w, *parameters, z, *routing, E, "swiglu", needs)
        return dx, dw, dw_in, dw_out

    def plain(grad: Tensor, x: Tensor, w: Tensor, w_in: Tensor, w_out: Tensor) -> Any:
        gate, value = torch.einsum("tm,emgh->gteh", x, w_in).unbind(0)
        s = torch.sigmoid(gate)
        h = gate * s * value
        y_grad = torch.einsum("tke,tk,tm->tem", chosen, w, grad)
        h_grad = torch.einsum("tem,ehm->teh", y_grad, w_out)
        dw = torch.einsum("tke,tm,teh,ehm->tk", chosen, grad, h, w_out)
        dz = torch.cat([h_grad * value * (s + gate * s * (1 - s)), h_grad * gate * s], -1)
        dx = torch.einsum("ted,emd->tm", dz, w_in.flatten(2))
        return dx, dw, torch.einsum("tm,ted->emd", x, dz), torch.einsum("teh,tem->ehm", h, y_grad)

    return Subject("ffn_backward", fused, plain, (_rand(T, M, seed=17), x, w, w_in, w_out))


def _layer_subject(layout: str) -> Subject:
    """The whole layer with its losses; the padded one drops."""
    capacity = CAPACITY if layout == "padded" else None
    config = MoEConfig(
        num_experts=E, model_dim=M, hidden_dim=H, router=TopK(K), bias=True, capacity=capacity, layout=layout
    )

    def layer(x: Tensor, weight: Tensor, w_in: Tensor, b_in: Tensor, w_out: Tensor, b_out: Tensor) -> Any:
        params = MoEParams(RouterParams(weight), ExpertParams(w_in, w_out, b_in, b_out))
        y, aux = moe(params, x, config)
        return y, aux.balance, aux.z, aux.importance, aux.load, aux.entropy

    def plain(x: Tensor, weight: Tensor, *experts: Tensor) -> Any:
        logits = x @ weight
        probs = logits.softmax(-1)
        ids = _best(logits, K)
        w = probs.gather(1, ids)
        w = w / w.sum(-1, keepdim=True)
        if capacity is not None:
            w = torch.where(_slots(ids, min(T, -int(-capacity * K * T // E))) >= 0, w, 0.0)
        y = torch.einsum("tke,tk,tem->tm", one_hot(ids, E), w, _plain_experts("swiglu", x, *experts))
        share, mean = one_hot(ids, E).mean((0, 1)), probs.mean(0)
        chance = torch.special.ndtr((logits - logits.gather(1, ids[:, -1:])) * E).mean(0)
        return (
            y,
            E * (share * mean).sum(),
            logits.logsumexp(-1).square().mean(),
            mean.var(correction=0) / mean.mean().square(),
            chance.var(correction=0) / chance.mean().square(),
            -(probs * probs.log()).sum(-1).mean(),
        )

    return Subject(f"moe {layout}", layer, plain, _layer_args(gated=True))


def subjects() -> dict[str, Subject]:
    """All subjects by name."""
    every = [*_rearrange_subjects(), *_grouped_subjects(), *_routing_subjects(), *map(_ffn_subject, ACTIVATIONS)]
    every += [_ffn_backward_subject(), _layer_subject("ragged"), _layer_subject("padded")]
    return {subject.name: subject for subject in every}

"""The layers that `gpu.py` times, and the contenders of each.

Every contender of a problem starts from the same numbers. Its `flops` are those of its own matmuls over
experts, so that a peer without a gate in its FFN is not credited with three matmuls.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as nnf
from layer_peers import Config, Contender, Problem, _flat_leaves, _route, dense, fmoe_layer, mixtral
from torch import Tensor

import fmoe
from fmoe import functional as F


@dataclass(frozen=True)
class Shape:
    """One layer to time.

    Attributes:
        layer: sizes.
        activation: of its experts.
        goals: what is asked on one H200: ``forward`` and ``train`` in TFLOP/s, ``saved_gb``, and ``over_grouped_mm``.
        small: whether launches are most of its time, so that a captured graph is timed too.
    """

    layer: Config
    activation: str
    goals: dict[str, float]
    small: bool = False

    @property
    def name(self) -> str:
        """As in tables."""
        return self.layer.name


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            Config("qwen3", 32768, 2048, 768, 128, 8), "swiglu",
            {"forward": 450, "train": 380, "saved_gb": 0.94, "over_grouped_mm": 1.5},
        ),
        Shape(
            Config("mixtral", 32768, 4096, 14336, 8, 2), "swiglu",
            {"forward": 590, "train": 510, "over_grouped_mm": 1.5},
        ),
        # the rows that one rank of eight gets of DeepSeek-V3, for its 32 of 256 experts
        Shape(Config("deepseek3", 16384, 7168, 2048, 32, 8), "swiglu", {"over_grouped_mm": 1.5}),
        # SwinV2-MoE-S, 192 pixels, batch 128: stages 3 and 4
        Shape(Config("swin3", 18432, 384, 1536, 32, 1), "gelu", {}, small=True),
        Shape(Config("swin4", 4608, 768, 3072, 32, 1), "gelu", {}, small=True),
        Shape(Config("decode", 64, 2048, 768, 128, 8, decode=True), "swiglu", {}, small=True),
    )
}  # fmt: skip


def shrunk(shape: Shape) -> Shape:
    """The same for a CPU: fewer of everything."""
    c = shape.layer
    fewer = {"tokens": min(c.tokens, 96), "model_dim": 32, "hidden_dim": 24, "experts": 8, "k": min(c.k, 2)}
    small = replace(c, **fewer)
    return replace(shape, layer=small)


def draw(shape: Shape, device: torch.device, dtype: torch.dtype, seed: int) -> Problem:
    """Fresh random numbers on the device; weights at the scale of `fmoe.init`."""
    c, generator = shape.layer, torch.Generator(device).manual_seed(seed)
    halves = (2,) if shape.activation == "swiglu" else ()

    def normal(scale: float, *dims: int) -> Tensor:
        return torch.randn(dims, generator=generator, device=device, dtype=dtype).mul_(scale)

    params = fmoe.MoEParams(
        fmoe.RouterParams(normal(c.model_dim**-0.5, c.model_dim, c.experts)),
        fmoe.ExpertParams(
            normal(c.model_dim**-0.5, c.experts, c.model_dim, *halves, c.hidden_dim),
            normal(c.hidden_dim**-0.5, c.experts, c.hidden_dim, c.model_dim),
        ),
    )
    return Problem(c, shape.activation, normal(1.0, c.tokens, c.model_dim), params)


def grouped_mm(problem: Problem) -> Contender:
    """`torch.nn.functional.grouped_mm` by hand, with nothing read on the host and nothing copied from it."""
    x, router, w_in, w_out = leaves = _flat_leaves(problem)
    k, num_experts = problem.config.k, problem.config.experts

    def run() -> Tensor:
        gates, experts = (x @ router).softmax(-1, dtype=torch.float32).topk(k, dim=-1)
        weights = (gates / gates.sum(-1, keepdim=True) if k > 1 else gates).to(x.dtype)
        flat = experts.flatten()
        order = flat.argsort(stable=True)
        ends = flat.new_zeros(num_experts).scatter_add_(0, flat, torch.ones_like(flat)).cumsum(0).int()
        h = activate(nnf.grouped_mm(x.index_select(0, order // k), w_in, offs=ends), problem.activation)
        rows = nnf.grouped_mm(h, w_out, offs=ends)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
        return (rows.index_select(0, inverse).view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(1)

    return Contender("grouped_mm", run, leaves)


_ACTIVATIONS = {"relu": nnf.relu, "gelu": nnf.gelu, "geglu": nnf.gelu, "silu": nnf.silu, "swiglu": nnf.silu}


def activate(z: Tensor, activation: str) -> Tensor:
    """The activation of z, of which a gated one has the gate in its first half."""
    if not activation.endswith("glu"):
        return _ACTIVATIONS[activation](z)
    gate, up = z.chunk(2, dim=-1)
    return _ACTIVATIONS[activation](gate) * up


def dense_ffn(problem: Problem) -> Contender:
    """One FFN on T*K rows: the layer's FLOPs without any routing, the limit."""
    made = dense(problem)
    x, w_in, w_out = made.leaves
    return replace(made, run=lambda: activate(x @ w_in, problem.activation) @ w_out)


def transformers_experts(problem: Problem) -> Contender:
    """`MixtralSparseMoeBlock` of transformers with its grouped_mm experts; swiglu only."""
    made = mixtral(problem, "grouped_mm")
    if made is None:
        raise NotImplementedError("swiglu only")
    return replace(made, name="transformers")


# --- layers of other libraries, where they are installed -----------------------------------------------------------


def scattermoe(problem: Problem) -> Contender:
    """Its GLU experts behind Mixtral's router; its halves stand the other way round."""
    mlp = importlib.import_module("scattermoe.mlp")
    c = problem.config
    x, router, w_in, w_out = problem.transposed()
    with torch.device(x.device):
        experts = mlp.GLUMLP(c.model_dim, c.hidden_dim, c.experts, c.k, activation=nnf.silu).to(x.dtype)
    with torch.no_grad():
        gate, up = w_in.detach().chunk(2, dim=1)
        experts.experts.weight.copy_(torch.cat([up, gate], dim=1))
        experts.output_experts.weight.copy_(w_out.detach())

    def run() -> Tensor:
        weights, ids = _route(x, router.t(), c.k)
        made: Tensor = experts(x, weights, ids)
        return made

    return Contender("scattermoe", run, (x, router, *experts.parameters()), transposed=True)


def megablocks(problem: Problem) -> Contender:
    """Its dropless layer with weights of its own: timed, its values are not compared."""
    arguments = importlib.import_module("megablocks.layers.arguments").Arguments
    c, (x, *_) = problem.config, problem.leaves()
    layer = importlib.import_module("megablocks.layers.dmoe").dMoE(
        arguments(
            hidden_size=c.model_dim, ffn_hidden_size=c.hidden_dim, moe_num_experts=c.experts, moe_top_k=c.k,
            mlp_type="glu", mlp_impl="grouped", activation_fn=nnf.silu, bias=False, bf16=True, fp16=False,
            return_bias=False, device=x.device,
        )
    ).to(x.dtype)  # fmt: skip
    return Contender("megablocks", lambda: layer(x.unsqueeze(1)).squeeze(1), (x, *layer.parameters()))


def tutel(problem: Problem) -> Contender:
    """Its layer with its own FFN, which has no gate: two matmuls where swiglu has three; values are not compared."""
    c, (x, *_) = problem.config, problem.leaves()
    layer = importlib.import_module("tutel.moe").moe_layer(
        gate_type={"type": "top", "k": c.k}, model_dim=c.model_dim,
        experts={
            "type": "ffn", "count_per_node": c.experts, "hidden_size_per_expert": c.hidden_dim,
            "activation_fn": nnf.silu,
        },
    ).to(x.device, x.dtype)  # fmt: skip
    return Contender("tutel", lambda: layer(x), (x, *layer.parameters()))


#: Name -> (maker, whether its values are compared with fmoe's, matmuls of its FFN in swiglu).
CONTENDERS: dict[str, tuple[Callable[[Problem], Contender], bool, int]] = {
    "fmoe": (fmoe_layer, True, 3),
    "dense": (dense_ffn, False, 3),
    "grouped_mm": (grouped_mm, True, 3),
    "transformers": (transformers_experts, True, 3),
    "scattermoe": (scattermoe, True, 3),
    "megablocks": (megablocks, False, 3),
    "tutel": (tutel, False, 2),
}


def flops(name: str, shape: Shape, train: bool) -> float:
    """Of a contender's matmuls over experts."""
    whole = shape.layer.flops("swiglu" if shape.activation == "swiglu" else "relu", train)
    return whole * (CONTENDERS[name][2] / 3 if shape.activation == "swiglu" else 1)


def least_bytes(shape: Shape, train: bool, size: int = 2) -> float:
    """Bytes that a pass must move: each kernel's inputs read once, tokens too, and its outputs written once.

    Forward: gather and up (z and h written), down, weighted sum. Backward: dh with its epilogue, dx of
    rows, their sum, and two weight gradients that gather again.
    """
    c = shape.layer
    columns = c.hidden_dim * (2 if shape.activation.endswith("glu") else 1)
    rows, tokens = c.tokens * c.k, c.tokens * c.model_dim
    z, h, out = rows * columns, rows * c.hidden_dim, rows * c.model_dim
    w_in, w_out = c.experts * c.model_dim * columns, c.experts * c.hidden_dim * c.model_dim
    moved = (tokens + w_in + z + h) + (h + w_out + out) + (out + tokens)
    if train:
        moved += (tokens + w_out + z + z + h) + (z + w_in + out) + (out + tokens)
        moved += (tokens + z + w_in) + (tokens + h + w_out)
    return float(moved * size)


# --- the reference ---------------------------------------------------------------------------------------------------


def oracle(x: Tensor, params: Any, experts: Tensor, activation: str, normalize: bool) -> Tensor:
    """The layer for given experts, in the dtype of x, expert by expert, by plain torch operations."""
    gates = (x @ params.router.weight).softmax(-1).gather(1, experts)
    weights = gates / gates.sum(-1, keepdim=True) if normalize else gates
    y = torch.zeros(x.shape[0], params.experts.w_out.shape[-1], dtype=x.dtype, device=x.device)
    own = params.experts
    for e in experts.unique().tolist():
        token, choice = (experts == e).nonzero(as_tuple=True)
        z = x[token] @ own.w_in[e].flatten(1)
        if own.b_in is not None:
            z = z + own.b_in[e].flatten()
        row = activate(z, activation) @ own.w_out[e]
        if own.b_out is not None:
            row = row + own.b_out[e]
        y = y.index_add(0, token, row * weights[token, choice, None])
    return y


def chosen_by(params: Any, x: Tensor, config: fmoe.MoEConfig) -> Tensor:
    """``[T,K]``: the experts that the layer itself chooses."""
    return F.gate(params.router, x, config.router).experts

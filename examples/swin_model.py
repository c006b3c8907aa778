"""A SwinV2 classifier of images as pure functions, with a mixture of experts in some of its blocks.

    config = SwinConfig(experts=8)
    params = init(config, seed=0)                        # dicts of tensors and `fmoe.MoEParams`
    logits, routings = forward(params, images, config)   # and so is every other function here

Self-attention inside windows of an image, every other block with windows that are shifted by half of one;
the image halves and the width doubles from stage to stage. What makes it version 2: norms stand behind
attention and feed-forward network, attention compares directions (cosines over a learned temperature of at
least 0.01), and the bias of a pair of places is a small network of their distance on a log scale.
The second block of each pair has experts, in the last `moe_stages` stages.

Letters: B images of H x W places, C channels, N heads, D dim of a head, w the side of a window, P = w*w its
places, E experts.

References: SwinV2 (arXiv 2111.09883), Swin (arXiv 2103.14030), its mixture of experts in Tutel (arXiv
2206.03382, section 5).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import optree
import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as nn

import fmoe
from fmoe import functional as F

Params = dict[str, Any]
ROUTERS = {"linear": fmoe.TopK(1), "cosine": fmoe.Cosine(1, dim=16)}


@dataclass(frozen=True)
class SwinConfig:
    """Sizes and choices of the model.

    Args:
        size: side of an image; a multiple of ``patch * 2^(stages - 1)``, at each stage of its window.
        channels: of an image.
        classes: to tell apart.
        patch: side of the patch that one place of the first stage stands for.
        window: w, made smaller where a stage has fewer places.
        dim: width of the first stage; it doubles at each.
        depths: blocks of each stage.
        heads: N in each stage.
        hidden: hidden dim of a feed-forward network, or of an expert, over the width.
        experts: E; 0 for a dense model.
        moe_stages: the last stages, which have experts in every other block.
        router: a name in `ROUTERS`.
        capacity: factor; the least certain tokens of the batch are dropped.
    """

    size: int = 16
    channels: int = 1
    classes: int = 10
    patch: int = 2
    window: int = 4
    dim: int = 32
    depths: tuple[int, ...] = (2, 4, 2)
    heads: tuple[int, ...] = (2, 4, 8)
    hidden: int = 4
    experts: int = 0
    moe_stages: int = 2
    router: str = "linear"
    capacity: float = 1.25

    def moe(self, width: int, capacity: float | None = None) -> fmoe.MoEConfig:
        """The MoE layer of a block."""
        return fmoe.MoEConfig(
            num_experts=self.experts,
            model_dim=width,
            hidden_dim=self.hidden * width,
            router=ROUTERS[self.router],
            activation="gelu",
            bias=True,
            capacity=fmoe.Capacity(self.capacity if capacity is None else capacity, priority="batch"),
        )


@dataclass(frozen=True, eq=False)
class Block:
    """What is fixed about a block by the sizes of the model.

    Attributes:
        stage: where it is, from 0.
        width: C.
        heads: N.
        side: of the image in this stage.
        window: w.
        shift: places by which windows are shifted.
        moe: whether it has experts.
        coords: ``[(2w-1)^2,2]``, from `log_distances`.
        pairs: ``[P,P]``, from `pair_index`.
        mask: ``[windows,1,P,P]``, from `shift_mask`.
    """

    stage: int
    width: int
    heads: int
    side: int
    window: int
    shift: int
    moe: bool
    coords: Tensor
    pairs: Tensor
    mask: Tensor


@functools.cache
def blocks_of(config: SwinConfig) -> tuple[Block, ...]:
    """The blocks of a model, in order. Made once: they are constants of the sizes."""
    blocks = []
    for stage, (depth, heads) in enumerate(zip(config.depths, config.heads, strict=True)):
        side = config.size // config.patch // 2**stage
        window = min(config.window, side)
        for index in range(depth):
            odd = index % 2 == 1
            shift = window // 2 if odd and window < side else 0  # one window sees everything already
            moe = odd and config.experts > 0 and stage >= len(config.depths) - config.moe_stages
            tables = log_distances(window), pair_index(window), shift_mask(side, window, shift)
            blocks.append(Block(stage, config.dim * 2**stage, heads, side, window, shift, moe, *tables))
    return tuple(blocks)


def misfits(config: SwinConfig) -> list[str]:
    """What is wrong with the sizes; empty if nothing is."""
    problems = []
    unit = config.patch * 2 ** (len(config.depths) - 1)
    if config.size % unit:
        return [f"size {config.size} is not a multiple of {unit}, a patch of the last of {len(config.depths)} stages"]
    for stage, heads in enumerate(config.heads):
        side, width = config.size // config.patch // 2**stage, config.dim * 2**stage
        window = min(config.window, side)
        if side % window:
            problems.append(f"stage {stage} has {side} x {side} places, which windows of {window} do not divide")
        if width % heads:
            problems.append(f"stage {stage} has width {width}, which {heads} heads do not divide")
    return problems


# --- windows -----------------------------------------------------------------------------------------------


def to_windows(x: Tensor, window: int) -> Tensor:
    """``[B,H,W,C] -> [B,windows,P,C]``, windows and their places row by row."""
    return rearrange(x, "b (h p) (w q) c -> b (h w) (p q) c", p=window, q=window)


def from_windows(windows: Tensor, side: int) -> Tensor:
    """The inverse of `to_windows` for an image of side `side`."""
    window = math.isqrt(windows.shape[2])
    return rearrange(windows, "b (h w) (p q) c -> b (h p) (w q) c", h=side // window, p=window)


def shift_mask(side: int, window: int, shift: int) -> Tensor:
    """``[windows,1,P,P]``: -100 between places that only shifting made neighbours, 0 elsewhere.

    Rolling the image by `shift` brings its first rows and columns behind the last ones. Of a window there,
    places from both ends of the image do not see each other.
    """
    row = torch.arange(side)
    part = (row >= side - window).long() + (row >= side - shift).long() if shift else torch.zeros_like(row)
    parts = to_windows((3 * part[:, None] + part).view(1, side, side, 1), window)[0, :, :, 0]  # [windows,P]
    return torch.where(parts[:, :, None] == parts[:, None, :], 0.0, -100.0).unsqueeze(1)


def log_distances(window: int) -> Tensor:
    """``[(2w-1)^2,2]``: row and column distances in a window on a log scale, from -log2(9)/3 to log2(9)/3.

    Distance d is scaled to ``8 d / (w - 1)``, then ``sign(d) log2(1 + |d|) / log2(8)``: a window of another
    size asks for little that is new.
    """
    d = torch.arange(1 - window, window, dtype=torch.float32) * 8 / max(1, window - 1)
    d = d.sign() * (1 + d.abs()).log2() / math.log2(8)
    return torch.cartesian_prod(d, d)


def pair_index(window: int) -> Tensor:
    """``[P,P]`` int64: the row of `log_distances` for each pair of places, of the first one minus the second."""
    at = torch.cartesian_prod(torch.arange(window), torch.arange(window))
    apart = at[:, None] - at[None, :] + window - 1
    return apart[..., 0] * (2 * window - 1) + apart[..., 1]


# --- the model ---------------------------------------------------------------------------------------------


def init(config: SwinConfig, *, seed: int) -> Params:
    """Makes the parameters: normal with variance 1 / fan_in, temperatures 0.1, norms 1 and 0.

    Norms behind attention and feed-forward networks begin at 0.1, so that blocks begin close to the identity.
    """
    generator = torch.Generator().manual_seed(seed)

    def linear(fan_in: int, fan_out: int) -> Tensor:
        return torch.randn(fan_in, fan_out, generator=generator) * fan_in**-0.5

    def norm(width: int, scale: float = 1.0) -> Params:
        return {"scale": torch.full((width,), scale), "shift": torch.zeros(width)}

    def feed_forward(index: int, block: Block) -> Any:
        hidden = config.hidden * block.width
        if block.moe:
            params = fmoe.init(
                config.moe(block.width), seed=int(np.random.SeedSequence([seed, index]).generate_state(1)[0])
            )
            return dataclasses.replace(params, experts=dataclasses.replace(params.experts, b_out=None))
        w_in, w_out = linear(block.width, hidden), linear(hidden, block.width)
        return {"w_in": w_in, "b_in": torch.zeros(hidden), "w_out": w_out}

    def block_params(index: int, block: Block) -> Params:
        width, heads = block.width, block.heads
        return {
            "qkv": linear(width, 3 * width),
            "q_bias": torch.zeros(width),
            "v_bias": torch.zeros(width),
            "log_scale": torch.full((heads, 1, 1), math.log(10)),
            "distance": {"w_in": linear(2, 64), "b_in": torch.zeros(64), "w_out": linear(64, heads) * 0.1},
            "out": linear(width, width),
            "out_bias": torch.zeros(width),
            "norm_attention": norm(width, 0.1),
            "ffn": feed_forward(index, block),
            "norm_ffn": norm(width, 0.1),
        }

    blocks = blocks_of(config)
    widths = [config.dim * 2**stage for stage in range(len(config.depths))]
    return {
        "patch": linear(config.patch**2 * config.channels, config.dim),
        "patch_norm": norm(config.dim),
        "blocks": [block_params(index, block) for index, block in enumerate(blocks)],
        "merges": [{"weight": linear(4 * width, 2 * width), "norm": norm(2 * width)} for width in widths[:-1]],
        "norm": norm(widths[-1]),
        "head": linear(widths[-1], config.classes) * 0.1,
        "head_bias": torch.zeros(config.classes),
    }


def forward(
    params: Params,
    images: Tensor,
    config: SwinConfig,
    *,
    noise: list[Tensor] | None = None,
    capacity: float | None = None,
) -> tuple[Tensor, list[fmoe.Routing]]:
    """Logits ``[B,classes]`` of ``images [B,size,size,channels]``, and the routing of each MoE layer.

    Args:
        params: from `init`.
        images: of mean 0 and variance 1.
        config: sizes.
        noise: standard normal, from `draw_noise`; none to classify.
        capacity: factor in place of the config's.
    """
    noises = iter(noise or ())
    x = rearrange(images, "b (h p) (w q) c -> b h w (p q c)", p=config.patch, q=config.patch)
    x = layer_norm(x @ params["patch"], params["patch_norm"])
    routings, stage = [], 0
    for block, p in zip(blocks_of(config), params["blocks"], strict=True):
        if block.stage > stage:
            x, stage = merge(x, params["merges"][stage]), block.stage
        x = x + layer_norm(window_attention(x, p, block), p["norm_attention"])
        if block.moe:
            y, routing = experts(x, p, config.moe(block.width, capacity), next(noises, None))
            routings.append(routing)
        else:
            y = layer_norm(feed_forward(x, p["ffn"]), p["norm_ffn"])
        x = x + y
    x = layer_norm(x, params["norm"]).mean((1, 2))
    return x @ params["head"] + params["head_bias"], routings


def layer_norm(x: Tensor, params: Params) -> Tensor:
    """Mean 0 and variance 1 over channels, then a learned scale and shift."""
    return nn.layer_norm(x, x.shape[-1:], params["scale"], params["shift"])


def merge(x: Tensor, params: Params) -> Tensor:
    """``[B,H,W,C] -> [B,H/2,W/2,2C]``: the four places of a square, down its columns, then a norm."""
    x = rearrange(x, "b (h p) (w q) c -> b h w (q p c)", p=2, q=2)
    return layer_norm(x @ params["weight"], params["norm"])


def window_attention(x: Tensor, params: Params, block: Block) -> Tensor:
    """Attention inside the windows of ``x [B,H,W,C]``, shifted or not."""
    shift = block.shift
    if shift:
        x = x.roll((-shift, -shift), (1, 2))
    x = from_windows(cosine_attention(to_windows(x, block.window), params, block), block.side)
    return x.roll((shift, shift), (1, 2)) if shift else x


def cosine_attention(x: Tensor, params: Params, block: Block) -> Tensor:
    """Self-attention in each window of ``x [B,windows,P,C]``.

    softmax_j(cos(q_i, k_j) * exp(min(log_scale, log 100)) + bias_ij + mask_ij)
    """
    bias = torch.cat([params["q_bias"], torch.zeros_like(params["q_bias"]), params["v_bias"]])  # keys have none
    q, k, v = rearrange(
        x @ params["qkv"] + bias, "b window p (three n d) -> three b window n p d", three=3, n=block.heads
    )
    scale = params["log_scale"].clamp(max=math.log(100)).exp()
    scores = (unit(q) * scale) @ unit(k).mT
    scores = scores + position_bias(params["distance"], block)
    if block.shift:
        scores = scores + block.mask.to(scores)
    y = rearrange(scores.softmax(-1) @ v, "b window n p d -> b window p (n d)")
    return y @ params["out"] + params["out_bias"]


def unit(x: Tensor) -> Tensor:
    """Vectors of length 1 along the last dim; 0 stays 0."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-12).rsqrt()


def position_bias(params: Params, block: Block) -> Tensor:
    """``[N,P,P]``, from 0 to 16: a network of two distances, looked up for each pair of places."""
    table = nn.relu(block.coords.to(params["w_in"]) @ params["w_in"] + params["b_in"]) @ params["w_out"]  # [(2w-1)^2,N]
    return 16 * table.sigmoid().t().index_select(1, block.pairs.flatten()).unflatten(1, block.pairs.shape)


def feed_forward(x: Tensor, params: Params) -> Tensor:
    """A dense feed-forward network, without a bias behind it, as experts have none."""
    return nn.gelu(x @ params["w_in"] + params["b_in"]) @ params["w_out"]


def experts(x: Tensor, params: Params, config: fmoe.MoEConfig, noise: Tensor | None) -> tuple[Tensor, fmoe.Routing]:
    """``weight * norm(expert(x))`` of each place, with one expert each; 0 where it is dropped.

    The norm stands before the weight. Behind it, as ``norm(weight * expert(x))``, it would divide the only
    weight of a place out again, and the router would learn nothing from what the experts do.
    """
    moe = params["ffn"]
    routing = F.gate(moe.router, x, config.router, capacity=config.capacity, noise=noise)
    tokens = F.dispatch(x, routing, layout="padded")
    tokens = F.expert_apply(moe.experts, tokens, activation=config.activation)
    y = F.combine(tokens, dataclasses.replace(routing, weights=torch.ones_like(routing.weights)))
    weights = torch.where(routing.slots >= 0, routing.weights, 0).view(*x.shape[:-1], 1)
    return weights * layer_norm(y, params["norm_ffn"]), routing


def draw_noise(config: SwinConfig, batch: int, generator: torch.Generator) -> list[Tensor]:
    """Noise for the routers of `forward`, which explore with it; none for routers without noise."""
    if "noise" not in ROUTERS[config.router].takes:
        return []
    shapes = [(batch, block.side, block.side, config.experts) for block in blocks_of(config) if block.moe]
    return [torch.randn(shape, generator=generator) for shape in shapes]


# --- what is asked of it -----------------------------------------------------------------------------------


def objective(
    params: Params, images: Tensor, labels: Tensor, config: SwinConfig, noise: list[Tensor] | None = None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """What training lowers, and the cross-entropy with the counts ``[layers,E]`` of experts' choices.

    Cross-entropy, plus 0.01 times the mean of importance and load loss (V-MoE, arXiv 2106.05974) of each
    layer.
    """
    logits, routings = forward(params, images, config, noise=noise)
    nats = nn.cross_entropy(logits, labels)
    total = nats
    for routing in routings:
        total = total + 0.01 * (routing.aux.importance + routing.aux.load) / 2
    counts = torch.stack([r.counts for r in routings]) if routings else torch.zeros(0, 0, dtype=torch.int64)
    return total, (nats.detach(), counts)


def parameter_counts(params: Params) -> tuple[int, int]:
    """How many parameters there are, and how many of them work on one place."""
    leaves = sum(leaf.numel() for leaf in optree.tree_leaves(params))
    idle = 0
    for block in params["blocks"]:
        if isinstance(block["ffn"], fmoe.MoEParams):
            held = block["ffn"].experts
            idle += sum(leaf.numel() - leaf[0].numel() for leaf in optree.tree_leaves(held))
    return leaves, leaves - idle

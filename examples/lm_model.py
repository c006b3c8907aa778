"""A byte-level language model as pure functions, with a mixture of experts in every block, and its text.

    config = LMConfig(dim=128, layers=2, heads=4, moe=fmoe.MoEConfig(8, 128, 256))
    params = init(config, seed=0)                        # dicts of tensors and `fmoe.MoEParams`
    logits, auxes = forward(params, tokens, config)      # and so is every other function here

Each block is ``x + attention(norm(x))``, then ``x + moe(norm(x))``: causal attention with rotary
positions, RMS norms, and `fmoe.moe`. `LMConfig.dense` puts one feed-forward network in place of the
experts. Letters: B sequences of L bytes, M model dim, N heads, D dim of a head, E experts, V = 256.
"""

from __future__ import annotations

import dataclasses
import math
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optree
import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as nn

import fmoe

BYTES = 256
STDLIB = "stdlib"
Params = dict[str, Any]


class Refused(Exception):
    """Input that cannot be used; the message says which, and what would do."""


class Failed(Exception):
    """A run that cannot go on."""


# --- the model ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LMConfig:
    """Sizes of the model; `moe` holds those of the experts.

    Args:
        dim: M, the width of the residual stream.
        layers: number of blocks.
        heads: N attention heads; M / N is even.
        moe: the layer in every block, of ``model_dim=dim``.
        dense: hidden dim of one feed-forward network in place of the experts; None for experts.
        dtype: dtype to compute in. Norms, the router and the loss stay in fp32 or wider.
    """

    dim: int
    layers: int
    heads: int
    moe: fmoe.MoEConfig
    dense: int | None = None
    dtype: torch.dtype = torch.float32

    @property
    def param_dtype(self) -> torch.dtype:
        """Dtype of the parameters: that of the computation, but never narrower than fp32."""
        return torch.promote_types(self.dtype, torch.float32)


def init(config: LMConfig, *, seed: int) -> Params:
    """Makes the parameters: normal with variance 1 / fan_in, less where a block adds to the residual stream."""
    generator = torch.Generator().manual_seed(seed)
    dim, dtype = config.dim, config.param_dtype
    residual = (2 * config.layers) ** -0.5

    def normal(*shape: int, std: float) -> Tensor:
        return (torch.randn(shape, generator=generator) * std).to(dtype)

    def feed_forward(layer: int) -> Any:
        if config.dense is not None:
            w_in = normal(dim, 2 * config.dense, std=dim**-0.5)
            return {"w_in": w_in, "w_out": normal(config.dense, dim, std=config.dense**-0.5 * residual)}
        stream = int(np.random.SeedSequence([seed, layer]).generate_state(1)[0])  # its own in every layer
        params = fmoe.init(config.moe, seed=stream, dtype=dtype)
        return fmoe.MoEParams(params.router, scaled_output(params.experts, residual))

    def block(layer: int) -> Params:
        return {
            "norm_attention": torch.ones(dim, dtype=dtype),
            "qkv": normal(dim, 3 * dim, std=dim**-0.5),
            "out": normal(dim, dim, std=dim**-0.5 * residual),
            "norm_ffn": torch.ones(dim, dtype=dtype),
            "ffn": feed_forward(layer),
        }

    return {
        "embed": normal(BYTES, dim, std=1.0),
        "blocks": [block(layer) for layer in range(config.layers)],
        "norm": torch.ones(dim, dtype=dtype),
        "head": normal(dim, BYTES, std=dim**-0.5),
    }


def forward(params: Params, tokens: Tensor, config: LMConfig) -> tuple[Tensor, list[fmoe.Aux]]:
    """Logits ``[B,L,V]`` of the byte after each of ``tokens [B,L]``, and what the MoE layers report."""
    # not params["embed"][tokens]: the gradient of indexing adds up in another order in every run
    x = nn.embedding(tokens, params["embed"].to(config.dtype))
    rotation = rotary(tokens.shape[1], config.dim // config.heads, like=x)
    auxes = []
    for block in params["blocks"]:
        x = x + attention(block, rms_norm(x, block["norm_attention"]), rotation, config.heads)
        h = rms_norm(x, block["norm_ffn"])
        if config.dense is None:
            y, aux = fmoe.moe(block["ffn"], h, config.moe)
            auxes.append(aux)
        else:
            y = dense_ffn(block["ffn"], h)
        x = x + y
    return rms_norm(x, params["norm"]) @ params["head"].to(config.dtype), auxes


#: `forward`, or what runs it in another way: under a plan, on the tokens of one rank.
Model = Callable[[Params, Tensor, LMConfig], tuple[Tensor, list[fmoe.Aux]]]


def attention(block: Params, x: Tensor, rotation: tuple[Tensor, Tensor], heads: int) -> Tensor:
    """Causal self-attention."""
    q, k, v = rearrange(x @ block["qkv"].to(x.dtype), "b l (three n d) -> three b n l d", three=3, n=heads)
    y = nn.scaled_dot_product_attention(rotate(q, rotation), rotate(k, rotation), v, is_causal=True)
    return rearrange(y, "b n l d -> b l (n d)") @ block["out"].to(x.dtype)


def rotary(length: int, dim: int, *, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine ``[L,D/2]`` of the angle by which each pair of features turns at each position."""
    speed = 10000.0 ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * speed
    return angle.cos().to(like), angle.sin().to(like)


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turns each pair of features of ``x [B,N,L,D]`` by its angle (RoPE, arXiv 2104.09864)."""
    cos, sin = rotation
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Scales each token to a root mean square of 1, in the dtype of `weight`, then back to that of x."""
    return nn.rms_norm(x.to(weight.dtype), x.shape[-1:], weight, eps=1e-6).to(x.dtype)


def dense_ffn(params: Params, x: Tensor) -> Tensor:
    """A SwiGLU feed-forward network."""
    gate, up = (x @ params["w_in"].to(x.dtype)).chunk(2, dim=-1)
    return (nn.silu(gate) * up) @ params["w_out"].to(x.dtype)


# --- what is asked of it -----------------------------------------------------------------------------------


def cross_entropy(
    params: Params, windows: Tensor, config: LMConfig, *, model: Model = forward
) -> tuple[Tensor, list[fmoe.Aux]]:
    """Mean nats per byte of ``windows [B,L+1]``, in which each byte but the first is predicted."""
    logits, auxes = model(params, windows[:, :-1], config)
    return nn.cross_entropy(logits.to(config.param_dtype).flatten(0, 1), windows[:, 1:].flatten()), auxes


def objective(
    params: Params, windows: Tensor, config: LMConfig, *, model: Model = forward
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """What training lowers, and as its auxiliary values: nats per byte, counts ``[layers,E]``, dropped ``[layers]``."""
    nats, auxes = cross_entropy(params, windows, config, model=model)
    total = nats
    for aux in auxes:
        total = total + 0.01 * aux.balance + 0.001 * aux.z
    none = torch.zeros(0, config.moe.num_experts, dtype=torch.int64)  # of a dense model
    counts = torch.stack([aux.counts for aux in auxes]) if auxes else none
    dropped = torch.stack([aux.dropped for aux in auxes]) if auxes else none[:, 0]
    return total, (nats.detach(), counts, dropped)


def scaled_output(ffn: Any, scale: float) -> Any:
    """The experts, or the feed-forward network, with all they add to the residual stream times `scale`."""
    if isinstance(ffn, dict):
        return {**ffn, "w_out": ffn["w_out"] * scale}
    return dataclasses.replace(ffn, w_out=ffn.w_out * scale)


def without_experts(params: Params) -> Params:
    """The same parameters with experts (or feed-forward networks) that output 0; the router stays."""

    def silenced(ffn: Any) -> Any:
        if isinstance(ffn, fmoe.MoEParams):
            return fmoe.MoEParams(ffn.router, scaled_output(ffn.experts, 0.0))
        return scaled_output(ffn, 0.0)

    return {**params, "blocks": [{**block, "ffn": silenced(block["ffn"])} for block in params["blocks"]]}


def parameter_counts(params: Params, config: LMConfig) -> tuple[int, int]:
    """How many parameters there are, and how many of them work on one byte."""
    total = sum(leaf.numel() for leaf in optree.tree_leaves(params))
    experts = [block["ffn"].experts for block in params["blocks"]] if config.dense is None else []
    in_experts = sum(leaf.numel() for leaf in optree.tree_leaves(experts))
    return total, total - in_experts + in_experts * config.moe.router.k // config.moe.num_experts


@torch.no_grad()
def evaluate(mean_nats: Callable[[Tensor], Tensor], text: Tensor, *, batch: int, length: int, batches: int) -> float:
    """Bits per byte over at most `batches` batches of windows, spread evenly over `text`, none overlapping.

    Args:
        mean_nats: nats per byte of ``windows [B,L+1]``.
        text: bytes.
        batch: windows to a batch.
        length: L.
        batches: how many.
    """
    count = min(batch * batches, (len(text) - 1) // length)
    starts = torch.arange(count) * ((len(text) - 1) // count)
    nats = 0.0
    for part in starts.split(batch):
        nats += float(mean_nats(windows_at(text, part, length))) * len(part)
    return nats / count / math.log(2)


@torch.no_grad()
def generate(
    params: Params, config: LMConfig, prompt: bytes, count: int, *, length: int, temperature: float, seed: int
) -> bytes:
    """`count` bytes after `prompt`, drawn from softmax(logits / temperature); the likeliest if that is 0."""
    config = dataclasses.replace(
        config, moe=config.moe.replace(capacity=None, layout=None)
    )  # one sequence: drop nothing
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    for _ in range(count):
        logits = forward(params, torch.tensor([text[-length:]]), config)[0][0, -1].double()
        if temperature > 0:
            logits = logits / temperature
            drawn = torch.multinomial((logits - logits.max()).softmax(0), 1, generator=generator)
        else:
            drawn = logits.argmax()
        text.append(int(drawn))
    return bytes(text[len(prompt) :])


# --- the text ----------------------------------------------------------------------------------------------


def read_text(source: str, limit: int) -> bytes:
    """The first `limit` bytes of a file, of a folder's files in the order of their names, or of `STDLIB`.

    `STDLIB` is the Python source of the standard library of this interpreter, without its tests.
    Hidden files and folders are left out.
    """
    root = Path(sysconfig.get_path("stdlib")) if source == STDLIB else Path(source)
    if root.is_dir():
        tests = {"site-packages", "dist-packages", "test", "tests", "idle_test"} if source == STDLIB else set()
        names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py" if tests else "*"))
        names = [n for n in names if not any(part in tests or part.startswith(".") for part in n.split("/"))]
        files = [root / name for name in names]
    elif root.is_file():
        files = [root]
    else:
        raise Refused(f"--data {source}: there is no such file or folder")
    text = bytearray()
    try:
        for path in files:
            if len(text) < limit and path.is_file():
                with path.open("rb") as file:
                    text += file.read(limit - len(text))
    except OSError as error:
        raise Refused(f"--data {source}: cannot read {path}: {error.strerror}") from None
    return bytes(text)


def split_text(text: bytes, source: str, length: int) -> tuple[Tensor, Tensor]:
    """Training and validation bytes; the last tenth is for validation, and no window crosses the cut."""
    if not text:
        raise Refused(f"--data {source}: holds no text")
    if len(text) < 10 * (length + 1):
        raise Refused(
            f"--data {source}: {len(text)} bytes are too few: --length {length} needs at least {10 * (length + 1)}"
        )
    whole = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    cut = len(whole) - len(whole) // 10
    return whole[:cut], whole[cut:]


def windows_at(text: Tensor, starts: Tensor, length: int) -> Tensor:
    """``[B,L+1]`` int64: the bytes from each of ``starts [B]``."""
    return text[starts[:, None] + torch.arange(length + 1)].long()


def training_windows(text: Tensor, *, seed: int, step: int, batch: int, length: int) -> Tensor:
    """The windows of one training step: they depend on these numbers and on nothing that came before."""
    starts = np.random.default_rng([seed, step]).integers(0, len(text) - length, size=batch)
    return windows_at(text, torch.from_numpy(starts), length)

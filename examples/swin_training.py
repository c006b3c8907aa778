"""One SwinV2 on its way: its parameters, their optimizer, what happened, and its file."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optree
import swin_model as swin
import torch
from lm_model import Failed, Refused
from swin_data import Images
from swin_model import Params, SwinConfig
from torch import Tensor
from torch.nn import functional as nn

import fmoe

FORMAT = "fmoe-swin"


@dataclass
class Run:
    """A model and how it fares.

    Attributes:
        name: for people.
        config: of the model.
        params: change in place.
        frozen: whether experts stay as they are.
        nats: cross-entropy of each step.
        counts: ``[layers,E]`` of each step, choices of experts.
        before: accuracy before the first step, of a model that was read from a file.
    """

    name: str
    config: SwinConfig
    params: Params
    frozen: bool = False
    nats: list[float] = field(default_factory=list)
    counts: list[Tensor] = field(default_factory=list)
    before: float | None = None


def split_experts(params: Params) -> tuple[Params, list[Any]]:
    """The parameters without their experts, and these; `joined` is the inverse."""
    rest, held = [], []
    for block in params["blocks"]:
        ffn = block["ffn"]
        if isinstance(ffn, fmoe.MoEParams):
            held.append(ffn.experts)
            block = {**block, "ffn": dataclasses.replace(ffn, experts=())}
        rest.append(block)
    return {**params, "blocks": rest}, held


def joined(params: Params, held: list[Any]) -> Params:
    """Parameters with the experts that `split_experts` took out."""
    experts, blocks = iter(held), []
    for block in params["blocks"]:
        if isinstance(block["ffn"], fmoe.MoEParams):
            block = {**block, "ffn": dataclasses.replace(block["ffn"], experts=next(experts))}
        blocks.append(block)
    return {**params, "blocks": blocks}


def gradient(run: Run, images: Tensor, labels: Tensor, noise: list[Tensor]) -> tuple[Params, tuple[Tensor, Tensor]]:
    """Gradients of `objective` in everything that learns, and its auxiliary values."""
    learning, held = split_experts(run.params) if run.frozen else (run.params, [])

    def objective(learning: Params) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        params = joined(learning, held) if run.frozen else learning
        return swin.objective(params, images, labels, run.config, noise)

    return torch.func.grad(objective, has_aux=True)(learning)


def shifted(images: Tensor, generator: torch.Generator) -> Tensor:
    """The batch moved by up to a pixel each way, its borders repeated."""
    down, right = torch.randint(0, 3, (2,), generator=generator).tolist()
    padded = nn.pad(images.permute(0, 3, 1, 2), (1, 1, 1, 1), mode="replicate").permute(0, 2, 3, 1)
    return padded[:, down : down + images.shape[1], right : right + images.shape[2]]


def train(run: Run, images: Images, *, steps: int, batch: int, lr: float, seed: int) -> Iterator[int]:
    """AdamW over shuffled epochs; the rate rises over the first tenth of the steps, then falls to 0 as a cosine.

    Yields:
        The number of each step that is done.

    Raises:
        Failed: if the loss is no longer finite.
    """
    generator = torch.Generator().manual_seed(seed)
    learning = split_experts(run.params)[0] if run.frozen else run.params
    leaves = optree.tree_leaves(learning)
    groups = [
        {"params": [leaf for leaf in leaves if leaf.dim() > 1], "weight_decay": 0.05},
        {"params": [leaf for leaf in leaves if leaf.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)
    batch = min(batch, len(images.train))
    order = torch.zeros(0, dtype=torch.int64)
    for step in range(1, steps + 1):
        if len(order) < batch:
            order = torch.randperm(len(images.train), generator=generator)
        rows, order = order[:batch], order[batch:]
        noise = swin.draw_noise(run.config, batch, generator)
        grads, (nats, counts) = gradient(run, shifted(images.train[rows], generator), images.train_labels[rows], noise)
        run.nats.append(float(nats))
        run.counts.append(counts)
        if not math.isfinite(run.nats[-1]):
            raise Failed(f"{run.name}: the loss of step {step} is {run.nats[-1]}: choose a smaller --lr, now {lr:g}")
        for leaf, grad in zip(leaves, optree.tree_leaves(grads), strict=True):
            leaf.grad = grad
        fmoe.clip_grad_norm_(leaves, 5.0)
        rise, progress = min(1.0, 10 * step / steps), max(0.0, (step - 0.1 * steps) / (0.9 * steps))
        for group in optimizer.param_groups:
            group["lr"] = lr * rise * (0.5 + 0.5 * math.cos(math.pi * progress))
        optimizer.step()
        yield step


@dataclass(frozen=True)
class Score:
    """What a model does with the test set: share of right answers, of dropped tokens, and `counts` ``[layers,E]``."""

    accuracy: float
    dropped: float
    counts: Tensor


@torch.no_grad()
def evaluate(run: Run, images: Images, *, batch: int, capacity: float | None = None) -> Score:
    """Classifies the test set, `batch` images at a time, which share their experts' capacity."""
    right = dropped = chosen = 0
    counts: Any = 0
    for part, labels in zip(images.test.split(batch), images.test_labels.split(batch), strict=True):
        logits, routings = swin.forward(run.params, part, run.config, capacity=capacity)
        right += int((logits.argmax(1) == labels).sum())
        dropped += sum(int(routing.aux.dropped) for routing in routings)
        if routings:
            counts = counts + torch.stack([routing.counts for routing in routings])
            chosen += sum(int(routing.counts.sum()) for routing in routings)
    counts = counts if chosen else torch.zeros(0, 0, dtype=torch.int64)
    return Score(right / len(images.test), dropped / max(chosen, 1), counts)


def seconds_of(call: Any) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def save(run: Run, path: Path, classes: tuple[str, ...]) -> None:
    """Writes a model, for ``--from``."""
    held = {"format": FORMAT, "config": dataclasses.asdict(run.config), "classes": list(classes), "params": run.params}
    with path.open("wb") as file:
        torch.save(held, file)


def load(path: Path) -> tuple[SwinConfig, tuple[str, ...], Params]:
    """What `save` wrote; no code in the file is ever run.

    Raises:
        Refused: if it is not such a file, or its tensors are not those of its config.
    """
    try:
        held = torch.load(path, weights_only=True)
    except OSError as error:
        raise Refused(f"--from {path}: {error.strerror or error}") from None
    except Exception:  # torch raises many kinds for a file that is not one of its own
        held = None
    if not isinstance(held, dict) or held.get("format") != FORMAT:
        raise Refused(f"--from {path}: not a model that swin_moe wrote")
    try:
        lists = {name: tuple(value) if isinstance(value, list) else value for name, value in held["config"].items()}
        config, params = SwinConfig(**lists), held["params"]
        expected = swin.init(config, seed=0)
        same = optree.tree_structure(params) == optree.tree_structure(expected) and all(
            a.shape == b.shape for a, b in zip(optree.tree_leaves(params), optree.tree_leaves(expected), strict=True)
        )
        classes = tuple(held["classes"])
    except (AttributeError, KeyError, TypeError, ValueError):
        same = False
    if not same or len(classes) != config.classes:
        raise Refused(f"--from {path}: a damaged model, its parameters do not fit its sizes")
    return config, classes, params

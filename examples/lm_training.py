"""One model on its way: its parameters, their optimizer, and the curves of what happened."""

from __future__ import annotations

from dataclasses import dataclass, field

import lm_model
import optree
import torch
from lm_model import LMConfig, Params
from lm_ranks import Runner
from torch import Tensor

import fmoe

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class Curves:
    """What happened at every step: bits per byte, rate, seconds, counts ``[layers,E]``, dropped ``[layers]``."""

    bits: list[float] = field(default_factory=list)
    rate: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    counts: list[Tensor] = field(default_factory=list)
    dropped: list[Tensor] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)

    def tensors(self, layers: int, experts: int) -> dict[str, Tensor]:
        """All but `validation`, with steps along dim 0."""
        numbers = {name: torch.tensor(getattr(self, name), dtype=torch.float64) for name in ("bits", "rate", "seconds")}
        counts = torch.stack(self.counts) if self.counts else torch.zeros(0, layers, experts, dtype=torch.int64)
        dropped = torch.stack(self.dropped) if self.dropped else torch.zeros(0, layers, dtype=torch.int64)
        return {**numbers, "counts": counts, "dropped": dropped}


class Training:
    """One model on its way. What a checkpoint holds of it has one name each, and changes in place."""

    def __init__(self, name: str, config: LMConfig, runner: Runner, *, seed: int):
        self.name, self.config, self.runner, self.curves = name, config, runner, Curves()
        self.params = runner.distribute(lm_model.init(config, seed=seed))
        paths = [".".join(map(str, path)) for path in optree.tree_paths(self.params)]
        self.leaves: dict[str, Tensor] = dict(zip(paths, optree.tree_leaves(self.params), strict=True))
        matrices = [leaf for leaf in self.leaves.values() if leaf.dim() > 1]
        vectors = [leaf for leaf in self.leaves.values() if leaf.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
        for leaf in self.leaves.values():  # as AdamW would begin, but before a checkpoint is to be written or read
            moments = {moment: torch.zeros_like(leaf) for moment in MOMENTS}
            self.optimizer.state[leaf] = {"step": torch.zeros(()), **moments}

    @property
    def step(self) -> int:
        """Steps done."""
        return len(self.curves.bits)

    def update(self, grads: Params, rate: float) -> None:
        """One step of AdamW along the functional gradients, clipped to norm 1."""
        for leaf, grad in zip(self.leaves.values(), optree.tree_leaves(grads), strict=True):
            leaf.grad = grad
        fmoe.clip_grad_norm_(list(self.leaves.values()), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()

    def state(self, steps: int | None = None) -> dict[str, Tensor]:
        """Parameters, optimizer state and curves by name; the curves empty, of length `steps`, if that is given."""
        state = {f"params.{name}": leaf for name, leaf in self.leaves.items()}
        for moment in MOMENTS:
            state |= {f"{moment}.{name}": self.optimizer.state[leaf][moment] for name, leaf in self.leaves.items()}
        layers = 0 if self.config.dense is not None else self.config.layers
        for name, curve in self.curves.tensors(layers, self.config.moe.num_experts).items():
            state[f"curves.{name}"] = curve if steps is None else curve.new_zeros(steps, *curve.shape[1:])
        return state

    def resume(self, state: dict[str, Tensor], validation: list[tuple[int, float]]) -> None:
        """Goes on from a `state` that was filled in: its curves are taken over, the rest is live already."""
        numbers = [state[f"curves.{name}"].tolist() for name in ("bits", "rate", "seconds")]
        lists = [list(state[f"curves.{name}"].unbind()) for name in ("counts", "dropped")]
        self.curves = Curves(*numbers, *lists, validation)
        for held in self.optimizer.state.values():
            held["step"].fill_(self.step)

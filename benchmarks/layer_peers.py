"""The contenders of `layer.py`, and the check that they compute the same.

All of one problem start from the same numbers. Each has leaves of its own, so that gradients do not
mix, and shares their memory where the layout is the same.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor

import fmoe

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Config:
    """One layer: T tokens of dim M through K of E experts of hidden dim H.

    Attributes:
        decode: a step with few tokens: forward only, and compared with reading the weights once.
    """

    name: str
    tokens: int
    model_dim: int
    hidden_dim: int
    experts: int
    k: int
    decode: bool = False

    def layer(self, activation: str) -> fmoe.MoEConfig:
        """The layer in fmoe's words."""
        return fmoe.MoEConfig(
            self.experts, self.model_dim, self.hidden_dim, router=fmoe.TopK(self.k), activation=activation
        )

    def flops(self, activation: str, train: bool) -> int:
        """Of the experts' matmuls; backward has two for each of forward's."""
        columns = self.hidden_dim * (3 if activation == "swiglu" else 2)
        return 2 * self.tokens * self.k * self.model_dim * columns * (3 if train else 1)


CONFIGS = {
    config.name: config
    for config in (
        Config("S", 512, 256, 512, 8, 2),
        Config("M", 4096, 512, 1024, 16, 2),
        Config("L", 4096, 1024, 2048, 8, 2),
        Config("F", 4096, 512, 256, 64, 8),
        Config("D", 16, 1024, 1024, 64, 8, decode=True),
    )
}


@dataclass(frozen=True)
class Contender:
    """Something to time.

    Attributes:
        name: as in the tables.
        run: one forward.
        leaves: what it has gradients of: x, router, w_in and w_out.
        transposed: whether its weights are stored ``[...,out,in]``.
    """

    name: str
    run: Callable[[], Tensor]
    leaves: tuple[Tensor, ...] = ()
    transposed: bool = False

    def gradients(self) -> list[Tensor]:
        """Of its leaves, in fmoe's layout, with the two halves of a gated ``w_in`` in one dim."""
        x, *weights = (leaf.grad for leaf in self.leaves)
        weights = [g.transpose(-2, -1) if self.transposed else g for g in weights]
        return [x, *(g.flatten(2) if g.dim() == 4 else g for g in weights)]


@dataclass
class Problem:
    """The numbers that all contenders of one layer start from."""

    config: Config
    activation: str
    x: Tensor
    params: fmoe.MoEParams
    stacked: dict[str, Tensor] = field(default_factory=dict)  # weights in a peer's own layout, made once

    @classmethod
    def draw(cls, config: Config, activation: str) -> Problem:
        """Random numbers in fp32, where no token is on the edge between two experts.

        A token is drawn again if its K-th and next logits are so near that rounding could decide.
        """
        params = fmoe.init(config.layer(activation), seed=0)
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(config.tokens, config.model_dim, generator=generator)
        near = torch.arange(config.tokens if config.k < config.experts else 0)
        while near.numel():
            best = (x[near].double() @ params.router.weight.double()).topk(config.k + 1).values
            near = near[best[:, -2] - best[:, -1] < 1e-4]
            x[near] = torch.randn(near.numel(), config.model_dim, generator=generator)
        return cls(config, activation, x, params)

    def to(self, dtype: torch.dtype) -> Problem:
        """The same problem in another dtype."""
        return Problem(self.config, self.activation, self.x.to(dtype), self.params.to(dtype))

    def leaves(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """New leaves x, router, w_in and w_out over the problem's memory."""
        experts = self.params.experts
        return tuple(map(_leaf, (self.x, self.params.router.weight, experts.w_in, experts.w_out)))  # type: ignore

    def transposed(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The same with weights stored ``[...,out,in]``, as `torch.nn.functional.linear` takes them."""
        if not self.stacked:
            experts = self.params.experts
            pairs = {"router": self.params.router.weight, "w_in": experts.w_in.flatten(2), "w_out": experts.w_out}
            self.stacked.update({name: w.transpose(-2, -1).contiguous() for name, w in pairs.items()})
        return tuple(map(_leaf, (self.x, *self.stacked.values())))  # type: ignore


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()


def _activate(z: Tensor, activation: str) -> Tensor:
    if activation == "relu":
        return z.relu()
    gate, up = z.chunk(2, dim=-1)
    return nnf.silu(gate) * up


def _route(x: Tensor, router: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Mixtral's router: softmax in fp32, the k largest, weights that add up to 1."""
    weights, experts = (x @ router).softmax(-1, dtype=torch.float32).topk(k, dim=-1)
    return (weights / weights.sum(-1, keepdim=True)).to(x.dtype), experts


def fmoe_layer(problem: Problem) -> Contender:
    """`fmoe.moe`, with its whole gate: slots, the five auxiliary values and the counts."""
    x, router, w_in, w_out = leaves = problem.leaves()
    params = fmoe.MoEParams(fmoe.RouterParams(router), fmoe.ExpertParams(w_in, w_out))
    layer = problem.config.layer(problem.activation)
    return Contender("fmoe", lambda: fmoe.moe(params, x, layer)[0], leaves)


def dense(problem: Problem) -> Contender:
    """The limit: the T*K rows, already gathered, through one expert; no routing."""
    config, experts = problem.config, problem.params.experts
    rows = problem.x.repeat_interleave(config.k, dim=0)
    x, w_in, w_out = leaves = tuple(map(_leaf, (rows, experts.w_in[0].flatten(1).clone(), experts.w_out[0].clone())))
    return Contender("dense", lambda: _activate(x @ w_in, problem.activation) @ w_out, leaves)


def loop(problem: Problem) -> Contender:
    """A loop over experts: find an expert's tokens, gather, two matmuls, scale, `index_add_`."""
    x, router, w_in, w_out = leaves = _flat_leaves(problem)

    def run() -> Tensor:
        weights, experts = _route(x, router, problem.config.k)
        y = torch.zeros_like(x)
        for e, (up, down) in enumerate(zip(w_in.unbind(0), w_out.unbind(0), strict=True)):
            token, choice = (experts == e).nonzero(as_tuple=True)
            if token.numel():
                h = _activate(x.index_select(0, token) @ up, problem.activation)
                y.index_add_(0, token, (h @ down) * weights[token, choice, None])
        return y

    return Contender("loop", run, leaves)


def grouped_mm(problem: Problem) -> Contender:
    """`torch.nn.functional.grouped_mm` by hand: sort, gather, two grouped matmuls, unsort, weighted sum."""
    x, router, w_in, w_out = leaves = _flat_leaves(problem)
    k, num_experts = problem.config.k, problem.config.experts

    def run() -> Tensor:
        weights, experts = _route(x, router, k)
        flat = experts.flatten()
        order = flat.argsort(stable=True)
        ends = torch.bincount(flat, minlength=num_experts).cumsum(0).int()
        h = _activate(nnf.grouped_mm(x.index_select(0, order // k), w_in, offs=ends), problem.activation)
        rows = nnf.grouped_mm(h, w_out, offs=ends)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel())
        return (rows.index_select(0, inverse).view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(1)

    return Contender("grouped_mm", run, leaves)


def _flat_leaves(problem: Problem) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Leaves with the two halves of a gated w_in side by side, ``[E,M,2H]``."""
    x, router, w_in, w_out = problem.leaves()
    return x, router, _leaf(w_in.flatten(2)), w_out


def mixtral(problem: Problem, implementation: str) -> Contender | None:
    """`transformers`' MixtralSparseMoeBlock, its experts "eager" (a loop) or "grouped_mm"; swiglu only."""
    if problem.activation != "swiglu":
        return None
    transformers = import_transformers()
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = problem.config
    with torch.device("meta"):
        block = MixtralSparseMoeBlock(
            transformers.MixtralConfig(
                hidden_size=config.model_dim,
                intermediate_size=config.hidden_dim,
                num_local_experts=config.experts,
                num_experts_per_tok=config.k,
                num_attention_heads=1,
                num_key_value_heads=1,
                experts_implementation=implementation,
            )
        )
    x, *weights = problem.transposed()
    router, w_in, w_out = (torch.nn.Parameter(w) for w in weights)
    block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj = router, w_in, w_out
    leaves = (x, router, w_in, w_out)
    return Contender(f"mixtral-{implementation}", lambda: block(x.unsqueeze(0)).squeeze(0), leaves, transposed=True)


def import_transformers() -> Any:
    """The module; raises ImportError where it is missing or its experts are not stacked (before version 5)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts  # noqa: F401
    return transformers


PEERS: dict[str, Callable[[Problem], Contender | None]] = {
    "loop": loop,
    "grouped_mm": grouped_mm,
    "mixtral-eager": lambda problem: mixtral(problem, "eager"),
    "mixtral-grouped_mm": lambda problem: mixtral(problem, "grouped_mm"),
}


def contenders(problem: Problem, peers: Sequence[str]) -> list[Contender]:
    """dense, fmoe, and those of `peers` that have the problem's activation."""
    made = (PEERS[name](problem) for name in peers)
    return [dense(problem), fmoe_layer(problem), *(peer for peer in made if peer is not None)]


def check(config: Config, activation: str, dtypes: Sequence[str], peers: Sequence[str]) -> list[dict[str, Any]]:
    """Compares every peer with fmoe; returns the errors, or leaves the program if one is too large."""
    results = []
    base = Problem.draw(config, activation)
    for dtype in dict.fromkeys(["fp32", *dtypes]):
        exact = dtype == "fp32"
        found = {}
        for runner in contenders(base.to(DTYPES[dtype]), peers)[1:]:
            with torch.set_grad_enabled(exact and not config.decode):
                y = runner.run()
                if y.requires_grad:
                    y.square().mean().backward()
            parts = [y.detach(), *(runner.gradients() if y.requires_grad else ())]
            found[runner.name] = parts
            for leaf in runner.leaves:
                leaf.grad = None
            errors = [(_error if exact else _row_error)(a, b) for a, b in zip(parts, found["fmoe"], strict=True)]
            limit = 1e-4 if exact else 0.03
            if not max(errors) <= limit:
                sys.exit(f"{runner.name} is not fmoe at {config.name} {activation} {dtype}: errors {errors}")
            where = {"config": config.name, "activation": activation, "dtype": dtype, "contender": runner.name}
            results.append(where | {"errors": errors, "limit": limit})
    return results


def _error(a: Tensor, b: Tensor) -> float:
    """Largest difference, over the largest value."""
    return float((a - b).abs().max() / b.abs().max())


def _row_error(a: Tensor, b: Tensor) -> float:
    """Relative error of a row, the median over rows: few tokens may have gone to another expert."""
    return float(((a - b).float().norm(dim=1) / b.float().norm(dim=1)).median())

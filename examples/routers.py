"""Every router on the same small language model and the same bytes, in one table.

    python examples/routers.py                       # one to two minutes on two cores
    python examples/routers.py --steps 20            # shorter
    python examples/routers.py --only TopK Sigmoid --out runs/routers

Each row trains a model of one block on the Python source of the standard library: attention, then a
mixture of 8 experts by one router. The table shows the bits per byte on text that was not trained on, the
share of choices that were dropped, the load of the fullest expert over the mean, experts that nobody chose,
choices per token, and the median step in milliseconds. ``loads`` has a bar for each expert, over the last
tenth of the steps; ``--out`` also draws them as routers.png. Routers marked * look at later bytes to route, so that
their loss flatters them: they are for encoders and vision.

What the rows show beside the routers: losses and updates that a router needs are a few lines each (`Recipe`),
and shared and residual experts are composition, one line each (`shared` and `residual` below).
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lm_model as lm
import optree
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as nn

import fmoe
from fmoe import functional as F

DIM, HIDDEN, EXPERTS, HEADS, LENGTH, BATCH = 64, 64, 8, 4, 64, 12
State = dict[str, Tensor]


@dataclass(frozen=True)
class Recipe:
    """A router and what goes with it.

    Attributes:
        router: as data.
        capacity: what is dropped.
        loss: of the router, from what the gate reports and the state.
        given: further arguments of the layer, from the state, the tokens and a generator.
        update: the state after a step; a selection bias and a coefficient are state of the user's.
        beside: what stands beside the experts: nothing, a shared expert, or a residual network.
    """

    router: fmoe.Router
    capacity: Any = None
    loss: Callable[[fmoe.Aux, State], Tensor] = lambda aux, state: 0.01 * aux.balance + 0.001 * aux.z
    given: Callable[[State, Tensor, torch.Generator], dict[str, Tensor]] = lambda state, tokens, generator: {}
    update: Callable[[State, fmoe.Aux, int], State] = lambda state, aux, tokens: state
    beside: str = ""


def noise(state: State, tokens: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    return {"noise": torch.randn(*tokens.shape, EXPERTS, generator=generator)}


def with_bias(state: State, tokens: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    return {"bias": state["bias"]}


def move_bias(state: State, aux: fmoe.Aux, tokens: int) -> State:
    return {**state, "bias": F.bias_update(state["bias"], aux.counts, rate=0.01)}


def move_l1(state: State, aux: fmoe.Aux, tokens: int) -> State:
    return {**state, "l1": F.l1_update(state["l1"], aux.counts, k=2, tokens=tokens)}


def z_only(aux: fmoe.Aux, state: State) -> Tensor:
    return 0.001 * aux.z


RECIPES = {
    "TopK": Recipe(fmoe.TopK(2), capacity=1.25),
    "TopK by score": Recipe(fmoe.TopK(2), capacity=fmoe.Capacity(1.25, priority="batch")),
    "TopK shared": Recipe(fmoe.TopK(1), beside="shared"),
    "TopK residual": Recipe(fmoe.TopK(1), beside="residual"),
    "NoisyTopK": Recipe(
        fmoe.NoisyTopK(2), given=noise, loss=lambda aux, state: 0.01 * (aux.importance + aux.load) + 0.001 * aux.z
    ),
    "GShard": Recipe(fmoe.GShard(), capacity=1.25, given=noise),
    "Cosine": Recipe(fmoe.Cosine(2, dim=16)),
    "Sigmoid": Recipe(fmoe.Sigmoid(2, expert_groups=4, top_groups=2), loss=z_only, given=with_bias, update=move_bias),
    "SqrtSoftplus": Recipe(fmoe.SqrtSoftplus(2), loss=z_only, given=with_bias, update=move_bias),
    "TopP": Recipe(
        fmoe.TopP(0.5, max_k=4), loss=lambda aux, state: 0.01 * aux.balance + 0.001 * aux.z + 0.01 * aux.entropy
    ),
    "ReLU": Recipe(fmoe.ReLU(2, max_k=4), loss=lambda aux, state: state["l1"] * aux.balance, update=move_l1),
    "Hash": Recipe(fmoe.Hash(1), loss=z_only, given=lambda state, tokens, generator: {"token_ids": tokens}),
    "Prototypes": Recipe(fmoe.Prototypes(2)),
    "ExpertChoice": Recipe(fmoe.ExpertChoice(2.0), loss=z_only),
    "Base": Recipe(fmoe.Base(), loss=z_only),
    "Sinkhorn": Recipe(fmoe.Sinkhorn(), loss=z_only),
    "SoftMoE": Recipe(fmoe.SoftMoE(8), loss=z_only),
}


def config_of(recipe: Recipe) -> fmoe.MoEConfig:
    return fmoe.MoEConfig(EXPERTS, DIM, HIDDEN, router=recipe.router, capacity=recipe.capacity)


def init(recipe: Recipe, *, seed: int) -> dict[str, Any]:
    config = lm.LMConfig(dim=DIM, layers=1, heads=HEADS, moe=config_of(recipe))
    params = lm.init(config, seed=seed)
    if recipe.beside:
        params["beside"] = fmoe.init(fmoe.MoEConfig(1, DIM, HIDDEN, router=fmoe.TopK(1)), seed=seed + 1).experts
    if recipe.beside == "residual":
        params["mix"] = torch.zeros(DIM, 2)
    return params


def layer(params: dict[str, Any], h: Tensor, recipe: Recipe, given: dict[str, Tensor]) -> tuple[Tensor, fmoe.Aux]:
    """The experts, and what stands beside them."""
    y, aux = fmoe.moe(params["blocks"][0]["ffn"], h, config_of(recipe), **given)
    if recipe.beside:
        w = params["beside"]
        gate, value = torch.einsum("blm,mgh->gblh", h, w.w_in[0])
        dense = (nn.silu(gate) * value) @ w.w_out[0]
    if recipe.beside == "shared":  # DeepSeekMoE: every token goes there too
        y = y + dense
    if recipe.beside == "residual":  # DeepSpeed's residual MoE: a learned mixture of both
        mix = (h @ params["mix"]).softmax(-1)
        y = mix[..., :1] * dense + mix[..., 1:] * y
    return y, aux


def cross_entropy(
    params: dict[str, Any], windows: Tensor, recipe: Recipe, given: dict[str, Tensor]
) -> tuple[Tensor, fmoe.Aux]:
    tokens, block = windows[:, :-1], params["blocks"][0]
    x = nn.embedding(tokens, params["embed"])
    rotation = lm.rotary(tokens.shape[1], DIM // HEADS, like=x)
    x = x + lm.attention(block, lm.rms_norm(x, block["norm_attention"]), rotation, HEADS)
    y, aux = layer(params, lm.rms_norm(x, block["norm_ffn"]), recipe, given)
    logits = lm.rms_norm(x + y, params["norm"]) @ params["head"]
    return nn.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()), aux


@dataclass(frozen=True)
class Result:
    """What a row shows."""

    bits: float
    dropped: float
    counts: Tensor
    per_token: float
    milliseconds: float


def train(recipe: Recipe, text: Tensor, held_out: Tensor, steps: int, *, seed: int = 0) -> Result:
    params = init(recipe, seed=seed)
    optimizer = torch.optim.AdamW(optree.tree_leaves(params), weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    state: State = {"bias": torch.zeros(EXPERTS), "l1": torch.tensor(1e-8)}

    def objective(params: Any, windows: Tensor, given: dict[str, Tensor], state: State) -> tuple[Tensor, fmoe.Aux]:
        nats, aux = cross_entropy(params, windows, recipe, given)
        return nats + recipe.loss(aux, state), optree.tree_map(torch.Tensor.detach, aux)

    counts, dropped, chosen = torch.zeros(EXPERTS, dtype=torch.int64), 0, 0
    tail, seconds = max(1, steps // 10), []
    for step in range(steps):
        start = time.perf_counter()
        windows = lm.training_windows(text, seed=seed, step=step, batch=BATCH, length=LENGTH)
        given = recipe.given(state, windows[:, :-1], generator)
        grads, aux = torch.func.grad(objective, has_aux=True)(params, windows, given, state)
        for leaf, grad in zip(optree.tree_leaves(params), optree.tree_leaves(grads), strict=True):
            leaf.grad = grad
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(1.0, (step + 1) / 10) * (0.1 + 0.9 * (1 - step / steps))
        optimizer.step()
        state = recipe.update(state, aux, BATCH * LENGTH)
        seconds.append(time.perf_counter() - start)
        if step >= steps - tail:
            counts, dropped, chosen = counts + aux.counts, dropped + int(aux.dropped), chosen + int(aux.counts.sum())
    with torch.no_grad():
        starts = torch.arange(64) * ((len(held_out) - 1) // 64 - 1)
        windows = lm.windows_at(held_out, starts.clamp(max=len(held_out) - LENGTH - 1), LENGTH)
        given = recipe.given(state, windows[:, :-1], generator)
        given.pop("noise", None)
        nats, _ = cross_entropy(params, windows, dataclasses.replace(recipe, capacity=None), given)
    per_token = chosen / (tail * BATCH * LENGTH)
    step = 1000 * statistics.median(seconds)
    return Result(float(nats) / math.log(2), dropped / max(chosen, 1), counts, per_token, step)


def bars(counts: Tensor) -> str:
    """A bar for each expert, as a share of twice the mean."""
    shares = counts.double() / (2 * counts.double().mean()).clamp(min=1e-9)
    return "".join(" ▁▂▃▄▅▆▇█"[min(8, math.ceil(8 * float(share)))] for share in shares)


def table_of(results: dict[str, Result]) -> Table:
    table = Table(title=f"{EXPERTS} experts; * looks at later bytes", box=box.SIMPLE, padding=(0, 1), pad_edge=False)
    for name in ("router", "bits", "dropped", "fullest", "dead", "choices", "ms", "loads"):
        table.add_column(name, justify="left" if name in ("router", "loads") else "right", no_wrap=True)
    for name, result in results.items():
        recipe = RECIPES[name]
        causal = recipe.router.causal and "batch" not in str(recipe.capacity)
        table.add_row(
            name + ("" if causal else " *"),
            f"{result.bits:.3f}",
            f"{result.dropped:.1%}",
            f"{1 + float(F.max_violation(result.counts)):.2f}",
            str(int(F.dead_experts(result.counts))),
            f"{result.per_token:.2f}",
            f"{result.milliseconds:.0f}",
            bars(result.counts),
        )
    return table


def draw(results: dict[str, Result], path: Path) -> None:
    """Loads of all experts, a panel for each router."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = -(-len(results) // 4)
    figure, axes = pyplot.subplots(rows, 4, figsize=(11, 2 * rows), sharex=True, sharey=True, squeeze=False)
    for axis in axes.flat[len(results) :]:
        axis.axis("off")
    for axis, (name, result) in zip(axes.flat, results.items(), strict=False):
        load = result.counts.double() / result.counts.double().mean().clamp(min=1)
        axis.bar(range(EXPERTS), load.tolist(), color="#4477aa")
        axis.axhline(1, color="#222222", linewidth=0.8)
        axis.set_title(f"{name}: {result.bits:.2f} bits", fontsize=9)
        axis.set_xticks(range(EXPERTS))
        axis.tick_params(labelsize=7)
    figure.supylabel("load / mean")
    figure.supxlabel("expert")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> dict[str, Result]:
    parser = argparse.ArgumentParser(description="Every router on the same small language model.")
    parser.add_argument("--steps", type=int, default=120, help="of training, for each router (120)")
    parser.add_argument("--only", nargs="+", choices=list(RECIPES), metavar="NAME", help="only these rows")
    parser.add_argument("--data", default=lm.STDLIB, help="file or folder of text; stdlib is Python's own source")
    parser.add_argument("--out", type=Path, help="folder for routers.png")
    given = parser.parse_args(arguments)
    if given.steps < 1:
        parser.error("--steps must be at least 1")
    try:
        text, held_out = lm.split_text(lm.read_text(given.data, 4_000_000), given.data, LENGTH)
    except lm.Refused as error:
        parser.error(str(error))
    console, results = Console(), {}
    for name in given.only or RECIPES:
        with console.status(f"training with {name}"):
            results[name] = train(RECIPES[name], text, held_out, given.steps)
    console.print(table_of(results))
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        draw(results, given.out / "routers.png")
        console.print(f"{given.out / 'routers.png'}")
    return results


if __name__ == "__main__":
    main()

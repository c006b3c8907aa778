"""What `swin_moe` prints and draws: the tables of accuracy and speed, and pictures of what the experts do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import swin_model as swin
import torch
from rich import box
from rich.table import Table
from swin_data import Images
from swin_training import Run, Score, evaluate, gradient, seconds_of
from torch import Tensor

from fmoe import functional as F

FACTORS = (1.25, 1.0, 0.625, 0.5)
COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#222222")


@dataclass(frozen=True)
class Speed:
    """Images per second in training, and in inference at each capacity factor (a dense model has one: None)."""

    train: float
    infer: dict[float | None, float]


def factors(run: Run) -> tuple[float | None, ...]:
    """The capacity factors that a run is measured at."""
    return FACTORS if run.config.experts else (None,)


def speeds(runs: list[Run], images: Images, *, batch: int, rounds: int) -> list[Speed]:
    """The best of `rounds` rounds; models take turns, so that what else the machine does hits them alike."""
    train, labels = images.train[:batch], images.train_labels[:batch]
    taken: list[dict[Any, list[float]]] = [{} for _ in runs]
    for _ in range(rounds + 1):  # the first one warms up
        for run, seconds in zip(runs, taken, strict=True):
            noise = swin.draw_noise(run.config, len(train), torch.Generator())
            seconds.setdefault("train", []).append(seconds_of(lambda r=run, n=noise: gradient(r, train, labels, n)))
            with torch.no_grad():
                for factor in factors(run):
                    call = lambda r=run, f=factor: swin.forward(r.params, train, r.config, capacity=f)  # noqa: E731
                    seconds.setdefault(factor, []).append(seconds_of(call))
    shown = []
    for seconds in taken:
        rate = {key: len(train) / min(times[1:]) for key, times in seconds.items()}
        shown.append(Speed(rate.pop("train"), rate))
    return shown


def scores(runs: list[Run], images: Images, *, batch: int) -> list[dict[float | None, Score]]:
    """The test set at each capacity factor, without training for it."""
    return [{f: evaluate(run, images, batch=batch, capacity=f) for f in factors(run)} for run in runs]


def usual(run: Run, values: dict[float | None, Any]) -> Any:
    """The value at the capacity factor that a model was trained with."""
    return values[run.config.capacity if run.config.capacity in values else next(iter(values))]


def table_of(runs: list[Run], found: list[dict[float | None, Score]], rates: list[Speed], test: int) -> Table:
    """One row for each model."""
    table = Table(title=f"SwinV2, {test} images to test on", box=box.SIMPLE, padding=0)
    before = ["before"] if any(run.before is not None for run in runs) else []
    for name in ("model", "parameters", "at work", *before, "accuracy", "train img/s", "infer img/s", "fullest"):
        table.add_column(name, justify="left" if name == "model" else "right", no_wrap=True)
    for run, by_factor, speed in zip(runs, found, rates, strict=True):
        total, active = swin.parameter_counts(run.params)
        score, infer = usual(run, by_factor), usual(run, speed.infer)
        cells = [run.name, f"{total / 1e6:.2f} M", f"{active / 1e6:.2f} M"]
        cells += [f"{run.before:.1%}"] if run.before is not None else []
        cells += [f"{score.accuracy:.1%}", f"{speed.train:,.0f}", f"{infer:,.0f}"]
        loads = [1 + float(F.max_violation(row)) for row in score.counts]
        table.add_row(*cells, f"{max(loads):.2f}" if loads else "")
    return table


def capacity_table(runs: list[Run], found: list[dict[float | None, Score]], rates: list[Speed]) -> Table:
    """Accuracy, share of dropped tokens and speed at each capacity factor in inference."""
    table = Table(title="capacity factor in inference, not trained for", box=box.SIMPLE, pad_edge=False)
    table.add_column("model", no_wrap=True)
    for factor in FACTORS:
        table.add_column(f"f = {factor:g}", justify="right", no_wrap=True)
    for run, by_factor, speed in zip(runs, found, rates, strict=True):
        if run.config.experts:
            table.add_row(run.name, *(f"{by_factor[f].accuracy:.1%}" for f in FACTORS))
            table.add_row("  tokens dropped", *(f"{by_factor[f].dropped:.1%}" for f in FACTORS))
            table.add_row("  img/s", *(f"{speed.infer[f]:,.0f}" for f in FACTORS))
    return table


# --- pictures ----------------------------------------------------------------------------------------------


def draw(runs: list[Run], found: list[dict[float | None, Score]], images: Images, out: Path) -> bool:
    """Writes the pictures; False without matplotlib."""
    try:
        from matplotlib.figure import Figure  # without pyplot its canvas is Agg: no display is needed
    except ImportError:
        return False
    pictures: dict[str, Any] = {"training.png": Figure(figsize=(9, 3.6), layout="constrained")}
    draw_training(pictures["training.png"], runs, found)
    for run, by_factor in zip(runs, found, strict=True):
        if run.config.experts:
            layers = len(run.counts[0])
            name = f"loads-{run.config.experts}.png"
            pictures[name] = Figure(figsize=(9, 1.2 + 1.9 * layers), layout="constrained")
            draw_loads(pictures[name], run, usual(run, by_factor))
            name = f"places-{run.config.experts}.png"
            width = max(4, 0.9 * min(10, len(images.classes)))
            pictures[name] = Figure(figsize=(width, 0.5 + 0.98 * (layers + 1)), layout="constrained")
            draw_places(pictures[name], run, images)
    for name, figure in pictures.items():
        figure.savefig(out / name, dpi=130)
    return True


def draw_training(figure: Any, runs: list[Run], found: list[dict[float | None, Score]]) -> None:
    """The loss of every model, and accuracy over the capacity factor."""
    left, right = figure.subplots(1, 2)
    for run, by_factor, color in zip(runs, found, COLORS, strict=False):
        nats = torch.tensor(run.nats, dtype=torch.float64)
        width = max(1, len(nats) // 25)
        smooth = nats.unfold(0, width, 1).mean(1)
        left.plot(range(1, len(nats) + 1), nats, color=color, alpha=0.2, linewidth=0.8)
        left.plot(torch.arange(len(smooth)) + (width + 1) / 2, smooth, color=color, linewidth=1.8, label=run.name)
        if run.config.experts:
            shares = [100 * by_factor[f].accuracy for f in FACTORS]
            right.plot(FACTORS, shares, "o-", color=color)
        else:
            right.axhline(100 * by_factor[None].accuracy, color=color, linestyle="--")
    left.set(xlabel="step", ylabel="cross-entropy, nats", yscale="log", title="Training")
    right.set(xlabel="capacity factor in inference", ylabel="test accuracy, %", title="Fewer slots, not trained for")
    right.set_xticks(sorted(FACTORS), [f"{factor:g}" for factor in sorted(FACTORS)])
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False)


def draw_loads(figure: Any, run: Run, score: Score) -> None:
    """A row for each layer: its loads over the steps of training, and on the test set."""
    counts = torch.stack(run.counts).double()  # [S,layers,E]
    load = counts / counts.mean(2, keepdim=True)
    steps, layers, experts = counts.shape
    width = -(-steps // 160)  # steps to a column
    shown = torch.stack([part.mean(0) for part in load.split(width)])
    rows = figure.subplots(layers, 2, squeeze=False, width_ratios=(3, 1))
    named = [(index, block) for index, block in enumerate(swin.blocks_of(run.config)) if block.moe]
    for layer, ((left, right), (index, block)) in enumerate(zip(rows, named, strict=True)):
        extent = (0.5, len(shown) * width + 0.5, experts - 0.5, -0.5)
        image = left.imshow(
            shown[:, layer].T.numpy(), aspect="auto", interpolation="nearest", cmap="RdBu_r", vmin=0, vmax=2,
            extent=extent,
        )  # fmt: skip
        left.set_title(
            f"block {index}: stage {block.stage + 1}, {block.side} x {block.side} places", fontsize=9, loc="left"
        )
        test = score.counts[layer].double() / score.counts[layer].double().mean()
        right.barh(range(experts), test.tolist(), color=COLORS[0])
        right.axvline(1, color="#222222", linewidth=0.8)
        right.set_ylim(experts - 0.5, -0.5)
        for axes in (left, right):
            axes.set_yticks(range(0, experts, -(-experts // 8)))
            axes.tick_params(labelsize=8)
        left.set_ylabel("expert")
    rows[0, 1].set_title("test set", fontsize=9, loc="left")
    rows[-1, 0].set_xlabel("step")
    rows[-1, 1].set_xlabel("load / mean load")
    figure.suptitle(f"{run.name}: load of each expert, before any token is dropped")
    bar = figure.colorbar(image, ax=list(rows[:, 0]), extend="max", fraction=0.05)
    bar.set_label("load / mean load")


@torch.no_grad()
def draw_places(figure: Any, run: Run, images: Images) -> None:
    """One test image of each class, and below it, for each layer, which expert every place goes to."""
    import matplotlib

    names = images.classes[:10]
    first = [
        int((images.test_labels == label).nonzero()[0])
        for label in range(len(names))
        if (images.test_labels == label).any()
    ]
    _, routings = swin.forward(run.params, images.test, run.config)
    blocks = [(index, block) for index, block in enumerate(swin.blocks_of(run.config)) if block.moe]
    rows = figure.subplots(len(blocks) + 1, len(first), squeeze=False)
    colors = matplotlib.colormaps["tab20"].resampled(20)
    for column, at in enumerate(first):
        rows[0, column].imshow(picture(images.test[at]), cmap="gray_r")
        rows[0, column].set_title(names[int(images.test_labels[at])], fontsize=9)
        for (_, block), routing, axes in zip(blocks, routings, rows[1:, column], strict=True):
            experts = routing.experts.view(len(images.test), block.side, block.side)[at]
            axes.imshow(experts.numpy() % 20, cmap=colors, vmin=-0.5, vmax=19.5)
            size = 40 / (block.side + 2)
            for row, ids in enumerate(experts.tolist()):
                for col, expert in enumerate(ids):
                    axes.text(col, row, str(expert), ha="center", va="center", fontsize=size, color="black")
    for axes in rows.flat:
        axes.set_xticks([])
        axes.set_yticks([])
    rows[0, 0].set_ylabel("image", fontsize=9)
    for (index, _), axes in zip(blocks, rows[1:, 0], strict=True):
        axes.set_ylabel(f"block {index}", fontsize=9)
    figure.suptitle(f"{run.name}: the expert of each place")


def picture(image: Tensor) -> Any:
    """An image for imshow: from 0 to 1, without its channel if it has one."""
    low, high = image.min(), image.max()
    scaled = (image - low) / (high - low).clamp(min=1e-6)
    return (scaled[..., 0] if image.shape[-1] == 1 else scaled).numpy()

"""What `train_lm` says and draws when it is done: the table, metrics.json, the pictures and the sample."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lm_model
import torch
from lm_checkpoint import written_whole
from lm_model import LMConfig, Params
from lm_training import Training
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from torch import Tensor

if TYPE_CHECKING:
    from train_lm import Session

LABELS = {"moe": "MoE", "dense": "dense"}


def final(run: Training, session: Session) -> dict[str, Any]:
    """The numbers that sum up a run."""
    batches = 4 * session.options.eval_batches
    parameters, active = lm_model.parameter_counts(run.params, run.config)
    seconds = sum(run.curves.seconds)
    return {
        "bits_per_byte": session.bits(run, run.params, batches),
        "without_experts": session.bits(run, lm_model.without_experts(run.params), batches),
        "parameters": parameters,
        "active_parameters": active,
        "seconds": seconds,
        "step_seconds": statistics.median(run.curves.seconds),
        "bytes_per_second": run.step * session.options.batch * session.options.length / seconds,
    }


def write_metrics(path: Path, runs: dict[str, Training], finals: dict[str, Any], session: Session) -> None:
    """Writes metrics.json, in the format that the top of this file describes."""
    shown = {}
    for name, run in runs.items():
        curves = run.curves
        shown[name] = {
            "bits_per_byte": curves.bits,
            "learning_rate": curves.rate,
            "seconds": curves.seconds,
            "counts": [counts.tolist() for counts in curves.counts],
            "dropped": [dropped.tolist() for dropped in curves.dropped],
            "validation": curves.validation,
            "final": finals[name],
        }
    text = {"bytes": len(session.train) + len(session.validation), "sha256": session.digest}
    metrics = {
        "format": "fmoe-lm-metrics",
        "version": 1,
        "options": dataclasses.asdict(session.options),
        "text": text,
        "runs": shown,
    }
    with written_whole(path) as temporary:
        temporary.write_text(json.dumps(metrics, allow_nan=False) + "\n")


def draw(runs: dict[str, Training], session: Session) -> None:
    """Writes loss.png and load.png, or says why not."""
    try:
        from matplotlib.figure import Figure  # without pyplot its canvas is Agg: no display is needed
    except ImportError:
        session.say("no pictures: matplotlib is not installed")
        return
    pictures = {"loss.png": Figure(figsize=(8, 4.8), layout="constrained")}
    draw_loss(pictures["loss.png"], runs)
    moe = runs["moe"]
    pictures["load.png"] = Figure(figsize=(8, 1.2 + 1.9 * moe.config.layers), layout="constrained")
    draw_load(pictures["load.png"], torch.stack(moe.curves.counts))
    for name, figure in pictures.items():
        with written_whole(session.out / name) as temporary:
            figure.savefig(temporary, format="png", dpi=130)


def draw_loss(figure: Any, runs: dict[str, Training]) -> None:
    """Training loss, as it was and smoothed, and validation loss, of every run."""
    axes = figure.subplots()
    for (name, run), color in zip(runs.items(), ("tab:blue", "tab:orange"), strict=False):
        bits = torch.tensor(run.curves.bits, dtype=torch.float64)
        width = max(1, len(bits) // 25)
        smooth = bits.unfold(0, width, 1).mean(1)
        axes.plot(range(1, len(bits) + 1), bits, color=color, alpha=0.2, linewidth=0.8)
        at = torch.arange(len(smooth)) + (width + 1) / 2  # the middle of each stretch
        axes.plot(at, smooth, color=color, linewidth=1.8, label=f"{LABELS[name]}, training (mean of {width} steps)")
        if run.curves.validation:
            steps, values = zip(*run.curves.validation, strict=True)
            label = f"{LABELS[name]}, validation (last {values[-1]:.2f})"
            axes.plot(
                steps, values, "o--", color=color, markersize=4, linewidth=1, markeredgecolor="black", label=label
            )
    axes.set(xlabel="step", ylabel="bits per byte", title="Loss of the language model")
    axes.set_xlim(left=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)


def draw_load(figure: Any, counts: Tensor) -> None:
    """A heatmap for each layer of ``counts [S,layers,E]``: steps across, experts down, 1 where all are equal."""
    steps, layers, experts = counts.shape
    load = counts.double() / counts.double().mean(2, keepdim=True)
    width = -(-steps // 160)  # steps to a column
    shown = torch.stack([part.mean(0) for part in load.split(width)])
    rows = figure.subplots(layers, 1, sharex=True, squeeze=False)[:, 0]
    for layer, axes in enumerate(rows):
        image = axes.imshow(
            shown[:, layer].T.numpy(),
            aspect="auto",
            interpolation="nearest",
            cmap="RdBu_r",
            vmin=0,
            vmax=2,
            extent=(0.5, len(shown) * width + 0.5, experts - 0.5, -0.5),
        )
        late = load[-max(1, steps // 10) :, layer].mean(0).max()
        axes.set_title(
            f"layer {layer}: fullest expert {late:.2f} times the mean in the last tenth", fontsize=9, loc="left"
        )
        axes.set_ylabel("expert")
        axes.set_yticks(range(0, experts, -(-experts // 16)))
    rows[-1].set_xlabel("step" if width == 1 else f"step (a column is the mean of {width} steps)")
    rows[-1].set_xlim(0.5, steps + 0.5)
    rows[-1].xaxis.get_major_locator().set_params(integer=True)
    figure.suptitle("Load of each expert, before any token is dropped")
    bar = figure.colorbar(image, ax=list(rows), extend="max", fraction=0.05)
    bar.set_label("load / mean load of the layer")


def summarize(runs: dict[str, Training], finals: dict[str, Any], session: Session) -> None:
    """Prints what a run, or the two of them, came to."""
    table = Table("", *(LABELS[name] for name in runs), box=None, pad_edge=False)
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    rows: list[tuple[str, Callable[[str], str]]] = [
        ("steps", lambda n: f"{runs[n].step:,}"),
        ("parameters", lambda n: f"{finals[n]['parameters']:,}"),
        ("  at work on one byte", lambda n: f"{finals[n]['active_parameters']:,}"),
        ("training, seconds", lambda n: f"{finals[n]['seconds']:.1f}"),
        ("  median step, ms", lambda n: f"{1000 * finals[n]['step_seconds']:.0f}"),
        ("tokens/s", lambda n: f"{finals[n]['bytes_per_second']:,.0f}"),
        ("validation, bits per byte", lambda n: f"{finals[n]['bits_per_byte']:.3f}"),
        ("  experts (or FFN) silenced", lambda n: f"{finals[n]['without_experts']:.3f}"),
    ]
    for label, cell in rows:
        table.add_row(label, *(cell(name) for name in runs))
    session.console.print(table)
    moe = finals["moe"]
    worth = moe["without_experts"] - moe["bits_per_byte"]
    session.say(f"the experts are worth {worth:.3f} bits per byte")
    if "dense" in finals:
        gain = finals["dense"]["bits_per_byte"] - moe["bits_per_byte"]
        ratio = moe["step_seconds"] / finals["dense"]["step_seconds"]
        session.say(
            f"against the dense model: {abs(gain):.3f} bits per byte {'better' if gain >= 0 else 'worse'}, "
            f"at {ratio:.2f} times the time per step"
        )


def show_sample(params: Params, config: LMConfig, session: Session) -> None:
    """Prints text of the model's own; `params` are plain tensors."""
    options = session.options
    if not options.sample_bytes:
        return
    prompt = options.prompt or ("def " if options.data == lm_model.STDLIB else "\n")
    start = prompt.encode(errors="surrogateescape")
    written = lm_model.generate(
        params,
        config,
        start,
        options.sample_bytes,
        length=options.length,
        temperature=options.temperature,
        seed=options.seed,
    )
    text = (start + written).decode(errors="replace").expandtabs()
    text = "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)
    title = f"{options.sample_bytes} bytes at temperature {options.temperature:g}"
    session.console.print(Panel(Text(text), title=title, title_align="left"))

"""What `transforms` prints and draws."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor


@dataclass(frozen=True)
class Digits:
    """Images ``[N,8,8]`` of mean 0, and what they are."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor


@dataclass(frozen=True)
class Found:
    """The answers.

    Attributes:
        data: what they are about.
        guesses: ``[members,N,10]`` probabilities of the test set's classes.
        milliseconds: for the gradients of all members at once, and one by one.
        norms: ``[N,E]``, of the gradient of each test image's loss in each expert.
        direction: ``[M,E]``, in which the loss bends the most.
        values: the estimate of its curvature after each iteration.
        residual: how far the last one is from an eigenvector, relative.
        along: ``[steps,3]``: step along the direction, loss, and quadratic model of the loss.
        balance: the balance loss.
        counts: ``[E]``, choices.
        by_expert: ``[E]``, derivatives of the balance loss.
        by_pixel: ``[8,8]``, likewise.
    """

    data: Digits
    guesses: Tensor
    milliseconds: tuple[float, float]
    norms: Tensor
    direction: Tensor
    values: list[float]
    residual: float
    along: Tensor
    balance: float
    counts: Tensor
    by_expert: Tensor
    by_pixel: Tensor


def plain_table(title: str, *columns: str) -> Table:
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1), pad_edge=False, title_justify="left")
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left", no_wrap=True)
    return table


def mean_norms(found: Found) -> Tensor:
    """``[10,E]``: of the images of each digit."""
    return torch.stack([found.norms[found.data.test_labels == digit].mean(0) for digit in range(10)])


def show(found: Found, console: Console) -> None:
    """Prints a table and a line for each question."""

    def say(text: str) -> None:
        console.print(text + "\n", highlight=False)

    labels = found.data.test_labels
    right = [float((guess.argmax(1) == labels).float().mean()) for guess in (*found.guesses, found.guesses.mean(0))]
    table = plain_table("ensemble: vmap over parameters", "", *(str(i) for i in range(len(found.guesses))), "together")
    table.add_row("accuracy of member", *(f"{share:.1%}" for share in right))
    console.print(table)
    once, apart = found.milliseconds
    say(f"gradients of all members: {once:.0f} ms at once, {apart:.0f} ms one by one")

    experts = [f"e{e}" for e in range(found.norms.shape[1])]
    table = plain_table("per sample: mean gradient norm x 1000", "digit", *experts, "moves most")
    for digit, mean in enumerate(mean_norms(found)):
        table.add_row(str(digit), *(f"{1000 * float(value):.0f}" for value in mean), experts[int(mean.argmax())])
    console.print(table)
    squares = found.norms.square().sum(1).sort(descending=True).values
    tenth = float(squares[: max(1, len(squares) // 10)].sum() / squares.sum())
    say(f"a tenth of the images makes {tenth:.0%} of the sum of squared gradient norms")

    shown = sorted({1, 2, 5, 10, 20, len(found.values)})
    table = plain_table("curvature of the loss in the router", "power iteration", *map(str, shown))
    table.add_row("largest eigenvalue", *(f"{found.values[n - 1]:.4f}" for n in shown))
    console.print(table)
    part = found.direction.square().sum(0)
    columns = ", ".join(f"e{int(e)} {float(part[e]):.0%}" for e in part.argsort(descending=True)[:3])
    say(f"relative residual {found.residual:.0e}; most of the direction is in {columns}")

    share = found.counts / found.counts.sum()
    title = f"sensitivity of the balance loss, now {found.balance:.3f}"
    table = plain_table(title, "expert", "share of choices", "d loss / d log(scale of its logits)")
    for name, part, slope in zip(experts, share.tolist(), found.by_expert.tolist(), strict=True):
        table.add_row(name, f"{part:.1%}", f"{slope:+.4f}")
    console.print(table)
    row, column = divmod(int(found.by_pixel.abs().argmax()), 8)
    say(f"of the pixels, row {row}, column {column} matters most: {float(found.by_pixel[row, column]):+.4f} if darker")


# --- pictures ----------------------------------------------------------------------------------------------


def draw(found: Found, out: Path) -> bool:
    """Writes the four pictures; False without matplotlib."""
    try:
        from matplotlib.figure import Figure  # without pyplot its canvas is Agg: no display is needed
    except ImportError:
        return False
    for name, fill, size in (
        ("ensemble", draw_ensemble, (9, 3.6)),
        ("per_sample", draw_norms, (9, 4.2)),
        ("curvature", draw_curvature, (10, 3.4)),
        ("sensitivity", draw_sensitivity, (8, 3.4)),
    ):
        figure = Figure(figsize=size, layout="constrained")
        fill(figure, found)
        figure.savefig(out / f"{name}.png", dpi=130)
    return True


def image_on(axes: Any, image: Tensor, title: str) -> None:
    axes.imshow(image.numpy(), cmap="gray_r")
    axes.set_title(title, fontsize=8)
    axes.set_xticks([])
    axes.set_yticks([])


def draw_ensemble(figure: Any, found: Found) -> None:
    """The images on which members disagree most, and what each makes of them."""
    members = len(found.guesses)
    mean = found.guesses.mean(0)
    spread = (found.guesses - mean).square().sum((0, 2))
    worst = spread.argsort(descending=True)[:9].tolist()
    rows = figure.subplots(2, len(worst), height_ratios=(1, 1.3), squeeze=False)
    for column, at in enumerate(worst):
        image_on(rows[0, column], found.data.test[at], f"a {int(found.data.test_labels[at])}")
        axes = rows[1, column]
        axes.imshow(found.guesses[:, at].T.numpy(), cmap="Blues", vmin=0, vmax=1, aspect="auto")
        axes.set_xticks(range(members))
        axes.set_yticks(range(10), range(10) if column == 0 else [])
        axes.tick_params(labelsize=7)
    rows[1, 0].set_ylabel("digit")
    rows[1, len(worst) // 2].set_xlabel("member")
    figure.suptitle("Test images on which the ensemble disagrees most, and each member's probabilities")


def draw_norms(figure: Any, found: Found) -> None:
    """Mean norms by class and expert, and the images that move the experts most."""
    left, right = figure.subfigures(1, 2, width_ratios=(1, 1.1))
    axes = left.subplots()
    labels = found.data.test_labels
    image = axes.imshow(mean_norms(found).numpy(), cmap="viridis", aspect="auto")
    axes.set(xlabel="expert", ylabel="digit", title="Mean gradient norm")
    axes.set_yticks(range(10))
    axes.set_xticks(range(found.norms.shape[1]))
    left.colorbar(image, ax=axes, fraction=0.05)
    cells = right.subplots(3, 4)
    norms = found.norms.square().sum(1).sqrt()
    for at, cell in zip(norms.argsort(descending=True).tolist(), cells.flat, strict=False):
        title = f"a {int(labels[at])}: {float(norms[at]):.1f}, most e{int(found.norms[at].argmax())}"
        image_on(cell, found.data.test[at], title)
    right.suptitle("Images that move the experts most", fontsize=11)


def draw_curvature(figure: Any, found: Found) -> None:
    """The power iteration, the direction, and the loss along it."""
    first, second, third = figure.subplots(1, 3, width_ratios=(1, 0.8, 1.2))
    first.plot(range(1, len(found.values) + 1), found.values, "o-", markersize=3, color="#4477aa")
    first.set(xlabel="power iteration", ylabel="estimate", title="Largest eigenvalue")
    most = float(found.direction.abs().max())
    image = second.imshow(found.direction.numpy(), cmap="RdBu_r", vmin=-most, vmax=most, aspect="auto")
    second.set_xticks(range(found.direction.shape[1]))
    second.set(xlabel="expert", ylabel="feature of the token", title="Its direction")
    figure.colorbar(image, ax=second, fraction=0.06)
    step, loss, model = found.along.unbind(1)
    third.plot(step, loss, color="#4477aa", label="loss")
    third.plot(step, model, "--", color="#ee6677", label="quadratic model")
    low, high = float(loss.min()), float(loss.max())
    third.set_ylim(low - 0.15 * (high - low), high + 0.25 * (high - low))
    third.set(xlabel="step along the direction", ylabel="nats", title="Loss there")
    third.legend(frameon=False)
    for axes in (first, third):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)


def draw_sensitivity(figure: Any, found: Found) -> None:
    """By expert, beside its load; and by pixel."""
    left, right = figure.subplots(1, 2, width_ratios=(1.3, 1))
    share = found.counts / found.counts.double().mean()
    left.scatter(share, found.by_expert, color="#4477aa")
    for expert in range(len(share)):
        left.annotate(f" e{expert}", (float(share[expert]), float(found.by_expert[expert])), fontsize=8, va="center")
    left.axhline(0, color="#222222", linewidth=0.8)
    left.axvline(1, color="#222222", linewidth=0.8, linestyle=":")
    left.set(xlabel="load / mean load", ylabel="change of the loss", title="Logits of an expert scaled up")
    left.grid(alpha=0.3)
    left.spines[["top", "right"]].set_visible(False)
    most = float(found.by_pixel.abs().max())
    image = right.imshow(found.by_pixel.numpy(), cmap="RdBu_r", vmin=-most, vmax=most)
    right.set_title("A pixel darker in all images")
    right.set_xticks(range(8))
    figure.colorbar(image, ax=right, fraction=0.05)
    figure.suptitle("Forward-mode derivatives of the balance loss")

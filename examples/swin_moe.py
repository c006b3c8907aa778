"""SwinV2 with a mixture of experts, on real images, beside a dense model that computes as much for each of them.

    python examples/swin_moe.py --quick          # two to three minutes on two cores
    python examples/swin_moe.py                  # four times the epochs

trains three models on the 1,797 handwritten digits that scikit-learn ships: a dense SwinV2, and two in which
every other block of the last two stages has 8 or 16 experts, of which each place of an image goes to one (top-1,
importance and load loss of 0.01, capacity 1.25, the least certain places dropped first). It prints

    a line for each model when it is trained
    a table of accuracy and images per second of the three models
    a table of accuracy, dropped tokens and speed against the capacity factor in inference (1.25, 1.0,
    0.625, 0.5), without retraining: those of Tutel (arXiv 2206.03382, tables 11 and 12) in small

and leaves in ``--out`` training.png, loads-E.png (load of each expert by layer, over training and on the test set),
places-E.png (the expert of each place of some images), metrics.json, and a file for each model, dense.pt and E.pt.

    python examples/swin_moe.py --data photos --size 64          # photos/CLASS/*.jpg, in colour
    python examples/swin_moe.py --router cosine --experts 4 32
    python examples/swin_moe.py --from runs/swin/16.pt --data turned --freeze-experts --out runs/tuned

``--from`` goes on with a model on other data (``turned`` are the digits a quarter turn to the left);
``--freeze-experts`` leaves its experts as they are, and ``--new-head`` gives it the classes of the data.

"at work" are parameters that one place meets, "fullest" the load of the fullest expert of any layer over the mean.
Speeds are the best of turns that the models take, of one batch of ``--batch`` images.

Exit codes: 0; 2 for input that cannot be used, with one line on stderr; 1 if the loss is no longer finite or the
disk is full; 130 after Ctrl-C.
"""

from __future__ import annotations

import os

# before torch is imported: its threads otherwise spin while they wait, and slow down a machine that others use too
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import argparse
import dataclasses
import json
import sys
from pathlib import Path

import swin_model as swin
from lm_model import Failed, Refused
from lm_options import Parser, real, whole
from rich.console import Console
from swin_data import DIGITS, Images, read
from swin_model import SwinConfig
from swin_report import Speed, capacity_table, draw, scores, speeds, table_of, usual
from swin_training import Run, Score, evaluate, load, save, train


def parse(argv: list[str] | None) -> argparse.Namespace:
    about, _, rest = (__doc__ or "").partition("\n")
    parser = Parser(description=about, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few epochs, to see all of it")
    parser.add_argument("--data", default=DIGITS, metavar="X", help="digits, turned, or a folder of folders of images")
    parser.add_argument("--size", type=whole(1, 4096), metavar="X", help="side of an image (16, or that of --from)")
    parser.add_argument("--experts", type=whole(2, 1024), nargs="+", default=[8, 16], metavar="E", help="8 16")
    parser.add_argument("--router", choices=list(swin.ROUTERS), default="linear", help="what chooses the experts")
    parser.add_argument("--epochs", type=whole(1), metavar="X", help="passes over the images (48; 12 with --quick)")
    parser.add_argument("--steps", type=whole(1), metavar="X", help="instead of epochs")
    parser.add_argument("--batch", type=whole(1), default=64, metavar="X", help="images in a step (64)")
    parser.add_argument("--lr", type=real(0, open_end=True), default=3e-3, metavar="X", help="highest rate (0.003)")
    parser.add_argument("--seed", type=whole(0, 2**63 - 1), default=0, metavar="X", help="of parameters and batches")
    parser.add_argument("--from", type=Path, dest="source", metavar="FILE", help="a model to go on with, alone")
    parser.add_argument("--freeze-experts", action="store_true", help="with --from: experts stay as they are")
    parser.add_argument("--new-head", action="store_true", help="with --from: for other classes")
    parser.add_argument("--out", type=Path, default=Path("runs/swin"), help="folder for the results (runs/swin)")
    return parser.parse_args(argv)


def checked(config: SwinConfig) -> SwinConfig:
    problems = swin.misfits(config)
    if problems:
        raise Refused(f"--size {config.size}: {problems[0]}")
    return config


def fresh(todo: argparse.Namespace) -> tuple[list[Run], Images]:
    """The dense model and those with experts, and the images."""
    size = todo.size or 16
    checked(SwinConfig(size=size))
    images = read(todo.data, size=size)
    base = SwinConfig(size=size, channels=images.channels, classes=len(images.classes), router=todo.router)
    runs = []
    for experts in dict.fromkeys((0, *todo.experts)):
        config = dataclasses.replace(base, experts=experts)
        runs.append(Run(f"{experts} experts" if experts else "dense", config, swin.init(config, seed=todo.seed)))
    return runs, images


def tuned(todo: argparse.Namespace) -> tuple[list[Run], Images]:
    """The model of a file, and the images to go on with."""
    config, classes, params = load(todo.source)
    if todo.freeze_experts and not config.experts:
        raise Refused(f"--freeze-experts: {todo.source} is a dense model")
    config = checked(dataclasses.replace(config, size=todo.size or config.size))
    images = read(todo.data, size=config.size, channels=config.channels)
    if todo.new_head:
        config = dataclasses.replace(config, classes=len(images.classes))
        made = swin.init(config, seed=todo.seed)
        params = {**params, "head": made["head"], "head_bias": made["head_bias"]}
    elif classes != images.classes:
        raise Refused(
            f"--from {todo.source}: has {len(classes)} classes ({', '.join(classes[:3])}, ...), --data {todo.data} has "
            f"{len(images.classes)} ({', '.join(images.classes[:3])}, ...): give --new-head"
        )
    run = Run(f"{config.experts} experts" if config.experts else "dense", config, params, frozen=todo.freeze_experts)
    run.before = evaluate(run, images, batch=todo.batch).accuracy
    return [run], images


def write_metrics(
    path: Path, runs: list[Run], found: list[dict[float | None, Score]], rates: list[Speed], todo: argparse.Namespace
) -> None:
    """Writes what the tables and pictures show."""
    shown = {}
    for run, by_factor, speed in zip(runs, found, rates, strict=True):
        total, active = swin.parameter_counts(run.params)
        shown[run.name] = {
            "config": dataclasses.asdict(run.config),
            "parameters": total,
            "active_parameters": active,
            "loss": run.nats,
            "counts": [counts.tolist() for counts in run.counts],
            "accuracy_before": run.before,
            "accuracy": usual(run, by_factor).accuracy,
            "train_images_per_second": speed.train,
            "inference": [
                {
                    "capacity": factor,
                    "accuracy": score.accuracy,
                    "dropped": score.dropped,
                    "images_per_second": speed.infer[factor],
                }
                for factor, score in by_factor.items()
            ],
        }
    options = {name: str(value) for name, value in vars(todo).items()}
    path.write_text(json.dumps({"format": "fmoe-swin-metrics", "options": options, "runs": shown}) + "\n")


def program(todo: argparse.Namespace) -> None:
    if todo.source is None and (todo.freeze_experts or todo.new_head):
        raise Refused(f"{'--freeze-experts' if todo.freeze_experts else '--new-head'} goes with --from")
    runs, images = fresh(todo) if todo.source is None else tuned(todo)
    files = {run.name: todo.out / f"{run.config.experts or 'dense'}.pt" for run in runs}
    if todo.source is not None and any(path.resolve() == todo.source.resolve() for path in files.values()):
        raise Refused(f"--out {todo.out}: the model would be written over --from {todo.source}")
    try:
        todo.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refused(f"--out {todo.out}: {error.strerror}") from None
    console = Console()
    console.print(
        f"{todo.data}: {len(images.train):,} images to train on, {len(images.test):,} to test", highlight=False
    )
    epochs = todo.epochs or (12 if todo.quick else 48)
    steps = todo.steps or epochs * max(1, len(images.train) // todo.batch)
    for run in runs:
        with console.status(f"training {run.name}") as status:
            for step in train(run, images, steps=steps, batch=todo.batch, lr=todo.lr, seed=todo.seed):
                status.update(f"training {run.name}: step {step} of {steps}, loss {run.nats[-1]:.3f}")
        accuracy = evaluate(run, images, batch=todo.batch).accuracy
        console.print(f"{run.name}: {steps} steps, test accuracy {accuracy:.1%}", highlight=False)
        save(run, files[run.name], images.classes)
    found = scores(runs, images, batch=todo.batch)
    with console.status("taking the time"):
        rates = speeds(runs, images, batch=todo.batch, rounds=7 if todo.quick else 21)
    console.print(table_of(runs, found, rates, len(images.test)))
    if any(run.config.experts for run in runs):
        console.print(capacity_table(runs, found, rates))
    write_metrics(todo.out / "metrics.json", runs, found, rates, todo)
    if not draw(runs, found, images, todo.out):
        console.print("no pictures: matplotlib is not installed")
    console.print(f"results are in {todo.out}", highlight=False)


def main(argv: list[str] | None = None) -> int:
    """Runs the program; whatever goes wrong takes one line on stderr."""
    try:
        program(parse(argv))
    except (Refused, Failed) as error:
        print("swin_moe: " + " ".join(str(error).split()), file=sys.stderr, flush=True)
        return 2 if isinstance(error, Refused) else 1
    except OSError as error:
        print(f"swin_moe: cannot write: {error}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        print("swin_moe: interrupted", file=sys.stderr, flush=True)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

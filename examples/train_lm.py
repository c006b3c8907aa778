"""Trains a small byte-level language model with a mixture of experts in every block, and draws what happened.

    python examples/train_lm.py --out runs/demo

reads the Python standard library's own source, trains for a minute or two on two cores, and prints
the loss as it falls, the bits per byte of text it has not seen, the same with the experts silenced
("the experts are worth ... bits"), and a page of Python as the model would write it.

    python examples/train_lm.py --data book.txt --out runs/book --steps 2000 --capacity 1.25
    python examples/train_lm.py --out runs/book --resume
    python examples/train_lm.py --out runs/both --compare-dense

``--compare-dense`` then trains the same model with one feed-forward network of top_k * hidden in place
of the experts, which costs the same arithmetic per byte, on the same bytes, and prints both in a table.

In ``--out`` it leaves

    loss.png         loss in training and validation
    load.png         load of every expert over the steps, one picture a layer (needs matplotlib, as loss.png)
    metrics.json     every curve and every expert's load, see below
    checkpoint.pt    parameters, optimizer, step, curves and options (checkpoint.dense.pt for the dense model)

**Stopping.** Ctrl-C stops at the end of the step: the checkpoint is written, the summary is printed and
drawn all the same, and the exit code is 130. A second Ctrl-C leaves at once. ``--resume`` goes on from the
checkpoint in ``--out`` with its options, unless others are given: the batch of a step depends on the seed
and the step alone, so the losses are those of a run that was never stopped, bit by bit on the same machine
with as many threads. What defines the model, the batches or the text cannot change. A new run in a folder
with a checkpoint keeps that as ``checkpoint.previous.pt`` (in place of an earlier one of that name), and
draws over the pictures.

Exit codes: 0; 2 for input that cannot be used, with one line on stderr and nothing written; 1 if the loss
is no longer finite or the disk is full; 130 after Ctrl-C.

**metrics.json** holds ``format`` ("fmoe-lm-metrics"), ``version`` (1), ``options``, ``text`` (``bytes``,
``sha256``) and ``runs``, with ``moe`` and perhaps ``dense``:

    bits_per_byte    [S]      training loss of steps 1 to S
    learning_rate    [S]
    seconds          [S]      wall time of each step
    counts           [S][layer][expert]   choices of each expert before any is dropped: a load trace
    dropped          [S][layer]           choices that found no place
    validation       [[step, bits per byte], ...]
    final            bits_per_byte, without_experts, parameters, active_parameters, seconds,
                     step_seconds (the median), bytes_per_second

so that ``counts[s][l]`` adds up to batch * length * top_k: what a planner or a benchmark replays.
"""

from __future__ import annotations

import os

# before torch is imported: its threads otherwise spin while they wait, and slow down a machine that others use too
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import argparse
import dataclasses
import hashlib
import math
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lm_model
import torch
from lm_model import LMConfig, Refused, Training
from lm_report import LABELS, draw, final, show_sample, summarize, write_metrics
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

import fmoe

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
CHECKPOINTS = {"moe": "checkpoint.pt", "dense": "checkpoint.dense.pt"}


class Failed(Exception):
    """A run that cannot go on."""


# --- options -----------------------------------------------------------------------------------------------


def whole(low: int, high: int = 10**9) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not low <= number <= high:
            raise argparse.ArgumentTypeError(f"{text} is not from {low} to {high}")
        return number

    return parse


def real(low: float, *, open_end: bool = False) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not math.isfinite(number) or number < low or (open_end and number == low):
            raise argparse.ArgumentTypeError(
                f"{text} is not a finite number {'above' if open_end else 'of at least'} {low:g}"
            )
        return number

    return parse


def capacity(text: str) -> float | str | None:
    if text.lower() == "none":
        return None
    return text if text == "as_needed" else real(0.0)(text)


def dtype_name(text: str) -> str:
    if text not in DTYPES:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(DTYPES)}")
    return text


def option(default: Any, parse: Callable[[str], Any], text: str, *, fixed: bool = False) -> Any:
    """A field of `Options`; `fixed` if a run cannot go on with another value."""
    return dataclasses.field(default=default, metadata={"parse": parse, "help": text, "fixed": fixed})


@dataclass(frozen=True)
class Options:
    """Everything that shapes a run. `--resume` takes what the command line leaves out from the checkpoint."""

    steps: int = option(500, whole(1), "optimizer steps")
    batch: int = option(16, whole(1), "sequences in a step", fixed=True)
    length: int = option(128, whole(1), "bytes in a sequence", fixed=True)
    dim: int = option(128, whole(1), "width of the model", fixed=True)
    layers: int = option(2, whole(1), "blocks", fixed=True)
    heads: int = option(4, whole(1), "attention heads", fixed=True)
    experts: int = option(8, whole(1), "experts in a block", fixed=True)
    top_k: int = option(2, whole(1), "experts that each byte goes to", fixed=True)
    hidden: int = option(256, whole(1), "hidden size of an expert", fixed=True)
    capacity: float | str | None = option(
        None, capacity, "capacity factor, as_needed, or none to drop nothing", fixed=True
    )
    dtype: str = option("float32", dtype_name, f"to compute in: {', '.join(DTYPES)}", fixed=True)
    lr: float = option(5e-3, real(0, open_end=True), "highest learning rate, after the warm-up")
    warmup: int = option(50, whole(0), "steps over which the rate rises, before it falls as a cosine to a tenth")
    seed: int = option(0, whole(0, 2**63 - 1), "of the parameters, the batches and the sample", fixed=True)
    data: str = option(lm_model.STDLIB, str, "file or folder of text; stdlib is Python's own source")
    max_bytes: int = option(8_000_000, whole(1), "read no more of it than this")
    eval_every: int = option(50, whole(1), "steps from one validation to the next")
    eval_batches: int = option(8, whole(1), "batches in each validation; the last one takes four times as many")
    checkpoint_every: int = option(100, whole(1), "steps from one checkpoint to the next")
    sample_bytes: int = option(400, whole(0), "bytes to write at the end")
    temperature: float = option(0.7, real(0), "of the sample; 0 for the likeliest byte")
    prompt: str = option("", str, "what the sample goes on from ('def ' for stdlib, a new line otherwise)")

    def as_text(self) -> dict[str, str]:
        """The options as they would stand on a command line."""
        return {name: str(value) for name, value in dataclasses.asdict(self).items()}

    def model(self, name: str) -> LMConfig:
        """The model of the run called `name`."""
        if self.top_k > self.experts:
            raise Refused(f"--top-k {self.top_k} is more than --experts {self.experts}")
        if self.dim % self.heads or self.dim // self.heads % 2:
            raise Refused(f"--dim {self.dim} over --heads {self.heads} must be an even whole number")
        dtype = DTYPES[self.dtype]
        moe = fmoe.MoEConfig(
            num_experts=self.experts,
            model_dim=self.dim,
            hidden_dim=self.hidden,
            router=fmoe.TopK(self.top_k),
            capacity=self.capacity,
            dtype=dtype,
        )
        dense = self.top_k * self.hidden if name == "dense" else None
        return LMConfig(self.dim, self.layers, self.heads, moe, dense, dtype)


class Parser(argparse.ArgumentParser):
    """A parser whose complaints take one line."""

    def error(self, message: str) -> Any:
        """Refuses the command line."""
        raise Refused(message)


def parse(argv: list[str] | None) -> tuple[dict[str, Any], argparse.Namespace]:
    """The options that were given, and what to do: out, resume, compare_dense."""
    description, _, rest = (__doc__ or "").partition("\n")
    parser = Parser(description=description, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/lm"), help="folder for the results (default runs/lm)")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument("--compare-dense", action="store_true", help="train a dense model of the same cost as well")
    for f in dataclasses.fields(Options):
        default = "" if f.default == "" else f" (default {str(f.default).lower()})"
        parser.add_argument(
            "--" + f.name.replace("_", "-"),
            type=f.metadata["parse"],
            default=argparse.SUPPRESS,
            metavar="X",
            help=f.metadata["help"] + default,
        )
    given = vars(parser.parse_args(argv))
    todo = argparse.Namespace(**{name: given.pop(name) for name in ("out", "resume", "compare_dense")})
    return given, todo


def resumed(given: dict[str, Any], saved: dict[str, Any], path: Path) -> Options:
    """The options of a checkpoint, with those given in their place where that is possible."""
    options = {}
    try:
        for f in dataclasses.fields(Options):
            options[f.name] = f.metadata["parse"](saved["options"][f.name])
    except (AttributeError, KeyError, TypeError, argparse.ArgumentTypeError):
        raise Refused(f"{path}: a damaged checkpoint (its options)") from None
    for f in dataclasses.fields(Options):
        if f.metadata["fixed"] and given.get(f.name, options[f.name]) != options[f.name]:
            flag = "--" + f.name.replace("_", "-")
            raise Refused(
                f"{path} was made with {flag} {options[f.name]}, which {flag} {given[f.name]} cannot go on from"
            )
    return Options(**{**options, **given})


# --- training ----------------------------------------------------------------------------------------------


class StopOnInterrupt:
    """While entered, the first Ctrl-C sets `requested`, and the second one raises KeyboardInterrupt."""

    requested = False

    def __enter__(self) -> StopOnInterrupt:
        self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _handle(self, *_: object) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


@dataclass(frozen=True)
class Session:
    """What the runs of one call share."""

    options: Options
    train: Tensor
    validation: Tensor
    digest: str
    out: Path
    resume: bool
    stop: StopOnInterrupt
    console: Console

    def say(self, text: str) -> None:
        """Prints a line as it is."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def bits(self, run: Training, params: lm_model.Params, batches: int) -> float:
        """Validation bits per byte."""
        o = self.options
        bits = lm_model.evaluate(params, self.validation, run.config, batch=o.batch, length=o.length, batches=batches)
        if not math.isfinite(bits):
            raise Failed(f"the validation loss at step {run.step} is {bits}: choose a smaller --lr, now {o.lr:g}")
        return bits

    def save(self, run: Training) -> None:
        """Writes the checkpoint of a run."""
        run.save(self.out / CHECKPOINTS[run.name], self.options.as_text(), self.digest)


def learning_rate(step: int, options: Options) -> float:
    """Of step 1, 2, ...: a linear rise, then a cosine down to a tenth."""
    rise = min(1.0, step / max(1, options.warmup))
    progress = min(1.0, max(0, step - options.warmup) / max(1, options.steps - options.warmup))
    return options.lr * rise * (0.55 + 0.45 * math.cos(math.pi * progress))


def one_step(run: Training, session: Session) -> None:
    """Draws a batch, updates the parameters, and notes what happened."""
    options, started, step = session.options, time.perf_counter(), run.step + 1
    windows = lm_model.training_windows(
        session.train, seed=options.seed, step=step, batch=options.batch, length=options.length
    )
    gradient = torch.func.grad_and_value(lm_model.objective, has_aux=True)
    grads, (total, (nats, counts, dropped)) = gradient(run.params, windows, run.config)
    if not math.isfinite(total):
        raise Failed(f"the loss of step {step} is {float(total)}: choose a smaller --lr, now {options.lr:g}")
    rate = learning_rate(step, options)
    run.update(grads, rate)
    curves = run.curves
    curves.bits.append(float(nats) / math.log(2))
    curves.rate.append(rate)
    curves.counts.append(counts)
    curves.dropped.append(dropped)
    curves.seconds.append(time.perf_counter() - started)


def note(run: Training, options: Options) -> str:
    """The numbers beside the progress bar; the imbalance is the worst layer's largest load over its mean load."""
    curves = run.curves
    recent = curves.seconds[-10:]
    speed = options.batch * options.length * len(recent) / sum(recent)
    text = f"{curves.bits[-1]:.2f} bits {speed / 1000:.1f}k tokens/s"
    if run.config.dense is None:
        load = curves.counts[-1].double()
        imbalance = float((load.amax(1) / load.mean(1)).max())
        text += f" {int(curves.dropped[-1].sum())} dropped imbalance {imbalance:.2f}"
    return text


def train(run: Training, session: Session) -> None:
    """Steps until the last one or Ctrl-C; evaluates and saves on the way and at the end."""
    options = session.options
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=8),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(compact=True),
    )
    if run.step >= options.steps:
        return
    with Progress(*columns, console=session.console) as progress:
        task = progress.add_task(LABELS[run.name], total=options.steps, completed=run.step, note="")
        while run.step < options.steps:
            one_step(run, session)
            last = run.step == options.steps
            if last or run.step % options.eval_every == 0:
                bits = session.bits(run, run.params, options.eval_batches)
                run.curves.validation.append((run.step, bits))
                session.say(f"step {run.step:5d}  validation {bits:.3f} bits per byte")
            progress.update(task, completed=run.step, note=note(run, options))
            if session.stop.requested or last:
                break
            if run.step % options.checkpoint_every == 0:
                session.save(run)
    session.save(run)


# --- the program -------------------------------------------------------------------------------------------


def prepare(argv: list[str] | None, stop: StopOnInterrupt, console: Console) -> tuple[dict[str, Training], Session]:
    """Checks everything, then makes the runs: nothing is written before all of it is known to be usable."""
    given, todo = parse(argv)
    saved = {}
    if todo.resume:
        paths = {name: todo.out / file for name, file in CHECKPOINTS.items()}
        wanted = ["moe", "dense"] if todo.compare_dense and paths["dense"].exists() else ["moe"]
        saved = {name: lm_model.read_checkpoint(paths[name]) for name in wanted}
        options = resumed(given, saved["moe"], paths["moe"])
        for name in wanted[1:]:
            resumed(dataclasses.asdict(options), saved[name], paths[name])  # of the same run
    else:
        options = Options(**given)
    text = lm_model.read_text(options.data, options.max_bytes)
    train_bytes, validation = lm_model.split_text(text, options.data, options.length)
    digest = hashlib.sha256(text).hexdigest()
    session = Session(options, train_bytes, validation, digest, todo.out, todo.resume, stop, console)
    runs = {}
    for name in ("moe", "dense") if todo.compare_dense else ("moe",):
        runs[name] = Training(name, options.model(name), seed=options.seed)
        if name in saved:
            path = todo.out / CHECKPOINTS[name]
            if saved[name].get("text") != session.digest:
                raise Refused(f"{path} was trained on another text than --data {options.data} is now")
            runs[name].restore(saved[name], path)
            if runs[name].step > options.steps:
                raise Refused(f"{path} is at step {runs[name].step}, past --steps {options.steps}")
    return runs, session


def set_aside(session: Session) -> None:
    """Keeps the checkpoints of an earlier run in the folder under another name."""
    for file in CHECKPOINTS.values():
        path = session.out / file
        if path.exists():
            kept = path.with_suffix(".previous.pt")
            os.replace(path, kept)
            session.say(f"{path} is of an earlier run: kept as {kept.name}")


def program(argv: list[str] | None, console: Console) -> int:
    with StopOnInterrupt() as stop:
        runs, session = prepare(argv, stop, console)
        options, out = session.options, session.out
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Refused(f"--out {out}: {error.strerror}") from None
        session.say(
            f"{options.data}: {len(session.train):,} bytes to train on, {len(session.validation):,} to validate"
        )
        if not session.resume:
            set_aside(session)
        for name, run in list(runs.items()):
            if stop.requested and name == "dense":
                del runs[name]
                continue
            if run.step == 0:
                session.save(run)  # a folder that cannot be written to shows now, not after the training
            else:
                session.say(f"{LABELS[name]}: going on from step {run.step}")
            train(run, session)
    if stop.requested:
        session.say("stopped: --resume goes on from here")
    finals = {name: final(run, session) for name, run in runs.items()}
    write_metrics(out / "metrics.json", runs, finals, session)
    draw(runs, session)
    summarize(runs, finals, session)
    show_sample(runs["moe"], session)
    session.say(f"results are in {out}")
    return 130 if stop.requested else 0


def main(argv: list[str] | None = None) -> int:
    """Runs the program; whatever goes wrong takes one line on stderr."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without the letters shows a question mark
    try:
        return program(argv, Console())
    except Refused as error:
        message, code = str(error), 2
    except Failed as error:
        message, code = str(error), 1
    except OSError as error:
        message, code = f"cannot write: {error}", 1
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate memory" not in str(error):
            raise
        message, code = "out of memory: choose smaller sizes", 1
    except KeyboardInterrupt:
        message, code = "interrupted; --resume goes on from the last checkpoint", 130
    print("train_lm: " + " ".join(message.split()), file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())

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

**On several processes.** Each takes its rows of every batch and holds its part of the experts:

    torchrun --standalone --nproc-per-node 2 examples/train_lm.py --out runs/two --plan "ep r=1 pipeline=2"
    torchrun --standalone --nproc-per-node 4 examples/train_lm.py --out runs/four --plan cycle --show-program

``--plan`` says how the experts run: ``dp`` gathers their weights, ``ep`` exchanges the bytes' vectors,
and ``cycle`` takes another legal plan at every step. Without a ``--capacity`` neither the plan nor the
number of processes changes what is learned, but for rounding (with one, each process drops choices of
its own rows). ``--show-program`` prints what one of them runs. If one dies, the others end with an error
as soon as they miss it, after ``--timeout`` seconds at most.

In ``--out`` it leaves

    loss.png         loss in training and validation
    load.png         load of every expert over the steps, one picture a layer (needs matplotlib, as loss.png)
    metrics.json     every curve and every expert's load, see below
    checkpoint       parameters, optimizer, step, curves and options (checkpoint.dense for the dense model)

**Stopping.** Ctrl-C stops at the end of the step: the checkpoint is written, the summary is printed and
drawn all the same, and the exit code is 130. A second Ctrl-C leaves at once. ``--resume`` goes on from the
checkpoint in ``--out`` with its options, unless others are given, on any number of processes: the batch of
a step depends on the seed and the step alone, so the losses are those of a run that was never stopped; on
one process bit by bit, on the same machine with as many threads. What defines the model, the batches or the
text cannot change. A new run in a folder with a checkpoint keeps that as ``checkpoint.previous`` (in place
of an earlier one of that name), and draws over the pictures.

Exit codes: 0; 2 for input that cannot be used, with one line on stderr and nothing written; 1 if the loss
is no longer finite, the disk is full or another process is gone; 130 after Ctrl-C, 143 after SIGTERM.
(torchrun has exit codes of its own.)

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

import dataclasses
import hashlib
import math
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lm_checkpoint
import lm_model
import lm_ranks
from lm_model import Failed, Refused
from lm_options import TIMEOUT, Options, parse, resumed
from lm_ranks import Ranks, Runner
from lm_report import LABELS, draw, final, show_sample, summarize, write_metrics
from lm_training import Training
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

CHECKPOINTS = {"moe": "checkpoint", "dense": "checkpoint.dense"}


# --- training ----------------------------------------------------------------------------------------------


class Terminated(BaseException):
    """SIGTERM, which torchrun sends to all processes that are left when one has died."""


class StopOnInterrupt:
    """While entered, Ctrl-C sets `requested`, a second one raises KeyboardInterrupt, and SIGTERM `Terminated`."""

    requested = False

    def __enter__(self) -> StopOnInterrupt:
        handlers = {signal.SIGINT: self._handle, signal.SIGTERM: self._end}
        self._previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _end(self, *_: object) -> None:
        raise Terminated

    def _handle(self, *_: object) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


@dataclass(frozen=True)
class Session:
    """What the runs of one call share."""

    options: Options
    todo: Any
    train: Tensor
    validation: Tensor
    digest: str
    ranks: Ranks
    stop: StopOnInterrupt
    console: Console

    @property
    def out(self) -> Path:
        """The folder for the results."""
        return self.todo.out

    def say(self, text: str) -> None:
        """Prints a line as it is, once for all ranks."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def stopped(self) -> bool:
        """Whether Ctrl-C reached any rank; every rank must ask."""
        return self.ranks.any(self.stop.requested)

    def bits(self, run: Training, params: lm_model.Params, batches: int) -> float:
        """Validation bits per byte."""
        o = self.options
        bits = lm_model.evaluate(
            lambda windows: run.runner.mean_nats(params, windows),
            self.validation,
            batch=o.batch,
            length=o.length,
            batches=batches,
        )
        if not math.isfinite(bits):
            raise Failed(f"the validation loss at step {run.step} is {bits}: choose a smaller --lr, now {o.lr:g}")
        return bits

    def windows(self, step: int) -> Tensor:
        """The batch of a step, the same on every rank."""
        o = self.options
        return lm_model.training_windows(self.train, seed=o.seed, step=step, batch=o.batch, length=o.length)

    def save(self, run: Training) -> None:
        """Writes the checkpoint of a run."""
        lm_checkpoint.save(run, self.out / CHECKPOINTS[run.name], self.options.as_text(), self.digest)


def learning_rate(step: int, options: Options) -> float:
    """Of step 1, 2, ...: a linear rise, then a cosine down to a tenth."""
    rise = min(1.0, step / max(1, options.warmup))
    progress = min(1.0, max(0, step - options.warmup) / max(1, options.steps - options.warmup))
    return options.lr * rise * (0.55 + 0.45 * math.cos(math.pi * progress))


def one_step(run: Training, session: Session) -> None:
    """Draws a batch, updates the parameters, and notes what happened."""
    options, started, step = session.options, time.perf_counter(), run.step + 1
    run.runner.begin(step)
    grads, (objective, nats, counts, dropped) = run.runner.gradient(run.params, session.windows(step))
    if not math.isfinite(objective):
        raise Failed(f"the loss of step {step} is {float(objective)}: choose a smaller --lr, now {options.lr:g}")
    rate = learning_rate(step, options)
    run.update(grads, rate)
    curves = run.curves
    curves.bits.append(float(nats) / math.log(2))
    curves.rate.append(rate)
    curves.counts.append(counts)
    curves.dropped.append(dropped)
    curves.seconds.append(time.perf_counter() - started)
    run.runner.end(counts, curves.seconds[-1])


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
            if session.stopped() or last:
                break
            if run.step % options.checkpoint_every == 0:
                session.save(run)
    session.save(run)


# --- the program -------------------------------------------------------------------------------------------


def prepare(given: dict[str, Any], todo: Any, ranks: Ranks, stop: StopOnInterrupt) -> tuple[list[Training], Session]:
    """Checks everything, then makes the runs: nothing is written before all of it is known to be usable."""
    names = ["moe", "dense"] if todo.compare_dense else ["moe"]

    def check() -> tuple[Session, dict[str, lm_checkpoint.Saved]]:
        saved = {}
        options = None if todo.resume else Options(**given)
        for name in names if todo.resume else ():
            path = todo.out / CHECKPOINTS[name]
            if name == "moe" or path.exists():
                saved[name] = lm_checkpoint.read(path)
                wanted = given if options is None else dataclasses.asdict(options)  # two checkpoints are of one run
                found = resumed(wanted, saved[name].options, path)
                options = options or found
        text = lm_model.read_text(options.data, options.max_bytes)
        parts, digest = lm_model.split_text(text, options.data, options.length), hashlib.sha256(text).hexdigest()
        for held in saved.values():
            if held.text != digest:
                raise Refused(f"{held.path} was trained on another text than --data {options.data} is now")
            if held.step > options.steps:
                raise Refused(f"{held.path} is at step {held.step}, past --steps {options.steps}")
        for name in names:
            options.model(name)
        return Session(options, todo, *parts, digest, ranks, stop, Console(quiet=not ranks.first)), saved

    session, saved = ranks.together(check)
    runs = []
    for name in names:
        config = session.options.model(name)
        runs.append(Training(name, config, Runner(config, ranks, session.options.plan), seed=session.options.seed))
        if name in saved:
            lm_checkpoint.restore(runs[-1], saved[name])
    return runs, session


def make_room(session: Session) -> None:
    """Makes the folder, and keeps the checkpoints of an earlier run in it under another name."""
    if not session.ranks.first:
        return
    try:
        session.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refused(f"--out {session.out}: {error.strerror}") from None
    for file in CHECKPOINTS.values() if not session.todo.resume else ():
        kept = lm_checkpoint.set_aside(session.out / file)
        if kept is not None:
            session.say(f"{session.out / file} is of an earlier run: kept as {kept.name}")


def program(given: dict[str, Any], todo: Any, ranks: Ranks) -> int:
    with StopOnInterrupt() as stop:
        runs, session = prepare(given, todo, ranks, stop)
        ranks.together(lambda: make_room(session))
        session.say(
            f"{session.options.data}: {len(session.train):,} bytes to train on, {len(session.validation):,} to validate"
        )
        if todo.show_program:
            session.say(runs[0].runner.program(runs[0].params, session.windows(1)))
        for run in list(runs):
            if run.name == "dense" and session.stopped():
                runs.remove(run)
                continue
            if run.step == 0:
                session.save(run)  # a folder that cannot be written to shows now, not after the training
            else:
                session.say(f"{LABELS[run.name]}: going on from step {run.step}")
            train(run, session)
        stopped = session.stopped()
    if stopped:
        session.say("stopped: --resume goes on from here")
    finals = {run.name: final(run, session) for run in runs}
    params = lm_ranks.gathered(runs[0].params)
    explanation = runs[0].runner.explanation()
    ranks.leave()  # the rest is for one alone, and may take its time
    if ranks.first:
        shown = {run.name: run for run in runs}
        write_metrics(session.out / "metrics.json", shown, finals, session)
        draw(shown, session)
        summarize(shown, finals, session)
        show_sample(params, runs[0].config, session)
        if explanation:
            session.say(explanation)
        session.say(f"results are in {session.out}")
    return 130 if stopped else 0


def main(argv: list[str] | None = None) -> int:
    """Runs the program; whatever goes wrong takes one line on stderr."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without the letters shows a question mark
    refused, given, todo, ranks = None, {}, None, Ranks()
    try:
        given, todo = parse(argv, __doc__ or "")
    except Refused as error:
        refused = error  # for later: all ranks have the same arguments, and first they meet
    try:
        ranks = lm_ranks.join(TIMEOUT if todo is None else todo.timeout)
        if refused is not None:
            raise refused
        return program(given, todo, ranks)
    except (Refused, Failed) as error:  # these are the same on all ranks
        if ranks.first:
            complain(str(error))
        ranks.leave()
        return 2 if isinstance(error, Refused) else 1
    except OSError as error:
        message, code = f"cannot write: {error}", 1
    except (MemoryError, RuntimeError, ValueError) as error:
        lost = lm_ranks.of_a_lost_rank(error)
        if not lost and not isinstance(error, MemoryError) and "allocate memory" not in str(error):
            raise
        message = f"another rank is gone or late; --resume goes on from the last checkpoint ({lost})"
        message, code = message if lost else "out of memory: choose smaller sizes", 1
    except KeyboardInterrupt:
        message, code = "interrupted; --resume goes on from the last checkpoint", 130
    except Terminated:
        message, code = "ended by SIGTERM; --resume goes on from the last checkpoint", 143
    complain(message if ranks.world == 1 else f"rank {ranks.rank}: {message}")
    return code


def complain(message: str) -> None:
    """Prints a message in one line on stderr."""
    print("train_lm: " + " ".join(message.split()), file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

"""Replays the load of a training through the planner: which plan it runs at each step, and what that is worth.

    python examples/replay_load.py --make --out runs/replay
    python examples/train_lm.py --out runs/lm && python examples/replay_load.py runs/lm/metrics.json --out runs/replay

The trace is the ``counts`` of a metrics.json that `train_lm.py` wrote. ``--make`` makes one instead: the
fullest expert goes from the mean load to 4.38 times that and back, the bound that Tutel (arXiv 2206.03382,
figure 1) reports within one training, as a wave on a log scale. Only the shares of the experts are taken from
a trace; tokens, dims, ranks and the machine are those of the options.

Nothing runs: a step takes what the model of the machine predicts for its load. The planner sees the steps
before, never the one it chooses for. As nothing can be learned from trying what is predicted anyway, every
trial counts as made; with ``--trials`` the planner makes them, as it does in a training.

It prints a line for each stretch of steps under one plan (steps, load of the fullest expert over the mean,
plan, ms a step of the planner and of the best single plan) and a table of all plans that fit at every step,
each run alone: its time in all, over that of the planner. The best single plan is known in hindsight only.
In ``--out`` it leaves replay.json and, with matplotlib, replay.png: load, times and plan over the steps.

Exit codes: 0; 2 for input that cannot be used, with one line on stderr.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import fmoe
from fmoe.sharding import planner, presets
from fmoe.sharding.cost import Load, price
from fmoe.sharding.profile import Profile

SWING = 4.38  # Tutel, figure 1
STATICS_SHOWN = 8

Counts = list[list[list[float]]]  # [step][layer][expert]


@dataclass(frozen=True)
class Replay:
    """What happened: an entry for each step.

    Attributes:
        load: rows of the fullest expert over the mean, of the fullest layer.
        plans: that ran.
        seconds: that it took.
        statics: plan to seconds at each step, for plans that fit at every step; the best in all first.
    """

    load: list[float]
    plans: list[str]
    seconds: list[float]
    statics: dict[str, list[float]]

    @property
    def best(self) -> str:
        """The best single plan."""
        return next(iter(self.statics))

    @property
    def changes(self) -> int:
        """How often the plan changed."""
        return sum(a != b for a, b in pairwise(self.plans))

    def over(self, plan: str) -> float:
        """Time of a single plan over that of the planner."""
        return sum(self.statics[plan]) / sum(self.seconds)


def make_trace(steps: int, experts: int, layers: int, ratio: float = SWING, waves: float = 2.0) -> Counts:
    """A load that swings: in every layer expert 0 goes from the mean to `ratio` times it and back."""
    trace = []
    for step in range(steps):
        height = ratio ** (0.5 - 0.5 * math.cos(2 * math.pi * waves * step / steps))
        rest = (experts - height) / max(1, experts - 1)
        trace.append([[height, *[rest] * (experts - 1)] for _ in range(layers)])
    return trace


def read_trace(path: Path) -> tuple[Counts, int]:
    """The load and K of a metrics.json.

    Raises:
        ValueError: if it is not one, naming what is wrong.
    """
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file.")
    try:
        held = json.loads(path.read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not JSON ({error}).") from None
    if not isinstance(held, dict) or held.get("format") != "fmoe-lm-metrics":
        raise ValueError(f'{path}: its format is not "fmoe-lm-metrics", as train_lm.py writes it to metrics.json.')
    try:
        counts, top_k = held["runs"]["moe"]["counts"], held["options"]["top_k"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: parts are missing ({error}).") from None
    _check_counts(path, counts)
    return counts, top_k


def _check_counts(path: Path, counts: Any) -> None:
    try:
        tensor = torch.tensor(counts, dtype=torch.float64)
    except (ValueError, TypeError, RuntimeError):
        raise ValueError(f"{path}: counts must be numbers, [step][layer][expert].") from None
    if tensor.dim() != 3 or not tensor.numel():
        raise ValueError(f"{path}: counts must be [step][layer][expert], but their dims are {list(tensor.shape)}.")
    bad = ~(tensor.isfinite() & (tensor >= 0)).all(2).all(1)
    if bad.any():
        step = int(bad.nonzero()[0])
        raise ValueError(f"{path}: counts of step {step + 1} are not all finite numbers of at least 0.")


def traced_layers(given: argparse.Namespace, layers: int, experts: int, top_k: int) -> fmoe.Traced:
    """MoE layers one after another, captured on shapes alone."""
    config = fmoe.MoEConfig(
        num_experts=experts,
        model_dim=given.model_dim,
        hidden_dim=given.hidden_dim,
        router=fmoe.TopK(top_k),
        activation="relu",
    )

    def model(params: Sequence[fmoe.MoEParams], x: torch.Tensor) -> torch.Tensor:
        for layer in params:
            x = x + fmoe.moe(layer, x, config)[0]
        return x

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    dim, hidden = given.model_dim, given.hidden_dim
    params = [
        fmoe.MoEParams(
            fmoe.RouterParams(empty(dim, experts)),
            fmoe.ExpertParams(empty(experts, dim, hidden), empty(experts, hidden, dim)),
        )
        for _ in range(layers)
    ]
    return fmoe.trace(model)(params, empty(given.tokens, dim))


class Machine:
    """Stands for the cluster: says what a step takes under a plan and a load."""

    def __init__(self, traced: fmoe.Traced, spec: fmoe.ShardingSpec, profile: Profile):
        self.traced, self.spec, self.profile = traced, spec, profile
        self.programs: dict[planner.Assignment, fmoe.Planned] = {}

    def step(self, plans: planner.Assignment, load: Mapping[str, Sequence[float]]) -> tuple[float, float]:
        """Seconds and bytes."""
        if plans not in self.programs:
            self.programs[plans] = self.traced.plan(self.spec.replace(plan=dict(plans)))
        program = self.programs[plans]
        loads = {name: Load(tuple(counts)) for name, counts in load.items()}
        found = price(program.program, program.axes, self.profile, loads=loads, tokens=self.spec.max_tokens)
        return found.seconds, found.memory


def tried(state: planner.State) -> planner.State:
    """The state as if all trials under its load had been made, each with what was predicted."""
    if state.load is None:
        return state
    known = state
    for plans, found in state.model.ranked(planner.Bucket.of(state.load, state.model))[: planner.TRIALS]:
        for _ in range(planner.REPEATS):
            known = planner.observe(known, plans, None, found.seconds)
    return replace(known, chosen=state.chosen, load=state.load, means=state.means, step=state.step)


def replay(counts: Counts, machine: Machine, *, trials: bool = False, track: Any = iter) -> Replay:
    """Runs the planner through a trace, and every single plan beside it.

    Args:
        counts: [step][layer][expert].
        machine: what steps take.
        trials: whether the planner makes its trials.
        track: wraps the steps, to show how far it is.

    Raises:
        PlanError: if no plan fits in memory.
    """
    spec, names = machine.spec, [layer.name for layer in machine.traced.layers]
    widths = {layer.name: layer.slots(spec.max_tokens) for layer in machine.traced.layers}
    state = planner.init(machine.traced, spec, machine.profile, widths, spec.max_tokens)
    limit = spec.memory if spec.memory is not None else machine.profile.memory
    single = {str(plan): tuple((name, plan) for name in names) for plan in state.model.candidates}
    statics: dict[str, list[float]] = {text: [] for text in single}
    loads, plans, seconds = [], [], []
    for step in track(counts):
        load = dict(zip(names, step, strict=True))
        known = state if trials else tried(state)
        chosen = planner.choose(known, known.load)
        took, _ = machine.step(chosen, load)
        state = planner.observe(known, chosen, load, took)
        loads.append(max(max(layer) * len(layer) / max(sum(layer), 1e-9) for layer in step))
        plans.append(text_of(chosen))
        seconds.append(took)
        for text in list(statics):
            time, memory = machine.step(single[text], load)
            if limit is not None and memory > limit:
                del statics[text]
            else:
                statics[text].append(time)
    order = sorted(statics, key=lambda text: (sum(statics[text]), text))
    return Replay(loads, plans, seconds, {text: statics[text] for text in order})


def text_of(plans: planner.Assignment) -> str:
    """Plans of the layers in a line."""
    every = {str(plan) for _, plan in plans}
    return every.pop() if len(every) == 1 else "; ".join(f"{name}: {plan}" for name, plan in plans)


# --- what is shown ---------------------------------------------------------------------------------------


def show(found: Replay, numbers: Sequence[int], console: Console) -> None:
    """Prints stretches of steps under one plan, and the single plans."""
    table = Table(box=None, pad_edge=False, title="What the planner ran", title_justify="left")
    for name in ("steps", "load", "plan", "ms", "best single, ms"):
        table.add_column(name, justify="left" if name == "plan" else "right")
    best = found.statics[found.best] if found.statics else [math.nan] * len(found.plans)
    for plan, group in groupby(range(len(found.plans)), key=lambda i: found.plans[i]):
        part = list(group)
        low, high = (f(found.load[i] for i in part) for f in (min, max))
        table.add_row(
            f"{numbers[part[0]]} to {numbers[part[-1]]}",
            f"{low:.2f} to {high:.2f}",
            plan,
            f"{1e3 * statistics.fmean(found.seconds[i] for i in part):.4g}",
            f"{1e3 * statistics.fmean(best[i] for i in part):.4g}",
        )
    console.print(table)
    console.print(
        f"the plan changed {found.changes} times in {len(found.plans)} steps, {sum(found.seconds):.4g} s in all"
    )
    console.print()
    table = Table(box=None, pad_edge=False, title="Each plan run alone", title_justify="left")
    for name in ("plan", "seconds", "over the planner"):
        table.add_column(name, justify="left" if name == "plan" else "right")
    for plan in list(found.statics)[:STATICS_SHOWN]:
        table.add_row(plan, f"{sum(found.statics[plan]):.4g}", f"{found.over(plan):.3f}x")
    console.print(table)
    if len(found.statics) > STATICS_SHOWN:
        console.print(f"and {len(found.statics) - STATICS_SHOWN} slower ones")


def draw(found: Replay, numbers: Sequence[int], path: Path) -> bool:
    """Writes the picture; False without matplotlib."""
    try:
        from matplotlib.figure import Figure  # without pyplot its canvas is Agg: no display is needed
    except ImportError:
        return False
    figure = Figure(figsize=(9, 8), layout="constrained")
    load, times, plans = figure.subplots(3, 1, sharex=True, height_ratios=(1, 2, 1))
    load.plot(numbers, found.load, color="black")
    load.set_ylabel("fullest expert / mean")
    ways: dict[str, str] = {}  # the best of each way to share an expert
    for plan in found.statics:
        ways.setdefault("dp" if plan.startswith("dp") else plan.split()[1], plan)
    for plan in list(ways.values())[:5]:
        times.plot(numbers, [1e3 * t for t in found.statics[plan]], linewidth=1, label=plan)
    times.plot(numbers, [1e3 * t for t in found.seconds], color="black", linewidth=2, label="planner")
    times.set_ylabel("ms a step")
    times.set_yscale("log")
    times.yaxis.set_major_formatter("{x:g}")
    times.yaxis.set_minor_formatter("{x:g}")
    times.legend(fontsize=7)
    names = list(dict.fromkeys(found.plans))
    plans.step(numbers, [names.index(plan) for plan in found.plans], where="mid", color="black")
    plans.set_yticks(range(len(names)), [name.replace("; ", "\n") for name in names], fontsize=6)
    plans.set_xlabel("step")
    for panel in (load, times, plans):
        panel.grid(alpha=0.3)
    if found.statics:
        load.set_title(f"The best single plan takes {found.over(found.best):.3f} times as long", fontsize=10)
    figure.savefig(path, dpi=120)
    return True


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("trace", nargs="?", type=Path, help="metrics.json of train_lm.py")
    parser.add_argument("--make", action="store_true", help="make a trace that swings, instead")
    parser.add_argument("--out", type=Path, default=Path("runs/replay"), metavar="DIR", help="(default runs/replay)")
    parser.add_argument("--profile", default="a100_ndm", help="preset, or .json of a calibration (default a100_ndm)")
    for name, default, text in (
        ("world", 8, "ranks"),
        ("node", 8, "ranks per node"),
        ("tokens", 4096, "tokens of each rank"),
        ("model-dim", 2048, "model dim"),
        ("hidden-dim", 2048, "hidden dim of an expert"),
        ("most", 200, "steps that are replayed; of a longer trace every n-th"),
        ("steps", 120, "of a made trace"),
        ("experts", 16, "of a made trace"),
        ("layers", 1, "of a made trace"),
        ("top-k", 2, "experts per token of a made trace"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{text} (default {default})")
    parser.add_argument("--trials", action="store_true", help="let the planner make its trials")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    given = parse(argv)
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    try:
        if given.make == (given.trace is not None):
            raise ValueError("give either the metrics.json of a training or --make.")
        for name in ("tokens", "most", "steps", "experts", "layers"):
            if getattr(given, name) < 1:
                raise ValueError(f"{name}={getattr(given, name)}, but it must be at least 1.")
        if given.make:
            if given.experts < SWING * given.top_k:
                raise ValueError(f"experts={given.experts}: one of them cannot hold {SWING} times the mean load.")
            counts, top_k = make_trace(given.steps, given.experts, given.layers), given.top_k
        else:
            counts, top_k = read_trace(given.trace)
        every = -(-len(counts) // given.most)
        counts, numbers = counts[::every], list(range(1, len(counts) + 1, every))
        layers, experts = len(counts[0]), len(counts[0][0])
        profile = presets.PRESETS.get(given.profile) or Profile.load(given.profile)
        mesh = fmoe.make_mesh(experts, world=given.world, node=given.node)
        spec = fmoe.ShardingSpec(mesh, max_tokens=given.tokens)
        machine = Machine(traced_layers(given, layers, experts, top_k), spec, profile)
        given.out.mkdir(parents=True, exist_ok=True)

        def shown(steps: Any) -> Any:
            return track(steps, "replaying", console=Console(stderr=True), transient=True)

        found = replay(counts, machine, trials=given.trials, track=shown)
        held = {"steps": numbers, "load": found.load, "plans": found.plans, "seconds": found.seconds}
        (given.out / "replay.json").write_text(json.dumps({**held, "statics": found.statics}) + "\n")
    except (ValueError, RuntimeError, OverflowError, OSError) as error:
        print("replay_load.py: " + " ".join(str(error).split()), file=sys.stderr)
        return 2
    source = "a made trace" if given.make else str(given.trace)
    console.print(
        f"{source}: {len(counts)} steps, {layers} layers of {experts} experts; {given.world} ranks in nodes of "
        f"{given.node}, T={given.tokens} M={given.model_dim} H={given.hidden_dim}, {profile.name}, all predicted",
        highlight=False,
        soft_wrap=True,
    )
    show(found, numbers, console)
    drawn = draw(found, numbers, given.out / "replay.png")
    console.print(
        f"wrote {given.out}/replay.json" + (" and replay.png" if drawn else "; no picture: no matplotlib"),
        soft_wrap=True,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

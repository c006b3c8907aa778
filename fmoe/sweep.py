"""``python -m fmoe sweep``: a grid of clusters, loads, capacities and sizes under static plans and the planner."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .advice import add_machine, memory_limit
from .grid import LEVELS, SWING, Point, Swing, grid, statics, swing
from .ops.activations import ACTIVATIONS
from .sharding.profile import Profile
from .sweep_report import draw, print_report
from .workload import DTYPES, Workload, profile_of

WORLDS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
LOADS = (1.0, 1.5, 2.0, 3.0, 4.0)
CAPACITIES = (1.0, 2.0, 4.0)
#: T, M and H of the two models whose parallelism is switched in Tutel (arXiv 2206.03382, figure 12).
SIZES = ("4096x2048x2048", "1024x2048x32768")
SWING_WORLDS = (16, 64, 256, 2048)
#: The same, and the dims of its table 5.
SWING_SIZES = (*SIZES, "4096x4096x4096")


def assumptions(given: argparse.Namespace, profile: Profile, limit: float | None) -> list[str]:
    """What the numbers rest on, a sentence each."""
    levels = f"{given.swing_levels} levels from 1 to {given.swing_ratio:g} in equal ratios, equally many steps each"
    return [
        f"Machine: {profile.name}, nodes of {given.node} ranks; nothing is measured here, all times are predicted.",
        f"Layer: E={given.experts} experts in all, K={given.top_k}, {given.activation}, {given.dtype}; forward and "
        "backward of one MoE layer alone, without attention, optimizer or data parallelism of other layers.",
        f"Sizes are TxMxH, T tokens on each rank: {', '.join(given.sizes)}"
        + (f"; of the swing {', '.join(given.swing_sizes)}." if given.swing else "."),
        f"Memory of a device: {'not limited' if limit is None else f'{limit:.4g} bytes'}, for this layer alone.",
        "Load: one expert has the given multiple of the mean choices, the others are alike; where rows are ragged the "
        "fullest rank is waited for, padded buffers are as wide as the capacity. Without a capacity nothing is "
        "dropped and plans are ragged; with one the fullest expert is as full as it may be, and plans are of both.",
        "Planner: the fastest legal plan that fits at each point, without trials, and a switch costs nothing.",
        "Static plan: one plan for all points; the best one is known in hindsight only. Ratios are its time over the "
        "planner's; means over a grid are geometric, each point counted once.",
        f"Swing: {levels}: the {SWING:g} is the paper's bound on the change of needed capacity in one training, the "
        "even spread of levels is ours. The load of the fullest expert swings, and the capacity as needed to "
        "drop nothing. Padded plans alone are what the paper's system has; ragged ones alone, and both, are ours.",
    ]


def add_sweep(commands: Any) -> None:
    """Adds the command."""
    command = commands.add_parser(
        "sweep",
        help="price a grid of clusters, loads, capacities and sizes under static plans and under the planner",
        description="Prices a grid on a machine given as numbers, and writes sweep.json and, with matplotlib, "
        "pictures. Needs no devices.",
    )
    command.add_argument("--out", type=Path, required=True, metavar="DIR", help="where sweep.json and pictures go")
    add_machine(command)
    command.add_argument("--worlds", type=int, nargs="+", default=WORLDS, metavar="W", help="numbers of ranks")
    command.add_argument(
        "--loads", type=float, nargs="*", default=LOADS, metavar="X", help="rows of the fullest expert over the mean"
    )
    command.add_argument("--capacities", type=float, nargs="*", default=CAPACITIES, metavar="F", help="factors")
    command.add_argument("--sizes", nargs="+", default=SIZES, metavar="TxMxH", help=f"(default {' '.join(SIZES)})")
    command.add_argument("--node", type=int, default=8, metavar="N", help="ranks per node (default 8)")
    command.add_argument("--experts", type=int, default=16, metavar="N", help="experts in all (default 16)")
    command.add_argument("--top-k", type=int, default=2, metavar="N", help="experts per token (default 2)")
    command.add_argument(
        "--activation", default="relu", choices=sorted(ACTIVATIONS), help="of the experts (default relu, two matrices)"
    )
    command.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    command.add_argument("--swing", action="store_true", help="also a load that swings within one training")
    command.add_argument("--swing-worlds", type=int, nargs="+", default=SWING_WORLDS, metavar="W")
    command.add_argument("--swing-sizes", nargs="+", default=SWING_SIZES, metavar="TxMxH")
    command.add_argument("--swing-ratio", type=float, default=SWING, metavar="X", help=f"(default {SWING:g})")
    command.add_argument("--swing-levels", type=int, default=LEVELS, metavar="N", help=f"(default {LEVELS})")


def run_sweep(given: argparse.Namespace) -> int:
    """Runs the sweep; 2 with one line on stderr for input that cannot be used."""
    try:
        profile = profile_of(given.profile)
        limit = memory_limit(given, profile)
        sizes = [_size(text) for text in given.sizes]
        base = _base(given, sizes)
        for text in given.swing_sizes:
            _size(text)
        points, swings = _priced(given, base, profile, limit, sizes)
        given.out.mkdir(parents=True, exist_ok=True)
        found = report(given, profile, limit, points, swings)
        (given.out / "sweep.json").write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")
    except (ValueError, RuntimeError, OverflowError, OSError) as error:
        print("python -m fmoe sweep: " + " ".join(str(error).split()), file=sys.stderr)
        return 2
    print_report(found, [given.out / "sweep.json", *draw(given.out, found)])
    return 0


def _size(text: str) -> tuple[int, int, int]:
    numbers = text.split("x")
    if len(numbers) != 3 or not all(n.isdecimal() and int(n) for n in numbers):
        raise ValueError(f"sizes={text!r}, but a size is TxMxH, such as {SIZES[0]}.")
    tokens, dim, hidden = map(int, numbers)
    return tokens, dim, hidden


def _base(given: argparse.Namespace, sizes: Sequence[tuple[int, int, int]]) -> Workload:
    """What the grid shares; all of the grid's values are tried before anything is priced."""
    tokens, dim, hidden = sizes[0]
    base = Workload(
        given.experts, given.worlds[0], min(given.node, given.worlds[0]), tokens, dim, hidden,
        top_k=given.top_k, dtype=given.dtype, activation=given.activation,
    )  # fmt: skip
    base = replace(base, node=given.node, world=given.node)
    for world in {*given.worlds, *(given.swing_worlds if given.swing else ())}:
        replace(base, world=world, node=min(given.node, world))
    for load in given.loads:
        replace(base, imbalance=load)
    for factor in given.capacities:
        if not 0 < factor < math.inf:
            raise ValueError(f"capacities={factor:g}, but a factor must be a number above 0.")
        replace(base, capacity=factor)
    if not given.loads and not given.capacities:
        raise ValueError("there is nothing to price: give --loads or --capacities.")
    if given.swing:
        if given.swing_levels < 2:
            raise ValueError(f"swing-levels={given.swing_levels}, but there must be at least 2.")
        replace(base, imbalance=given.swing_ratio)
    return base


def _priced(
    given: argparse.Namespace,
    base: Workload,
    profile: Profile,
    limit: float | None,
    sizes: Sequence[tuple[int, int, int]],
) -> tuple[list[Point], list[Swing]]:
    """Prices everything, with a bar that tells how far it is."""
    from rich.console import Console
    from rich.progress import Progress

    cells = len(sizes) * len(given.worlds) * (len(given.loads) + len(given.capacities))
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("pricing the grid", total=cells)
        points = grid(
            base, profile, limit, worlds=given.worlds, loads=given.loads, capacities=given.capacities, sizes=sizes,
            done=lambda count: progress.advance(task, count),
        )  # fmt: skip
        swings = []
        every = [(_size(text), world) for text in given.swing_sizes for world in given.swing_worlds] * given.swing
        task = progress.add_task("pricing the swing", total=len(every) * given.swing_levels, visible=given.swing)
        for (tokens, dim, hidden), world in every:
            here = replace(
                base, tokens=tokens, model_dim=dim, hidden_dim=hidden, world=world, node=min(base.node, world)
            )
            swings.extend(
                swing(here, profile, limit, ratio=given.swing_ratio, levels=given.swing_levels,
                      done=lambda count: progress.advance(task, count))
            )  # fmt: skip
    return points, swings


def report(
    given: argparse.Namespace, profile: Profile, limit: float | None, points: Sequence[Point], swings: Sequence[Swing]
) -> dict[str, Any]:
    """Everything that was found, as it is written to sweep.json."""
    kinds = {"load": [p for p in points if p.workload.capacity is None]}
    kinds["capacity"] = [p for p in points if p.workload.capacity is not None]
    return {
        "format": "fmoe-sweep",
        "version": 1,
        "assumptions": assumptions(given, profile, limit),
        "profile": json.loads(profile.as_json()),
        "memory": limit,
        "points": [p.as_data() for p in points],
        "statics": {kind: [dataclasses.asdict(s) for s in statics(some)] for kind, some in kinds.items()},
        "swings": [{**dataclasses.asdict(s), "speedup": s.speedup} for s in swings],
    }

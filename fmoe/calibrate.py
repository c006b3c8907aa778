"""Fits a `Profile` to the machine and the process group at hand.

Every number is fitted to what equations take (`measure`), in the units in which they are priced:

    collective   t = alpha + S / bandwidth   least squares of relative errors, in one or two segments of S
    experts      the efficiency curve is that of the main dtype; the peak of a dtype is its best speed
    shared       what experts take beside an all_to_all in flight, over what they take alone

What cannot be measured here is taken from a preset or copied from the other level, and `sources` says so.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from .measure import Bench, Effort, bytes_text
from .ops.processes import agree, is_up, this_rank
from .sharding.distribute import make_mesh
from .sharding.profile import COLLECTIVES, LEVELS, Profile, Segment


def calibrate(
    *,
    device: str | None = None,
    node: int | None = None,
    quick: bool = False,
    effort: Effort | None = None,
    name: str = "calibrated",
) -> Profile:
    """Measures this machine and, where there is one, the process group; every rank must call.

    Args:
        device: ``"cpu"`` or ``"cuda"``; by default that of the process group's tensors, or a GPU if there is one.
        node: ranks per node; by default LOCAL_WORLD_SIZE, which torchrun sets, or all of them.
        quick: measures fewer and smaller sizes, fewer times.
        effort: what to measure, instead of `quick`.
        name: of the profile.

    Returns:
        The profile, the same on every rank. ``sources`` has the fit of every number.

    Raises:
        SpecError: if node does not divide the number of ranks.

    Example:
        >>> small = Effort(dims=(32, 128), sizes=(2**10, 2**14), moved=2**22, budget=0.0, longest=1.0)
        >>> profile = calibrate(device="cpu", effort=small)
        >>> profile.name, profile.sources["links.inside"]
        ('calibrated', 'preset cpu_gloo: one process has no links')
    """
    mesh = make_mesh(1) if node is None else make_mesh(1, world=dist.get_world_size() if is_up() else 1, node=node)
    if device is None:
        device = "cuda" if torch.cuda.is_available() and (not is_up() or "nccl" in dist.get_backend()) else "cpu"
    bench = Bench(device, effort or Effort.of(device, quick), mesh)
    with torch.no_grad():
        launch = bench.launch()
        peak, curve = bench.experts(launch)
        bandwidth = bench.memory(launch)
        links = bench.links()
        shared = bench.shared(links)
    bench.sources["congestion"] = f"none: measured on {mesh.nodes} node{'s' if mesh.nodes > 1 else ''} alone"
    memory = None
    if device != "cpu":
        (least,) = agree([-torch.cuda.get_device_properties(device).total_memory], "calibrate")
        memory = float(-least)
        bench.sources["memory"] = "of the device, the smallest of the ranks"
    return Profile(
        name, peak, curve, bandwidth, launch, links, memory=memory, shared=shared, sources=bench.sources
    )  # fmt: skip


# --- the command line ----------------------------------------------------------------------------------------------


def add_calibrate(commands: Any) -> None:
    """Adds the command to the subparsers of an argparse parser."""
    command = commands.add_parser(
        "calibrate",
        help="measure this machine, and under torchrun its links, and write them for the planner",
        description="Measures experts, memory, launches and, under torchrun, every collective; fits a profile and "
        'writes it as JSON, for fmoe.auto(..., profile=Profile.load("profile.json")).',
    )
    command.add_argument("--out", default="profile.json", metavar="FILE", help="(default profile.json)")
    command.add_argument("--quick", action="store_true", help="fewer and smaller sizes, fewer times")
    names = "--ranks-per-node", "--node"  # torchrun takes the short one for its own
    command.add_argument(
        *names, dest="node", type=int, metavar="N", help="LOCAL_WORLD_SIZE, which torchrun sets, by default"
    )
    command.add_argument("--device", choices=("cpu", "cuda"), help="a GPU if there is one, by default")


def run_calibrate(arguments: argparse.Namespace) -> int:
    """Runs the command on this rank; 2 with one line on stderr if the arguments do not fit."""
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    begins = dist.is_torchelastic_launched() and not is_up()
    if begins:
        if device == "cuda":
            torch.cuda.set_device(dist.get_node_local_rank(0))
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        found = calibrate(device=device, node=arguments.node, quick=arguments.quick)
        if this_rank() == 0:
            Path(arguments.out).write_text(found.as_json() + "\n")
            Console().print(report(found))
            Console().print(f"{arguments.out} holds the profile.", markup=False)
    except (ValueError, OSError) as error:
        print(f"python -m fmoe calibrate: {error}", file=sys.stderr)
        return 2
    finally:
        if begins:
            dist.destroy_process_group()
    return 0


def report(profile: Profile) -> Table:
    """A profile's numbers, each with its source, as a table.

    Args:
        profile: from `calibrate`.

    Returns:
        A table of rich.

    Example:
        >>> from fmoe.sharding.presets import PRESETS
        >>> report(PRESETS["cpu_gloo"]).row_count
        16
    """
    table = Table("what", "fitted", "from")
    known = {**profile.sources}
    rows = [(f"peak.{name}", f"{speed / 1e9:.4g} GFLOP/s") for name, speed in profile.peak.items()]
    rows += [("efficiency", ", ".join(f"{share:.2f}" for _, share in profile.efficiency))]
    rows += [("memory_bandwidth", f"{profile.memory_bandwidth / 1e9:.4g} GB/s")]
    rows += [("launch", f"{1e6 * profile.launch:.4g} us"), ("shared", f"{profile.shared:.0%}")]
    for level, name in itertools.product(LEVELS, COLLECTIVES):
        rows += [(f"links.{level}.{name}", "\n".join(map(_segment_text, profile.links[level][name])))]
    for what, text in rows:
        parts = what.split(".")
        keys = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
        table.add_row(what, text, next((known[key] for key in keys if key in known), known.get("all", "")))
    return table


def _segment_text(segment: Segment) -> str:
    upto = "" if math.isinf(segment.most) else f" up to {bytes_text(segment.most)}"
    return f"{1e6 * segment.alpha:.4g} us + {segment.bandwidth / 1e9:.4g} GB/s{upto}"

"""Measures the machine and the process group at hand, and fits a `Profile` to them.

Every number is fitted to equations that programs run, and in the units in which they are priced: experts to
``expert_ffn``, memory to ``encode`` and ``decode``, collectives over the groups that plans use. All ranks
measure at the same time, as they work at the same time; a repetition takes what its slowest rank took, a
measurement is the median of repetitions after a warm-up, and every rank ends with the same numbers.

    collective   t = alpha + S / bandwidth   least squares of relative errors, in one or two segments of S
    experts      the efficiency curve is that of the main dtype; the peak of a dtype is its best speed

What cannot be measured here is taken from a preset or copied from the other level, and `sources` says so.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ._axes import Axes
from .functional.config import MoEConfig
from .functional.moe import moe
from .functional.routers import TopK
from .ops.processes import Processes, agree, is_up, this_rank
from .ops.runtime import Column, Splits, run
from .program import Equation, Program, Var
from .sharding.cost import price
from .sharding.distribute import make_mesh
from .sharding.fit import fit, received, rising
from .sharding.mesh import Mesh
from .sharding.presets import default_profile
from .sharding.profile import COLLECTIVES, LEVELS, Profile, Segment
from .sharding.spec import ShardingSpec
from .stages import Planned, trace
from .values import ExpertParams, MoEParams, RouterParams

_DTYPES = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
_EXPERTS = 2
_WIDTH = 256  # M of the layer whose rows are moved


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Attributes:
        dims: M = H of experts of as many rows, ascending.
        sizes: bytes of a collective's whole tensor, ascending.
        moved: bytes of the largest x by whose dispatch memory is measured.
        budget: seconds for the repetitions of one measurement, after the first.
        longest: seconds; what takes longer is the last of its sizes.
        repeats: repetitions of a measurement, at least and at most.
    """

    dims: tuple[int, ...]
    sizes: tuple[int, ...]
    moved: int
    budget: float
    longest: float
    repeats: tuple[int, int] = (3, 21)

    @classmethod
    def of(cls, device: str, quick: bool) -> Effort:
        """For a type of device."""
        large = device != "cpu"
        dims = (256, 512, 1024, 2048, 4096, 8192) if large else (32, 64, 128, 256, 512, 1024)
        sizes = tuple(2**n for n in range(12, 29 if large else 25))
        if quick:
            return cls(dims[:-1] if large else dims[1:5], sizes[:-2:2], 2**28 if large else 2**22, 0.05, 0.1, (5, 9))
        return cls(dims, sizes, 2**28 if large else 2**25, 0.15, 0.4)


class _Alone(Processes):
    """Exchanges nothing: what would be received is what would be sent."""

    def all_to_all(self, axis: str, column: Column, sends: Splits = None, receives: Splits = None) -> Column:
        """See `Processes`."""
        return column

    def all_reduce(self, axis: str, column: Column) -> Column:
        """See `Processes`."""
        return column


@dataclass(frozen=True)
class _Bench:
    """Measures on this rank together with all others."""

    device: str
    effort: Effort
    mesh: Mesh
    sources: dict[str, str] = field(default_factory=dict)

    def seconds(self, call: Callable[[], Any], *, inner: bool = False) -> float:
        """Median over repetitions of the slowest rank; `inner` calls several times in a row if that is fast."""
        for _ in range(2):
            call()
        first = self._agreed([self._once(call, 1)])[0]
        times = min(50, max(1, int(5e-4 / first))) if inner else 1
        least, most = self.effort.repeats
        repeats = min(most, max(least, int(self.effort.budget / (first * times))))
        return statistics.median(self._agreed([self._once(call, times) for _ in range(repeats)]))

    def _once(self, call: Callable[[], Any], times: int) -> float:
        self._wait()
        if is_up():
            dist.barrier()
        self._wait()
        start = time.perf_counter()
        for _ in range(times):
            call()
        self._wait()
        return (time.perf_counter() - start) / times

    def _wait(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()

    def _agreed(self, seconds: Sequence[float]) -> list[float]:
        return [max(n, 1) / 1e9 for n in agree([round(1e9 * s) for s in seconds], "calibrate")]

    # --- one device ---------------------------------------------------------------------------------------------

    def launch(self) -> float:
        """Seconds of an equation: of a layer on a few numbers, for each time that its price counts one."""
        planned = self._layer(8, 8, torch.float32)
        free = replace(_nothing(), launch=1.0)
        counted = round(price(planned.program, planned.axes, free).forward)
        values = self._values(planned.program)
        taken = self.seconds(lambda: run([planned.program], values, _Alone(), [0], planned.axes), inner=True)
        self.sources["launch"] = f"measured: a layer of 8 tokens in {1e6 * taken:.0f} us, for {counted} launches"
        return min(1.0, taken / counted)

    def memory(self, launch: float) -> float:
        """Bytes per second, read and written, of the equations that move rows: the median of several sizes."""
        speeds = []
        for size in (self.effort.moved // n for n in (64, 16, 4, 1)):
            planned = self._layer(size // (4 * _EXPERTS * _WIDTH), _WIDTH, torch.float32)
            found = list(self._equations(planned, ("encode", "decode")))
            taken = sum(seconds for _, seconds in found)
            speeds.append(sum(moved for moved, _ in found) / max(taken - 2 * launch, taken / 10))
        self.sources["memory_bandwidth"] = (
            f"measured: encode and decode of {_bytes_text(self.effort.moved // 64)} to "
            f"{_bytes_text(self.effort.moved)}, {min(speeds) / 1e9:.3g} to {max(speeds) / 1e9:.3g} GB/s"
        )
        return statistics.median(speeds)

    def experts(self, launch: float) -> tuple[dict[str, float], tuple[tuple[float, float], ...]]:
        """The peak of each dtype, and the efficiency of the main one."""
        main = "f32" if self.device == "cpu" else "bf16"
        speeds = {name: dict(self._speeds(dtype, launch)) for name, dtype in _DTYPES.items()}
        peak = {name: max(found.values()) for name, found in speeds.items()}
        curve = rising([(size, round(speed / peak[main], 6)) for size, speed in speeds[main].items()])
        self.sources["efficiency"] = f"measured: expert_ffn in {main}, {len(curve)} sizes, made to rise with size"
        for name, found in speeds.items():
            known = dict(curve)
            errors = [abs(speed / (peak[name] * known[size]) - 1) for size, speed in found.items() if size in known]
            self.sources[f"peak.{name}"] = (
                f"measured: best of {len(found)} sizes; residuals to the curve median {statistics.median(errors):.1%}, "
                f"worst {max(errors):.1%}"
            )
        return peak, curve

    def _speeds(self, dtype: torch.dtype, launch: float) -> Iterator[tuple[float, float]]:
        spent = 0.0  # more work takes no less time
        for dim in self.effort.dims:
            planned = self._layer(dim, dim, dtype)
            ((_, taken),) = self._equations(planned, ("expert_ffn",))
            spent = max(spent, taken - launch, taken / 10)
            yield 2.0 * dim**3, 2 * _EXPERTS * 2.0 * dim**3 / spent
            if taken > self.effort.longest / 4:
                return

    def _layer(self, rows: int, dim: int, dtype: torch.dtype) -> Planned:
        """A layer of which each of two ranks has `_EXPERTS` experts, of `rows` rows each."""
        experts, tokens = 2 * _EXPERTS, _EXPERTS * rows
        config = MoEConfig(experts, dim, dim, router=TopK(1), capacity=1.0, activation="relu")
        shapes = (dim, experts), (experts, dim, dim), (experts, dim, dim), (tokens, dim)
        router, w_in, w_out, x = (torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
        params = MoEParams(RouterParams(router), ExpertParams(w_in, w_out))
        spec = ShardingSpec(make_mesh(experts, world=2), plan="ep layout=padded", max_tokens=tokens)
        return trace(lambda params, x: moe(params, x, config))(params, x).plan(spec)

    def _equations(self, planned: Planned, ops: Sequence[str]) -> Iterator[tuple[float, float]]:
        """(bytes of operands and results, seconds) of those equations of a layer whose op is given."""
        types = planned.program.types()
        values = dict(zip((var.name for var in planned.program.inputs), self._values(planned.program), strict=True))
        for eq in planned.program.equations:
            inputs, outputs = ([Var(name, types[name]) for name in names] for names in (eq.operands, _names(eq)))
            program = Program(eq.op, tuple(inputs), (eq,), _names(eq))
            call = partial(run, [program], [values[name] for name in eq.operands], _Alone(), [0], planned.axes)
            values.update(zip(_names(eq), call(), strict=True))
            if eq.op in ops:
                moved = sum(var.type.bytes for var in (*inputs, *outputs) if var.type.kind == "tensor")
                yield float(moved), self.seconds(call, inner=True)

    def _values(self, program: Program) -> list[list[Tensor]]:
        makers = [(var.type.dtype, [int(d) for d in var.type.dims]) for var in program.inputs]
        return [[torch.randn(dims, device=self.device).mul_(0.1).to(dtype)] for dtype, dims in makers]

    # --- links ----------------------------------------------------------------------------------------------------

    def links(self) -> dict[str, dict[str, tuple[Segment, ...]]]:
        """The segments of every level that there is, the other copied from it, or a preset's."""
        world, node = self.mesh.world, self.mesh.node
        if world == 1:
            preset = default_profile([self.device])
            for level in LEVELS:
                self.sources[f"links.{level}"] = f"preset {preset.name}: one process has no links"
            return {level: dict(preset.links[level]) for level in LEVELS}
        found = {}
        if node > 1:
            found["inside"] = self._level("inside", "gpu" if node < world else "world", node, 1)
        if node < world:
            found["between"] = self._level("between", "world", world, world // node)
        for level, other in (LEVELS, LEVELS[::-1]):
            if level not in found:
                found[level] = found[other]
                self.sources[f"links.{level}"] = f"copied from {other}: the ranks here have no other links"
        return found

    def _level(self, level: str, axis: str, ranks: int, nodes: int) -> dict[str, tuple[Segment, ...]]:
        found = {}
        for name in COLLECTIVES:
            points = list(self._points(name, axis, ranks, nodes))
            fitted = fit(points)
            found[name] = fitted.segments
            where = f"{ranks} ranks on {nodes} nodes" if nodes > 1 else f"{ranks} ranks"
            self.sources[f"links.{level}.{name}"] = f"measured: {where}, {len(points)} sizes; {fitted.as_text()}"
        return found

    def _points(self, name: str, axis: str, ranks: int, nodes: int) -> Iterator[tuple[float, float]]:
        """(bytes received as prices count them, seconds), by size."""
        comm = Processes().at("calibrate", Axes(1, 1, self.mesh.world, self.mesh.node))
        last = self.effort.sizes[1]  # a line needs two points
        for whole in self.effort.sizes:
            rows = -(-whole // (4 * ranks))
            x = torch.ones(rows if name == "all_gather" else rows * ranks, device=self.device)
            taken = self.seconds(lambda: getattr(comm, name)(axis, [x]))  # noqa: B023
            yield received(name, 4.0 * rows * ranks, ranks, nodes), taken
            if taken > self.effort.longest and whole >= last:
                return


def _names(eq: Equation) -> tuple[str, ...]:
    return tuple(var.name for var in eq.outputs)


def _nothing() -> Profile:
    """A machine on which all but a launch is free."""
    free = {name: (Segment(math.inf, 0.0, 1e14),) for name in COLLECTIVES}
    return Profile("nothing", dict.fromkeys(_DTYPES, 1e18), ((1.0, 1.0),), 1e15, 0.0, dict.fromkeys(LEVELS, free))


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
        >>> small = Effort(dims=(8, 16), sizes=(64, 256), moved=2**18, budget=0.0, longest=1.0)
        >>> profile = calibrate(device="cpu", effort=small)
        >>> profile.name, profile.sources["links.inside"]
        ('calibrated', 'preset cpu_gloo: one process has no links')
    """
    mesh = make_mesh(1) if node is None else make_mesh(1, world=dist.get_world_size() if is_up() else 1, node=node)
    if device is None:
        device = "cuda" if torch.cuda.is_available() and (not is_up() or "nccl" in dist.get_backend()) else "cpu"
    bench = _Bench(device, effort or Effort.of(device, quick), mesh)
    preset = default_profile([device])
    with torch.no_grad():
        launch = bench.launch()
        peak, curve = bench.experts(launch)
        bandwidth = bench.memory(launch)
        links = bench.links()
    bench.sources["shared"] = f"preset {preset.name}: not measured"
    bench.sources["congestion"] = f"none: measured on {mesh.nodes} node{'s' if mesh.nodes > 1 else ''} alone"
    memory = None
    if device != "cpu":
        (least,) = agree([-torch.cuda.get_device_properties(device).total_memory], "calibrate")
        memory = float(-least)
        bench.sources["memory"] = "of the device, the smallest of the ranks"
    return Profile(
        name, peak, curve, bandwidth, launch, links, memory=memory, shared=preset.shared, sources=bench.sources
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
    upto = "" if math.isinf(segment.most) else f" up to {_bytes_text(segment.most)}"
    return f"{1e6 * segment.alpha:.4g} us + {segment.bandwidth / 1e9:.4g} GB/s{upto}"


def _bytes_text(size: float) -> str:
    return f"{size / 2**20:.4g} MiB" if size >= 2**20 else f"{size / 2**10:.4g} KiB"

"""Measures the machine and the process group at hand, and fits a `Profile` to them.

Every number is fitted to what programs run: experts to the ``expert_ffn`` equation, collectives to those of
`ops`, over the groups that plans use. All ranks measure at the same time, as they work at the same time; a
repetition takes what its slowest rank took, a measurement is the median of repetitions after a warm-up, and
every rank ends with the same numbers.

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
from .ops.runtime import run
from .program import Equation, Program, Var
from .sharding.cost import price
from .sharding.distribute import make_mesh
from .sharding.mesh import Mesh
from .sharding.presets import default_profile
from .sharding.profile import COLLECTIVES, LEVELS, Profile, Segment
from .sharding.spec import ShardingSpec
from .stages import Planned, trace
from .values import ExpertParams, MoEParams, RouterParams

_DTYPES = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
_EXPERTS = 2


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Attributes:
        dims: M = H of experts of as many rows, ascending.
        sizes: bytes of a collective's whole tensor, ascending.
        copied: bytes of the tensor by whose copies memory is measured.
        budget: seconds for the repetitions of one measurement, after the first.
        longest: seconds; what takes longer is the last of its sizes.
        repeats: repetitions of a measurement, at least and at most.
    """

    dims: tuple[int, ...]
    sizes: tuple[int, ...]
    copied: int
    budget: float
    longest: float
    repeats: tuple[int, int] = (3, 21)

    @classmethod
    def of(cls, device: str, quick: bool) -> Effort:
        """For a type of device."""
        large = device != "cpu"
        dims = (256, 512, 1024, 2048, 4096, 8192) if large else (32, 64, 128, 256, 512, 1024)
        sizes = tuple(4**n for n in range(6, 15 if large else 13))
        if quick:
            return cls(dims[:-1] if large else dims[1:5], sizes[:-1], 2**28 if large else 2**24, 0.02, 0.05, (3, 7))
        return cls(dims, sizes, 2**30 if large else 2**26, 0.15, 0.4)


@dataclass(frozen=True)
class Fit:
    """Segments fitted to (bytes, seconds), and how well they fit.

    Attributes:
        segments: ascending in size.
        r2: share of the variance that they explain, points weighted by 1/seconds as in the fit.
        errors: predicted over measured, minus 1, of each point.
    """

    segments: tuple[Segment, ...]
    r2: float
    errors: tuple[float, ...]

    def as_text(self) -> str:
        """How well it fits."""
        sizes = [abs(e) for e in self.errors]
        return f"r2 {self.r2:.4f}, residuals median {statistics.median(sizes):.1%}, worst {max(sizes):.1%}"


def fit(points: Sequence[tuple[float, float]]) -> Fit:
    """Fits ``alpha + bytes / bandwidth`` by least squares of relative errors, in one or two segments.

    Two are taken where they explain the points better than chance (Bayes' information criterion) and time
    does not fall from one to the other.

    Args:
        points: (bytes, seconds), ascending in bytes, at least two.

    Returns:
        The fit.

    Raises:
        ValueError: if there are fewer points.

    Example:
        >>> found = fit([(1e3, 1.1e-4), (1e4, 2e-4), (1e5, 1.1e-3)])
        >>> [(round(s.alpha, 9), round(s.bandwidth)) for s in found.segments]
        [(0.0001, 100000000)]
    """
    if len(points) < 2:
        raise ValueError(f"fit: {len(points)} points were given, but a line needs at least 2.")
    best, lowest = (replace(_line(points), most=math.inf),), math.inf
    for first in (None, *range(3, len(points) - 2)):
        found = best if first is None else _two(points, first)
        if found is None:
            continue
        count, numbers = len(points), 2 if first is None else 5
        rest = sum(e**2 for e in _errors(found, points)) / count
        criterion = count * math.log(max(rest, 1e-8)) + numbers * math.log(count)
        if criterion < lowest:
            best, lowest = found, criterion
    errors = _errors(best, points)
    weights = [1 / t**2 for _, t in points]
    mean = sum(w * t for w, (_, t) in zip(weights, points, strict=True)) / sum(weights)
    spread = sum(w * (t - mean) ** 2 for w, (_, t) in zip(weights, points, strict=True))
    r2 = 1 - sum(e**2 for e in errors) / spread if spread > 0 else 1.0
    return Fit(best, r2, errors)


def _line(points: Sequence[tuple[float, float]]) -> Segment:
    """One segment: alpha and the slope are at least 0."""
    a, b, c = (sum(s**n / t**2 for s, t in points) for n in range(3))
    d, e = (sum(s**n / t for s, t in points) for n in range(2))
    determinant = a * c - b * b
    alpha, slope = ((d * c - e * b) / determinant, (a * e - b * d) / determinant) if determinant > 0 else (d / a, 0.0)
    if alpha < 0:
        alpha, slope = 0.0, e / c
    if slope <= 1e-14:
        alpha, slope = d / a, 1e-14
    return Segment(0.0, alpha, 1 / slope)


def _two(points: Sequence[tuple[float, float]], first: int) -> tuple[Segment, ...] | None:
    """Segments before and after a point; None where time would fall between them."""
    low, high = _line(points[:first]), _line(points[first:])
    begin, end = points[first - 1][0], points[first][0]
    most = math.sqrt(begin * end)
    bend = 1 / high.bandwidth - 1 / low.bandwidth
    if bend and begin <= (low.alpha - high.alpha) / bend <= end:
        most = (low.alpha - high.alpha) / bend
    elif high.alpha + most / high.bandwidth < low.alpha + most / low.bandwidth:
        return None
    return replace(low, most=most), replace(high, most=math.inf)


def _errors(segments: Sequence[Segment], points: Sequence[tuple[float, float]]) -> tuple[float, ...]:
    def seconds(size: float) -> float:
        segment = next(s for s in segments if size <= s.most)
        return segment.alpha + size / segment.bandwidth

    return tuple(seconds(size) / taken - 1 for size, taken in points)


# --- measurements ------------------------------------------------------------------------------------------------


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
        taken = self.seconds(lambda: run([planned.program], values, Processes(), [0], planned.axes), inner=True)
        self.sources["launch"] = f"measured: a layer of 8 tokens in {1e6 * taken:.0f} us, for {counted} launches"
        return min(1.0, taken / counted)

    def memory(self) -> float:
        """Bytes per second, read and written."""
        x = torch.ones(self.effort.copied // 4, device=self.device)
        taken = self.seconds(x.clone)
        self.sources["memory_bandwidth"] = f"measured: a copy of {_bytes_text(self.effort.copied)}"
        return 2 * self.effort.copied / taken

    def experts(self, launch: float) -> tuple[dict[str, float], tuple[tuple[float, float], ...]]:
        """The peak of each dtype, and the efficiency of the main one."""
        main = "f32" if self.device == "cpu" else "bf16"
        speeds = {name: dict(self._speeds(dtype, launch)) for name, dtype in _DTYPES.items()}
        peak = {name: max(found.values()) for name, found in speeds.items()}
        curve = tuple((size, round(speed / peak[main], 6)) for size, speed in speeds[main].items())
        self.sources["efficiency"] = f"measured: expert_ffn in {main}, {len(curve)} sizes"
        for name, found in speeds.items():
            known = dict(curve)
            errors = [abs(speed / (peak[name] * known[size]) - 1) for size, speed in found.items() if size in known]
            self.sources[f"peak.{name}"] = (
                f"measured: best of {len(found)} sizes; residuals to the curve median {statistics.median(errors):.1%}, "
                f"worst {max(errors):.1%}"
            )
        return peak, curve

    def _speeds(self, dtype: torch.dtype, launch: float) -> Iterator[tuple[float, float]]:
        for dim in self.effort.dims:
            program = _alone(self._layer(dim, dim, dtype), "expert_ffn")
            values, axes = self._values(program), {"": Axes(1, 1, 1, 1), "moe.0": Axes(1, 1, 1, 1)}
            call = lambda: run([program], values, Processes(), [0], axes)  # noqa: B023, E731
            taken = self.seconds(call, inner=True)
            yield 2.0 * dim**3, 2 * _EXPERTS * 2.0 * dim**3 / max(taken - launch, taken / 10)
            if taken > self.effort.longest / 4:
                return

    def _layer(self, rows: int, dim: int, dtype: torch.dtype) -> Planned:
        """A layer on one device, of two experts of `rows` rows each."""
        config = MoEConfig(_EXPERTS, dim, dim, router=TopK(1), capacity=1.0, activation="relu")
        shapes = (dim, _EXPERTS), (_EXPERTS, dim, dim), (_EXPERTS, dim, dim), (_EXPERTS * rows, dim)
        router, w_in, w_out, x = (torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
        params = MoEParams(RouterParams(router), ExpertParams(w_in, w_out))
        spec = ShardingSpec(make_mesh(_EXPERTS, world=1), plan="ep layout=padded", max_tokens=_EXPERTS * rows)
        return trace(lambda params, x: moe(params, x, config))(params, x).plan(spec)

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


def received(name: str, whole: float, ranks: int, nodes: int) -> float:
    """Bytes that a price hands to `Profile.collective`, for a tensor of `whole` bytes over ranks on nodes.

    Args:
        name: of the collective.
        whole: bytes of the tensor before a reduce_scatter or after an all_gather.
        ranks: that exchange.
        nodes: on which they stand.

    Returns:
        Bytes that a rank receives at the slowest level.

    Example:
        >>> received("all_to_all", 1600.0, 16, 2), received("all_gather", 1600.0, 16, 2)
        (800.0, 100.0)
    """
    local = ranks // nodes
    times = 2 if name == "all_reduce" else 1
    if nodes == 1:
        return times * whole * (ranks - 1) / ranks
    return whole * (ranks - local) / ranks if name == "all_to_all" else times * whole * (nodes - 1) / nodes / local


def _alone(planned: Planned, op: str) -> Program:
    """The program of one equation."""
    eq: Equation = next(eq for eq in planned.program.equations if eq.op == op)
    types = planned.program.types()
    inputs = tuple(Var(name, types[name]) for name in eq.operands)
    return Program(op, inputs, (eq,), tuple(var.name for var in eq.outputs))


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
        >>> small = Effort(dims=(8, 16), sizes=(64, 256), copied=2**16, budget=0.0, longest=1.0)
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
        bandwidth = bench.memory()
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
    command.add_argument("--node", type=int, metavar="N", help="ranks per node; LOCAL_WORLD_SIZE by default")
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

"""What a machine and a process group take for the equations that programs run: what `calibrate` fits.

Experts are measured as ``expert_ffn``, memory as ``encode`` and ``decode``, collectives over the groups that plans
use. All ranks measure at the same time, as they work at the same time; a repetition takes what its slowest rank
took, a measurement is the median of repetitions after a warm-up, and every rank ends with the same numbers.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ._axes import Axes
from .functional.config import MoEConfig
from .functional.moe import moe
from .functional.routers import TopK
from .ops.processes import Processes, agree, is_up
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
class Bench:
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

    def _together(self) -> None:
        self._wait()
        if is_up():
            dist.barrier()
        self._wait()

    def _once(self, call: Callable[[], Any], times: int) -> float:
        self._together()
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
            f"measured: encode and decode of {bytes_text(self.effort.moved // 64)} to "
            f"{bytes_text(self.effort.moved)}, {min(speeds) / 1e9:.3g} to {max(speeds) / 1e9:.3g} GB/s"
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
        for moved, call in self._calls(planned, ops):
            yield moved, self.seconds(call, inner=True)

    def _calls(self, planned: Planned, ops: Sequence[str]) -> Iterator[tuple[float, Callable[[], Any]]]:
        types = planned.program.types()
        values = dict(zip((var.name for var in planned.program.inputs), self._values(planned.program), strict=True))
        for eq in planned.program.equations:
            inputs, outputs = ([Var(name, types[name]) for name in names] for names in (eq.operands, _names(eq)))
            program = Program(eq.op, tuple(inputs), (eq,), _names(eq))
            call = partial(run, [program], [values[name] for name in eq.operands], _Alone(), [0], planned.axes)
            values.update(zip(_names(eq), call(), strict=True))
            if eq.op in ops:
                moved = sum(var.type.bytes for var in (*inputs, *outputs) if var.type.kind == "tensor")
                yield float(moved), call

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

    def shared(self, links: Mapping[str, Mapping[str, Sequence[Segment]]]) -> float:
        """Share of compute that an exchange in flight takes: experts beside an all_to_all of four times their time."""
        ranks, nodes = self.mesh.world, self.mesh.nodes
        if ranks == 1:
            preset = default_profile([self.device])
            self.sources["shared"] = f"preset {preset.name}: one process exchanges nothing"
            return preset.shared
        dim = self.effort.dims[-2]
        ((_, work),) = self._calls(self._layer(dim, dim, torch.float32), ("expert_ffn",))
        alone = self.seconds(work)
        segment = links["between" if nodes > 1 else "inside"]["all_to_all"][-1]
        whole = 4 * alone * segment.bandwidth / received("all_to_all", 1.0, ranks, nodes)
        x = torch.ones(ranks * (1 + int(min(whole, self.effort.sizes[-1]) / 4 / ranks)), device=self.device)
        comm = Processes().at("calibrate", Axes(1, 1, ranks, self.mesh.node))

        def beside() -> float:
            self._together()
            future = comm.start("all_to_all", "world", [x])
            start = time.perf_counter()
            work()
            if self.device != "cpu":
                torch.cuda.current_stream().synchronize()
            taken = time.perf_counter() - start
            comm.done("all_to_all", "world", future)
            return taken

        least, most = self.effort.repeats
        repeats = min(most, max(least, int(self.effort.budget / alone)))
        taken = statistics.median(self._agreed([beside() for _ in range(1 + repeats)][1:]))
        found = min(0.9, max(0.0, 1 - alone / taken))
        self.sources["shared"] = f"measured: experts take {1e3 * alone:.3g} ms alone, {1e3 * taken:.3g} ms beside one"
        return round(found, 6)

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


def bytes_text(size: float) -> str:
    """A size in the unit that suits it."""
    return f"{size / 2**20:.4g} MiB" if size >= 2**20 else f"{size / 2**10:.4g} KiB"

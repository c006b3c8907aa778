"""What one rank of `cluster.py` measures: ``python cluster_ranks.py JOB RANK``, JOB a JSON file of `cluster.py`."""

from __future__ import annotations

import datetime
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout's fmoe, installed or not

from cluster_net import limit

import fmoe
from fmoe.ops import collectives
from fmoe.ops.processes import Processes
from fmoe.ops.runtime import Column, Splits, run
from fmoe.program import Program, Var
from fmoe.stages import Compiled, Planned

WARM = 2
CALIBRATIONS = 3
SAMPLES = 7  # of a calibration
FREE_MBIT = 20_000.0  # a rate that nothing here reaches

TIMEOUT = datetime.timedelta(seconds=30)  # of one exchange

Runner = Callable[[], Tensor]


def main(path: str, rank: int) -> None:
    job = json.loads(Path(path).read_text())
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    store = f"file://{job['store']}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=job["world"], timeout=TIMEOUT)
    gc.disable()
    result = {"overlap": overlap, "levels": levels}[job["what"]](job)
    if rank == 0:
        Path(job["out"]).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def slowest(seconds: list[float]) -> list[float]:
    """Of each number, the largest of any rank."""
    held = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(held, op=dist.ReduceOp.MAX)
    return [float(s) for s in held]


# --- overlap ---------------------------------------------------------------------------------------------------------


class Alone(Processes):
    """Exchanges nothing: what would be received is what would be sent."""

    def all_to_all(self, axis: str, column: Column, sends: Splits = None, receives: Splits = None) -> Column:
        """See `Processes`."""
        return column

    def all_reduce(self, axis: str, column: Column) -> Column:
        """See `Processes`."""
        return column

    def start(self, name: str, axis: str, column: Column, *splits: Splits) -> Column:
        """See `Processes`."""
        return column

    def done(self, name: str, axis: str, column: Column, *splits: Splits) -> Column:
        """See `Processes`."""
        return column


def overlap(job: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds of every contender in every round, forward and backward, at a rate set to balance them."""
    leaves, runners = contenders(job)
    limit(FREE_MBIT)
    for runner in [*runners.values()] * WARM:
        timed(runner, leaves)
    mbit = balanced(job, leaves, runners)
    rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in runners}
    names = list(runners)
    for i in range(job["repeats"]):
        first = 5 * i % len(names)
        turn = names[first:] + names[:first]
        for name in turn if i % 2 == 0 else reversed(turn):
            rounds[name].append(timed(runners[name], leaves))
        gc.collect()
    times = {}
    for name, pairs in rounds.items():
        forward, backward = zip(*pairs, strict=True)
        times[name] = {"forward": slowest(list(forward)), "backward": slowest(list(backward))}
    return {"mbit": mbit, "times": times}


def contenders(job: Mapping[str, Any]) -> tuple[list[Tensor], dict[str, Runner]]:
    """The leaves of which gradients are taken, and what is timed: each returns something to differentiate."""
    tokens, dim = job["tokens"], job["model_dim"]
    config = fmoe.MoEConfig(job["world"], dim, job["hidden_dim"], router=fmoe.TopK(1), capacity=1.0, activation="relu")
    spec = fmoe.ShardingSpec(fmoe.make_mesh(config.num_experts), max_tokens=tokens)
    held = fmoe.local(fmoe.init(config, seed=0), spec)
    params = pytree.tree_map(lambda leaf: leaf.detach().clone().requires_grad_(), held)
    x = torch.randn(tokens, dim, requires_grad=True)
    buffer = torch.randn(job["world"], 1, tokens // job["world"], dim, requires_grad=True)

    def layer(params: fmoe.MoEParams, x: Tensor) -> Tensor:
        return fmoe.moe(params, x, config)[0]

    runners: dict[str, Runner] = {}
    for degree in job["degrees"]:
        step = fmoe.auto(layer, spec.replace(plan=f"ep r=1 pipeline={degree} layout=padded"))
        alone = Compiled(step.planned(params, x), Alone())
        assert any(buffer.shape == eq.outputs[0].type.dims for eq in alone.planned.program.equations)
        runners[f"layer {degree}"] = partial(step, params, x)
        runners[f"computation {degree}"] = partial(alone, params, x)
        runners[f"exchange {degree}"] = partial(exchange, buffer, degree)
    return [*pytree.tree_leaves(params), x, buffer], runners


def exchange(buffer: Tensor, degree: int) -> Tensor:
    """There and back, with the calls that a plan of this degree makes."""
    sizes = [1] * buffer.shape[0]
    rest = (sizes, sizes, dist.group.WORLD.group_name, "exchange")  # type: ignore[union-attr]
    if degree == 1:
        return collectives.all_to_all(collectives.all_to_all(buffer, *rest), *rest)
    there = [collectives.start_all_to_all(part.contiguous(), *rest) for part in buffer.chunk(degree, dim=2)]
    back = [collectives.start_all_to_all(collectives.done_all_to_all(future, *rest), *rest) for future in there]
    return torch.cat([collectives.done_all_to_all(future, *rest) for future in back], dim=2)


def timed(runner: Runner, leaves: list[Tensor]) -> tuple[float, float]:
    """Seconds of this rank, forward and backward, each begun by all ranks together."""
    for leaf in leaves:
        leaf.grad = None
    dist.barrier()
    start = time.perf_counter()
    y = runner()
    forward = time.perf_counter() - start
    gradient = torch.ones_like(y)
    dist.barrier()
    start = time.perf_counter()
    y.backward(gradient)
    return forward, time.perf_counter() - start


def balanced(job: Mapping[str, Any], leaves: list[Tensor], runners: Mapping[str, Runner]) -> float:
    """Sets the rate of the links so that exchange takes ``balance`` times what computation does, forward; in Mbit/s."""

    def median(name: str) -> float:
        return statistics.median(slowest([timed(runners[name], leaves)[0] for _ in range(SAMPLES)]))

    mbit = job["mbit"]
    if mbit is None:
        mbit = 8 * 4 * job["tokens"] * job["model_dim"] / 1e6 / median("computation 1")  # half the rows go, and return
        for _ in range(CALIBRATIONS):
            limit(mbit)
            mbit *= median("exchange 1") / median("computation 1") / job["balance"]
    limit(mbit)
    return float(mbit)


# --- levels ----------------------------------------------------------------------------------------------------------


def levels(job: Mapping[str, Any]) -> list[dict[str, Any]]:
    """For each size of message, the seconds of both ways in every round."""
    if dist.get_rank() % job["node"] == 0:
        limit(job["mbit"], job["packet_bytes"])
    dist.barrier()
    rows = []
    for size in job["sizes"]:
        ways = both_ways(size, job)
        results = [way() for way in ways.values() for _ in range(WARM)]
        if not all(torch.equal(result, results[0]) for result in results):
            raise AssertionError(f"linear and 2dh move {size} bytes elsewhere")
        runs = max(1, min(16, 2**18 // size))
        times: dict[str, list[float]] = {name: [] for name in ways}
        for i in range(job["repeats"]):
            for name in ways if i % 2 == 0 else reversed(ways):
                dist.barrier()
                start = time.perf_counter()
                for _ in range(runs):
                    ways[name]()
                times[name].append((time.perf_counter() - start) / runs)
        rows.append({"bytes": size, "runs": runs, "times": {name: slowest(each) for name, each in times.items()}})
    return rows


def both_ways(size: int, job: Mapping[str, Any]) -> dict[str, Runner]:
    """The exchange of `size` bytes with each peer, as plans lower it."""
    world, dim = job["world"], 256
    slots = size // (4 * dim)
    config = fmoe.MoEConfig(world, dim, 1, router=fmoe.TopK(1), capacity=1.0, activation="relu")
    spec = fmoe.ShardingSpec(fmoe.make_mesh(world, world=world, node=job["node"]))
    tokens = torch.empty(world * slots, dim, device="meta")
    traced = fmoe.trace(lambda params, x: fmoe.moe(params, x, config)[0])(fmoe.init(config, seed=0), tokens)
    linear = traced.plan(spec.replace(plan="ep a2a=linear layout=padded"))
    two = traced.plan(spec.replace(plan="ep a2a=2dh layout=padded"))
    first = next(eq for eq in linear.program.equations if eq.op == "all_to_all")
    operand = linear.program.types()[first.operands[0]]
    alone = Program("linear", (Var(first.operands[0], operand),), (first,), (first.outputs[0].name,))
    x = torch.randn([int(d) for d in operand.dims])
    rank, comm = dist.get_rank(), Processes()

    def way(program: Program, planned: Planned) -> Runner:
        axes = {**planned.axes, "": planned.axes["moe.0"]}
        return lambda: run([program], [[x]], comm, [rank], axes)[0][0]

    return {"linear": way(alone, linear), "2dh": way(two.program.lets[0], two)}


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

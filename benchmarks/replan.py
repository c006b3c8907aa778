"""How soon the planner answers a link or a rank that changes its speed while training goes on.

Two hosts made of network namespaces, a rank of one thread on each, over gloo (`cluster_net`; Linux, root and
iproute2, or it says so and measures nothing). One MoE layer whose router sends all tokens to the experts of
rank 0, forward and backward, under ``fmoe.auto`` without a plan, in phases:

    fast link    gathering the weights shares the work: dp is the faster one
    slow link    weights are more bytes than tokens: ep is
    fast again   dp is
    slow rank    rank 1 is stopped nine tenths of the time, and ep gives it no rows: ep is

Prints the plan that ran and the median time of a step in each phase, and after how many steps of the phase the
planner last changed its mind. Writes JSON.

    python benchmarks/replan.py --out replan.json
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cluster_net import cluster, limit, run_ranks, why_not
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout's fmoe, installed or not

import fmoe

FAST, SLOW = 10_000.0, 60.0  # Mbit/s
PHASES = {"fast link": FAST, "slow link": SLOW, "fast again": FAST, "slow rank": FAST}
EXPERTS, TOKENS, DIM, HIDDEN = 2, 2048, 128, 4096


@contextlib.contextmanager
def slowed(share: float) -> Iterator[None]:
    """Stops this process for `share` of the time."""
    code = (
        "import os, signal, sys, time\n"
        "pid, share = int(sys.argv[1]), float(sys.argv[2])\n"
        "while True:\n"
        "    os.kill(pid, signal.SIGSTOP); time.sleep(0.04 * share)\n"
        "    os.kill(pid, signal.SIGCONT); time.sleep(0.04 * (1 - share))\n"
    )
    brake = subprocess.Popen([sys.executable, "-c", code, str(os.getpid()), str(share)])
    try:
        yield
    finally:
        brake.kill()
        brake.wait()
        os.kill(os.getpid(), signal.SIGCONT)


def rank_main(path: str, rank: int) -> None:
    """What one rank does."""
    job = json.loads(Path(path).read_text())
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job['store']}",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )
    config = fmoe.MoEConfig(EXPERTS, DIM, HIDDEN, router=fmoe.TopK(1), activation="relu")
    params = fmoe.init(config, seed=0)
    params.router.weight[0, : EXPERTS // 2] += 100.0  # feature 0 of every token is 1: rank 0 has all choices
    x = torch.randn(TOKENS, DIM, generator=torch.Generator().manual_seed(rank))
    x[:, 0] = 1
    spec = fmoe.ShardingSpec(fmoe.make_mesh(EXPERTS, node=1), max_tokens=TOKENS)
    params = fmoe.local(params, spec)
    step = fmoe.auto(lambda p, x: fmoe.moe(p, x, config), spec)

    def loss(p: Any, x: torch.Tensor) -> Any:
        y, aux = step(p, x)
        return y.square().sum(), aux

    found: dict[str, list[tuple[str, float]]] = {}
    for phase, mbit in PHASES.items():
        limit(mbit)
        dist.barrier()
        found[phase] = []
        with slowed(0.9) if phase == "slow rank" and rank == 1 else contextlib.nullcontext():
            for _ in range(job["steps"]):
                plan = str(step.planned(params, x).plans["moe.0"])
                began = time.perf_counter()
                _, aux = torch.func.grad(loss, has_aux=True)(params, x)
                step.update(aux)
                found[phase].append((plan, time.perf_counter() - began))
    if rank == 0:
        Path(job["out"]).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measure(steps: int) -> dict[str, dict[str, Any]]:
    """By phase: the plan and the seconds of every step, what ran last, and the step that first ran it for good."""
    with tempfile.TemporaryDirectory() as folder, cluster(2) as hosts:
        job = {"store": f"{folder}/store", "out": f"{folder}/out", "steps": steps}
        path = Path(folder) / "job.json"
        path.write_text(json.dumps(job))
        run_ranks([sys.executable, __file__, "--rank", str(path)], hosts, timeout=300)
        found = json.loads(Path(job["out"]).read_text())
    report = {}
    for phase, ran in found.items():
        last = ran[-1][0]
        settled = next(i for i in range(len(ran)) if all(plan == last for plan, _ in ran[i:]))
        seconds = statistics.median(took for plan, took in ran[settled:])
        report[phase] = {"steps": ran, "plan": last, "settled": settled, "seconds": seconds}
    return report


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24, help="of each phase (default 24)")
    parser.add_argument("--out", type=Path, default=None, metavar="FILE")
    given = parser.parse_args()
    console = Console()
    if reason := why_not():
        console.print(f"nothing measured: {reason}")
        return 0
    report = measure(given.steps)
    table = Table("phase", "plan", "settled after", "step")
    for phase, row in report.items():
        table.add_row(phase, row["plan"], f"{row['settled']} steps", f"{1e3 * row['seconds']:.0f} ms")
    console.print(table)
    if given.out:
        given.out.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main(sys.argv[2], int(sys.argv[3]))
    else:
        sys.exit(main())

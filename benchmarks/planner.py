"""Does the planner choose well: its first choice, and its choice after three trials, against all plans measured.

Ranks run on hosts made of network namespaces with links of limited rate (`cluster_net`; Linux, root and
iproute2, or it says so and measures nothing), one thread each, over gloo. A profile is calibrated there
first. Each workload is one MoE layer, forward and backward: experts, tokens, hidden dim and the load of the
fullest expert are drawn at random. Of every candidate plan (at most 12) the step is timed in interleaved
rounds, the slowest rank's time counting; a plan that took twice as long as another in a first run is left out
of them, unless the model ranks it among its three. The best plan is the one of the least median.

    first        the plan that the model ranks first, before any trial
    after trials the fastest of the three that the model ranks first, by two steps of their own
    within x     the median over rounds of (chosen / best) is at most 1 + x + n, where n is the 95th
                 percentile of a plan against itself in this run
    error        the median over all plans of |predicted / measured - 1|

It prints a table, writes JSON with every time, and draws predicted against measured time (matplotlib).

    python benchmarks/planner.py --out planner.json                  # 12 workloads each on 2 and on 4 ranks
    python benchmarks/planner.py --worlds 2 --workloads 6 --mbit 50 --quick
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cluster_net import cluster, limit, run_ranks, why_not
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout's fmoe, installed or not

import fmoe
from fmoe.calibrate import calibrate
from fmoe.sharding import planner
from fmoe.sharding.profile import Profile

ROUNDS, TRIAL_STEPS, DIM = 5, 2, 256
HOPELESS = 2.0


def workloads(count: int, seed: int) -> list[dict[str, Any]]:
    """Layers to try: steps of a tenth of a second to a few seconds, on both sides of where dp and ep cross."""
    draw = random.Random(seed)
    return [
        {
            "experts": draw.choice([2, 4, 8]),
            "tokens": draw.choice([512, 1024, 2048]),
            "hidden": draw.choice([128, 512, 1024, 2048]),
            "top_k": draw.choice([1, 2]),
            "skew": draw.choice([0.0, 1.0, 2.0]),
            "capacity": draw.choice([None, 1.25]),
        }
        for _ in range(count)
    ]


class Workload:
    """One layer on this rank, under any plan."""

    def __init__(self, given: dict[str, Any], world: int, profile: Profile, rank: int):
        config = fmoe.MoEConfig(
            given["experts"], DIM, given["hidden"], router=fmoe.TopK(given["top_k"]), capacity=given["capacity"]
        )
        params = fmoe.init(config, seed=0)
        params.router.weight[0, 0] += given["skew"]  # feature 0 of every token is 1: expert 0 is chosen more
        x = torch.randn(given["tokens"], DIM, generator=torch.Generator().manual_seed(rank))
        x[:, 0] = 1
        mesh = fmoe.make_mesh(given["experts"], node=1 if world == 2 else 2)
        self.spec = fmoe.ShardingSpec(mesh, max_tokens=given["tokens"])
        self.x, self.params = x, fmoe.local(params, self.spec)
        self.step = fmoe.auto(lambda p, x: fmoe.moe(p, x, config), self.spec)
        traced = fmoe.trace(lambda p, x: fmoe.moe(p, x, config))(self.params, x)
        widths = {layer.name: layer.slots(given["tokens"]) for layer in traced.layers}
        self.state = planner.init(traced, self.spec, profile, widths, given["tokens"])
        pipelines = (1, 2, 4) if world == 2 else (1, 2)
        self.candidates = [p for p in fmoe.legal_plans(mesh, pipelines=pipelines) if p.a2a == "linear"][:12]

    def run(self, plan: fmoe.Plan) -> float:
        """Seconds of one step on the slowest rank."""
        self.step.use(plan)
        dist.barrier()
        began = time.perf_counter()
        torch.func.grad(lambda p, x: self.step(p, x)[0].square().sum(), (0, 1))(self.params, self.x)
        held = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
        dist.all_reduce(held, op=dist.ReduceOp.MAX)
        return float(held)

    def predicted(self) -> dict[str, float]:
        """Seconds that the model gives each candidate under this load."""
        self.step.use(self.candidates[0])
        _, aux = self.step(self.params, self.x)
        bucket = planner.Bucket.of({"moe.0": [float(c) for c in aux.counts]}, self.state.model)
        return {str(p): self.state.model.price((("moe.0", p),), bucket).seconds for p in self.candidates}


def measure(given: dict[str, Any], world: int, profile: Profile, rank: int) -> dict[str, Any]:
    """All times of a workload."""
    load = Workload(given, world, profile, rank)
    predicted = load.predicted()
    plans = {str(p): p for p in load.candidates}
    ranked = sorted(plans, key=lambda name: (predicted[name], name))
    for plan in plans.values():
        load.run(plan)  # compiles it
    trials = {name: statistics.median(load.run(plans[name]) for _ in range(TRIAL_STEPS)) for name in ranked[:3]}
    times = {name: [load.run(plan)] for name, plan in plans.items()}
    fastest = min(taken[0] for taken in times.values())
    rounds = [name for name in plans if times[name][0] < HOPELESS * fastest or name in ranked[:3]]
    for name in rounds:
        times[name] = []
    again = []
    for _ in range(ROUNDS):
        for name in rounds:
            times[name].append(load.run(plans[name]))
        again.append(load.run(plans[ranked[0]]))
    best = min(rounds, key=lambda name: statistics.median(times[name]))

    def against_best(name: str) -> float:
        if name not in rounds:
            return times[name][0] / statistics.median(times[best])
        return statistics.median(a / b for a, b in zip(times[name], times[best], strict=True))

    tried = min(trials, key=lambda name: trials[name])
    return {
        **given, "world": world, "times": times, "predicted": predicted, "best": best, "first": ranked[0],
        "first_ratio": against_best(ranked[0]), "tried": tried, "tried_ratio": against_best(tried),
        "self": [abs(a / b - 1) for a, b in zip(times[ranked[0]], again, strict=True)],
        "static": {name: against_best(name) for name in plans},
    }  # fmt: skip


def rank_main(path: str, rank: int) -> None:
    """What one rank does."""
    job = json.loads(Path(path).read_text())
    torch.set_num_threads(1)
    minute = datetime.timedelta(seconds=120)
    dist.init_process_group(
        "gloo", init_method=f"file://{job['store']}", rank=rank, world_size=job["world"], timeout=minute
    )
    limit(job["mbit"])
    dist.barrier()
    gc.disable()
    profile = calibrate(quick=job["quick"], node=1 if job["world"] == 2 else 2)
    found: list[dict[str, Any]] = []
    for number, given in enumerate(job["workloads"]):
        found.append(measure(given, job["world"], profile, rank))
        if rank == 0:
            print(
                f"{job['world']} ranks, workload {number + 1} of {len(job['workloads'])}", file=sys.stderr, flush=True
            )
            Path(job["out"]).write_text(json.dumps({"profile": json.loads(profile.as_json()), "workloads": found}))
    dist.barrier()
    dist.destroy_process_group()


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The shares of workloads in which the choices are good, and the model's error."""
    noise = sorted(d for w in found for d in w["self"])
    n = noise[int(0.95 * (len(noise) - 1))]
    errors = [
        abs(w["predicted"][name] / statistics.median(times) - 1) for w in found for name, times in w["times"].items()
    ]
    common = set.intersection(*(set(w["static"]) for w in found))
    means = {name: statistics.fmean(w["static"][name] for w in found) for name in sorted(common)}
    return {
        "n": n,
        "first_within_15": sum(w["first_ratio"] <= 1.15 + n for w in found) / len(found),
        "first_within_15_without_n": sum(w["first_ratio"] <= 1.15 for w in found) / len(found),
        "tried_within_5": sum(w["tried_ratio"] <= 1.05 + n for w in found) / len(found),
        "tried_within_5_without_n": sum(w["tried_ratio"] <= 1.05 for w in found) / len(found),
        "mean_of_first": statistics.fmean(w["first_ratio"] for w in found),
        "mean_of_tried": statistics.fmean(w["tried_ratio"] for w in found),
        "mean_of_static": means,
        "error": statistics.median(errors),
    }


def short(plan: str) -> str:
    """A plan without what all of these plans have."""
    return plan.replace(" a2a=linear", "").replace("pipeline=", "d=").replace("layout=", "")


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """Predicted against measured time of every plan."""
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5, 5))
    for world in sorted({w["world"] for w in found}):
        points = [
            (statistics.median(t), w["predicted"][name])
            for w in found
            if w["world"] == world
            for name, t in w["times"].items()
        ]
        axes.loglog(*zip(*points, strict=True), ".", label=f"{world} ranks")
    low, high = axes.get_xlim()
    axes.plot([low, high], [low, high], color="gray")
    axes.set(xlabel="measured, s", ylabel="predicted, s")
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> int:
    """Runs the ranks of each world in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4], choices=(2, 4))
    parser.add_argument("--workloads", type=int, default=12, help="for each world (default 12)")
    parser.add_argument("--mbit", type=float, default=200.0, help="rate of each host's link (default 200)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="calibrate in a few seconds")
    parser.add_argument("--out", type=Path, default=Path("planner.json"))
    given = parser.parse_args()
    console = Console(width=140, soft_wrap=True)
    if reason := why_not():
        console.print(f"not measured: {reason}")
        return 0
    found: list[dict[str, Any]] = []
    profiles = {}
    with tempfile.TemporaryDirectory() as folder, cluster(2) as hosts:
        for world in given.worlds:
            job = {
                "world": world, "mbit": given.mbit, "quick": given.quick, "store": f"{folder}/store{world}",
                "out": f"{folder}/out{world}", "workloads": workloads(given.workloads, given.seed + world),
            }  # fmt: skip
            path = Path(folder) / f"job{world}.json"
            path.write_text(json.dumps(job))
            places = [hosts[rank * 2 // world] for rank in range(world)]
            run_ranks([sys.executable, __file__, "--rank", str(path)], places, timeout=3600)
            made = json.loads(Path(job["out"]).read_text())
            profiles[world] = made["profile"]
            found += made["workloads"]
    result = summary(found)
    given.out.write_text(json.dumps({"summary": result, "profiles": profiles, "workloads": found}, indent=1))
    draw(found, given.out.with_suffix(".png"))
    table = Table("ranks", "E", "T", "H", "k", "skew", "C", "best", "first", "ratio", "tried", "ratio", box=SIMPLE_HEAD)
    for w in found:
        sizes = [str(w[key]) for key in ("world", "experts", "tokens", "hidden", "top_k", "skew", "capacity")]
        ratios = f"{w['first_ratio']:.2f}", f"{w['tried_ratio']:.2f}"
        best, first, tried = (short(w[key]) for key in ("best", "first", "tried"))
        table.add_row(*sizes, best, first, ratios[0], tried, ratios[1])
    console.print(table)
    console.print_json(json.dumps(result))
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main(sys.argv[2], int(sys.argv[3]))
    else:
        sys.exit(main())

"""What a switch of plans between steps costs, once both are compiled: nothing.

Processes over gloo hold one MoE layer's parameters as DTensors. A step is ``torch.func.grad`` of a loss through
``step = fmoe.auto(layer, spec)``, and ``step.use(plan)`` changes the plan before some of them, in the order
A A B B A A B B ...: the first step of each pair follows a switch, the second does not.

    switched  median ms of the steps after a switch; the call of ``use`` counts
    stayed    median ms of the others
    ratio     the median over pairs of (first step / second step of the same plan)

The last line is the median over the pairs of both plans. A time is that of the slowest rank; all begin
together. Every plan has run ``--warm`` pairs before.

Examples:
    python benchmarks/switch.py
    python benchmarks/switch.py --plans dp "ep r=1 pipeline=2 layout=padded" --pairs 100 --out switch.json
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich import box
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout's fmoe, installed or not

from layer import WIDTH, machine, quartiles

import fmoe

WANTED = 1.05


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    console = Console(width=WIDTH, highlight=False, soft_wrap=True)
    facts = machine()
    console.print(f"{facts['cpu']}, {facts['cores']} cores, {args.world} ranks, torch {facts['torch']}")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, args=(args, folder), nprocs=args.world)
        every = np.array([json.loads(Path(f"{folder}/{rank}.json").read_text()) for rank in range(args.world)])
    pairs = every.max(0).reshape(-1, len(args.plans), 2)  # rounds, plans, (switched, stayed)
    ratios = pairs[:, :, 0] / pairs[:, :, 1]
    plans = {}
    for i, plan in enumerate(args.plans):
        switched, stayed = (quartiles(pairs[:, i, j] * 1e3) for j in (0, 1))
        plans[plan] = {"switched_ms": switched, "stayed_ms": stayed, "ratio": quartiles(ratios[:, i])}
    report = {"machine": facts, "arguments": vars(args), "plans": plans, "ratio": quartiles(ratios.ravel())}
    console.print(table(report))
    console.print(f"after a switch / without: {report['ratio']['median']:.3f} (wanted at most {WANTED})")
    if args.out:
        Path(args.out).write_text(json.dumps(report, indent=1) + "\n")
    return report


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    plans = ["dp layout=ragged", "ep r=1 pipeline=2 layout=padded"]
    parser.add_argument("--plans", nargs="+", default=plans, metavar="PLAN", help=f"two or more {plans}")
    parser.add_argument("--pairs", type=int, default=60, help="pairs of steps of each plan (60)")
    parser.add_argument("--warm", type=int, default=3, help="pairs of each plan before (3)")
    parser.add_argument("--world", type=int, default=2, help="ranks (2)")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a rank (512)")
    parser.add_argument("--model-dim", type=int, default=256, help="M (256)")
    parser.add_argument("--hidden-dim", type=int, default=512, help="H (512)")
    parser.add_argument("--experts", type=int, default=4, help="E (4)")
    parser.add_argument("--out", metavar="PATH", help="where to write all numbers, with the machine they are from")
    args = parser.parse_args(argv)
    if args.pairs < 1 or args.warm < 1 or len(args.plans) < 2:
        parser.error("--pairs and --warm are at least 1, and --plans are two or more")
    return args


def rank_main(rank: int, args: argparse.Namespace, folder: str) -> None:
    """Writes the seconds of this rank's steps, in order."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", f"file://{folder}/store", timeout, rank=rank, world_size=args.world)
    config = fmoe.MoEConfig(args.experts, args.model_dim, args.hidden_dim, router=fmoe.TopK(2), capacity=1.25)
    spec = fmoe.ShardingSpec(fmoe.make_mesh(args.experts), plan=args.plans[0], max_tokens=args.tokens)
    params = fmoe.distribute(fmoe.init(config, seed=0), spec)
    x = torch.randn(args.tokens, args.model_dim)

    def layer(params: fmoe.MoEParams, x: torch.Tensor) -> tuple[torch.Tensor, fmoe.Aux]:
        return fmoe.moe(params, x, config)

    def loss(params: fmoe.MoEParams, x: torch.Tensor) -> torch.Tensor:
        y, aux = step(params, x)
        return y.square().mean() + 0.01 * aux.balance

    step = fmoe.auto(layer, spec)
    seconds = []
    gc.disable()
    for number in range(args.warm + args.pairs):
        if number == args.warm:
            gc.freeze()  # what lives now is not looked at again
        for plan in args.plans:
            for switch in (True, False):
                gc.collect()
                dist.barrier()
                start = time.perf_counter()
                if switch:
                    step.use(plan)
                torch.func.grad(loss)(params, x)
                seconds.append((number, time.perf_counter() - start))
    Path(f"{folder}/{rank}.json").write_text(json.dumps([each for number, each in seconds if number >= args.warm]))
    dist.barrier()
    dist.destroy_process_group()


def table(report: dict[str, Any]) -> Table:
    out = Table(title="median ms of a step", box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
    for heading in ("plan", "switched", "stayed", "ratio"):
        out.add_column(heading, justify="left" if heading == "plan" else "right", no_wrap=True)
    for plan, numbers in report["plans"].items():
        times = [f"{numbers[key]['median']:.2f}" for key in ("switched_ms", "stayed_ms")]
        out.add_row(plan, *times, f"{numbers['ratio']['median']:.3f}")
    return out


if __name__ == "__main__":
    main()

"""Times one MoE layer beside its limit and its peers, in one process: ``python benchmarks/layer.py``.

What is measured
    dense               one FFN on T*K rows: the layer's FLOPs without any routing, the limit
    fmoe                ``fmoe.moe``, with its whole gate and all auxiliary values
    loop                a loop over experts, by hand
    grouped_mm          ``torch.nn.functional.grouped_mm``, by hand
    mixtral-eager       ``MixtralSparseMoeBlock`` of transformers, its loop over experts
    mixtral-grouped_mm  the same with its grouped_mm experts

    The last two run where transformers 5 is installed (``pip install transformers``), and in swiglu only.
    Of the layer's auxiliary values only fmoe computes any. In bf16, fmoe routes in fp32, the others as
    Mixtral does: logits in bf16, softmax in fp32.

    forward  under ``torch.no_grad``
    train    forward, the loss ``y.square().mean()``, and gradients of x, the router and the experts

How
    First, every chosen layer is checked: in fp32, each contender's output and gradients are those of
    fmoe; in bf16 its output is, except in a few tokens that rounding may send to another expert.
    Then each cell (configuration, activation, dtype, mode) is timed in rounds: a round runs every
    contender once, in an order that changes from round to round, so that a machine that gets
    slower or faster does so for all. Every contender has run twice before. Gradients, output and
    graph of a run are freed after its clock stops. All run in one process, so with the same
    allocator, threads and environment, and each finds the caches as another left them.

    ms     the median over rounds
    ratio  the median over rounds of (time / dense's time in the same round)

    Each cell says which share of the cores other processes took meanwhile. Threads wait for each other,
    so one busy core costs all contenders several times its share, and not evenly: above 0.02 or so,
    time again. ``OMP_WAIT_POLICY=passive`` makes a busy machine bearable, with other numbers.

    ``best peer / fmoe`` is the lowest ``median over rounds of (peer's time / fmoe's)``: above 1, fmoe is
    the fastest. The median of quotients, not the quotient of medians: both of a round's times see
    the same weather, and the least and the quartiles, in the JSON, show how much of it was left.

    D is a decoding step: few tokens, so the time goes into reading weights. Beside the dense FFN it
    is compared with reading the weights of the experts its tokens chose once, at the rate of
    ``dst.copy_(src)`` (bytes read over time) on buffers that do not fit a cache, in the same rounds.

Examples:
    python benchmarks/layer.py                                                      # everything
    python benchmarks/layer.py --configs S F --dtypes bf16 --activations swiglu --seconds 3
    python benchmarks/layer.py --configs F --modes train --dtypes fp32 --rounds 1 --profile fmoe loop
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout's fmoe, installed or not

from layer_peers import CONFIGS, DTYPES, PEERS, Config, Contender, Problem, check, contenders, import_transformers

import fmoe

COPY_BYTES = 2**30
COPY = "copy"
MIN_ROUNDS = 5
PROFILED_RUNS = 3
WIDTH = 160  # of the tables, also where the terminal is narrower
ENVIRONMENT = (
    "ATEN_", "DNNL_", "GLIBC_", "GOMP_", "KMP_", "LD_PRELOAD", "MALLOC_", "MKL_", "OMP_", "ONEDNN_", "THP_", "TORCH",
)  # fmt: skip


def main(argv: Sequence[str] | None = None, configs: Mapping[str, Config] = CONFIGS) -> dict[str, Any]:
    args = parse(argv, configs)
    torch.set_num_threads(args.threads)
    console = Console(width=WIDTH, highlight=False, soft_wrap=True)
    facts = machine()
    console.print(f"{facts['cpu']}, {facts['cores']} cores, {args.threads} threads, torch {facts['torch']}")
    peers = usable(args.peers, facts)
    console.print(f"transformers {facts['transformers']}")
    chosen = [(configs[name], activation) for name in args.configs for activation in args.activations]

    checks = [result for config, activation in chosen for result in check(config, activation, args.dtypes, peers)]
    console.print(f"{len(checks)} checks passed: every contender computes what fmoe does")
    cells = []
    for config, activation in chosen:
        base = Problem.draw(config, activation)
        for dtype in args.dtypes:
            problem = base.to(DTYPES[dtype])
            runners = contenders(problem, peers)
            for mode in args.modes:
                if mode == "forward" or not config.decode:
                    cells.append(cell(problem, runners, dtype, mode, args))
                    console.print(summary(cells[-1]))
                    for name in args.profile or ():
                        profile([r for r in runners if r.name == name], mode == "train", console)
        del base, problem, runners
    for dtype in args.dtypes:
        for mode in args.modes:
            part = [c for c in cells if (c["dtype"], c["mode"]) == (dtype, mode)]
            if part:
                console.print(table(part, f"{dtype}, {mode}: median ms (ratio over dense)"))
    facts["load_average_after"] = os.getloadavg()
    report = {"machine": facts, "checks": checks, "cells": cells}
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")
    return report


def parse(argv: Sequence[str] | None, configs: Mapping[str, Config]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def some(flag: str, choices: Sequence[str], text: str, nargs: str = "+", **more: Any) -> None:
        metavar = flag[2:].rstrip("s").upper()
        parser.add_argument(
            flag, nargs=nargs, choices=choices, metavar=metavar, help=text, **{"default": choices} | more
        )

    sizes = "; ".join(f"{c.name} ({c.tokens},{c.model_dim},{c.hidden_dim},{c.experts},{c.k})" for c in configs.values())
    some("--configs", list(configs), f"layers, as (T,M,H,E,K): {sizes}")
    some("--dtypes", list(DTYPES), "fp32, bf16")
    some("--activations", ["swiglu", "relu"], "swiglu, relu")
    some("--modes", ["forward", "train"], "forward, train (D has forward only)")
    some("--peers", list(PEERS), f"{', '.join(PEERS)}; or none", nargs="*")
    text = "after a cell's timing, print the time of each op in these contenders; without a name, in fmoe"
    some("--profile", ["fmoe", "dense", *PEERS], text, nargs="*", default=None)
    parser.add_argument("--seconds", type=float, default=10.0, help=f"per cell, but {MIN_ROUNDS} rounds at least (10)")
    parser.add_argument("--rounds", type=int, help="rounds per cell, in place of --seconds")
    parser.add_argument("--threads", type=int, default=2, help="torch's threads (2)")
    parser.add_argument("--json", metavar="PATH", help="where to write all numbers, with the machine they are from")
    args = parser.parse_args(argv)
    if args.profile == []:
        args.profile = ["fmoe"]
    if args.threads < 1 or (args.rounds is not None and args.rounds < 1):
        parser.error("--threads and --rounds are at least 1")
    return args


def usable(peers: Sequence[str], facts: dict[str, Any]) -> list[str]:
    """`peers` without those that need a package which is not installed; says so in `facts`."""
    facts["transformers"] = "not asked for"
    try:
        if any(peer.startswith("mixtral") for peer in peers):
            facts["transformers"] = import_transformers().__version__
    except ImportError as error:
        facts["transformers"] = f"not usable: {error}"
        return [peer for peer in peers if not peer.startswith("mixtral")]
    return list(peers)


def once(runner: Contender, train: bool) -> float:
    """Seconds of one run; nothing of it is left."""
    with torch.set_grad_enabled(train):
        start = time.perf_counter()
        y = runner.run()
        if train:
            y.square().mean().backward()
        seconds = time.perf_counter() - start
    del y
    for leaf in runner.leaves:
        leaf.grad = None
    return seconds


def measure(
    runners: Sequence[Contender], train: bool, rounds: int | None, seconds: float
) -> tuple[dict[str, np.ndarray], float]:
    """The seconds of every contender in every round, and the share of the cores that others took meanwhile."""
    times: dict[str, list[float]] = {runner.name: [] for runner in runners}
    for runner in [*runners, *runners]:
        once(runner, train)
    gc.collect()
    gc.disable()
    try:
        done, start, before = 0, time.perf_counter(), _others_seconds()
        while done < (rounds or MIN_ROUNDS) or (rounds is None and time.perf_counter() - start < seconds):
            first = done % len(runners)
            turn = [*runners[first:], *runners[:first]]
            for runner in turn if done % 2 == 0 else reversed(turn):  # so that neighbours change too
                times[runner.name].append(once(runner, train))
            done += 1
        others = max(0.0, _others_seconds() - before) / (time.perf_counter() - start) / (os.cpu_count() or 1)
    finally:
        gc.enable()
    return {name: np.array(each) for name, each in times.items()}, others


def _others_seconds() -> float:
    """Processor seconds of all other processes since the machine started; NaN where the system does not say."""
    if not Path("/proc/stat").exists():
        return float("nan")
    user, nice, system, _idle, _iowait, *interrupts = map(int, Path("/proc/stat").read_text().split(maxsplit=9)[1:9])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK") - time.process_time()


def quartiles(values: np.ndarray) -> dict[str, float]:
    return dict(zip(("min", "q1", "median", "q3"), np.percentile(values, [0, 25, 50, 75]).tolist(), strict=True))


def cell(
    problem: Problem, runners: Sequence[Contender], dtype: str, mode: str, args: argparse.Namespace
) -> dict[str, Any]:
    """Times one cell of the tables."""
    config, train = problem.config, mode == "train"
    flops = config.flops(problem.activation, train)
    copy = [copier()] if config.decode else []
    times, others = measure([*runners, *copy], train, args.rounds, args.seconds)
    results = {
        runner.name: {
            "ms": quartiles(times[runner.name] * 1e3),
            "over_dense": quartiles(times[runner.name] / times["dense"]),
            "over_fmoe": quartiles(times[runner.name] / times["fmoe"]),
        }
        for runner in runners
    }
    over_fmoe = {name: r["over_fmoe"]["median"] for name, r in results.items() if name not in ("dense", "fmoe")}
    best = min(over_fmoe, key=over_fmoe.__getitem__) if over_fmoe else None
    return {
        "config": config.name,
        **{key: getattr(config, key) for key in ("tokens", "model_dim", "hidden_dim", "experts", "k")},
        "activation": problem.activation,
        "dtype": dtype,
        "mode": mode,
        "rounds": len(times["fmoe"]),
        "others_share": others,
        "gflop": flops / 1e9,
        "dense_gflop_per_s": flops / 1e9 / float(np.median(times["dense"])),
        "contenders": results,
        "best_peer": best,
        "best_peer_over_fmoe": best and over_fmoe[best],
        "reading": reading(problem, times) if copy else None,
    }


def copier() -> Contender:
    source, target = torch.ones(COPY_BYTES // 4), torch.ones(COPY_BYTES // 4)
    return Contender(COPY, lambda: target.copy_(source))


def reading(problem: Problem, times: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The layer's time over that of reading the active experts' weights once, at the rate of a copy."""
    with torch.no_grad():
        counts = fmoe.moe(problem.params, problem.x, problem.config.layer(problem.activation))[1].counts
    experts = problem.params.experts
    active, stacked = int((counts > 0).sum()), (experts.w_in, experts.w_out)
    size = active * sum(w[0].numel() * w.element_size() for w in stacked)
    seconds = times[COPY] * (size / COPY_BYTES)
    return {
        "active_experts": active,
        "bytes": size,
        "copy_gb_per_s": COPY_BYTES / 1e9 / float(np.median(times[COPY])),
        "ms": quartiles(seconds * 1e3),
        "fmoe_over_reading": quartiles(times["fmoe"] / seconds),
    }


def profile(runners: Sequence[Contender], train: bool, console: Console) -> None:
    """Prints what each op takes, by its own time."""
    for runner in runners:
        once(runner, train)
        with torch.profiler.profile(acc_events=True, activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            for _ in range(PROFILED_RUNS):
                once(runner, train)
        console.print(f"{runner.name}, {PROFILED_RUNS} runs:")
        ops = seen.key_averages()
        print(ops.table(sort_by="self_cpu_time_total", row_limit=24, max_name_column_width=45), flush=True)


def machine() -> dict[str, Any]:
    def read(path: str) -> str:
        return Path(path).read_text() if Path(path).exists() else ""

    models = [line.split(":", 1)[1].strip() for line in read("/proc/cpuinfo").splitlines() if line[:10] == "model name"]
    return {
        "cpu": models[0] if models else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "fmoe": fmoe.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "huge_pages": read("/sys/kernel/mm/transparent_hugepage/enabled").strip(),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(ENVIRONMENT)},
        "load_average_before": os.getloadavg(),
    }


def summary(c: Mapping[str, Any]) -> str:
    """One line as soon as a cell is done."""
    of = c["contenders"]
    ratios = "  ".join(f"{name} {of[name]['over_dense']['median']:.2f}" for name in of if name != "dense")
    dense = of["dense"]["ms"]["median"]
    line = f"{c['config']} {c['activation']} {c['dtype']} {c['mode']}, {c['rounds']} rounds, "
    line += f"others took {c['others_share']:.2f}: "
    line += f"dense {dense:.1f} ms, {c['dense_gflop_per_s']:.0f} GFLOP/s; over dense: {ratios}"
    if c["reading"]:
        r = c["reading"]
        line += (
            f"\n  {r['active_experts']} active experts, {r['bytes'] / 1e6:.0f} MB at {r['copy_gb_per_s']:.1f} GB/s, "
        )
        line += f"read once in {r['ms']['median']:.1f} ms; fmoe / that = {r['fmoe_over_reading']['median']:.2f}"
    return line


def table(cells: Sequence[Mapping[str, Any]], title: str) -> Table:
    names = list(dict.fromkeys(name for c in cells for name in c["contenders"]))
    out = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
    for heading in ("layer", "rounds", *names):
        out.add_column(heading, justify="left" if heading == "layer" else "right", no_wrap=True)
    out.add_column("fmoe / dense", justify="right", style="bold", no_wrap=True)
    out.add_column("best peer / fmoe", justify="right", style="bold", no_wrap=True)
    if any(c["reading"] for c in cells):
        out.add_column("fmoe / reading", justify="right", no_wrap=True)
    for c in cells:
        of = c["contenders"]
        shown = [
            f"{of[n]['ms']['median']:.1f} ({of[n]['over_dense']['median']:.2f})" if n in of else "-" for n in names
        ]
        best = f"{c['best_peer_over_fmoe']:.2f} ({c['best_peer']})" if c["best_peer"] else "-"
        reads = [f"{c['reading']['fmoe_over_reading']['median']:.2f}"] if c["reading"] else []
        fmoe_ratio = f"{of['fmoe']['over_dense']['median']:.2f}"
        out.add_row(f"{c['config']} {c['activation']}", str(c["rounds"]), *shown, fmoe_ratio, best, *reads)
    return out


if __name__ == "__main__":
    main()

"""Checks and times the layer on one GPU in under six minutes: ``python benchmarks/gpu.py --json gpu.json``.

What it does, in this order; what no longer fits in ``--budget`` seconds is skipped, with a line that says so
    ceilings  one large bf16 matmul and one large copy, in this very run: shares are of these
    checks    kernels against fp64 over odd shapes and dtypes, poisoned outputs, the same bits twice, transforms,
              ids out of range, rows beyond 2^31 elements, no waiting on the host, a captured graph, exchanges over
              NCCL, torch.compile (`gpu_checks.py`)
    cells     each layer of `gpu_peers.SHAPES`, forward and training, in bf16: first its values and gradients
              against fp64 on 256 tokens, then times beside a dense FFN of the same FLOPs, `grouped_mm` by
              hand, the experts of transformers, and scattermoe, megablocks and tutel where they are installed
    rows      encode (expand) and decode (combine) alone, against the copy

How
    A round runs every contender once, in an order that changes from round to round; between runs the L2 cache
    is overwritten; times are between CUDA events, and the median over rounds counts. Inputs are random
    numbers, never zeros. ``train`` is forward, ``(y * cotangent).sum()``, and gradients of x, router and experts.
    Layers that launches dominate are also timed as a replayed CUDA graph (``graph``), in the padded layout.
    ``saved`` is what forward keeps for backward beside x and parameters; ``peak`` what training holds at most.
    Goals are for one NVIDIA H200. A contender that fails has its error in the table.

On a CPU (``--device cpu``) all of it runs on small layers, to test the script; no time means anything there.
It needs torch, numpy and this checkout; rich draws the tables where it is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout's fmoe, installed or not

from gpu_checks import CHECKS, Skipped, capture, large
from gpu_measure import (
    Budget,
    Flush,
    card_state,
    ceilings,
    clear,
    error_text,
    finish,
    peak_bytes,
    require,
    rounds,
    row_error,
    saved_bytes,
)
from gpu_peers import CONTENDERS, SHAPES, Shape, chosen_by, draw, flops, least_bytes, shrunk
from layer_peers import Contender, Problem, fmoe_layer

import fmoe
from fmoe.ops import OPS

#: Seconds that are kept for: a check, a cell besides its timing, the end.
CHECK, CELL, REST = 8.0, 6.0, 5.0
#: Checks that wait for a compiler, after everything else, and the seconds they may take.
LATE = {"compiled": 70.0}
ROW_GOAL = 0.8
#: Contenders that are layers of a package of their name.
PACKAGES = ("transformers", "scattermoe", "megablocks", "tutel")


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("gpu.py: torch sees no GPU here; --device cpu runs the script on small layers.")
    budget, flush = Budget(args.budget - REST), Flush(device)
    absent = [name for name in args.contenders if name in PACKAGES and importlib.util.find_spec(name) is None]
    args.contenders = [name for name in args.contenders if name not in absent]
    report: dict[str, Any] = {"machine": machine(device), "absent": absent, "checks": {}, "cells": [], "rows": []}
    print("  ".join(f"{name} {value}" for name, value in report["machine"].items()), flush=True)

    def write() -> None:
        report["skipped"], report["seconds"] = budget.skipped, round(budget.spent(), 1)
        if args.json:
            Path(args.json).write_text(json.dumps(report, indent=1) + "\n")

    report["ceilings"] = ceilings(device, flush, min(args.seconds, 2.0), small=device.type == "cpu")
    print("ceilings: {matmul_tflops:.4g} TFLOP/s, {copy_gb_per_s:.4g} GB/s".format(**report["ceilings"]), flush=True)
    write()
    checks = [] if args.no_checks else list(CHECKS)

    def run_check(name: str) -> None:
        if alive(report) and budget.allows(f"check {name}", LATE.get(name, CHECK)):
            report["checks"][name] = outcome(lambda: CHECKS[name](device))
            print(f"check {name}: {report['checks'][name]}", flush=True)
            clear(device)
            write()

    for name in checks:
        if name not in LATE:
            run_check(name)
    for name in args.configs:
        shape = SHAPES[name] if device.type == "cuda" else shrunk(SHAPES[name])
        for mode in ("forward",) if shape.layer.decode else ("forward", "train"):
            if alive(report) and budget.allows(f"{name} {mode}", CELL + args.seconds):
                report["cells"].append(cell(shape, mode, args, device, flush, report["ceilings"]))
                write()
        if alive(report) and not shape.layer.decode and budget.allows(f"{name} rows", CELL):
            report["rows"] += move_rows(shape, device, flush, min(args.seconds, 2.0), report["ceilings"])
            write()
    for name in checks:
        if name in LATE:
            run_check(name)
    show(report)
    write()
    return report


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cuda (default) or cpu, in small")
    parser.add_argument("--budget", type=float, default=345.0, help="seconds after which nothing is begun (345)")
    parser.add_argument("--seconds", type=float, default=5.0, help="of timing for each cell (5)")
    parser.add_argument("--rounds", type=int, default=50, help="at most so many for each cell (50)")
    parser.add_argument("--configs", nargs="+", choices=list(SHAPES), default=list(SHAPES), help=", ".join(SHAPES))
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--no-checks", action="store_true", help="time only")
    parser.add_argument("--json", metavar="PATH", help="where to write everything, again after each step")
    return parser.parse_args(argv)


def machine(device: torch.device) -> dict[str, Any]:
    facts = {"torch": torch.__version__, "python": platform.python_version(), "fmoe": fmoe.__version__}
    for package in ("triton", "transformers"):
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            facts[package] = "not installed"
    return facts | ({"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}) | card_state()


def outcome(run: Callable[[], str]) -> str:
    """What a check found: ``ok: ...``, ``skipped: ...`` or ``FAILED: ...``."""
    try:
        return f"ok: {run()}"
    except Skipped as reason:
        return f"skipped: {reason}"
    except Exception as error:
        return f"FAILED: {error_text(error)}"


def alive(report: dict[str, Any]) -> bool:
    """Whether the device still answers: after an illegal access nothing on it does."""
    if "lost" not in report and torch.cuda.is_available():
        try:
            torch.cuda.synchronize()
        except Exception as error:
            report["lost"] = error_text(error)
            print(f"the device is lost, nothing more runs on it: {report['lost']}", flush=True)
    return "lost" not in report


# --- cells -----------------------------------------------------------------------------------------------------------


def cell(
    shape: Shape, mode: str, args: argparse.Namespace, device: torch.device, flush: Flush, limits: dict[str, float]
) -> dict[str, Any]:
    """One layer, forward or training: its check, and every contender's time, rate and memory."""
    clear(device)
    found: dict[str, Any] = {"config": shape.name, "mode": mode, "before": card_state(), "contenders": {}}
    if mode == "forward":
        found["check"] = outcome(lambda: large(shape, device))
        print(f"check {shape.name}: {found['check']}", flush=True)
        clear(device)
    problem, train = draw(shape, device, torch.bfloat16, seed=2), mode == "train"
    runs: dict[str, Callable[[], Any]] = {}
    numbers: dict[str, dict[str, Any]] = found["contenders"]
    ours: torch.Tensor | None = None
    for name in args.contenders:
        try:
            maker, compared, _ = CONTENDERS[name]
            made = maker(problem)
            with torch.no_grad():
                y = made.run()
                ours = y if name == "fmoe" else ours
                if compared and ours is not None:
                    require(row_error(y, ours), 0.03, f"{name} against fmoe")
            runs[name] = step(made, y, train)
            numbers[name] = {"memory": memory(made, runs[name], device)} if train else {}
        except Exception as error:
            numbers[name] = {"error": error_text(error)}
    if shape.small and device.type == "cuda" and "fmoe" in runs:
        try:
            graph, _ = capture(step(padded(problem), ours, train))
            runs["fmoe graph"] = graph.replay
            numbers["fmoe graph"] = {}
        except Exception as error:
            numbers["fmoe graph"] = {"error": error_text(error)}
    for name, times in rounds(runs, device, flush, args.seconds, args.rounds).items():
        numbers[name] |= times
        if "ms" in times:
            numbers[name] |= rates(name.removesuffix(" graph"), shape, train, times["ms"], limits)
    if shape.layer.decode and "ms" in numbers.get("fmoe", {}):
        found["reading"] = reading(problem, numbers, limits)
    found["after"] = card_state()
    print(summary(found), flush=True)
    return found


def rates(name: str, shape: Shape, train: bool, ms: float, limits: dict[str, float]) -> dict[str, float]:
    """TFLOP/s and its share of the matmul, and what share of the copy the least bytes of a pass took."""
    tflops, rate = flops(name, shape, train) / ms / 1e9, least_bytes(shape, train) / ms / 1e6
    return {"tflops": tflops, "of_matmul": tflops / limits["matmul_tflops"], "of_copy": rate / limits["copy_gb_per_s"]}


def step(made: Contender, y: torch.Tensor, train: bool) -> Callable[[], Any]:
    """One forward, or one forward and backward of which nothing is left."""
    if not train:

        def forward() -> None:
            with torch.no_grad():
                made.run()

        return forward
    cotangent = torch.randn_like(y)

    def both() -> None:
        torch.autograd.grad(made.run(), made.leaves, cotangent, allow_unused=True)

    return both


def padded(problem: Problem) -> Contender:
    """`fmoe.moe` in the padded layout, whose shapes a graph can hold."""
    ragged = fmoe_layer(problem)
    x, router, w_in, w_out = ragged.leaves
    params = fmoe.MoEParams(fmoe.RouterParams(router), fmoe.ExpertParams(w_in, w_out))
    config = problem.config.layer(problem.activation).replace(capacity=1.25)
    return replace(ragged, run=lambda: fmoe.moe(params, x, config)[0])


def memory(made: Contender, run: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """Gigabytes that a training step saves and holds at most."""
    run()
    finish(device)
    peak = peak_bytes(run, device)
    return {"saved_gb": saved_bytes(made.run, made.leaves) / 1e9, "peak_gb": None if peak is None else peak / 1e9}


def reading(problem: Problem, numbers: dict[str, Any], limits: dict[str, float]) -> dict[str, float]:
    """Reading the chosen experts' weights once, which is what a step of few tokens must do."""
    active = int(chosen_by(problem.params, problem.x, problem.config.layer(problem.activation)).unique().numel())
    own = problem.params.experts
    size = active * (own.w_in[0].numel() + own.w_out[0].numel()) * own.w_in.element_size()
    best = min(found["ms"] for name, found in numbers.items() if name.startswith("fmoe") and "ms" in found)
    rate = size / best / 1e6
    return {"active_experts": active, "gb": size / 1e9, "gb_per_s": rate, "of_copy": rate / limits["copy_gb_per_s"]}


def move_rows(
    shape: Shape, device: torch.device, flush: Flush, seconds: float, limits: dict[str, float]
) -> list[dict[str, Any]]:
    """Encode and decode alone: every row of tokens to its expert, and back with weights."""
    clear(device)
    c = shape.layer
    x = torch.randn(c.tokens, c.model_dim, device=device, dtype=torch.bfloat16)
    scores = torch.randn(c.tokens, c.experts, device=device)
    experts = scores.topk(c.k).indices.flatten()
    index = torch.empty_like(experts).scatter_(
        0, experts.argsort(stable=True), torch.arange(experts.numel(), device=device)
    ).view(c.tokens, c.k)  # fmt: skip
    ones, weights = torch.ones(c.tokens, c.k, device=device, dtype=x.dtype), torch.rand(c.tokens, c.k, device=device)
    try:
        rows = OPS["expand"](x, index, ones, index.numel())
        runs = {
            "encode": lambda: OPS["expand"](x, index, ones, index.numel()),
            "decode": lambda: OPS["combine"](rows, index, weights),
        }
        times = rounds(runs, device, flush, seconds)
    except Exception as error:
        times = {"encode": {"error": error_text(error)}}
    moved = (c.tokens + index.numel()) * c.model_dim * x.element_size()
    made = []
    for name, found in times.items():
        made.append({"config": shape.name, "op": name, "gb": moved / 1e9} | found)
        if "ms" in found:
            rate = moved / found["ms"] / 1e6
            made[-1] |= {"gb_per_s": rate, "of_copy": rate / limits["copy_gb_per_s"]}
    return made


# --- report ------------------------------------------------------------------------------------------------------


def summary(found: dict[str, Any]) -> str:
    """One line as soon as a cell is done."""
    parts = [
        f"{name} {of['ms']:.3f} ms {of['tflops']:.0f}" if "ms" in of else f"{name} failed"
        for name, of in found["contenders"].items()
    ]
    return f"{found['config']} {found['mode']} (TFLOP/s): " + ", ".join(parts)


HEADINGS = ("layer", "mode", "contender", "ms", "TFLOP/s", "of matmul", "of copy", "saved GB", "peak GB", "goal")
_TOLD = 70  # characters of an error in the table; the JSON has all


def lines(report: dict[str, Any]) -> list[tuple[str, ...]]:
    """The rows of the table: a contender in a cell, what it reached, what was asked."""
    made: list[tuple[str, ...]] = []
    for found in report["cells"]:
        where, numbers = (found["config"], found["mode"]), found["contenders"]
        for name, of in numbers.items():
            if "ms" not in of:
                made.append((*where, name, *[""] * 6, of.get("error", "")[:_TOLD]))
                continue
            kept = of.get("memory", {})
            peak = kept.get("peak_gb")
            reached = f"{of['ms']:.3f}", f"{of['tflops']:.1f}", percent(of["of_matmul"]), percent(of["of_copy"])
            memory = f"{kept['saved_gb']:.3f}" if kept else "", "" if peak is None else f"{peak:.2f}"
            made.append((*where, name, *reached, *memory, goal_of(found) if name == "fmoe" else ""))
        if "reading" in found:
            r = found["reading"]
            told = f"{r['active_experts']} experts' weights, {r['gb_per_s']:.0f} GB/s"
            made.append((*where, "read once", "", "", "", percent(r["of_copy"]), "", "", told))
    for of in report["rows"]:
        where = (of["config"], "rows", of["op"])
        if "ms" in of:
            told = f"{percent(ROW_GOAL)} of copy; {of['gb_per_s']:.0f} GB/s"
            made.append((*where, f"{of['ms']:.3f}", "", "", percent(of["of_copy"]), "", "", told))
        else:
            made.append((*where, *[""] * 6, of["error"][:_TOLD]))
    return made


def percent(share: float) -> str:
    """A share as a table shows it."""
    return f"{100 * share:.0f}%"


def goal_of(found: dict[str, Any]) -> str:
    """What is asked of a cell, beside what is not in its columns."""
    goals, numbers = SHAPES[found["config"]].goals, found["contenders"]
    asked = [f"{goals[found['mode']]} TFLOP/s"] if found["mode"] in goals else []
    over = numbers.get("grouped_mm", {}).get("ms")
    if over and "over_grouped_mm" in goals:
        asked.append(f"{goals['over_grouped_mm']}x grouped_mm, is {over / numbers['fmoe']['ms']:.2f}x")
    if found["mode"] == "train" and "saved_gb" in goals:
        asked.append(f"saved {goals['saved_gb']} GB")
    return "; ".join(asked)


def show(report: dict[str, Any]) -> None:
    """The table, in the end, where the end of an output is what is kept."""
    body = lines(report)
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(len(line[i]) for line in [HEADINGS, *body]) for i in range(len(HEADINGS))]
        for line in [HEADINGS, *body]:
            print("  ".join(part.ljust(width) for part, width in zip(line, widths, strict=True)).rstrip())
    else:
        table = Table(box=None, padding=(0, 1, 0, 0))
        for heading in HEADINGS:
            table.add_column(heading, justify="right" if heading in HEADINGS[3:9] else "left", no_wrap=True)
        for line in body:
            table.add_row(*line)
        Console(width=170, highlight=False, soft_wrap=True).print(table)
    failed = [name for name, found in report["checks"].items() if found.startswith("FAILED")]
    failed += [f"{c['config']} against fp64" for c in report["cells"] if c.get("check", "").startswith("FAILED")]
    print(f"contenders not installed here: {', '.join(report['absent']) or 'none'}")
    print(f"checks: {len(report['checks'])}, failed: {', '.join(failed) or 'none'}")


if __name__ == "__main__":
    main()

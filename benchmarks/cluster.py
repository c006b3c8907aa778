"""Does overlap save time, and when do two levels: measured between hosts with slow links.

Hosts are network namespaces of this machine on a bridge, and each sends through a link of limited rate
(``tc tbf``), so exchange takes time in which cores are free, as between real hosts. Needs Linux, root
and iproute2; without, it says so and measures nothing. Every rank is a process of one thread, over gloo.

overlap: one MoE layer (TopK(1), relu, an expert on each rank, capacity factor 1, padded, fp32) through
    ``fmoe.auto`` under ``ep r=1 pipeline=d layout=padded``, 2 hosts of 1 rank. Beside it, in the same rounds,
    what the program of d takes without one half or the other:

    computation  the program with a communicator that exchanges nothing: gate, encode, experts, decode
    exchange     its all_to_alls, or starts and dones, there and back, alone

    The rate of the links is set first, so that exchange takes ``--balance`` times what computation does,
    forward, d=1. A time is that of the slowest rank, forward and backward each begun by all together.

    ideal           of a round with computation C and exchange X: when the last of d results is home by list
                    scheduling of the program's order on a network and a core (`ideal`). Backward runs the
                    same order, so the same formula holds
    over ideal      the median over rounds of (time / ideal)
    over that of 1  the same, with the ideal made of the computation and exchange of d=1. Chunks fit caches
                    better, and gloo may serialise the two directions of a single exchange (it sends
                    before it says that it can receive), so this may be below 1
    overlap         the median over rounds of ((computation + exchange) / time): what running both at once saves
    speed-up        the median over rounds of (time of d=1 / time of d)

levels: one all_to_all of 2 hosts of 2 ranks: ``linear``, one message to each peer, against ``2dh``, first
    inside the host (in memory) and then between hosts, one message for both ranks there. What is timed is
    what the planned programs hold: the one equation ``all_to_all[world]`` of a linear plan, and the
    sub-program ``a2a_2dh`` of a 2dh plan, run by `fmoe.ops.runtime.run`.

    2dh sends as many bytes between hosts and fewer messages, so it needs a link on which a message costs
    something however short it is. ``--packet-bytes`` makes such links: every packet takes the time of that
    many bytes more (``tc stab``). With 0, what is left is what a message costs gloo and the kernel.

``others took`` is the share of the cores that other processes took meanwhile: above 0.05 or so, time again.

Examples:
    python benchmarks/cluster.py                                             # both
    python benchmarks/cluster.py --only overlap --repeats 15 --degrees 1 2 4 --out overlap.json
    python benchmarks/cluster.py --only levels --mbit 200 --packet-bytes 0 20000
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout's fmoe, installed or not

from cluster_net import cluster, run_ranks, why_not
from layer import WIDTH, machine, quartiles

RANKS = Path(__file__).with_name("cluster_ranks.py")
PHASES = ("forward", "backward")
WANTED = {"forward": 1.4, "backward": 1.25}  # the least speed-up of the best degree
WANTED_OVER_IDEAL = 1.15


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    console = Console(width=WIDTH, highlight=False, soft_wrap=True)
    lacking = why_not()
    if lacking:
        console.print(f"nothing measured: hosts are network namespaces with slow links, but {lacking}")
        return {}
    facts = machine()
    console.print(f"{facts['cpu']}, {facts['cores']} cores, one thread a rank, torch {facts['torch']}")
    report: dict[str, Any] = {"machine": facts, "arguments": vars(args)}
    if args.only in (None, "overlap"):
        report["overlap"] = overlap(args)
        for phase in PHASES:
            console.print(overlap_table(report["overlap"], phase))
            console.print(verdict(report["overlap"], phase))
    if args.only in (None, "levels"):
        report["levels"] = [levels(args, packet_bytes) for packet_bytes in args.packet_bytes]
        for part in report["levels"]:
            console.print(levels_table(part))
            console.print(winners(part))
    if args.out:
        Path(args.out).write_text(json.dumps(report, indent=1) + "\n")
    return report


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["overlap", "levels"], help="one of the two parts")
    parser.add_argument("--repeats", type=int, default=11, help="rounds (11)")
    parser.add_argument("--degrees", type=int, nargs="+", default=[1, 2, 4, 8], help="overlap: d, 1 first (1 2 4 8)")
    parser.add_argument("--tokens", type=int, default=1024, help="overlap: tokens of a rank (1024)")
    parser.add_argument("--model-dim", type=int, default=256, help="overlap: M (256)")
    parser.add_argument("--hidden-dim", type=int, default=4096, help="overlap: H (4096)")
    parser.add_argument("--balance", type=float, default=1.0, help="overlap: exchange over computation, forward (1)")
    parser.add_argument("--overlap-mbit", type=float, help="overlap: rate of the links, in place of --balance")
    sizes = [2**n for n in range(10, 23, 2)]
    parser.add_argument("--sizes", type=int, nargs="+", default=sizes, help="levels: bytes for each peer (1 KiB-4 MiB)")
    parser.add_argument("--mbit", type=float, default=400.0, help="levels: rate of the links (400)")
    text = "levels: what a packet costs beyond its bytes, in bytes (0, and 20000)"
    parser.add_argument("--packet-bytes", type=int, nargs="+", default=[0, 20_000], help=text)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for each measurement (300)")
    parser.add_argument("--out", metavar="PATH", help="where to write all numbers, with the machine they are from")
    args = parser.parse_args(argv)
    if args.repeats < 1 or args.degrees[0] != 1:
        parser.error("--repeats is at least 1, and --degrees begins with 1")
    if any(size % 1024 for size in args.sizes):
        parser.error("--sizes are multiples of 1024")
    return args


def measured(job: Mapping[str, Any], per_host: int, timeout: float) -> dict[str, Any]:
    """What the ranks of a job measure on 2 hosts, and the share of the cores that others took meanwhile."""
    with tempfile.TemporaryDirectory() as folder, cluster(2) as hosts:
        files = {"store": f"{folder}/store", "out": f"{folder}/out.json"}
        world = 2 * per_host
        Path(f"{folder}/job.json").write_text(json.dumps({**job, **files, "world": world, "node": per_host}))
        start, before = time.perf_counter(), _others_seconds()
        ranks = [host for host in hosts for _ in range(per_host)]
        run_ranks([sys.executable, str(RANKS), f"{folder}/job.json"], ranks, timeout)
        others = (_others_seconds() - before) / (time.perf_counter() - start) / (os.cpu_count() or 1)
        return {"found": json.loads(Path(files["out"]).read_text()), "others_share": max(0.0, others)}


def _others_seconds() -> float:
    """Processor seconds of processes other than this one and those that it has waited for."""
    user, nice, system = map(int, Path("/proc/stat").read_text().split(maxsplit=4)[1:4])
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    own = time.process_time() + children.ru_utime + children.ru_stime
    return (user + nice + system) / os.sysconf("SC_CLK_TCK") - own


# --- overlap ---------------------------------------------------------------------------------------------------------


def ideal(computation: float, exchange: float, degree: int) -> float:
    """When the last result is home: d sends start first; each chunk is computed when it is there, then sent home.

    The network carries one chunk at a time, in the order they were started, each for X/2d; a core takes
    C/d for each. With d=1 that is X/2 + C + X/2.
    """
    message, work = exchange / 2 / degree, computation / degree
    network, core = exchange / 2, 0.0  # all chunks are there when the network is free for the way home
    for chunk in range(degree):
        core = max(core, (chunk + 1) * message) + work
        network = max(network, core) + message
    return network


def overlap(args: argparse.Namespace) -> dict[str, Any]:
    keys = ("tokens", "model_dim", "hidden_dim", "degrees", "repeats", "balance")
    job = {"what": "overlap", "mbit": args.overlap_mbit, **{key: getattr(args, key) for key in keys}}
    run = measured(job, 1, args.timeout)
    times = run["found"]["times"]
    phases = {
        phase: {d: cell({name: np.array(each[phase]) for name, each in times.items()}, d) for d in args.degrees}
        for phase in PHASES
    }
    return {"mbit": run["found"]["mbit"], "others_share": run["others_share"], "rounds": args.repeats, "phases": phases}


def cell(times: Mapping[str, np.ndarray], degree: int) -> dict[str, Any]:
    """What is said of one degree, from the seconds of every contender."""

    def best(of: int) -> np.ndarray:
        pairs = zip(times[f"computation {of}"], times[f"exchange {of}"], strict=True)
        return np.array([ideal(computation, exchange, degree) for computation, exchange in pairs])

    layer = times[f"layer {degree}"]
    return {
        **{f"{name}_ms": quartiles(times[f"{name} {degree}"] * 1e3) for name in ("computation", "exchange", "layer")},
        "ideal_ms": quartiles(best(degree) * 1e3),
        "over_ideal": quartiles(layer / best(degree)),
        "over_ideal_of_1": quartiles(layer / best(1)),
        "overlap": quartiles((times[f"computation {degree}"] + times[f"exchange {degree}"]) / layer),
        "speed_up": quartiles(times["layer 1"] / layer),
    }


def overlap_table(part: Mapping[str, Any], phase: str) -> Table:
    title = f"{phase}, 2 hosts of 1 rank, links of {part['mbit']:.0f} Mbit/s, {part['rounds']} rounds, "
    title += f"others took {part['others_share']:.2f}: median ms"
    out = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
    headings = ["d", "computation", "exchange", "layer", "ideal", "over ideal", "over that of 1", "overlap", "speed-up"]
    for heading in headings:
        out.add_column(heading, justify="right", no_wrap=True, style="bold" if heading == "speed-up" else None)
    for degree, numbers in part["phases"][phase].items():
        shown = [f"{n['median']:.1f}" if name.endswith("_ms") else f"{n['median']:.2f}" for name, n in numbers.items()]
        out.add_row(str(degree), *shown)
    return out


def verdict(part: Mapping[str, Any], phase: str) -> str:
    """The best degree of a phase and the worst ratio to the ideal, beside what is wanted."""
    cells = part["phases"][phase]
    speed = {degree: numbers["speed_up"]["median"] for degree, numbers in cells.items()}
    best = max(speed, key=speed.__getitem__)
    worst = max(numbers["over_ideal"]["median"] for numbers in cells.values())
    words = f"best {phase}: {speed[best]:.2f} at d={best} (wanted {WANTED[phase]}); "
    return words + f"at most {worst:.2f} over ideal (wanted {WANTED_OVER_IDEAL})"


# --- levels ----------------------------------------------------------------------------------------------------------


def levels(args: argparse.Namespace, packet_bytes: int) -> dict[str, Any]:
    job = {
        "what": "levels",
        "mbit": args.mbit,
        "packet_bytes": packet_bytes,
        "sizes": args.sizes,
        "repeats": args.repeats,
    }
    run = measured(job, 2, args.timeout)
    rows = []
    for row in run["found"]:
        linear, two = (np.array(row["times"][name]) for name in ("linear", "2dh"))
        ms = {name: quartiles(np.array(each) * 1e3) for name, each in row["times"].items()}
        rows.append({"bytes": row["bytes"], "runs": row["runs"], "ms": ms, "linear_over_2dh": quartiles(linear / two)})
    shared = {"mbit": args.mbit, "packet_bytes": packet_bytes, "rounds": args.repeats}
    return {**shared, "others_share": run["others_share"], "rows": rows}


def levels_table(part: Mapping[str, Any]) -> Table:
    title = (
        f"levels, 2 hosts of 2 ranks, links of {part['mbit']:.0f} Mbit/s, {part['packet_bytes']} bytes more a packet, "
    )
    title += f"{part['rounds']} rounds, others took {part['others_share']:.2f}: median ms"
    out = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
    for heading in ("bytes for each peer", "linear", "2dh", "linear / 2dh", "faster"):
        out.add_column(heading, justify="right", no_wrap=True)
    for row in part["rows"]:
        times = [f"{row['ms'][name]['median']:.2f}" for name in ("linear", "2dh")]
        out.add_row(_bytes(row["bytes"]), *times, f"{row['linear_over_2dh']['median']:.2f}", _faster(row))
    return out


def _faster(row: Mapping[str, Any]) -> str:
    """Which way is faster; neither where the quartiles of the quotient lie on both sides of 1."""
    quotient = row["linear_over_2dh"]
    if quotient["q1"] < 1 < quotient["q3"]:
        return "-"
    return "2dh" if quotient["median"] > 1 else "linear"


def winners(part: Mapping[str, Any]) -> str:
    """Where each way is faster."""
    words = []
    for name in ("2dh", "linear"):
        sizes = [_bytes(row["bytes"]) for row in part["rows"] if _faster(row) == name]
        words.append(f"{name} is faster for {', '.join(sizes) if sizes else 'none'}")
    return "; ".join(words)


def _bytes(size: int) -> str:
    return f"{size // 2**20} MiB" if size % 2**20 == 0 else f"{size // 2**10} KiB"


if __name__ == "__main__":
    main()

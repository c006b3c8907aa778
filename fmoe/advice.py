"""``python -m fmoe plan``: what to run on a cluster, and why."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from ._errors import PlanError
from .ops.activations import ACTIVATIONS
from .sharding.cost import COMPUTE, Price
from .sharding.plan import Plan
from .sharding.presets import PRESETS
from .sharding.profile import Profile
from .workload import DTYPES, Workload, best, duplicates, profile_of

CHANNELS = {COMPUTE: "compute", "inside": "exchange inside nodes", "between": "exchange between nodes"}
#: Parts of a time that are less than this share of it are not told.
SMALL = 0.01


def add_plan(commands: Any) -> None:
    """Adds the command."""
    command = commands.add_parser(
        "plan",
        help="what to run on a cluster: the plan the planner would choose, its time and memory, and why",
        description="Prices every legal plan of one layer, forward and backward, on a machine given as numbers, "
        "and says which one to run and why. Needs no devices.",
    )
    add_layer(command)
    command.add_argument(
        "--imbalance", type=float, default=1.0, metavar="X", help="rows of the fullest expert over the mean (default 1)"
    )
    add_machine(command)
    command.add_argument("--rows", type=int, default=12, metavar="N", help="of the table (default 12; 0 for all)")


def add_layer(command: Any) -> None:
    """Adds the options that say what one layer is, and on how many ranks."""
    for name, default, text in (
        ("experts", 8, "experts (E)"),
        ("world", 8, "ranks (W)"),
        ("node", None, "ranks per node; all of them by default"),
        ("tokens", 4096, "tokens of each rank (T)"),
        ("model-dim", 1024, "model dim (M)"),
        ("hidden-dim", 4096, "hidden dim of an expert (H)"),
        ("top-k", 2, "experts per token (K)"),
    ):
        command.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{text} (default {default})")
    command.add_argument("--capacity", type=float, metavar="F", help="capacity factor; drops nothing by default")
    command.add_argument("--activation", default="swiglu", choices=sorted(ACTIVATIONS))
    command.add_argument("--dtype", default="bfloat16", choices=DTYPES)


def add_machine(command: Any) -> None:
    """Adds the options that say what the cluster is made of."""
    command.add_argument(
        "--profile",
        default="a100_ndm",
        metavar="P",
        help=f"{', '.join(PRESETS)}, or a file of a calibration (default a100_ndm)",
    )
    command.add_argument("--memory", type=float, metavar="BYTES", help="of a device (default: that of the profile)")


def memory_limit(given: argparse.Namespace, profile: Profile) -> float | None:
    """Bytes a device may use.

    Raises:
        ValueError: if ``--memory`` is not positive.
    """
    if given.memory is None:
        return profile.memory
    if not given.memory > 0:
        raise ValueError(f"memory={given.memory:g}, but it must be a number of bytes above 0.")
    return float(given.memory)


def run_plan(given: argparse.Namespace) -> int:
    """Prints the advice; 2 with one line on stderr for input that cannot be used."""
    try:
        profile = profile_of(given.profile)
        limit = memory_limit(given, profile)
        workload = Workload(
            experts=given.experts,
            world=given.world,
            node=given.world if given.node is None else given.node,
            tokens=given.tokens,
            model_dim=given.model_dim,
            hidden_dim=given.hidden_dim,
            top_k=given.top_k,
            capacity=given.capacity,
            imbalance=given.imbalance,
            dtype=given.dtype,
            activation=given.activation,
        )
        prices = workload.prices(profile)
        if limit is not None and min(found.memory for found in prices.values()) > limit:
            raise PlanError(workload.why_none_fits(prices, limit, profile))
    except (ValueError, RuntimeError, OverflowError) as error:
        print("python -m fmoe plan: " + " ".join(str(error).split()), file=sys.stderr)
        return 2
    chosen = best(prices, limit)
    print("\n".join(advice(workload, profile, prices, chosen, limit)))
    print()
    _print_table(prices, chosen, limit, given.rows)
    return 0


def advice(
    workload: Workload, profile: Profile, prices: Mapping[Plan, Price], chosen: Plan, limit: float | None
) -> Iterator[str]:
    """Lines that say what to run, what it takes, and why the others lose."""
    w, found = workload, prices[chosen]
    mesh = w.mesh
    rows = f"capacity factor {w.capacity:g}" if w.capacity is not None else "nothing dropped"
    yield (
        f"E={w.experts} K={w.top_k} M={w.model_dim} H={w.hidden_dim} {w.activation} {w.dtype}, T={w.tokens} on each of "
        f"{mesh.world} ranks on {mesh.nodes} {'node' if mesh.nodes == 1 else 'nodes'} of {mesh.node} "
        f"({profile.name}); {rows}, the fullest expert at {w.imbalance:g} times the mean load."
    )
    yield ""
    yield f"Run {chosen}"
    yield (
        f"  {_ms(found.seconds)} ms a layer (forward {_ms(found.forward)}, backward {_ms(found.backward)}), "
        f"{_gib(found.memory)} at most" + (f" of {_gib(limit)}" if limit is not None else "")
    )
    busy = ", ".join(
        f"{name} {_ms(found.busy[channel])} ms" for channel, name in CHANNELS.items() if found.busy.get(channel)
    )
    exchanged = any(found.busy.get(channel) for channel in CHANNELS if channel != COMPUTE)
    hidden = f"; {100 * found.hidden:.0f} % of the exchange runs beside compute" if exchanged else ""
    yield f"  {busy}{hidden}"
    yield f'  fmoe.ShardingSpec(fmoe.make_mesh({w.experts}, world={w.world}, node={mesh.node}), plan="{chosen}")'
    yield ""
    yield "Why not"
    yield from _reasons(prices, chosen, limit)
    if chosen.parallelism == "ep" and mesh.nodes > 1 and w.experts % mesh.nodes == 0 and w.top_k > 1:
        share = duplicates(w.experts, w.top_k, mesh.nodes)
        yield f"  {100 * share:.0f} % of the copies that ep sends to nodes are of a token the node has (even routing)"


def _reasons(prices: Mapping[Plan, Price], chosen: Plan, limit: float | None) -> Iterator[str]:
    """For each thing a plan chooses, the best plan that chooses otherwise, and where its time goes."""
    fits = {plan: found for plan, found in prices.items() if limit is None or found.memory <= limit}
    told = set()
    for name in ("parallelism", "r", "mp", "pipeline", "a2a", "layout"):
        mine = getattr(chosen, name)
        other = {p: f for p, f in fits.items() if getattr(p, name) != mine}
        if name != "parallelism":
            other = {p: f for p, f in other.items() if p.parallelism == chosen.parallelism}
        if name == "mp":
            other = {p: f for p, f in other.items() if p.r > 1 and chosen.r > 1}
        if not other or (plan := best(other, None)) in told:
            continue
        told.add(plan)
        what = plan.parallelism if name == "parallelism" else f"{name}={getattr(plan, name)}"
        yield f"  {what}: {_difference(fits[chosen], fits[plan])} ({plan})"
    out = [plan for plan in prices if plan not in fits]
    if out:
        least = min(prices[plan].memory for plan in out)
        yield f"  {len(out)} of {len(prices)} plans take more memory than there is, {_gib(least)} or more"
    elif not told:
        yield "  there is no other plan"


def _difference(mine: Price, other: Price) -> str:
    """How much longer another plan takes, and in which parts."""
    more = other.seconds / mine.seconds - 1
    head = "as fast" if abs(more) < 5e-4 else _longer(more, "longer", "times as long")
    parts = []
    for channel, name in CHANNELS.items():
        change = other.busy.get(channel, 0.0) - mine.busy.get(channel, 0.0)
        if abs(change) > SMALL * mine.seconds:
            parts.append(f"{name} {1e3 * change:+.4g} ms")
    if abs(other.hidden - mine.hidden) > SMALL:
        parts.append(f"{100 * other.hidden:.0f} % of the exchange hidden instead of {100 * mine.hidden:.0f} %")
    return f"{head}: {', '.join(parts)}" if parts else head


def _print_table(prices: Mapping[Plan, Price], chosen: Plan, limit: float | None, most: int) -> None:
    from rich.console import Console
    from rich.table import Table

    def place(plan: Plan) -> tuple[bool, float, str]:
        return limit is not None and prices[plan].memory > limit, prices[plan].seconds, str(plan)

    order = sorted(prices, key=place)
    shown = order[:most] if most > 0 else order
    table = Table(box=None, pad_edge=False)
    for name in ("plan", "ms", "compute", "inside", "between", "hidden", "memory", "why"):
        table.add_column(name, justify="left" if name in ("plan", "why") else "right", no_wrap=name != "why")
    for plan in shown:
        found = prices[plan]
        more = found.seconds / prices[chosen].seconds - 1
        why = "runs" if plan == chosen else _longer(more, "slower", "times as slow")
        if limit is not None and found.memory > limit:
            why = f"takes {found.memory:.3g} of {limit:.3g} bytes"
        channels = [_ms(found.busy.get(channel, 0.0)) for channel in CHANNELS]
        table.add_row(
            str(plan), _ms(found.seconds), *channels, f"{100 * found.hidden:.0f} %", _gib(found.memory), why,
            style="bold" if plan == chosen else None,
        )  # fmt: skip
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    console.print(table)
    if len(shown) < len(order):
        console.print(f"and {len(order) - len(shown)} more (--rows 0 for all)", highlight=False)


def _longer(more: float, little: str, much: str) -> str:
    return f"{100 * more:.3g} % {little}" if more < 1 else f"{1 + more:.3g} {much}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g}"


def _gib(size: float) -> str:
    return f"{size / 2**30:.3g} GiB"

"""The command line: ``python -m fmoe`` with show, plan, sweep, calibrate or transforms."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from . import __version__
from .advice import add_layer, add_plan, run_plan
from .calibrate import add_calibrate, run_calibrate
from .functional.config import MoEConfig
from .functional.moe import moe
from .functional.routers import TopK
from .ops.differentiable import TORCH_CHECKED
from .sharding.distribute import make_mesh
from .sharding.spec import ShardingSpec
from .stages import trace
from .sweep import add_sweep, run_sweep
from .values import MoEParams
from .workload import without_data

if TYPE_CHECKING:
    from .transforms.table import Cell


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code: 0, 1 if a cell of the table fails, 2 for a plan that is not legal."""
    parser = argparse.ArgumentParser(prog="python -m fmoe", description="Mixture-of-Experts as pure functions.")
    parser.add_argument("--version", action="version", version=f"fmoe {__version__}, torch {torch.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    _add_show(commands)
    add_plan(commands)
    add_sweep(commands)
    add_calibrate(commands)
    table = commands.add_parser(
        "transforms",
        help="run every operation and the layer under every transform, here and now, and print the table",
        description="Runs every operation and the whole layer under every transform in float64 and compares with "
        "plain torch. The compile rows take minutes with inductor.",
    )
    table.add_argument("--backend", default="inductor", help="of torch.compile: inductor (default) or aot_eager")
    table.add_argument("--rows", nargs="+", metavar="NAME", help="only these transforms, such as grad 'jvp(jvp)'")
    table.add_argument("--subjects", nargs="+", metavar="NAME", help="only these, such as gmm 'moe ragged'")
    arguments = parser.parse_args(argv)
    if arguments.command == "show":
        return _show(arguments)
    if arguments.command in ("plan", "sweep"):
        return run_plan(arguments) if arguments.command == "plan" else run_sweep(arguments)
    if arguments.command == "calibrate":
        return run_calibrate(arguments)
    return _transforms(table, arguments.backend, arguments.rows, arguments.subjects)


def _add_show(commands: Any) -> None:
    show = commands.add_parser(
        "show",
        help="print the program of one layer under a plan, and its cost; needs no devices",
        description="Prints the program that each rank runs under a plan, and what it costs, for any number of ranks.",
    )
    add_layer(show)
    show.add_argument("--plan", default="ep", help='such as "ep r=2 pipeline=2 a2a=2dh" (default ep)')
    show.add_argument("--logical", action="store_true", help="the program before any plan")


def _show(given: argparse.Namespace) -> int:
    """Prints the text of a layer under a plan; 2 with one line on stderr if there is no such plan."""
    try:
        config = MoEConfig(
            num_experts=given.experts,
            model_dim=given.model_dim,
            hidden_dim=given.hidden_dim,
            router=TopK(given.top_k),
            activation=given.activation,
            capacity=given.capacity,
        )
        mesh = make_mesh(given.experts, world=given.world, node=given.node)
        spec = ShardingSpec(mesh, plan=given.plan, max_tokens=given.tokens)
        params, x = without_data(config, given.tokens, getattr(torch, given.dtype))

        def layer(params: MoEParams, x: torch.Tensor) -> Any:
            return moe(params, x, config)

        traced = trace(layer)(params, x)
        print(traced.as_text() if given.logical else traced.plan(spec).as_text())
    except (ValueError, RuntimeError, OverflowError) as error:
        print(f"python -m fmoe show: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    return 0


def _transforms(
    parser: argparse.ArgumentParser, backend: str, rows: Sequence[str] | None, names: Sequence[str] | None
) -> int:
    from .transforms.routers import router_subjects
    from .transforms.subjects import subjects
    from .transforms.table import ROWS, run_cell

    every = {**subjects(), **router_subjects()}
    for what, chosen, known in (("row", rows, ROWS), ("subject", names, every), ("backend", [backend], _backends())):
        for name in chosen or ():
            if name not in known:
                parser.error(f"no {what} {name!r}: choose from {', '.join(known)}")
    rows, names = rows or list(ROWS), names or list(every)
    cells = {}
    with Progress(console=Console(stderr=True), transient=True) as progress, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        task = progress.add_task("running", total=len(rows) * len(names))
        for row in rows:
            for name in names:
                progress.update(task, advance=1, description=f"{row} of {name}")
                cells[row, name] = run_cell(row, every[name], backend)
    console = Console()
    console.print(f"fmoe {__version__}, torch {torch.__version__} (checked on {' to '.join(TORCH_CHECKED)})")
    fit = max(1, (console.width - 24) // 14)  # subjects side by side
    for first in range(0, len(names), fit):
        console.print(_table(rows, names[first : first + fit], cells))
    counts = Counter(cell.outcome for cell in cells.values())
    console.print(
        f"{counts['pass']} ok, {counts['torch']} where plain torch fails too (torch), {counts['fail']} failed; "
        f"compile backend {backend}."
    )
    for (row, name), cell in cells.items():
        if cell.detail:
            console.print(f"{row} of {name}: {cell.detail}", markup=False)
    return 1 if counts["fail"] else 0


def _table(rows: Sequence[str], names: Sequence[str], cells: Mapping[tuple[str, str], Cell]) -> Table:
    marks = {"pass": "[green]ok[/]", "torch": "[yellow]torch[/]", "fail": "[red]FAIL[/]"}
    table = Table()
    table.add_column("transform", no_wrap=True)
    for name in names:
        table.add_column(name.replace(" ", "\n").replace("_", "_\n", 1), justify="center")
    for row in rows:
        table.add_row(row, *(marks[cells[row, name].outcome] for name in names))
    return table


def _backends() -> Sequence[str]:
    return ("inductor", "aot_eager")


if __name__ == "__main__":
    sys.exit(main())

"""What a sweep prints and draws, from what it writes to sweep.json."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

#: Static plans that are told of, of each kind of rows.
SHOWN = 6
KINDS = {"load": "nothing dropped, load of the fullest expert", "capacity": "capacity factor, filled"}
_COLORS = ("tab:orange", "tab:blue", "tab:green", "tab:purple", "tab:red", "tab:brown", "tab:pink", "tab:olive")

Found = Mapping[str, Any]


def short(plan: str | None) -> str:
    """A plan in a few letters: r2g/4/2dh is ep with r=2, gather, 4 chunks and the 2dh exchange; ~ if ragged.

    Example:
        >>> short("ep r=2 mp=gather pipeline=4 a2a=2dh layout=padded"), short("dp layout=ragged")
        ('r2g/4/2dh', 'dp~')
    """
    if plan is None:
        return "none"
    head, *rest = plan.split()
    words = dict(word.split("=") for word in rest)
    ragged = "~" * (words.get("layout") == "ragged")
    if head == "dp":
        return head + ragged
    text = f"r{words['r']}" + ("g" if words.get("mp") == "gather" else "")
    text += f"/{words['pipeline']}" if words["pipeline"] != "1" else ""
    return text + ("/2dh" if words["a2a"] == "2dh" else "") + ragged


def _way(name: str) -> str:
    """How a short plan shares an expert."""
    return name.split("/")[0].removesuffix("~")


def _size(point: Found) -> str:
    w = point["workload"]
    return f"{w['tokens']}x{w['model_dim']}x{w['hidden_dim']}"


def _need(point: Found) -> float:
    """The load or the capacity of a point."""
    w = point["workload"]
    return float(w["imbalance"] if w["capacity"] is None else w["capacity"])


def _parts(found: Found) -> dict[tuple[str, str], dict[tuple[int, float], Found]]:
    """By (size, kind) the points by (world, load or capacity)."""
    parts: dict[tuple[str, str], dict[tuple[int, float], Found]] = {}
    for point in found["points"]:
        kind = "load" if point["workload"]["capacity"] is None else "capacity"
        parts.setdefault((_size(point), kind), {})[point["workload"]["world"], _need(point)] = point
    return parts


def _axes(cells: Mapping[tuple[int, float], Found]) -> tuple[list[int], list[float]]:
    return sorted({world for world, _ in cells}), sorted({need for _, need in cells})


# --- tables --------------------------------------------------------------------------------------------------


def print_report(found: Found, paths: Sequence[Path]) -> None:
    """Prints the assumptions, the tables, and what was written."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    for line in found["assumptions"]:
        console.print(line, highlight=False, markup=False)
    for (size, kind), cells in _parts(found).items():
        console.print()
        console.print(_map_table(size, kind, cells))
    console.print(
        "A cell is the planner's milliseconds for a layer and its plan: "
        "dp, or r, g if gathered, /chunks, /2dh; ~ if ragged."
    )
    for kind, some in found["statics"].items():
        if some:
            console.print()
            console.print(_static_table(kind, some))
    if found["swings"]:
        console.print()
        console.print(_swing_table(found["swings"]))
    for path in paths:
        console.print(f"wrote {path}", highlight=False, markup=False, soft_wrap=True)
    if len(paths) == 1:
        console.print("no pictures: matplotlib is not installed")


def _table(title: str, *columns: str) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    for name in columns:
        table.add_column(name, justify="left" if "plan" in name else "right")
    return table


def _map_table(size: str, kind: str, cells: Mapping[tuple[int, float], Found]) -> Any:
    worlds, needs = _axes(cells)
    table = _table(f"{size}, {KINDS[kind]}, over ranks", "", *(f"{world:,}" for world in worlds))
    for need in needs:
        row = []
        for world in worlds:
            point = cells[world, need]
            row.append(
                "does not fit" if point["chosen"] is None else f"{1e3 * point['seconds']:.3g} {short(point['chosen'])}"
            )
        table.add_row(f"{need:g}", *row)
    return table


def _static_table(kind: str, some: Sequence[Found]) -> Any:
    table = _table(f"The planner against static plans, {KINDS[kind]}", "plan", "points", "mean speed-up", "greatest")
    for static in _told(some):
        points = f"{static['points']}" + (", all" if static["everywhere"] else "")
        table.add_row(static["plan"], points, f"{static['mean']:.3f}x", f"{static['most']:.2f}x")
    if some[0]["everywhere"]:
        table.caption = f"best single plan for all points: {some[0]['plan']}"
        table.caption_justify = "left"
    return table


def _told(some: Sequence[Found]) -> list[Found]:
    """Static plans worth telling of: the best that run everywhere, and of the others those at most points."""
    everywhere = [s for s in some if s["everywhere"]][:SHOWN]
    other = sorted((s for s in some if not s["everywhere"]), key=lambda s: (-s["points"], s["mean"], s["plan"]))
    return everywhere + other[:SHOWN]


def _swing_table(swings: Sequence[Found]) -> Any:
    table = _table(
        "A load that swings within one training", "size", "layouts", "ranks", "planner ms", "speed-up", "best plan",
        "best ms", "over ep r=1", "over slowest", "the planner's plans",
    )  # fmt: skip
    for s in swings:
        usual = "" if s["usual_seconds"] is None else f"{s['usual_seconds'] / s['planner']:.2f}x"
        table.add_row(
            s["size"], s["layouts"], f"{s['world']:,}", f"{1e3 * s['planner']:.4g}", f"{s['speedup']:.3f}x",
            short(s["static"]), f"{1e3 * s['static_seconds']:.4g}", usual, f"{s['worst'] / s['planner']:.2f}x",
            " ".join(dict.fromkeys(map(short, s["plans"]))),
        )  # fmt: skip
    return table


# --- pictures ------------------------------------------------------------------------------------------------


def draw(out: Path, found: Found) -> list[Path]:
    """Writes the pictures; none without matplotlib."""
    try:
        from matplotlib.figure import Figure  # without pyplot its canvas is Agg: no display is needed
    except ImportError:
        return []
    parts = _parts(found)
    pictures: dict[str, Callable[[Any], None]] = {
        "plans.png": lambda figure: _draw_maps(figure, parts),
        "speedup.png": lambda figure: _draw_speedup(figure, parts, found["statics"]),
        "time.png": lambda figure: _draw_lines(figure, parts, "ms of a layer", lambda p: 1e3 * p["seconds"]),
        "exchange.png": lambda figure: _draw_lines(
            figure, parts, "exchange, waited for (line) and in all (dots), % of the time",
            lambda p: 100 * p["exposed_share"], lambda p: 100 * p["exchange_share"],
        ),
    }  # fmt: skip
    if found["swings"]:
        pictures["swing.png"] = lambda figure: _draw_swings(figure, found["swings"])
    written = []
    for name, paint in pictures.items():
        figure = Figure(figsize=(6.5 * max(1, len({size for size, _ in parts})), 8), layout="constrained")
        paint(figure)
        figure.savefig(out / name, dpi=110)
        written.append(out / name)
    return written


def _panels(figure: Any, parts: Mapping[tuple[str, str], Any]) -> dict[tuple[str, str], Any]:
    """A panel for each part: sizes across, kinds down."""
    sizes = list(dict.fromkeys(size for size, _ in parts))
    kinds = list(dict.fromkeys(kind for _, kind in parts))
    panels = figure.subplots(len(kinds), len(sizes), squeeze=False)
    return {(size, kind): panels[kinds.index(kind)][sizes.index(size)] for size, kind in parts}


def _worlds_below(panel: Any, worlds: Sequence[int]) -> None:
    panel.set_xticks(range(len(worlds)), [str(world) for world in worlds], fontsize=8)
    panel.set_xlabel("ranks")


def _draw_maps(figure: Any, parts: Mapping[tuple[str, str], Any]) -> None:
    """The planner's plan over ranks and load: a color for each plan's way to share an expert."""
    ways = sorted({_way(short(p["chosen"])) for cells in parts.values() for p in cells.values()})
    color = {way: _COLORS[i % len(_COLORS)] for i, way in enumerate(ways)}
    for (size, kind), panel in _panels(figure, parts).items():
        cells = parts[size, kind]
        worlds, needs = _axes(cells)
        for (world, need), point in cells.items():
            x, y, name = worlds.index(world), needs.index(need), short(point["chosen"])
            panel.bar(x, 1, 1, y - 0.5, color=color[_way(name)], edgecolor="white", alpha=0.75)
            panel.text(x, y, name.replace("/", "\n"), ha="center", va="center", fontsize=7)
        _worlds_below(panel, worlds)
        panel.set_yticks(range(len(needs)), [f"{need:g}" for need in needs])
        panel.set_ylabel("fullest expert / mean" if kind == "load" else "capacity factor")
        panel.set_title(f"{size}, {kind}", fontsize=10, loc="left")
    figure.suptitle("The planner's plan (r, g if gathered, chunks, exchange, ~ if ragged)")


def _draw_speedup(figure: Any, parts: Mapping[tuple[str, str], Any], found: Mapping[str, Sequence[Found]]) -> None:
    """The planner over static plans against ranks, geometric mean over loads or capacities."""
    for (size, kind), panel in _panels(figure, parts).items():
        cells = parts[size, kind]
        worlds, needs = _axes(cells)
        for i, static in enumerate(_told(found[kind])):
            plan, line = static["plan"], []
            for world in worlds:
                here = [cells[world, need] for need in needs]
                ratios = [p["plans"][plan] / p["seconds"] for p in here if plan in p["plans"]]
                line.append(statistics.geometric_mean(ratios) if len(ratios) == len(here) else float("nan"))
            single = i == 0 and static["everywhere"]
            label = short(plan) + (" (best single plan)" if single else "")
            panel.plot(
                line, "-" if static["everywhere"] else "--", marker="o", markersize=3, label=label,
                linewidth=2.5 if single else 1.2, color="black" if single else f"C{(i - 1) % 10}",
            )  # fmt: skip
        panel.set_yscale("log", subs=(2, 5))
        panel.yaxis.set_major_formatter("{x:g}x")
        panel.yaxis.set_minor_formatter("{x:g}x")
        panel.axhline(1, color="black", linewidth=0.8)
        _worlds_below(panel, worlds)
        panel.set_ylabel("speed-up of the planner")
        panel.set_title(f"{size}, {kind}", fontsize=10, loc="left")
        panel.grid(alpha=0.3)
        if panel.lines[:-1]:
            panel.legend(fontsize=7, framealpha=0.6, ncols=2)
    figure.suptitle("The planner against static plans (dashed: not legal at every point)")


def _draw_lines(
    figure: Any,
    parts: Mapping[tuple[str, str], Any],
    title: str,
    value: Callable[[Found], float],
    beside: Callable[[Found], float] | None = None,
) -> None:
    """A number of the planner's choice against ranks, a line for each load or capacity."""
    for (size, kind), panel in _panels(figure, parts).items():
        cells = parts[size, kind]
        worlds, needs = _axes(cells)
        for need in needs:
            held = [cells[world, need] for world in worlds]
            line = [float("nan") if p["chosen"] is None else value(p) for p in held]
            (drawn,) = panel.plot(line, marker="o", markersize=3, label=f"{need:g}")
            if beside is not None:
                dots = [float("nan") if p["chosen"] is None else beside(p) for p in held]
                panel.plot(dots, ":", color=drawn.get_color(), linewidth=1)
        _worlds_below(panel, worlds)
        panel.set_ylim(bottom=0)
        panel.set_title(f"{size}, {kind}", fontsize=10, loc="left")
        panel.grid(alpha=0.3)
        panel.legend(title=kind, fontsize=7, title_fontsize=8, frameon=False)
    figure.suptitle(title)


def _draw_swings(figure: Any, swings: Sequence[Found]) -> None:
    """Speed-up over the best single plan, and over ep r=1, for each number of ranks."""
    groups = list(dict.fromkeys((s["size"], s["layouts"]) for s in swings))
    worlds = sorted({s["world"] for s in swings})
    panels = figure.subplots(2, 1, sharex=True)
    for panel, title in zip(panels, ("over the best single plan, known in hindsight", "over ep r=1"), strict=True):
        for i, group in enumerate(groups):
            held = {s["world"]: s for s in swings if (s["size"], s["layouts"]) == group}
            bars = []
            for world in worlds:
                s = held[world]
                usual = s["usual_seconds"]
                over = s["speedup"] if panel is panels[0] else (0.0 if usual is None else usual / s["planner"])
                bars.append(over)
            at = [x + (i - (len(groups) - 1) / 2) * 0.8 / len(groups) for x in range(len(worlds))]
            drawn = panel.bar(at, bars, 0.75 / len(groups), label=f"{group[0]}, {group[1]}")
            panel.bar_label(drawn, fmt="%.2f", fontsize=7)
        panel.axhline(1, color="black", linewidth=0.8)
        panel.set_title(title, fontsize=10, loc="left")
        panel.set_ylabel("speed-up")
        panel.margins(y=0.1)
        _worlds_below(panel, worlds)
    panels[0].legend(fontsize=7, ncols=3, loc="lower center")
    figure.suptitle("The planner while the load swings within one training")

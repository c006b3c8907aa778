"""The one printer of programs and plans.

    program  = name "(" {var} ")" "{" {equation} "}" "->" "(" names ")"
    equation = {var} "=" op ["[" key=value ... "]"] {operand} ["  # note"]
    var      = name ":" type

One equation a line, in the order they run; several results stand one on a line. The text is the same
on every rank and in every run: no ids, addresses, ranks, times or hash order.
"""

from __future__ import annotations

import dataclasses
import enum
import io
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from ._axes import Axes, Place
from ._typing import dtype_text
from .ops.binding import binding, experts_binding, routing_binding
from .ops.differentiable import without_transforms
from .program import OPERATIONS, Equation, Hole, Program
from .sharding.placement import placed_text

_WIDTH = 100
_SHOWN = 16  # rows of an explanation


def program_text(program: Program, bound: Callable[[Equation], str] | None = None) -> str:
    """A program as text; `bound` adds what runs each equation."""
    lines = []
    for sub in program.lets:
        lines += ["let " + line if i == 0 else line for i, line in enumerate(program_text(sub, bound).split("\n"))]
    head = " ".join(str(var) for var in program.inputs)
    if len(program.name) + len(head) > _WIDTH:
        lines.append(f"{program.name} (")
        lines += [f"    {var}" for var in program.inputs]
        lines.append(") {")
    else:
        lines.append(f"{program.name} ({head}) {{")
    for equation in program.equations:
        lines += ["  " + line for line in _equation_lines(equation, bound)]
    lines.append(f"}} -> ({', '.join(program.outputs)})")
    return "\n".join(lines)


def _equation_lines(equation: Equation, bound: Callable[[Equation], str] | None) -> list[str]:
    tail = f"= {equation.op}{_params_text(equation)}"
    if equation.operands:
        tail += " " + " ".join(equation.operands)
    if equation.note:
        tail += f"  # {equation.note}"
    if bound is not None:
        tail += f"  -> {bound(equation)}"
    *first, last = [str(var) for var in equation.outputs] or [""]
    if len(" ".join(first)) + len(last) <= 40:
        return [" ".join([*first, last, tail])]
    return [*first, f"{last} {tail}"]


def _params_text(equation: Equation) -> str:
    parts = []
    if equation.op.startswith("torch."):
        args, kwargs = equation.param("call")
        constants = [_call_value(arg) for arg in args] + [
            f"{k}={_call_value(v)}" for k, v in kwargs.items() if v is not None
        ]
        while constants and constants[-1] == "_":
            constants.pop()
        if any(c != "_" for c in constants):
            parts.append(", ".join(constants))
    else:
        shown = OPERATIONS[equation.op].shown
        for name, value in equation.params:
            if (shown is None or name in shown) and value not in (None, ()) and value is not False:
                parts.append(f"{name}={_value_text(value)}")
    if equation.no_grad:
        parts.append("no_grad")
    if equation.autocast is not None:
        dtype = equation.autocast[1]
        parts.append(f"autocast={_value_text(dtype) if dtype else 'off'}")
    return f"[{' '.join(parts)}]" if parts else ""


def _call_value(value: Any) -> str:
    """An argument of a torch call, with `_` for each operand."""
    leaves, tree = pytree.tree_flatten(value)
    if len(leaves) == 1 and leaves[0] is value:
        return "_" if isinstance(value, Hole) else _value_text(value)
    if isinstance(value, (list, tuple)):
        inner = ", ".join(map(_call_value, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    return _value_text(pytree.tree_unflatten([_call_value(leaf) for leaf in leaves], tree))


def _value_text(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return dtype_text(value)
    if isinstance(value, enum.Enum):
        return value.name.lower()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = [
            f"{f.name}={_value_text(getattr(value, f.name))}"
            for f in dataclasses.fields(value)
            if f.repr and (f.default is dataclasses.MISSING or getattr(value, f.name) != f.default)
        ]
        return f"{type(value).__name__}({', '.join(changed)})"
    if isinstance(value, (tuple, list)):
        return f"({','.join(map(_value_text, value))})"
    if isinstance(value, float):
        return f"{value:g}"
    if callable(value):
        return str(getattr(value, "__name__", type(value).__name__)).strip("<>")
    return str(value)


def plan_text(planned: Any) -> str:
    """A planned program: mesh, topology, strategy, dims, specs, program, cost."""
    spec, layers = planned.spec, planned.traced.layers
    mesh = spec.mesh
    lines = [f"plan {planned.program.name}"]
    lines.append(f"  topology  node={mesh.nodes} gpu={mesh.node}")
    for layer in layers:
        axes, plan = planned.axes[layer.name], planned.plans[layer.name]
        lines.append(f"  {layer.name}")
        lines.append(f"    mesh      ep={axes.ep} mp={axes.mp} dp={axes.dp}")
        lines.append(f"    strategy  {plan}")
        lines.append(f"    dims      {_dims_text(planned, layer)}")
    lines.append("  specs")
    captured = planned.traced.captured
    for var, role in zip(planned.traced.program.inputs, captured.roles, strict=True):
        mine = [layer.name for layer in layers if var.name in layer.apply.operands]
        axes = planned.axes[(mine or [layer.name for layer in layers] or [""])[0]]
        lines.append(f"    {var.name}: {placed_text(var.type, role, axes)}")
    if mesh.world > 1:
        lines.append(f"  agree     {'once' if spec.max_tokens else 'each call'}, on slots per expert and program")
    lines.append("  program")
    named = dataclasses.replace(planned.program, name=f"{planned.program.name}@device")
    lines += ["    " + line for line in program_text(named).split("\n")]
    lines += ["  " + line for line in cost_text(planned.cost(), planned.axes[""])]
    return "\n".join(lines)


def _dims_text(planned: Any, layer: Any) -> str:
    rows = layer.dispatch.outputs[0].type
    parts = [f"E={layer.num_experts}", f"K={layer.k}", f"M={rows.dims[-1]}"]
    for eq in planned.program.equations:
        if eq.layer == layer.name and eq.op == "encode" and eq.param("capacity") is not None:
            parts.append(f"C={eq.param('capacity')}")
    return " ".join(parts)


def cost_text(cost: Any, axes: Axes) -> list[str]:
    """Lines of a cost."""
    about = "~" if cost.run_time else ""
    lines = ["cost (per device, forward)", f"  expert matmul  {about}{_amount(cost.flops, 'FLOP', 1000)}"]
    for (collective, axis), (calls, size) in cost.traffic.items():
        where = "between nodes" if axes.spans_nodes(axis) else "inside the node"
        plural = "call" if calls == 1 else "calls"
        lines.append(f"  {collective} {axis}  {about}{_amount(size, 'B', 1024)} in {calls} {plural}, {where}")
    lines.append(
        f"  memory  {_amount(cost.resident, 'B', 1024)} resident, {about}{_amount(cost.peak, 'B', 1024)} at most"
    )
    return lines


def _amount(number: float, unit: str, step: int) -> str:
    prefixes = ("", "k", "M", "G", "T", "P") if step == 1000 else ("", "Ki", "Mi", "Gi", "Ti", "Pi")
    for prefix in prefixes:
        if number < step or prefix == prefixes[-1]:
            return f"{number:.0f} {unit}" if not prefix else f"{number:.4g} {prefix}{unit}"
        number /= step
    raise AssertionError


def explanation_text(rows: Sequence[Any]) -> str:
    """The candidates of a planner as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("plan", "predicted ms", "measured ms", "memory", "why"):
        table.add_column(name, justify="left" if name in ("plan", "why") else "right", no_wrap=True)
    for row in rows[:_SHOWN]:
        measured = "" if row.measured is None else f"{1e3 * row.measured:.4g}"
        table.add_row(row.plans, f"{1e3 * row.predicted:.4g}", measured, _amount(row.memory, "B", 1024), row.why)
    console = Console(file=io.StringIO(), width=240)
    console.print(table)
    lines = [line.rstrip() for line in console.file.getvalue().rstrip().split("\n")]  # type: ignore[attr-defined]
    more = len(rows) - _SHOWN
    return "\n".join(lines + [f"and {more} slower ones"] * (more > 0))


def bound_text(planned: Any) -> str:
    """The program of a rank, each line with what runs it."""
    named = dataclasses.replace(planned.program, name=f"{planned.program.name}@device")
    return program_text(named, lambda eq: _bound(eq, planned))


def _bound(equation: Equation, planned: Any) -> str:
    if equation.op.startswith("torch."):
        return "torch"
    operation = OPERATIONS[equation.op]
    axes = planned.axes.get(equation.layer, planned.axes[""])
    if operation.collective and equation.op not in ("done", "call"):
        axis = equation.param("axis") or "node"
        fn = equation.param("fn") or equation.op
        return f"torch.distributed {fn} {axis}[{axes.size(axis)}]"
    device = _device(planned)
    types = planned.program.types()
    if equation.op in ("expert_ffn", "combine"):
        experts = _experts_of(equation, planned.program)
        if experts is not None and experts.param("fn") is None:
            return _experts_bound(experts, types, device)
    if equation.op == "route":
        return routing_binding(device, lambda: _without_data(equation, types, Place(axes, 0)))
    op = _RUNS.get(equation.op)
    if op is None:
        return equation.op
    moved = [types[name].dtype for name in equation.operands if types[name].dtype.is_floating_point]
    return binding(op, device, *(moved if op != "row_index" else ()))  # that one moves no rows


def _without_data(equation: Equation, types: Any, place: Place) -> None:
    """Runs an equation of one rank on tensors of its operands' types that hold no data."""
    with without_transforms(), FakeTensorMode(), torch.no_grad():
        operands = [torch.empty([int(d) for d in types[o].dims], dtype=types[o].dtype) for o in equation.operands]
        OPERATIONS[equation.op].run(place, *operands, **dict(equation.params))


#: Equations that one operation runs.
_RUNS = {"dispatch": "row_index", "encode": "expand", "decode": "combine"}


def _device(planned: Any) -> torch.device:
    """Where a program's tensors are."""
    kinds = {leaf[2] for leaf in planned.traced.signature.leaves if isinstance(leaf, tuple)}
    return torch.device("cuda" if "cuda" in kinds else "cpu")


def _experts_of(equation: Equation, program: Program) -> Equation | None:
    """The equation that holds the experts: what `combine` evaluates stands before it."""
    if equation.op == "expert_ffn":
        return equation
    made = (eq for eq in program.equations if eq.op == "expert_apply")
    return next((eq for eq in made if eq.outputs[0].name == equation.operands[0]), None)


def _experts_bound(equation: Equation, types: Any, device: torch.device) -> str:
    rows, tree = types[equation.operands[0]], equation.param("tree")
    leaves = [types[name] for name in equation.operands[1 : 1 + tree.num_leaves]]
    params = pytree.tree_unflatten(leaves, tree)
    experts, hidden, model_dim = map(int, params.w_out.dims)
    count = math.prod(map(int, rows.dims[:-1]))
    dtype, biases = params.w_out.dtype, params.b_out is not None
    return experts_binding(device, dtype, equation.param("activation"), count, experts, model_dim, hidden, biases)

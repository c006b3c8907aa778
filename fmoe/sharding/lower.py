"""The order in which the rewrites make one rank's program of a logical one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from .._axes import Axes
from ..program import Program
from .exchange import exchange_tokens
from .layers import Layer
from .mesh import Mesh
from .pipeline import hierarchical, pipeline
from .plan import Plan, check_legal
from .rewrites import Part, drop_unused, gather_weights, localize, overlap_gathers, sum_losses


def axes_of(plan: Plan, mesh: Mesh) -> Axes:
    """The axes of a mesh under a plan."""
    return Axes(**mesh.axes(plan.r), gpu=mesh.node)


def lower(
    program: Program,
    layers: Sequence[Layer],
    roles: Sequence[str],
    mesh: Mesh,
    plans: Mapping[str, Plan],
    widths: Mapping[str, int],
    known: dict[Any, Any] | None = None,
) -> tuple[Program, dict[str, Axes]]:
    """One rank's program, and the axes of each layer.

    Args:
        program: logical, its layers named.
        layers: its MoE layers.
        roles: of its inputs.
        mesh: the ranks.
        plans: by layer, with a layout.
        widths: by padded layer, slots per expert that suffice on every rank.
        known: programs that other plans have on the way, kept by callers who ask for many plans of one function.

    Raises:
        PlanError: if a plan is not legal.
    """
    steps: dict[Any, Any] = {} if known is None else known

    def once(through: Any, rewrite: Callable[..., Any], *args: Any, **rest: Any) -> Any:
        if through not in steps:
            steps[through] = rewrite(*args, **rest)
        return steps[through]

    plain = axes_of(Plan("dp"), mesh)
    axes = {"": plain, "gate": plain}
    program, parts = once("local", _local, program, roles, mesh)
    through: tuple[Any, ...] = ()  # what the program has been through so far
    for layer in layers:
        name, plan = layer.name, plans[layer.name]
        check_legal(plan, mesh, name)
        axes[name] = mine = axes_of(plan, mesh)
        padded = plan.layout == "padded"
        width = widths.get(name, layer.slots(layer.tokens)) if padded else 0
        given = (name, mine, plan, parts, width)
        if plan.parallelism == "dp" or mesh.world == 1:  # one rank has nothing to exchange
            through = (*through, plan)
            program = once(through, gather_weights, program, *given)
            continue
        through = (*through, replace(plan, a2a="linear", pipeline=plan.pipeline if padded else 1))
        program = once(through, exchange_tokens, program, *given, by_hand=layer.gate is None)
        through = (*through, plan.pipeline)
        program = once(through, pipeline, program, name, plan.pipeline)
        if plan.a2a == "2dh":
            through = (*through, plan.a2a)
            program = once(through, hierarchical, program, name, mine)
    return drop_unused(overlap_gathers(program)), axes


def _local(program: Program, roles: Sequence[str], mesh: Mesh) -> tuple[Program, dict[str, Part]]:
    program, parts = localize(program, roles, mesh)
    return sum_losses(program, mesh.world), parts

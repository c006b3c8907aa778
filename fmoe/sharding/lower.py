"""The order in which the rewrites make one rank's program of a logical one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .._axes import Axes
from ..program import Program
from .exchange import exchange_tokens
from .layers import Layer
from .mesh import Mesh
from .pipeline import hierarchical, pipeline
from .plan import Plan, check_legal
from .rewrites import drop_unused, gather_weights, localize, overlap_gathers, sum_losses


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
) -> tuple[Program, dict[str, Axes]]:
    """One rank's program, and the axes of each layer.

    Args:
        program: logical, its layers named.
        layers: its MoE layers.
        roles: of its inputs.
        mesh: the ranks.
        plans: by layer, with a layout.
        widths: by padded layer, slots per expert that suffice on every rank.

    Raises:
        PlanError: if a plan is not legal.
    """
    plain = axes_of(Plan("dp"), mesh)
    axes = {"": plain, "gate": plain}
    program, parts = localize(program, roles, mesh)
    program = sum_losses(program, mesh.world)
    for layer in layers:
        plan = plans[layer.name]
        check_legal(plan, mesh, layer.name)
        axes[layer.name] = mine = axes_of(plan, mesh)
        width = widths.get(layer.name, layer.slots(layer.tokens)) if plan.layout == "padded" else 0
        if plan.parallelism == "dp" or mesh.world == 1:  # one rank has nothing to exchange
            program = gather_weights(program, layer.name, mine, plan, parts, width)
            continue
        program = exchange_tokens(program, layer.name, mine, plan, parts, width, by_hand=layer.gate is None)
        program = pipeline(program, layer.name, plan.pipeline)
        if plan.a2a == "2dh":
            program = hierarchical(program, layer.name, mine)
    return drop_unused(overlap_gathers(program)), axes

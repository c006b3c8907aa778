"""Finds the MoE layers of a logical program by the dataflow of their routing."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .._errors import PlanError
from ..program import Equation, Program, Type
from .plan import Plan


@dataclass(frozen=True)
class Layer:
    """One MoE layer of a logical program.

    Attributes:
        name: ``moe.0``, ``moe.1``, ... in the order of dispatch.
        gate: its gate equation, or None for a routing made by hand.
        dispatch: its dispatch equation.
        apply: its expert_apply equation.
        routed: type of the choices ``[T,K]``.
    """

    name: str
    gate: Equation | None
    dispatch: Equation
    apply: Equation
    routed: Type

    @property
    def num_experts(self) -> int:
        """E."""
        return int(self.dispatch.param("num_experts"))

    @property
    def tokens(self) -> int:
        """This rank's T."""
        return int(self.routed.dims[0])

    @property
    def k(self) -> int:
        """Choices per token."""
        return int(self.routed.dims[1])

    @property
    def layout(self) -> str:
        """The layout that the function asks for, or else the one that fits its capacity."""
        capacity = None if self.gate is None else self.gate.param("capacity")
        return str(self.dispatch.param("layout") or ("ragged" if capacity is None else "padded"))

    def resolve(self, plan: Plan) -> Plan:
        """The plan in this layer's layout, unless it says or needs another."""
        if plan.layout is not None:
            return plan
        needs_padded = plan.mp == "gather" or plan.a2a == "2dh"
        return replace(plan, layout="padded" if needs_padded else self.layout)

    def slots(self, tokens: int) -> int:
        """Slots per expert that suffice for any rank with at most `tokens` tokens."""
        if self.gate is None:  # made by hand: a token may choose an expert more than once
            capacity = self.dispatch.param("capacity")
            return tokens * self.k if capacity is None else int(capacity)
        rule, groups = self.gate.param("capacity"), self.gate.param("groups")
        if not isinstance(groups, int):
            return tokens
        each = -(-tokens // groups)
        if rule is None:
            replayed = "replay" in self.gate.param("given")
            own = None if replayed else self.gate.param("router").slots([each] * groups, self.num_experts)
            return tokens if own is None else min(tokens, int(own))
        return min(tokens, groups * int(rule.of(tokens=each, k=self.k, num_experts=self.num_experts)))


def name_layers(program: Program) -> tuple[Program, list[Layer]]:
    """The program with each equation of an MoE layer marked by the layer's name, and the layers.

    Raises:
        PlanError: if a dispatch is not followed by exactly one expert_apply and one combine.
    """
    made_by = {var.name: eq for eq in program.equations for var in eq.outputs}
    marks: dict[str, str] = {}
    types = program.types()
    layers: list[Layer] = []
    for eq in program.equations:
        if eq.op != "dispatch":
            continue
        name = f"moe.{len(layers)}"
        apply = _only(program, eq, "expert_apply", name)
        combine = _only(program, apply, "combine", name)
        gate = made_by.get(eq.operands[1])
        gate = gate if gate is not None and gate.op == "gate" else None
        for part in (gate, eq, apply, combine):
            if part is not None:
                marks.setdefault(part.outputs[0].name, name)
        layers.append(Layer(name, gate, eq, apply, types[eq.operands[1]]))
    for eq in program.equations:  # a gate of no dispatch has losses all the same
        if eq.op == "gate" and eq.outputs[0].name not in marks:
            marks[eq.outputs[0].name] = "gate"
    equations = tuple(
        replace(eq, layer=marks.get(eq.outputs[0].name, "")) if eq.outputs else eq for eq in program.equations
    )
    return replace(program, equations=equations), layers


def _only(program: Program, source: Equation, op: str, name: str) -> Equation:
    value = source.outputs[0].name
    users = [eq for eq in program.equations if value in eq.operands]
    if len(users) != 1 or users[0].op != op or users[0].operands[0] != value:
        found = ", ".join(eq.op for eq in users) or "nothing"
        raise PlanError(
            f"{name}: what {source.op} makes must go to one {op}, but it goes to {found}. Under a plan a layer is "
            "dispatch, expert_apply, combine, once each."
        )
    return users[0]

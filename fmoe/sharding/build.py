"""Writes equations one after another, with fresh names and types by the operations' rules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..program import Equation, Program, Type, Var, infer


class Builder:
    """Makes a program from another one, equation by equation."""

    def __init__(self, program: Program, inputs: Sequence[Var] | None = None):
        self.source = program
        self.inputs = tuple(program.inputs if inputs is None else inputs)
        self.equations: list[Equation] = []
        self.lets = list(program.lets)
        self.types: dict[str, Type] = {var.name: var.type for var in self.inputs}
        self._taken = set(program.types())

    def fresh(self, name: str) -> str:
        """`name`, or the first of ``name_1``, ``name_2``, ... that is free, also for chunks ``name.0``, ``name.1``."""
        unique, n = name, 0
        while any(taken in self.types or taken in self._taken for taken in (unique, f"{unique}.0")):
            n += 1
            unique = f"{name}_{n}"
        self._taken.add(unique)
        return unique

    def copy(self, equation: Equation) -> None:
        """Keeps an equation as it is."""
        self.equations.append(equation)
        self.types.update((var.name, var.type) for var in equation.outputs)

    def emit(
        self,
        op: str,
        operands: Iterable[str],
        names: Sequence[str],
        *,
        like: Equation | None = None,
        note: str = "",
        **params: Any,
    ) -> list[str]:
        """Writes an equation; `names` are taken as they are. Layer and modes are those of `like`."""
        operands = tuple(operands)
        pairs = tuple(params.items())
        types = infer(op, [self.types[name] for name in operands], pairs, lets=self.lets)
        outputs = tuple(Var(name, type) for name, type in zip(names, types, strict=True))
        modes = {} if like is None else {"layer": like.layer, "no_grad": like.no_grad, "autocast": like.autocast}
        self.copy(Equation(outputs, op, operands, pairs, note, **modes))
        return list(names)

    def one(self, op: str, operands: Iterable[str], name: str, **rest: Any) -> str:
        """Writes an equation with one result, under a fresh name."""
        return self.emit(op, operands, [self.fresh(name)], **rest)[0]

    def program(self) -> Program:
        """What was written."""
        return Program(
            self.source.name, self.inputs, tuple(self.equations), self.source.outputs, tuple(self.lets), checked=False
        )

"""Runs a program: equation by equation, on this process's rank or on all ranks at once.

One interpreter serves both. It keeps a column of values for every variable, one for each rank of the
process: a single one in training (`processes`), all W in a simulation (`simulate`). A local equation
runs on each; a collective gets the whole column and a communicator that exchanges it.

Every step is an operation that torch.func can transform, so the run as a whole is too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .._axes import Axes, Place
from ..program import OPERATIONS, Equation, Hole, Program

Column = list[Any]
Splits = Sequence[Sequence[int]] | None


class Communicator(Protocol):
    """Exchanges columns over an axis; `sends` and `receives` are rows of dim 0 for each peer, even if None."""

    def all_to_all(self, axis: str, column: Column, sends: Splits = None, receives: Splits = None) -> Column:
        """Piece i of each rank's tensor goes to the i-th rank of the axis."""

    def all_gather(self, axis: str, column: Column) -> Column:
        """All tensors of the axis, along dim 0."""

    def reduce_scatter(self, axis: str, column: Column) -> Column:
        """The sum over the axis, of which each rank keeps its piece of dim 0."""

    def all_reduce(self, axis: str, column: Column) -> Column:
        """The sum over the axis."""

    def start(self, name: str, axis: str, column: Column, *splits: Splits) -> Column:
        """Begins the exchange called `name`; a column of futures."""

    def done(self, name: str, axis: str, column: Column, *splits: Splits) -> Column:
        """Waits for futures."""

    def at(self, where: str, axes: Axes) -> Communicator:
        """The same, with the axes of a layer, and naming `where` in errors."""


@dataclass(frozen=True)
class Scope:
    """What a collective equation may use: the communicator, its ranks' places, and the program's lets."""

    comm: Communicator
    places: Sequence[Place]
    lets: Mapping[str, Program]


def run(
    programs: Sequence[Program],
    inputs: Sequence[Column],
    comm: Communicator,
    ranks: Sequence[int],
    axes: Mapping[str, Axes],
) -> list[Column]:
    """Runs a program.

    Args:
        programs: the program of each place of a column: the same but for its number of tokens.
        inputs: for each input, its value on each rank.
        comm: exchanges columns.
        ranks: the rank that each place of a column stands for.
        axes: for each layer of the program, the axes of its plan.

    Returns:
        For each output, its value on each rank.
    """
    program = programs[0]
    env = {var.name: column for var, column in zip(program.inputs, inputs, strict=True)}
    lets = {sub.name: sub for sub in program.lets}
    last = _last_uses(program)
    for number, each in enumerate(zip(*(p.equations for p in programs), strict=True)):
        equation = each[0]
        columns = [env[name] for name in equation.operands]
        with _modes(equation):
            results = _apply(each, columns, comm, ranks, axes, lets)
        for var, column in zip(equation.outputs, results, strict=True):
            env[var.name] = column
        for name in last.get(number, ()):
            del env[name]  # free what nobody reads any more
    return [env[name] for name in program.outputs]


def _apply(
    equations: Sequence[Equation],
    columns: list[Column],
    comm: Communicator,
    ranks: Sequence[int],
    axes: Mapping[str, Axes],
    lets: Mapping[str, Program],
) -> list[Column]:
    """For each output, its column."""
    equation = equations[0]
    if equation.op.startswith("torch."):
        each = [call_torch(eq, [column[i] for column in columns]) for i, eq in enumerate(equations)]
        return [list(column) for column in zip(*each, strict=True)]
    operation, params = OPERATIONS[equation.op], dict(equation.params)
    mine = axes[equation.layer]
    places = [Place(mine, rank) for rank in ranks]
    if operation.collective:
        where = f"{equation.layer or 'program'}: {equation.outputs[0].name} = {equation.op}"
        scope = Scope(comm.at(where, mine), places, lets)
        return [operation.run(scope, *columns, **params)]
    results = []
    for i, place in enumerate(places):
        result = operation.run(place, *(column[i] for column in columns), **dict(equations[i].params))
        results.append(result if isinstance(result, tuple) else (result,))
    return [list(column) for column in zip(*results, strict=True)]


def call_torch(equation: Equation, operands: Sequence[Any]) -> list[Tensor]:
    """Makes the torch call that an equation recorded."""
    params = dict(equation.params)
    args, kwargs = pytree.tree_map(
        lambda leaf: operands[leaf.place] if isinstance(leaf, Hole) else leaf, params["call"]
    )
    out = params["function"](*args, **kwargs)
    return [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)]


@contextlib.contextmanager
def _modes(equation: Equation) -> Any:
    with contextlib.ExitStack() as stack:
        if equation.no_grad:
            stack.enter_context(torch.no_grad())
        if equation.autocast is not None:
            device, dtype = equation.autocast
            stack.enter_context(torch.autocast(device, dtype=dtype or None, enabled=dtype is not False))
        yield


def _last_uses(program: Program) -> dict[int, list[str]]:
    last: dict[str, int] = {}
    for number, equation in enumerate(program.equations):
        for name in (*equation.operands, *(v.name for v in equation.outputs)):
            last[name] = number
    uses: dict[int, list[str]] = {}
    for name, number in last.items():
        if name not in program.outputs:
            uses.setdefault(number, []).append(name)
    return uses

"""The typed program: what is traced, rewritten, printed, priced and run.

A `Program` is a list of equations in single assignment over typed variables. The logical program of a
user's function has no devices in it; a rewrite makes it a per-device program, in which one rank's
tensors and collectives over named mesh axes appear. Both are the same kind of object.

Every equation names an `Operation`, one record with its type rule, how it runs and what it costs.
Operations register themselves where they are written; a program is checked against their type rules
when it is made, so a `Program` that exists is well typed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ._errors import ProgramError
from ._typing import dtype_text


class Size(int):
    """A dim that prints as a letter: ``T``, this rank's tokens, or ``R``, rows known at run time only.

    Its number is this rank's T, or for R the rows expected under an even load, `per_token` times T.

    Example:
        >>> f"{Size(6, 'T')}", Size(6, "T") == 6, Size(12, "R", 2.0).at(100)
        ('T', True, 200)
    """

    letter: str
    per_token: float

    def __new__(cls, number: int, letter: str, per_token: float = 1.0) -> Size:
        """A number and the letter it prints as."""
        size = super().__new__(cls, number)
        size.letter, size.per_token = letter, per_token
        return size

    def at(self, tokens: int) -> int:
        """The number for another T."""
        return round(self.per_token * tokens)

    def __str__(self) -> str:
        return self.letter

    def __format__(self, _: str) -> str:
        return self.letter

    __repr__ = __str__

    def __reduce__(self) -> Any:
        """Copies and pickles with its letter."""
        return Size, (int(self), self.letter, self.per_token)


@dataclass(frozen=True)
class Type:
    """The type of a variable: ``f32[T,512]``, ``f32[T,512]{P:mp}``, ``future``, ``host i64[4,1]``.

    Attributes:
        dtype: of the elements.
        dims: sizes; of a future, those of what `done` returns.
        partial: mesh axes over which the value is a sum not yet taken.
        kind: ``"tensor"``, ``"future"`` (in flight) or ``"host"`` (numbers on the host).
    """

    dtype: torch.dtype
    dims: tuple[int, ...]
    partial: tuple[str, ...] = ()
    kind: str = "tensor"

    def __str__(self) -> str:
        if self.kind == "future":
            return "future"
        text = f"{dtype_text(self.dtype)}[{','.join(str(d) for d in self.dims)}]"
        if self.partial:
            text += f"{{P:{','.join(self.partial)}}}"
        return f"host {text}" if self.kind == "host" else text

    @property
    def bytes(self) -> int:
        """Bytes of the tensor, at the expected number of rows."""
        count = self.dtype.itemsize
        for dim in self.dims:
            count *= int(dim)
        return count

    def with_dims(self, *dims: int) -> Type:
        """The same dtype and pending sums, other dims."""
        return Type(self.dtype, tuple(dims), self.partial, self.kind)

    def at(self, tokens: int) -> Type:
        """The type for another T."""
        return self.with_dims(*(d.at(tokens) if isinstance(d, Size) else d for d in self.dims))

    def fits(self, other: Type) -> bool:
        """Whether a value of type `other` may stand here; run-time rows fit any number."""
        same = (self.dtype, self.partial, self.kind) == (other.dtype, other.partial, other.kind)
        return same and len(self.dims) == len(other.dims) and all(map(_same_size, self.dims, other.dims))


def _same_size(a: int, b: int) -> bool:
    return a == b or "R" in (getattr(a, "letter", ""), getattr(b, "letter", ""))


def at_run_time(base: int, times: float = 1.0) -> Size:
    """The number of rows of something that only the data decides, `times` another number; prints as R."""
    return Size(round(base * times), "R", getattr(base, "per_token", 0.0) * times)


@dataclass(frozen=True)
class Var:
    """A named, typed variable."""

    name: str
    type: Type

    def __str__(self) -> str:
        return f"{self.name}:{self.type}"


@dataclass(frozen=True)
class Hole:
    """Where an operand stands among the arguments of a ``torch.*`` equation."""

    place: int


@dataclass(frozen=True)
class Equation:
    """``outputs = op[params] operands``.

    Attributes:
        outputs: the variables it defines.
        op: name of an `Operation`, or ``torch.*`` for a call the user made.
        operands: names of variables.
        params: (name, value) pairs in the operation's order.
        note: a fixed remark of the rewrite that made the line.
        no_grad: whether the user made the call under `torch.no_grad`.
        autocast: (device, dtype) of the autocast in force, where it is not that of the caller; False for off.
        layer: name of the MoE layer it belongs to, or "".
    """

    outputs: tuple[Var, ...]
    op: str
    operands: tuple[str, ...] = ()
    params: tuple[tuple[str, Any], ...] = ()
    note: str = ""
    no_grad: bool = False
    autocast: Any = None
    layer: str = ""

    def param(self, name: str, default: Any = None) -> Any:
        """The value of a parameter."""
        return dict(self.params).get(name, default)

    @property
    def wiring(self) -> str:
        """What it makes of what, without parameters or types: equal for any number of tokens."""
        return f"{' '.join(var.name for var in self.outputs)} = {self.op} {' '.join(self.operands)}"


@dataclass(frozen=True)
class Operation:
    """One operation of programs.

    Attributes:
        name: as it prints.
        types: ``types(*operand types, **params) -> output types``; raises `ProgramError` for operands
            that do not fit. A pending sum is refused unless `partial` says otherwise.
        run: ``run(place, *values, **params) -> outputs`` on one rank; with ``collective``,
            ``run(comm, places, *columns, **params)`` on all ranks of the process at once (one, or all
            simulated ones), a column holding one operand's value on each.
        cost: ``cost(mesh, operand types, output types, **params) -> Cost``, or None for nothing to price.
        collective: whether it exchanges data between ranks.
        partial: whether operands may be pending sums.
        shown: names of the parameters that print; all by default.
    """

    name: str
    types: Callable[..., Sequence[Type]]
    run: Callable[..., Any]
    cost: Callable[..., Any] | None = None
    collective: bool = False
    partial: bool = False
    shown: tuple[str, ...] | None = None


OPERATIONS: dict[str, Operation] = {}


def operation(name: str, types: Callable[..., Sequence[Type]], **rules: Any) -> Callable[..., Any]:
    """Registers the decorated function as the way operation `name` runs."""

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        OPERATIONS[name] = Operation(name, types, run, **rules)
        return run

    return register


@dataclass(frozen=True)
class Program:
    """A typed program; checked when it is made.

    Attributes:
        name: of the function.
        inputs: its parameters.
        equations: in the order they run.
        outputs: names of variables, in the order they are returned.
        lets: programs that equations refer to by ``fn=``.
        checked: False between the passes of a rewrite, which check what they end with.

    Raises:
        ProgramError: if a variable is assigned twice or never, or types do not fit.
    """

    name: str
    inputs: tuple[Var, ...]
    equations: tuple[Equation, ...]
    outputs: tuple[str, ...]
    lets: tuple[Program, ...] = field(default=())
    checked: bool = field(default=True, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.checked:
            return  # a step of a rewrite: its result is
        known = self.types_of_inputs()
        for equation in self.equations:
            _check(self, equation, known)
            for var in equation.outputs:
                if var.name in known:
                    raise ProgramError(f"{self.name}: {var.name} is assigned twice.")
                known[var.name] = var.type
        for name in self.outputs:
            if name in known and (known[name].partial or known[name].kind != "tensor"):
                raise ProgramError(f"{self.name}: the output {name}:{known[name]} is not a whole tensor.")
        missing = [name for name in self.outputs if name not in known]
        if missing:
            raise ProgramError(f"{self.name}: the outputs {', '.join(missing)} are never assigned.")

    def types_of_inputs(self) -> dict[str, Type]:
        """Name to type of the inputs."""
        known: dict[str, Type] = {}
        for var in self.inputs:
            if var.name in known:
                raise ProgramError(f"{self.name}: two inputs are called {var.name}.")
            known[var.name] = var.type
        return known

    def types(self) -> dict[str, Type]:
        """Name to type of every variable."""
        return {**self.types_of_inputs(), **{v.name: v.type for eq in self.equations for v in eq.outputs}}

    def let(self, name: str) -> Program:
        """The sub-program called `name`."""
        return next(program for program in self.lets if program.name == name)


def _check(program: Program, equation: Equation, known: Mapping[str, Type]) -> None:
    where = f"{program.name}: {' '.join(v.name for v in equation.outputs)} = {equation.op}"
    missing = [name for name in equation.operands if name not in known]
    if missing:
        raise ProgramError(f"{where}: {', '.join(missing)} is used before it is assigned.")
    operands = [known[name] for name in equation.operands]
    if equation.op.startswith("torch."):
        odd = [f"{n}:{known[n]}" for n in equation.operands if known[n].partial or known[n].kind != "tensor"]
        if odd:
            raise ProgramError(f"{where}: {', '.join(odd)} is not a whole tensor.")
        return
    if equation.op not in OPERATIONS:
        raise ProgramError(f"{where}: there is no operation of that name.")
    found = infer(equation.op, operands, equation.params, where, program.lets)
    declared = [var.type for var in equation.outputs]
    if len(found) != len(declared) or not all(map(Type.fits, declared, found)):
        raise ProgramError(
            f"{where}: the types {', '.join(map(str, declared))} are declared, but it makes "
            f"{', '.join(map(str, found))}."
        )


def infer(
    op: str,
    operands: Sequence[Type],
    params: Sequence[tuple[str, Any]],
    where: str = "",
    lets: Sequence[Program] = (),
) -> list[Type]:
    """Output types of an operation.

    Raises:
        ProgramError: if the operands do not fit it.
    """
    record, where = OPERATIONS[op], where or op
    pending = sorted({axis for t in operands for axis in t.partial})
    if pending and not record.partial:
        raise ProgramError(f"{where}: an operand is still a pending sum over {', '.join(pending)}: add it up first.")
    try:
        return list(record.types(*operands, **dict(params)))
    except ProgramError as error:
        raise ProgramError(f"{where}: {error}") from None
    except (TypeError, ValueError, IndexError) as error:
        raise ProgramError(f"{where}: the operands {', '.join(map(str, operands))} do not fit ({error}).") from None

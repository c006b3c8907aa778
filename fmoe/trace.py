"""Captures a function as a program, by running it once on tensors without data.

Design. The function runs under a `TorchFunctionMode` on FakeTensors. The four functions of the layer
record one equation each and return real `Routing` and `Tokens`; every torch call between them becomes
a ``torch.*`` equation with the arguments it had; containers, ints and branches on shapes are the
user's own and leave no trace. Grad mode and autocast are kept per equation. functorch's transforms are
set aside meanwhile, so a function can be captured inside grad and vmap.

What a program cannot hold is refused with the line it stands on: branches on values, in-place calls,
randomness, torch.func or checkpointing inside the function, calls on the inside of `Tokens`. What
fx's symbolic trace does instead is drop `no_grad` and autocast and freeze random numbers, silently.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ._errors import TraceError
from ._trace_rules import check_call, user_line
from ._typing import type_text
from .ops.differentiable import is_transformed, watched_functions, without_transforms
from .program import Equation, Hole, Program, Size, Type, Var, infer


@dataclass(frozen=True)
class Captured:
    """A captured function.

    Attributes:
        program: the logical program, no devices in it.
        roles: for each input, which leaf of an expert's parameters it is, or ``"value"``.
        constants: closed-over tensors; the last inputs.
        outputs: the function's result, with an `Output` for each tensor.
        treespec: of the result.
    """

    program: Program
    roles: tuple[str, ...]
    constants: tuple[Tensor, ...]
    outputs: tuple[Any, ...]
    treespec: Any


@dataclass(frozen=True)
class Output:
    """The place of an output of the program in the function's result."""

    place: int


class Recorder(TorchFunctionMode):
    """Writes equations while a function runs."""

    def __init__(self, device: str):
        super().__init__()
        self.inputs: list[Var] = []
        self.equations: list[Equation] = []
        self.constants: list[Tensor] = []
        self._names: dict[int, str] = {}
        self._types: dict[str, Type] = {}
        self._inside: set[int] = set()
        self._kept: list[Any] = []  # ids stay valid only as long as the tensors live
        self._used: set[str] = set()
        self._depth = 0
        self._device = device
        self._ambient = self._autocast()

    # --- what functions of the layer call ---------------------------------------------------------------------

    def record(
        self, op: str, operands: Sequence[Tensor], params: Sequence[tuple[str, Any]], names: Sequence[str]
    ) -> list[Tensor]:
        """Writes one equation and returns its results, without data."""
        with self.paused():
            given = [self._name_of(operand, op) for operand in operands]
            types = infer(op, [self._types[name] for name in given], params)
            device = operands[0].device
            made = [torch.empty([int(d) for d in t.dims], dtype=t.dtype, device=device) for t in types]
            self._add(op, given, params, list(zip(names, types, made, strict=True)))
        return made

    def hide(self, *tensors: Tensor) -> None:
        """Marks tensors as the inside of `Tokens`, which torch calls may not touch."""
        self._inside.update(map(id, tensors))
        self._kept.extend(tensors)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Runs what is not part of the program."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    # --- torch calls --------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs a call, and records it if it makes a tensor."""
        kwargs = kwargs or {}
        if self._depth:
            return func(*args, **kwargs)
        name = _name(func)
        if name == "__iter__":
            return iter(self.__torch_function__(torch.unbind, types, args))
        return self._call(name, func, func, args, kwargs)

    def _watch(self, apply: Any, cls: Any, args: Any) -> Any:
        """A call of the user's own autograd function: one equation, which keeps its backward."""
        if self._depth:
            return apply(*args)
        return self._call(cls.__name__, apply, functools.partial(_apply_again, cls), args, {})

    def _call(self, name: str, run: Any, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs a call by `run`, and records it as `func` if it makes a tensor."""
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        check_call(name, tensors, args, kwargs)
        before = [leaf._version for leaf in tensors]
        with self.paused():
            out = run(*args, **kwargs)
            if name == "contiguous":  # handed back by a contiguous fake, and a copy of a strided tensor
                out = out.view(out.shape)
        if before != [leaf._version for leaf in tensors]:
            raise TraceError(f"{user_line()}: {name} changes a tensor in place. Use its out-of-place form.")
        made = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)]
        if name.startswith("_set_grad") or not made or all(id(leaf) in self._names for leaf in made):
            return out  # a shape, a dtype, or a tensor handed back
        if any(id(leaf) in self._inside for leaf in tensors):
            raise TraceError(
                f"{user_line()}: {name} touches the inside of Tokens, which depends on the plan. {_OPAQUE}"
            )
        operands: list[str] = []

        def hole(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            operands.append(self._name_of(leaf, name))
            return Hole(len(operands) - 1)

        with self.paused():
            call = pytree.tree_map(hole, (tuple(args), kwargs))
            results = [(name, type_of(leaf), leaf) for leaf in made]
            self._add(f"torch.{name}", operands, (("function", func), ("call", call)), results)
        return out

    # --- bookkeeping --------------------------------------------------------------------------------------------

    def add_input(self, name: str, type: Type, tensor: Tensor) -> None:
        """Declares an input of the program."""
        self.inputs.append(self._declare(name, type, tensor))

    def output(self, tensor: Tensor) -> str:
        """The variable that a tensor of the result is."""
        if id(tensor) in self._inside:
            raise TraceError(f"the function returns Tokens, whose inside depends on the plan. {_OPAQUE}")
        return self._name_of(tensor, "return")

    def _declare(self, name: str, type: Type, tensor: Tensor) -> Var:
        """A variable of a fresh name for a tensor."""
        unique, n = name, 0
        while unique in self._used:
            n += 1
            unique = f"{name}_{n}"
        self._used.add(unique)
        self._names[id(tensor)] = unique
        self._kept.append(tensor)
        self._types[unique] = type
        return Var(unique, type)

    def _name_of(self, tensor: Tensor, name: str) -> str:
        if id(tensor) in self._names:
            return self._names[id(tensor)]
        if isinstance(tensor, FakeTensor):
            raise TraceError(
                f"{user_line()}: {name} uses a tensor ({type_text(tensor)}) that was made in a way that cannot be "
                "recorded. Make it outside the function, or with torch.tensor, torch.zeros, ..."
            )
        if is_transformed(tensor) or tensor.requires_grad:
            raise TraceError(
                f"{user_line()}: {name} uses a tensor from outside the function ({type_text(tensor)}) that is being "
                "differentiated or batched. Pass it as an argument."
            )
        self.constants.append(tensor)
        self.inputs.append(self._declare("const", type_of(tensor), tensor))
        return self._names[id(tensor)]

    def _add(
        self,
        op: str,
        operands: Sequence[str],
        params: Sequence[tuple[str, Any]],
        results: Sequence[tuple[str, Type, Tensor]],
    ) -> None:
        outputs = tuple(self._declare(name.strip("_"), t, tensor) for name, t, tensor in results)
        autocast = self._autocast()
        self.equations.append(
            Equation(
                outputs,
                op,
                tuple(operands),
                tuple(params),
                no_grad=not torch.is_grad_enabled(),
                autocast=None if autocast == self._ambient else (self._device, autocast),
            )
        )

    def _autocast(self) -> Any:
        device = self._device
        on = device != "meta" and torch.is_autocast_enabled(device)
        return torch.get_autocast_dtype(device) if on else False


#: How the four functions run under a spec when nothing is captured; `stages` fills it in.
_UNDER_SPEC: dict[str, Callable[..., Any]] = {}


def runs_under_spec(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers how the function called `name` runs under a spec."""

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        _UNDER_SPEC[name] = run
        return run

    return register


def under_spec(name: str) -> Callable[..., Any]:
    """How the function called `name` runs under a spec."""
    return _UNDER_SPEC[name]


_OPAQUE = "Give Tokens to expert_apply and combine only; change x before dispatch, or y after combine."
_active: list[Recorder] = []


def recorder() -> Recorder | None:
    """The recorder at work, if a function is being captured."""
    return _active[-1] if _active else None


#: The arguments of a call: by position and by keyword.
Call = tuple[tuple[Any, ...], dict[str, Any]]


def capture(fn: Callable[..., Any], call: Call, types: Sequence[Type], roles: Sequence[str]) -> Captured:
    """Captures ``fn(*args, **kwargs)``.

    Args:
        fn: a function of trees of tensors.
        call: args and kwargs; only their structure, devices and what is not a tensor are used.
        types: the whole type of each tensor leaf, in order.
        roles: what each is, for `Captured`.

    Raises:
        TraceError: if the function does what a program cannot hold, with the line and the way out.
    """
    leaves, treespec = pytree.tree_flatten(call)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    names = [path for path, leaf in zip(_paths(fn, call), leaves, strict=True) if isinstance(leaf, Tensor)]
    device = tensors[0].device if tensors else torch.device("cpu")
    with without_transforms(), FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
        writer = Recorder(device.type)
        made = iter(torch.empty([int(d) for d in t.dims], dtype=t.dtype, device=device) for t in types)
        fakes = [next(made) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        inputs = zip(names, types, (f for f in fakes if isinstance(f, Tensor)), strict=True)
        for path, kind, fake in inputs:
            writer.add_input(path, kind, fake)
        _active.append(writer)
        try:
            with writer, watched_functions(writer._watch):
                args, kwargs = pytree.tree_unflatten(fakes, treespec)
                result = fn(*args, **kwargs)
        finally:
            _active.pop()
        results, out_spec = pytree.tree_flatten(result)
        outputs: list[str] = []
        shape: list[Any] = []
        for leaf in results:
            shape.append(Output(len(outputs)) if isinstance(leaf, Tensor) else leaf)
            if isinstance(leaf, Tensor):
                outputs.append(writer.output(leaf))
    name = getattr(fn, "__name__", type(fn).__name__).strip("<>")
    program = Program(name, tuple(writer.inputs), tuple(writer.equations), tuple(outputs))
    roles = (*roles, *["value"] * len(writer.constants))
    program = _with_letters(program, roles)
    return Captured(program, roles, tuple(writer.constants), tuple(shape), out_spec)


def type_of(tensor: Tensor) -> Type:
    """The type of a tensor."""
    return Type(tensor.dtype, tuple(int(d) for d in tensor.shape))


def _with_letters(program: Program, roles: Sequence[str]) -> Program:
    """The program with the token dim of data printed as T: dim 0 of the size that is routed, but for parameters."""
    types = program.types()
    routed = {int(types[eq.operands[1]].dims[0]) for eq in program.equations if eq.op == "dispatch"}
    routed |= {int(eq.outputs[0].type.dims[0]) for eq in program.equations if eq.op == "gate"}
    if len(routed) != 1:
        return program
    tokens = Size(routed.pop(), "T")
    parameters = {v.name for v, role in zip(program.inputs, roles, strict=False) if role != "value"}
    parameters |= {eq.operands[1] for eq in program.equations if eq.op == "gate"}

    def lettered(var: Var) -> Var:
        dims = var.type.dims
        if var.name in parameters or len(dims) < 2 or dims[0] != tokens:
            return var
        return Var(var.name, var.type.with_dims(tokens, *dims[1:]))

    known = {var.name: lettered(var).type for var in program.inputs}
    equations = []
    for eq in program.equations:
        outputs = tuple(map(lettered, eq.outputs))
        if not eq.op.startswith("torch."):
            found = infer(eq.op, [known[name] for name in eq.operands], eq.params)
            outputs = tuple(Var(var.name, kind) for var, kind in zip(eq.outputs, found, strict=True))
        known.update((var.name, var.type) for var in outputs)
        equations.append(replace(eq, outputs=outputs))
    return replace(program, inputs=tuple(map(lettered, program.inputs)), equations=tuple(equations))


def _paths(fn: Callable[..., Any], call: Call) -> list[str]:
    """A name for each leaf of the arguments: the parameter's name and the way to the leaf."""
    try:
        given = [p.name for p in inspect.signature(fn).parameters.values()]
    except (TypeError, ValueError):
        given = []
    names = [given[i] if i < len(given) else f"arg{i}" for i in range(len(call[0]))]
    found = []
    for path, _ in pytree.tree_flatten_with_path(call)[0]:
        keys = [str(getattr(k, "name", getattr(k, "key", getattr(k, "idx", k)))) for k in path]
        first = names[int(keys[1])] if keys[0] == "0" else keys[1]
        found.append(".".join([first, *keys[2:]]))
    return found


def _name(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    if name == "__get__":
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    return name.split(".")[0]


def _apply_again(cls: Any, *args: Any) -> Any:
    return cls.apply(*args)

"""The transform table: every operation and the whole layer under every transform, compared with plain torch.

A cell runs one transform (a `ROWS` entry) on one subject, in float64, and compares with the same
transform of the subject's reference, which is ordinary torch code without any operation of fmoe. A
cell that fails is excused only if the reference itself fails under the same transform: then it is
torch's own limit. ``python -m fmoe transforms`` prints the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vjp, vmap
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from .subjects import BATCH, Function, Subject


def _scalar(fn: Function) -> Function:
    """A smooth scalar of all floating outputs."""

    def total(*args: Tensor) -> Tensor:
        outputs = [out for out in pytree.tree_leaves(fn(*args)) if out.is_floating_point()]
        return torch.stack([out.sin().sum() for out in outputs]).sum()

    return total


def _square(tensors: Iterable[Tensor]) -> Tensor:
    return torch.stack([t.square().sum() for t in tensors]).sum()


def _all(subject: Subject) -> tuple[int, ...]:
    return tuple(range(len(subject.args)))


class _Module(torch.nn.Module):
    """The subject with its parameters as module parameters."""

    def __init__(self, fn: Function, parameters: Sequence[Tensor]):
        super().__init__()
        self.fn = fn
        self.held = torch.nn.ParameterList([torch.nn.Parameter(p.clone()) for p in parameters])

    def forward(self, x: Tensor) -> Any:
        return self.fn(x, *self.held)


def _ensemble(fn: Function, s: Subject) -> Any:
    copies = [_Module(fn, [p[i] for p in s.batched[1:]]) for i in range(BATCH)]
    parameters, buffers = stack_module_state(copies)

    def one(p: Any, b: Any, x: Tensor) -> Any:
        return functional_call(copies[0], (p, b), (x,))

    return vmap(one, in_dims=(0, 0, None))(parameters, buffers, s.args[0])


def _nested(fn: Function, s: Subject) -> Any:
    if not s.args[1:]:
        return vmap(vmap(fn))(torch.stack([s.batched[0], -s.batched[0]]))
    return vmap(lambda x: vmap(lambda *p: fn(x, *p))(*s.batched[1:]))(s.batched[0])


def _checkpointed(fn: Function, s: Subject) -> Any:
    leaves = [a.clone().requires_grad_() for a in s.args]
    checkpoint(_scalar(fn), *leaves, use_reentrant=False).backward()
    return [leaf.grad for leaf in leaves]


def _exported(fn: Function, s: Subject) -> Any:
    return torch.export.export(_Module(fn, s.args[1:]), (s.args[0],)).module()(s.args[0])


def _grad(fn: Function, s: Subject) -> Function:
    return grad(_scalar(fn), _all(s))


def _no_compiler(fn: Function) -> Function:
    return fn


#: Each row: transform(function, subject, compiler) -> outputs. Only the compile rows use the compiler; a row
#: over parameters returns None for a subject that has none.
ROWS: dict[str, Callable[[Function, Subject, Callable[[Function], Function]], Any]] = {
    "eager": lambda f, s, _: f(*s.args),
    "grad": lambda f, s, _: _grad(f, s)(*s.args),
    "vjp": lambda f, s, _: vjp(_scalar(f), *s.args)[1](torch.tensor(1.5, dtype=torch.float64)),
    "jvp": lambda f, s, _: jvp(_scalar(f), s.args, s.tangents),
    "jvp(jvp)": lambda f, s, _: jvp(lambda *a: jvp(_scalar(f), a, s.tangents)[1], s.args, s.tangents),
    "jacrev": lambda f, s, _: jacrev(f, _all(s))(*s.args),
    "jacfwd": lambda f, s, _: jacfwd(f, _all(s))(*s.args),
    "hessian": lambda f, s, _: hessian(_scalar(f), _all(s))(*s.args),
    "grad(grad)": lambda f, s, _: grad(lambda *a: _square(_grad(f, s)(*a)), _all(s))(*s.args),
    "vmap data": lambda f, s, _: vmap(lambda x: f(x, *s.args[1:]))(s.batched[0]),
    "vmap parameters": lambda f, s, _: vmap(lambda *p: f(s.args[0], *p))(*s.batched[1:]) if s.args[1:] else None,
    "vmap(vmap)": lambda f, s, _: _nested(f, s),
    "vmap(grad)": lambda f, s, _: vmap(_grad(f, s))(*s.batched),
    "functional_call": lambda f, s, _: _ensemble(f, s) if s.args[1:] else None,
    "checkpoint": lambda f, s, _: _checkpointed(f, s),
    "compile": lambda f, s, compiler: compiler(f)(*s.args),
    "compile(grad)": lambda f, s, compiler: compiler(_grad(f, s))(*s.args),
    "compile(vmap(grad))": lambda f, s, compiler: compiler(vmap(_grad(f, s)))(*s.batched),
    "compile(jacfwd)": lambda f, s, compiler: compiler(jacfwd(f, 0))(*s.args),
    "compile(hessian)": lambda f, s, compiler: compiler(hessian(_scalar(f), 0))(*s.args),
    "export": lambda f, s, _: _exported(f, s),
}


@dataclass(frozen=True)
class Cell:
    """The outcome of one cell: ``"pass"``, ``"torch"`` (plain torch fails too) or ``"fail"``."""

    outcome: str
    detail: str = ""


def run_cell(row: str, subject: Subject, backend: str = "aot_eager") -> Cell:
    """Runs one transform on one subject and compares it with the reference.

    Args:
        row: a key of `ROWS`.
        subject: from `subjects`.
        backend: of torch.compile.

    Returns:
        A `Cell`.

    Example:
        >>> from fmoe.transforms.subjects import subjects
        >>> run_cell("grad", subjects()["gmm"]).outcome
        'pass'
    """

    def compiler(fn: Function) -> Function:
        torch._dynamo.reset()
        return torch.compile(fn, fullgraph=True, backend=backend)

    transform = ROWS[row]
    uncompiled = ROWS["eager"] if row == "export" else transform
    try:
        eager = _tensors(uncompiled(subject.reference, subject, _no_compiler))
    except Exception as error:
        return Cell("torch", f"plain torch: {type(error).__name__}")
    try:
        problem = _difference(_tensors(transform(subject.function, subject, compiler)), eager)
    except Exception as error:
        problem = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    if not problem:
        return Cell("pass")
    try:
        torch_too = _difference(_tensors(transform(subject.reference, subject, compiler)), eager)
    except Exception as error:
        torch_too = type(error).__name__
    return Cell("torch", f"plain torch: {torch_too}") if torch_too else Cell("fail", problem)


def _tensors(outputs: Any) -> list[Tensor]:
    return [leaf.detach() for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]


def _difference(found: list[Tensor], expected: list[Tensor], tolerance: float = 1e-9) -> str:
    """What differs, or an empty string."""
    if [t.shape for t in found] != [t.shape for t in expected]:
        return f"shapes {[tuple(t.shape) for t in found]} instead of {[tuple(t.shape) for t in expected]}"
    worst = 0.0
    for a, b in zip(found, expected, strict=True):
        error = (a - b).abs() / b.abs().clamp(min=1)
        worst = max([worst, *error.flatten().tolist()], key=lambda e: float("inf") if e != e else e)
    return "" if worst <= tolerance else f"wrong by {worst:.1e}"

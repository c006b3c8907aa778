"""What runs an operation on a device, as text, and why not something else.

The same rules decide when an operation runs (`kernels.choice`), so what this says is what happens for
operands of these dtypes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .activations import form_of
from .differentiable import NAMESPACE
from .kernels.choice import target, why_not_library
from .kernels.cuda_routing import why_not_best, why_not_places
from .kernels.launch import cdiv
from .registry import OPS


def binding(op: str, device: torch.device, *dtypes: torch.dtype) -> str:
    """What runs an operation: ``triton.ffn``, ``cpu.ffn``, or ``reference (why)``.

    Example:
        >>> binding("ffn", torch.device("cpu"), torch.float32)
        'cpu.ffn'
        >>> binding("gmm", torch.device("cpu"), torch.float32)
        'reference (no kernel for cpu)'
    """
    kernel = OPS[op].kernels.get(device.type)
    if kernel is None:
        return f"reference (no kernel for {device.type})"
    if device.type == "cpu":
        return f"cpu.{op}"
    to, why = target(device, *dtypes)
    return f"reference ({why})" if to is None else f"triton.{op}"


def experts_binding(
    device: torch.device,
    dtype: torch.dtype,
    activation: str,
    rows: int,
    experts: int,
    model_dim: int,
    hidden: int,
    biases: bool = False,
) -> str:
    """What runs the experts: the kernel of each product in its blocks, and why not torch's grouped matmul.

    Example:
        >>> experts_binding(torch.device("cpu"), torch.float32, "gelu", 64, 4, 8, 16)
        'cpu.ffn'
    """
    bound = binding("ffn", device, dtype)
    to, _ = target(device, dtype) if bound.startswith("triton") else (None, "")
    if to is None:
        return bound
    up = to.blocks("up" if form_of(activation).gated else "act", rows, experts)
    down = to.blocks("rows", rows, experts)
    why = why_not_library(to, dtype, rows, experts, experts, hidden, model_dim)
    if biases and not why:
        why = "has no bias"
    taken = (
        f"{down}; not torch.grouped_mm: it {why}" if why else f"torch.grouped_mm, from {cdiv(rows, experts)} rows each"
    )
    return f"{bound} [{to.arch} {to.kind}; up {up}; down {taken}]"


class _Called(TorchDispatchMode):
    """Notes the operations of this package that are called, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.namespace == NAMESPACE:
            self.calls.append((func.name().split("::")[1], args))
        return func(*args, **(kwargs or {}))


def routing_binding(device: torch.device, route: Callable[[], Any]) -> str:
    """What runs the operations that have GPU kernels and that `route` calls, on tensors without data, in order.

    Example:
        >>> routing_binding(torch.device("cpu"), lambda: OPS["top_k"](torch.ones(4, 3), 2))
        'cpu.top_k'
    """
    with _Called() as called:
        route()
    made = [_routing_step(device, name, args) for name, args in called.calls if OPS[name].kernels["cuda"] is not None]
    return ", ".join(dict.fromkeys(made)) or "torch"


def _routing_step(device: torch.device, name: str, args: tuple[Any, ...]) -> str:
    bound, why = binding(name, device), ""
    if name == "top_k":
        bound, why = binding(name, device, args[0].dtype), why_not_best(args[0].shape[1], args[1])
    elif name == "assign_slots":
        why = why_not_places(args[2])
    return f"reference ({why})" if why and bound.startswith("triton") else bound

"""Activations of the built-in experts, and how each is written without temporaries.

A gated activation splits the last dim of its input in two, gate first: ``act(gate) * up``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor

aten = torch.ops.aten


@dataclass(frozen=True)
class Activation:
    """An activation by name: what it computes, and ATen's in-place forms for kernels.

    Attributes:
        gated: whether it takes two halves.
        function: the plain activation, differentiable to any order.
        into: ``into(z, out)`` writes ``function(z)``.
        backward_into: ``backward_into(grad, z, out)`` writes the gradient of z.
    """

    gated: bool
    function: Callable[[Tensor], Tensor]
    into: Callable[[Tensor, Tensor], Any]
    backward_into: Callable[[Tensor, Tensor, Tensor], Any]

    def __call__(self, z: Tensor) -> Tensor:
        """``[...,D] -> [...,H]`` with H = D, or D/2 if gated."""
        if not self.gated:
            return self.function(z)
        gate, up = z.chunk(2, dim=-1)
        return self.function(gate) * up


_RELU = (
    torch.relu,
    lambda z, out: torch.clamp(z, min=0, out=out),
    lambda grad, z, out: aten.threshold_backward.grad_input(grad, z, 0, grad_input=out),
)
_GELU = (
    nnf.gelu,
    lambda z, out: aten.gelu.out(z, out=out),
    lambda grad, z, out: aten.gelu_backward.grad_input(grad, z, grad_input=out),
)
_SILU = (
    nnf.silu,
    lambda z, out: aten.silu.out(z, out=out),
    lambda grad, z, out: aten.silu_backward.grad_input(grad, z, grad_input=out),
)

ACTIVATIONS = {
    "relu": Activation(False, *_RELU),
    "gelu": Activation(False, *_GELU),
    "silu": Activation(False, *_SILU),
    "swiglu": Activation(True, *_SILU),
    "geglu": Activation(True, *_GELU),
}

"""Activations of the built-in experts, and how each is written without temporaries.

A gated activation splits the last dim of its input in two halves, gate and up: ``act(gate) * up``. The gate
comes first; in the interleaved form of the same activation (`form_of`), which expert weights stored as
``gate0, up0, gate1, up1, ...`` have, they take turns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor

aten = torch.ops.aten

INTERLEAVED = ".interleaved"
#: Of gpt-oss: the slope of its sigmoid, and where its halves are cut off.
ALPHA, LIMIT = 1.702, 7.0


@dataclass(frozen=True)
class Curve:
    """A function of each number by itself, and ATen's in-place forms for kernels.

    Attributes:
        function: differentiable to any order.
        slope: ``slope(z, grad)``, the gradient of z, differentiable to any order.
        into: ``into(z, out)`` writes ``function(z)``.
        backward_into: ``backward_into(grad, z, out)`` writes the gradient of z.
    """

    function: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor, Tensor], Tensor]
    into: Callable[[Tensor, Tensor], Any]
    backward_into: Callable[[Tensor, Tensor, Tensor], Any]


@dataclass(frozen=True)
class Activation(Curve):
    """An activation: the curve of its input, or of the gate if it has one.

    Attributes:
        gated: whether it takes two halves.
        up: the curve of the other half; None where it is taken as it is.
        interleaved: whether the halves take turns.
    """

    gated: bool = False
    up: Curve | None = None
    interleaved: bool = False

    def __call__(self, z: Tensor) -> Tensor:
        """``[...,D] -> [...,H]`` with H = D, or D/2 if gated."""
        if not self.gated:
            return self.function(z)
        gate, value = self.halves(z)
        return self.function(gate) * (value if self.up is None else self.up.function(value))

    def halves(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Gate and up, as views: ``[...,2H] -> [...,H]`` twice."""
        if self.interleaved:
            return z[..., ::2], z[..., 1::2]
        half = z.shape[-1] // 2
        return z[..., :half], z[..., half:]

    def joined(self, gate: Tensor, value: Tensor) -> Tensor:
        """The reverse of `halves`."""
        if self.interleaved:
            return torch.stack([gate, value], dim=-1).flatten(-2)
        return torch.cat([gate, value], dim=-1)


def _gelu_slope(z: Tensor, grad: Tensor) -> Tensor:
    density = torch.exp(-0.5 * z * z) * (0.5 / torch.pi) ** 0.5
    return grad * (0.5 * (1 + torch.erf(z * 0.5**0.5)) + z * density)


def _silu_slope(z: Tensor, grad: Tensor) -> Tensor:
    s = torch.sigmoid(z)
    return grad * (s + z * s * (1 - s))


def _oss_gate(z: Tensor) -> Tensor:
    gate = z.clamp(max=LIMIT)
    return gate * torch.sigmoid(ALPHA * gate)


def _oss_gate_into(z: Tensor, out: Tensor) -> None:
    torch.clamp(z, max=LIMIT, out=out).mul_(ALPHA)
    aten.silu.out(out, out=out)
    out.div_(ALPHA)


def _oss_gate_backward_into(grad: Tensor, z: Tensor, out: Tensor) -> None:
    torch.clamp(z, max=LIMIT, out=out).mul_(ALPHA)
    aten.silu_backward.grad_input(grad, out, grad_input=out)
    out.masked_fill_(z > LIMIT, 0)


_RELU = (
    torch.relu,
    lambda z, grad: torch.where(z > 0, grad, torch.zeros_like(grad)),
    lambda z, out: torch.clamp(z, min=0, out=out),
    lambda grad, z, out: aten.threshold_backward.grad_input(grad, z, 0, grad_input=out),
)
_GELU = (
    nnf.gelu,
    _gelu_slope,
    lambda z, out: aten.gelu.out(z, out=out),
    lambda grad, z, out: aten.gelu_backward.grad_input(grad, z, grad_input=out),
)
_SILU = (
    nnf.silu,
    _silu_slope,
    lambda z, out: aten.silu.out(z, out=out),
    lambda grad, z, out: aten.silu_backward.grad_input(grad, z, grad_input=out),
)
_OSS = (
    _oss_gate,
    lambda z, grad: torch.where(z <= LIMIT, _silu_slope(ALPHA * z.clamp(max=LIMIT), grad), 0),
    _oss_gate_into,
    _oss_gate_backward_into,
)
_OSS_UP = Curve(
    lambda z: z.clamp(-LIMIT, LIMIT) + 1,
    lambda z, grad: torch.where(z.abs() <= LIMIT, grad, 0),
    lambda z, out: torch.clamp(z, -LIMIT, LIMIT, out=out).add_(1),
    lambda grad, z, out: out.copy_(grad).masked_fill_(z.abs() > LIMIT, 0),
)

ACTIVATIONS = {
    "relu": Activation(*_RELU),
    "gelu": Activation(*_GELU),
    "silu": Activation(*_SILU),
    "swiglu": Activation(*_SILU, gated=True),
    "geglu": Activation(*_GELU, gated=True),
    "swiglu_oss": Activation(*_OSS, gated=True, up=_OSS_UP),
}


def form_of(name: str) -> Activation:
    """An activation by the name that operations take: one of `ACTIVATIONS`, or that with ``.interleaved``."""
    base = name.removesuffix(INTERLEAVED)
    return ACTIVATIONS[base] if base == name else dataclasses.replace(ACTIVATIONS[base], interleaved=True)

"""A matmul in fp32 or wider of narrower operands, which keeps the narrow ones for backward.

Plain torch would keep what it multiplied: for a router that is every token again in fp32, a quarter of what a
layer in bf16 of small experts saves.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._typing import accumulation_dtype
from .differentiable import Saved, add, batch_first
from .registry import define


def _reference(x: Tensor, w: Tensor) -> Tensor:
    dtype = accumulation_dtype(x.dtype, w.dtype)
    return x.to(dtype) @ w.to(dtype)


def _backward(saved: Saved, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, w = saved.args
    dx = wide_linear(grad, w.mT).to(x.dtype) if saved.needs[0] else None
    dw = wide_linear(x.mT, grad).to(w.dtype) if saved.needs[1] else None
    return dx, dw


def _jvp(saved: Saved, dx: Tensor | None, dw: Tensor | None) -> Tensor | None:
    x, w = saved.args
    return add(None if dx is None else wide_linear(dx, w), None if dw is None else wide_linear(x, dw))


def _vmap(batch: int, dims: tuple[Any, ...], x: Tensor, w: Tensor) -> tuple[Tensor, int]:
    x = batch_first(x, dims[0], batch)
    if dims[1] is None and w.dim() == 2:
        return wide_linear(x.flatten(0, 1), w).unflatten(0, x.shape[:2]), 0
    return wide_linear(x, batch_first(w, dims[1], batch)), 0


wide_linear = define(
    "wide_linear(Tensor x, Tensor w) -> Tensor",
    reference=_reference,
    fake=lambda x, w: x.new_empty(*x.shape[:-1], w.shape[-1], dtype=accumulation_dtype(x.dtype, w.dtype)),
    backward=_backward,
    jvp=_jvp,
    vmap=_vmap,
)
"""``[T,M], [M,E] -> [T,E]``: ``x @ w`` in fp32 or wider; or of B pairs at once, ``[B,T,M], [B,M,E]``."""

"""Moving rows between token order and expert order: combine, expand and rowdot.

`index [T,K]` names, for each choice of each token, a row of an ``[R,D]`` buffer, or -1 for none; it names no
row twice, so that on a GPU every row is written by one program. The three ops are the three partial
derivatives of one trilinear form,

    F(x, y, w) = sum over t,k with index[t,k] >= 0 of  w[t,k] * <x[t], y[index[t,k]]>

    dF/dx = combine(y, index, w)     [R,D] [T,K] [T,K] -> [T,D]
    dF/dy = expand(x, index, w, R)   [T,D] [T,K] [T,K] -> [R,D]
    dF/dw = rowdot(x, y, index)      [T,D] [R,D] [T,K] -> [T,K]

so each one's derivatives are the other two, to every order. A choice with index -1 contributes
exactly 0 and gets exactly 0 gradient, whatever NaN its row or weight holds. Sums are taken in fp32
or wider and rounded once. vmap adds ``b * R`` to the indices of batch entry b.

Example on two tokens, K=1, R=3: ``index = [[2], [-1]]``, ``w = [[5.], [7.]]``;
``combine(y, index, w) = [5*y[2], 0]`` and ``expand(x, index, w, 3) = [0, 0, 5*x[0]]``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._typing import accumulation_dtype
from .differentiable import Saved, add, batch_first
from .kernels.cuda_rows import combine_cuda, expand_cuda, rowdot_cuda
from .registry import define


def _combine_reference(y: Tensor, index: Tensor, w: Tensor) -> Tensor:
    total = accumulation_dtype(y.dtype)
    out = torch.zeros(index.shape[0], y.shape[1], dtype=total, device=y.device)
    for ids, weight in zip(index.unbind(1), w.unbind(1), strict=True):
        (kept,) = (ids >= 0).nonzero(as_tuple=True)
        rows = y.index_select(0, ids[kept]).to(total)
        out.index_add_(0, kept, rows * weight[kept, None].to(total))
    return out.to(y.dtype)


def _combine_cpu(y: Tensor, index: Tensor, w: Tensor) -> Tensor:
    """`embedding_bag` makes no [T,K,D] temporary; it would round the weights of a half type."""
    if y.dtype != torch.float32 or not index.numel() or int(index.min()) < 0:
        return _combine_reference(y, index, w)
    return torch.nn.functional.embedding_bag(
        index, y.contiguous(), per_sample_weights=w.to(y.dtype).contiguous(), mode="sum"
    )


def _expand_reference(x: Tensor, index: Tensor, w: Tensor, rows: int) -> Tensor:
    out = x.new_zeros(rows, x.shape[1])
    for ids, weight in zip(index.unbind(1), w.unbind(1), strict=True):
        (kept,) = (ids >= 0).nonzero(as_tuple=True)
        out.index_add_(0, ids[kept], (x.index_select(0, kept) * weight[kept, None]).to(x.dtype))
    return out


def _rowdot_reference(x: Tensor, y: Tensor, index: Tensor) -> Tensor:
    total = accumulation_dtype(x.dtype, y.dtype)
    out = torch.zeros(index.shape, dtype=total, device=x.device)
    for column, ids in zip(out.unbind(1), index.unbind(1), strict=True):
        (kept,) = (ids >= 0).nonzero(as_tuple=True)
        left, right = x.index_select(0, kept).to(total), y.index_select(0, ids[kept]).to(total)
        column.index_copy_(0, kept, (left * right).sum(1))
    return out


def _combine_backward(saved: Saved, grad: Tensor) -> tuple[Tensor | None, ...]:
    y, index, w = saved.args
    dy = expand(grad, index, w, y.shape[0]) if saved.needs[0] else None
    dw = rowdot(grad, y, index).to(w.dtype) if saved.needs[2] else None
    return dy, None, dw


def _combine_jvp(saved: Saved, dy: Tensor | None, _: Any, dw: Tensor | None) -> Tensor | None:
    y, index, w = saved.args
    return add(None if dy is None else combine(dy, index, w), None if dw is None else combine(y, index, dw))


def _expand_backward(saved: Saved, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, index, w, _ = saved.args
    dx = combine(grad, index, w) if saved.needs[0] else None
    dw = rowdot(x, grad, index).to(w.dtype) if saved.needs[2] else None
    return dx, None, dw, None


def _expand_jvp(saved: Saved, dx: Tensor | None, _: Any, dw: Tensor | None, __: Any) -> Tensor | None:
    x, index, w, rows = saved.args
    return add(
        None if dx is None else expand(dx, index, w, rows),
        None if dw is None else expand(x, index, dw, rows),
    )


def _rowdot_backward(saved: Saved, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, y, index = saved.args
    dx = combine(y, index, grad).to(x.dtype) if saved.needs[0] else None
    dy = expand(x, index, grad, y.shape[0]).to(y.dtype) if saved.needs[1] else None
    return dx, dy, None


def _rowdot_jvp(saved: Saved, dx: Tensor | None, dy: Tensor | None, _: Any) -> Tensor | None:
    x, y, index = saved.args
    return add(None if dx is None else rowdot(dx, y, index), None if dy is None else rowdot(x, dy, index))


def fold_index(index: Tensor, rows: int) -> Tensor:
    """``[B,T,K]`` indices into B buffers as indices into one of ``B * rows`` rows; -1 stays."""
    offset = torch.arange(index.shape[0], device=index.device).mul(rows).view(-1, 1, 1)
    return torch.where(index >= 0, index + offset, index).flatten(0, 1)


def _combine_vmap(batch: int, dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
    y, index, w = (batch_first(arg, dim, batch) for arg, dim in zip(args, dims, strict=True))
    out = combine(y.flatten(0, 1), fold_index(index, y.shape[1]), w.flatten(0, 1))
    return out.unflatten(0, (batch, index.shape[1])), 0


def _expand_vmap(batch: int, dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
    rows = args[3]
    x, index, w = (batch_first(arg, dim, batch) for arg, dim in zip(args[:3], dims[:3], strict=True))
    out = expand(x.flatten(0, 1), fold_index(index, rows), w.flatten(0, 1), batch * rows)
    return out.unflatten(0, (batch, rows)), 0


def _rowdot_vmap(batch: int, dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
    x, y, index = (batch_first(arg, dim, batch) for arg, dim in zip(args, dims, strict=True))
    out = rowdot(x.flatten(0, 1), y.flatten(0, 1), fold_index(index, y.shape[1]))
    return out.unflatten(0, (batch, index.shape[1])), 0


combine = define(
    "combine(Tensor y, Tensor index, Tensor w) -> Tensor",
    reference=_combine_reference,
    cpu=_combine_cpu,
    cuda=combine_cuda,
    fake=lambda y, index, w: y.new_empty(index.shape[0], y.shape[1]),
    backward=_combine_backward,
    jvp=_combine_jvp,
    vmap=_combine_vmap,
)
expand = define(
    "expand(Tensor x, Tensor index, Tensor w, SymInt rows) -> Tensor",
    reference=_expand_reference,
    cuda=expand_cuda,
    fake=lambda x, index, w, rows: x.new_empty(rows, x.shape[1]),
    backward=_expand_backward,
    jvp=_expand_jvp,
    vmap=_expand_vmap,
)
rowdot = define(
    "rowdot(Tensor x, Tensor y, Tensor index) -> Tensor",
    reference=_rowdot_reference,
    cuda=rowdot_cuda,
    fake=lambda x, y, index: x.new_empty(index.shape, dtype=accumulation_dtype(x.dtype, y.dtype)),
    backward=_rowdot_backward,
    jvp=_rowdot_jvp,
    vmap=_rowdot_vmap,
)

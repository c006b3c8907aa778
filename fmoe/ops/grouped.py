"""Grouped matmul: rows in groups, each group with its own matrix.

`groups [G,3]` gives, for each group, its first row, its last row plus one, and its matrix; groups stand in
the order of their rows and share none, and as many groups as matrices are one for each, in order. Rows in no
group come out exactly 0. The three ops are the partial derivatives of one trilinear form,

    F(x, w, dy) = sum over groups (first, last, e) and rows first <= r < last of  <x[r] @ w[e], dy[r]>

    dF/ddy = gmm(x, w, groups)              [R,D] [E,D,F] -> [R,F]
    dF/dx  = gmm_t(dy, w, groups)           [R,F] [E,D,F] -> [R,D]
    dF/dw  = gmm_dw(x, dy, groups, E)       [R,D] [R,F]   -> [E,D,F]

so each one's derivatives are the other two, to every order. vmap over B entries makes B*G groups;
weights without a batch keep their matrix numbers and are never copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .._errors import refuse
from .._typing import dtype_text, type_text
from .differentiable import Saved, add, batch_first
from .kernels.cuda_gemm import gmm_cuda, gmm_dw_cuda, gmm_t_cuda
from .kernels.cuda_routing import groups_from_sizes_cuda
from .registry import OPS, define
from .transfers import numbers_on


def filled(groups: Tensor) -> Iterator[tuple[int, int, int]]:
    """The groups that have rows, as (first row, last row + 1, matrix)."""
    for first, last, matrix in groups.tolist():
        if last > first:
            yield first, last, matrix


def matmul_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype a matmul computes in: fp16 matmuls on the CPU run at a tenth of the speed of fp32."""
    return torch.float32 if dtype == torch.float16 and device.type == "cpu" else dtype


def is_transposed(w: Tensor) -> bool:
    """Whether stacked matrices ``[E,D,F]`` lie in memory column by column, as ``[E,F,D]``."""
    return w.dim() == 3 and w.stride(1) < w.stride(2)


def empty_in_order(like: Tensor, matrices: int) -> Tensor:
    """Gradients of `matrices` entries like those of `like`, in their order in memory: none has to be transposed."""
    if not is_transposed(like):
        return like.new_empty(matrices, *like.shape[1:])
    return like.new_empty(matrices, like.shape[2], like.shape[1]).transpose(1, 2)


def _gmm_reference(x: Tensor, w: Tensor, groups: Tensor) -> Tensor:
    wide = matmul_dtype(x.dtype, x.device)
    out = x.new_zeros(x.shape[0], w.shape[2])
    for first, last, e in filled(groups):
        out[first:last] = x[first:last].to(wide) @ w[e].to(wide)
    return out


def _gmm_t_reference(dy: Tensor, w: Tensor, groups: Tensor) -> Tensor:
    return _gmm_reference(dy, w.transpose(1, 2), groups)


def _gmm_dw_reference(x: Tensor, dy: Tensor, groups: Tensor, experts: int) -> Tensor:
    wide = matmul_dtype(x.dtype, x.device)
    out = torch.zeros(experts, x.shape[1], dy.shape[1], dtype=wide, device=x.device)
    for first, last, e in filled(groups):
        out[e].addmm_(x[first:last].to(wide).t(), dy[first:last].to(wide))
    return out.to(x.dtype)


def _groups_from_sizes_reference(sizes: Tensor, rows: int) -> Tensor:
    last = sizes.to(torch.int64).cumsum(0)
    if sizes.numel() and (int(sizes.min()) < 0 or int(last[-1]) > rows):
        refuse(
            "grouped_matmul",
            [f"group_sizes={sizes.tolist()}, but sizes must be at least 0 and add up to at most the {rows} rows of x."],
        )
    return torch.stack([last - sizes, last, torch.arange(sizes.shape[0], device=sizes.device)], dim=1)


def _groups_from_sizes_rule(batch: int, dims: tuple[Any, ...], sizes: Tensor, rows: int) -> tuple[Tensor, int]:
    each = [groups_from_sizes(entry, rows) for entry in batch_first(sizes, dims[0], batch)]
    return torch.stack(each) if each else sizes.new_empty(0, sizes.shape[-1], 3, dtype=torch.int64), 0


def _dw_like(w: Tensor, left: Tensor, right: Tensor, groups: Tensor) -> Tensor:
    """``gmm_dw(left, right)``, in w's order in memory."""
    if is_transposed(w):
        return gmm_dw(right, left, groups, w.shape[0]).transpose(1, 2)
    return gmm_dw(left, right, groups, w.shape[0])


def _gmm_backward(saved: Saved, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, w, groups = saved.args
    dx = gmm_t(grad, w, groups) if saved.needs[0] else None
    dw = _dw_like(w, x, grad, groups) if saved.needs[1] else None
    return dx, dw, None


def _gmm_jvp(saved: Saved, dx: Tensor | None, dw: Tensor | None, _: Any) -> Tensor | None:
    x, w, groups = saved.args
    return add(None if dx is None else gmm(dx, w, groups), None if dw is None else gmm(x, dw, groups))


def _gmm_t_backward(saved: Saved, grad: Tensor) -> tuple[Tensor | None, ...]:
    dy, w, groups = saved.args
    ddy = gmm(grad, w, groups) if saved.needs[0] else None
    dw = _dw_like(w, grad, dy, groups) if saved.needs[1] else None
    return ddy, dw, None


def _gmm_t_jvp(saved: Saved, ddy: Tensor | None, dw: Tensor | None, _: Any) -> Tensor | None:
    dy, w, groups = saved.args
    return add(None if ddy is None else gmm_t(ddy, w, groups), None if dw is None else gmm_t(dy, dw, groups))


def _gmm_dw_backward(saved: Saved, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, dy, groups, _ = saved.args
    dx = gmm_t(dy, grad, groups) if saved.needs[0] else None
    ddy = gmm(x, grad, groups) if saved.needs[1] else None
    return dx, ddy, None, None


def _gmm_dw_jvp(saved: Saved, dx: Tensor | None, ddy: Tensor | None, *_: Any) -> Tensor | None:
    x, dy, groups, experts = saved.args
    return add(
        None if dx is None else gmm_dw(dx, dy, groups, experts),
        None if ddy is None else gmm_dw(x, ddy, groups, experts),
    )


def fold_groups(groups: Tensor, rows: int, matrices: int) -> Tensor:
    """``[B,G,3]`` groups of B buffers as ``[B*G,3]`` groups of one; `matrices` is E, or 0 if shared."""
    batch = torch.arange(groups.shape[0], device=groups.device).view(-1, 1, 1)
    step = numbers_on([rows, rows, matrices], groups.device)
    return (groups + batch * step).flatten(0, 1)


def fold_weights(w: Tensor, dim: int | None) -> tuple[Tensor, int]:
    """Stacked matrices ``[B,E,...]`` as ``[B*E,...]`` and E; without a batch as they are, and 0."""
    if dim is None:
        return w, 0
    w = w.movedim(dim, 0)
    return w.flatten(0, 1), w.shape[1]


def _gmm_rule(op: str) -> Any:
    def rule(batch: int, dims: tuple[Any, ...], x: Tensor, w: Tensor, groups: Tensor) -> tuple[Tensor, int]:
        x, groups = batch_first(x, dims[0], batch), batch_first(groups, dims[2], batch)
        w, matrices = fold_weights(w, dims[1])
        out = OPS[op](x.flatten(0, 1), w, fold_groups(groups, x.shape[1], matrices))
        return out.unflatten(0, (batch, x.shape[1])), 0

    return rule


def _gmm_dw_rule(batch: int, dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
    x, dy, groups = (batch_first(arg, dim, batch) for arg, dim in zip(args[:3], dims[:3], strict=True))
    experts = args[3]
    out = gmm_dw(x.flatten(0, 1), dy.flatten(0, 1), fold_groups(groups, x.shape[1], experts), batch * experts)
    return out.unflatten(0, (batch, experts)), 0


gmm = define(
    "gmm(Tensor x, Tensor w, Tensor groups) -> Tensor",
    reference=_gmm_reference,
    cuda=gmm_cuda,
    fake=lambda x, w, groups: x.new_empty(x.shape[0], w.shape[2]),
    backward=_gmm_backward,
    jvp=_gmm_jvp,
    vmap=_gmm_rule("gmm"),
)
gmm_t = define(
    "gmm_t(Tensor dy, Tensor w, Tensor groups) -> Tensor",
    reference=_gmm_t_reference,
    cuda=gmm_t_cuda,
    fake=lambda dy, w, groups: dy.new_empty(dy.shape[0], w.shape[1]),
    backward=_gmm_t_backward,
    jvp=_gmm_t_jvp,
    vmap=_gmm_rule("gmm_t"),
)
gmm_dw = define(
    "gmm_dw(Tensor x, Tensor dy, Tensor groups, SymInt experts) -> Tensor",
    reference=_gmm_dw_reference,
    cuda=gmm_dw_cuda,
    fake=lambda x, dy, groups, experts: x.new_empty(experts, x.shape[1], dy.shape[1]),
    backward=_gmm_dw_backward,
    jvp=_gmm_dw_jvp,
    vmap=_gmm_dw_rule,
)
groups_from_sizes = define(
    "groups_from_sizes(Tensor sizes, SymInt rows) -> Tensor",
    reference=_groups_from_sizes_reference,
    cuda=groups_from_sizes_cuda,
    fake=lambda sizes, rows: sizes.new_empty(sizes.shape[0], 3, dtype=torch.int64),
    vmap=_groups_from_sizes_rule,
)


def grouped_matmul(x: Tensor, w: Tensor, group_sizes: Tensor) -> Tensor:
    """Multiplies consecutive groups of rows by their own matrices, as `jax.lax.ragged_dot` does.

    ``out[r] = x[r] @ w[e]`` for the rows r of group e, and exactly 0 for rows past the last group. Any
    floating dtype, any strides and sizes, empty groups, zero rows; every transform of torch.func.

    Args:
        x: ``[R,D]`` rows, sorted by group.
        w: ``[E,D,F]``, of x's dtype.
        group_sizes: ``[E]`` integers >= 0 that add up to at most R.

    Returns:
        ``[R,F]`` in x's dtype.

    Raises:
        ValueError: if shapes or dtypes do not fit, a size is negative, or the sizes exceed R. On a GPU sizes are
            refused under `checked` only; else they are cut to what fits.

    Example:
        >>> x, w = torch.ones(3, 2), torch.stack([torch.eye(2), 5 * torch.eye(2)])
        >>> grouped_matmul(x, w, torch.tensor([1, 1]))
        tensor([[1., 1.],
                [5., 5.],
                [0., 0.]])
    """
    problems = []
    if x.dim() != 2 or w.dim() != 3 or group_sizes.dim() != 1:
        problems.append(
            f"x is {type_text(x)}, w is {type_text(w)} and group_sizes is {type_text(group_sizes)}: "
            "give x [R,D], w [E,D,F] and group_sizes [E]."
        )
    elif x.shape[1] != w.shape[1]:
        problems.append(f"x is {type_text(x)} and w is {type_text(w)}: dim 1 of both must be the same D.")
    if w.dim() == 3 and group_sizes.dim() == 1 and w.shape[0] != group_sizes.shape[0]:
        problems.append(
            f"w has {w.shape[0]} matrices and group_sizes {group_sizes.shape[0]} entries: give one for each."
        )
    if x.dtype != w.dtype or not x.is_floating_point():
        problems.append(f"x is {dtype_text(x.dtype)} and w is {dtype_text(w.dtype)}: cast both to one floating dtype.")
    if group_sizes.is_floating_point() or group_sizes.dtype == torch.bool:
        problems.append(f"group_sizes is {dtype_text(group_sizes.dtype)}: give integers.")
    refuse("grouped_matmul", problems)
    return gmm(x, w, groups_from_sizes(group_sizes, x.shape[0]))

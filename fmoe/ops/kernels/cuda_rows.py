"""Moving rows on a GPU: expand, combine and rowdot, each element one program's own sum in a fixed order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .choice import target
from .launch import cdiv, launch, power_of_two, unit_rows

#: Elements of one program, eight for each of 128 threads: 16 bytes of a half type in one load.
ELEMENTS = 1024
#: Most choices per token for which all loads are begun at once.
UNROLLED = 8


def row_blocks(width: int) -> tuple[int, int]:
    """Rows and columns of one program."""
    columns = power_of_two(width, 64, ELEMENTS)
    return ELEMENTS // columns, columns


def combine_into(y: Tensor, index: Tensor, w: Tensor | None) -> Tensor:
    """``out[t] = sum_k w[t,k] * y[index[t,k]]``; without w all weights are 1."""
    y, index = unit_rows(y), index.contiguous()
    (tokens, choices), (rows, width) = index.shape, y.shape
    out = y.new_empty(tokens, width)
    block_t, block_d = row_blocks(width)
    launch(
        "rows.combine_rows", (cdiv(tokens, block_t), cdiv(width, block_d)),
        y, index, y if w is None else w.contiguous(), out, tokens, rows, width, choices, y.stride(0),
        WEIGHTED=w is not None, UNROLL=choices if choices <= UNROLLED else 0, BLOCK_T=block_t, BLOCK_D=block_d, warps=4,
    )  # fmt: skip
    return out


def combine_cuda(y: Tensor, index: Tensor, w: Tensor) -> Any:
    """``[T,D]``; NotImplemented where the reference is to run."""
    if target(y.device, y.dtype, w.dtype)[0] is None:
        return NotImplemented
    if not (y.numel() and index.numel()):
        return y.new_zeros(index.shape[0], y.shape[1])
    return combine_into(y, index, w)


def expand_cuda(x: Tensor, index: Tensor, w: Tensor, rows: int) -> Any:
    """``[R,D]``; NotImplemented where the reference is to run."""
    if target(x.device, x.dtype, w.dtype)[0] is None:
        return NotImplemented
    if not (x.numel() and index.numel() and rows):
        return x.new_zeros(rows, x.shape[1])
    x, index, width, count = unit_rows(x), index.contiguous(), x.shape[1], index.numel()
    order = torch.full((rows,), -1, dtype=torch.int64, device=x.device)
    launch("rows.inverse", (cdiv(count, ELEMENTS),), index, order, count, rows, BLOCK=ELEMENTS, warps=4)
    out = x.new_empty(rows, width)
    block_r, block_d = row_blocks(width)
    launch(
        "rows.expand_rows", (cdiv(rows, block_r), cdiv(width, block_d)),
        x, order, w.contiguous(), out, rows, width, count, index.shape[1], x.stride(0),
        BLOCK_R=block_r, BLOCK_D=block_d, warps=4,
    )  # fmt: skip
    return out


def rowdot_cuda(x: Tensor, y: Tensor, index: Tensor) -> Any:
    """``[T,K]`` in fp32; NotImplemented where the reference is to run."""
    if target(x.device, x.dtype, y.dtype)[0] is None:
        return NotImplemented
    out = x.new_empty(index.shape, dtype=torch.float32)
    if not (x.numel() and y.numel() and index.numel()):
        return out.zero_()
    x, y, index = unit_rows(x), unit_rows(y), index.contiguous()
    launch(
        "rows.row_dots", (cdiv(index.numel(), 16),), x, y, index, out, index.numel(), y.shape[0], x.shape[1],
        index.shape[1], x.stride(0), y.stride(0), BLOCK_C=16, BLOCK_D=128, warps=4,
    )  # fmt: skip
    return out

"""The expert layer on a GPU, forward and backward (the plan of SonicMoE, arXiv 2512.14080).

    forward    tile_map                            which rows a program works on
               rows_gemm   x, w_in -> z, h         gathers x on load, activates on store
               rows_gemm   h, w_out -> y           or torch's grouped_mm
               combine_rows  y, weights -> out     each token sums its own rows; a token of one choice needs
                                                   no sum: rows_gemm stores its weighted row, zero_dropped the rest
    backward   tile_map
               down_back   dout, w_out, z -> dz, weight*h, dots     gathers dout on load
               score_sums  dots -> dweights
               rows_gemm   dz, w_in -> dx of rows  or torch's grouped_mm
               combine_rows  dx of rows -> dx      or, for one choice, rows_gemm stores at the token
               weight_gemm x, dz -> dw_in          gathers x on load
               weight_gemm weight*h, dout -> dw_out    gathers dout on load

Kept for backward: x, z, the weights and the routing; `saved_bytes` says how much. h, y and the gathered x
are made anew or not at all. No atomics: two runs give the same bits. No number is read on the host.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..grouped import is_transposed
from .choice import Target, target
from .cuda_gemm import Pass, activation_constants, weights_product
from .launch import cdiv, launch, unit_rows


def saved_bytes(tokens: int, choices: int, model_dim: int, pre_dim: int, itemsize: int, weight_size: int = 4) -> int:
    """Bytes that forward keeps for backward besides parameters: x, z, weights, index, order.

    Example:
        >>> saved_bytes(32768, 8, 2048, 2 * 768, 2)  # Qwen3-30B
        944766976
    """
    return tokens * (model_dim * itemsize + choices * (pre_dim * itemsize + weight_size + 8 + 8))


def _target(x: Tensor, w: Tensor, *parameters: Tensor | None) -> tuple[Target | None, str]:
    dtypes = [p.dtype for p in parameters if p is not None]
    to, why = target(x.device, x.dtype, *dtypes, alike=True)
    if to is not None and target(x.device, w.dtype)[0] is None:
        return target(x.device, w.dtype)
    return to, why


def ffn_cuda(
    x: Tensor,
    w: Tensor,
    w_in: Tensor,
    b_in: Tensor | None,
    w_out: Tensor,
    b_out: Tensor | None,
    index: Tensor,
    order: Tensor,
    groups: Tensor,
    activation: str,
    keep: bool,
) -> Any:
    """``y [T,M]``, and the pre-activation ``z [N,D]`` if `keep` (else ``[0,D]``)."""
    to, _ = _target(x, w, w_in, b_in, w_out, b_out)
    if to is None or 0 in (*w_in.shape, *w_out.shape):
        return NotImplemented
    rows = order.shape[0]
    z = x.new_empty(rows if keep else 0, w_in.shape[2])
    if not rows:
        return x.new_zeros(x.shape[0], w_out.shape[2]), z
    order = order.contiguous()
    over = Pass.over(to, groups, rows, w_in.shape[0])
    source: dict[str, Any] = {"order": order, "choices": w.shape[1]}
    h = over.product(x, w_in, b_in, activation=activation, z=z if keep else None, **source)
    return over.to_tokens(h, w_out, b_out, index, order, w), z


def ffn_backward_cuda(
    grad: Tensor,
    x: Tensor,
    w: Tensor,
    w_in: Tensor,
    b_in: Tensor | None,
    w_out: Tensor,
    b_out: Tensor | None,
    z: Tensor,
    index: Tensor,
    order: Tensor,
    groups: Tensor,
    written: Tensor,
    experts: int,
    activation: str,
    needs: list[bool],
) -> Any:
    """Gradients of x, w, w_in, b_in, w_out and b_out; empty where `needs` says no."""
    to, _ = _target(x, w, w_in, b_in, w_out, b_out, grad, z)
    if to is None or 0 in (*w_in.shape, *w_out.shape, experts):
        return NotImplemented
    need_w, need_w_out = needs[1], needs[4]
    rows, choices = order.shape[0], w.shape[1]
    if not rows:
        shapes = (
            x.shape,
            w.shape,
            *((experts, *p.shape[1:]) if p is not None else (0,) for p in (w_in, b_in, w_out, b_out)),
        )
        wanted = zip(shapes, (x, w, x, x, x, x), needs, strict=True)
        return tuple(like.new_zeros(shape if need else 0) for shape, like, need in wanted)
    order, grad, w, index = order.contiguous(), unit_rows(grad), w.contiguous(), index.contiguous()
    over = Pass.over(to, groups, rows, w_in.shape[0])
    source: dict[str, Any] = {"order": order, "choices": choices}
    dz, wh, dots = _through_down(over, grad, w, w_out, b_out if need_w else None, z, order, activation, need_w_out)
    spread = (over.groups, written, experts, rows)

    def made_w() -> Tensor:
        dw = torch.empty_like(w)
        launch(
            "rows.score_sums", (cdiv(index.numel(), 256),), dots, index, dw, index.numel(), rows, dots.shape[1],
            BLOCK=256, warps=4,
        )  # fmt: skip
        return dw

    made = (
        lambda: over.to_tokens(dz, w_in.transpose(1, 2), None, index, order, None),
        made_w,
        lambda: _matrices(w_in, to, x, dz, *spread, gathered="a", **source),
        lambda: _bias_sum(dz, w, *spread),
        lambda: _matrices(w_out, to, wh, grad, *spread, gathered="b", **source),
        lambda: _bias_sum(grad, w, *spread, order=order),
    )
    return tuple(make() if need else x.new_zeros(0) for make, need in zip(made, needs, strict=True))


def _through_down(
    over: Pass,
    grad: Tensor,
    w: Tensor,
    w_out: Tensor,
    b_out: Tensor | None,
    z: Tensor,
    order: Tensor,
    activation: str,
    save_h: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Dz ``[N,D]``, weight * h ``[N,H]`` and ``dots [N,parts]``, whose sums are the gradients of the weights."""
    hidden, inner = w_out.shape[1], w_out.shape[2]
    blocks = over.blocks("down_back")
    columns = cdiv(hidden, blocks.n)
    parts = columns + (b_out is not None)
    z = z.contiguous()
    dz = torch.empty_like(z)
    wh = z.new_empty(over.rows if save_h else 0, hidden)
    dots = z.new_empty(over.rows, parts, dtype=torch.float32)
    stride_e, stride_h, stride_m = w_out.stride()
    common = (over.num_tiles, w.numel(), w.shape[1], grad.stride(0))
    launch(
        "backward.down_back", (over.num_tiles * columns,), grad, w_out, z, w, dz, wh, dots, order, over.tiles,
        inner, hidden, *common, stride_e, stride_m, stride_h, parts,
        SAVE_H=save_h, SUB=blocks.sub, **activation_constants(activation),
        **over.constants(blocks, inner),
    )  # fmt: skip
    if b_out is not None:
        launch(
            "backward.bias_dots", (over.num_tiles,), grad, b_out.contiguous(), dots, order, over.tiles,
            inner, *common, parts, columns, BLOCK_M=16, BLOCK_D=128, warps=4,
        )  # fmt: skip
    return dz, wh, dots


def _matrices(
    parameter: Tensor, to: Target, a: Tensor, b: Tensor, *spread: Any, gathered: str, **source: Any
) -> Tensor:
    """`weights_product`, in the parameter's order in memory."""
    if not is_transposed(parameter):
        return weights_product(to, a, b, *spread, gathered=gathered, **source)
    return weights_product(to, b, a, *spread, gathered="b" if gathered == "a" else "a", **source).transpose(1, 2)


def _bias_sum(
    a: Tensor, w: Tensor, groups: Tensor, written: Tensor, experts: int, rows: int, *, order: Tensor | None = None
) -> Tensor:
    """``[E,D]``: sums of the rows of each matrix; with `order` of the weighted rows of the tokens."""
    width = a.shape[1]
    out = a.new_empty(experts, width)
    launch(
        "backward.bias_sum", (experts * cdiv(width, 128),),
        a, w, out, groups if order is None else order, groups, written,
        rows, width, groups.shape[0], w.numel(), w.shape[1], a.stride(0), written.stride(0),
        GATHER=order is not None, BLOCK_R=8, BLOCK_D=128, BLOCK_G=128, warps=4,
    )  # fmt: skip
    return out

"""Backward of the expert layer in Triton: through the second matmul and the activation at once, and dW.

What forward kept is z, x and the routing. `down_back` multiplies the gathered gradient with w_out^T
and, while the product is in registers, recomputes h from z: out come dz, the weighted h that dw_out is
made of, and the dot of each row with its gradient that the routing weights are made of. So neither
h, nor y, nor a gathered x is ever kept.
"""

import triton
import triton.language as tl

from .triton_gemm import (
    activate,
    find_tile,
    load_left,
    load_right,
    raised,
    row_weight,
    slope,
    source_row,
    through_raised,
    turns,
)


@triton.jit
def _through_activation(
    acc, z, dz, wh, weight, r, inside, first, hidden,
    ACT: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, SAVE_H: tl.constexpr,
):  # fmt: skip
    """Columns of a tile from `first` on: stores dz and the weighted h, and returns ``sum_n acc * h``."""
    WIDTH: tl.constexpr = acc.shape[1]
    row = r[:, None].to(tl.int64)
    n = first + tl.arange(0, WIDTH)
    stored = inside[:, None] & (n < hidden)[None, :]
    if INTERLEAVED:
        both = 2 * first + tl.arange(0, 2 * WIDTH)
        at = row * (2 * hidden) + both[None, :]
        stored_both = inside[:, None] & (both < 2 * hidden)[None, :]
        gate, value = turns(tl.load(z + at, mask=stored_both, other=0.0).to(tl.float32))
    elif GATED:
        at = row * (2 * hidden) + n[None, :]
        gate = tl.load(z + at, mask=stored, other=0.0).to(tl.float32)
        value = tl.load(z + at + hidden, mask=stored, other=0.0).to(tl.float32)
    else:
        at = row * hidden + n[None, :]
        gate = tl.load(z + at, mask=stored, other=0.0).to(tl.float32)
    opened = activate(gate, ACT)
    h = opened * raised(value, ACT) if GATED else opened
    if SAVE_H:
        tl.store(wh + row * hidden + n[None, :], (h * weight[:, None]).to(wh.dtype.element_ty), mask=stored)
    dot = tl.sum(acc * h, 1)  # acc is 0 outside
    dh = acc * weight[:, None]
    if GATED:
        dvalue = through_raised(value, dh * opened, ACT)
        if not INTERLEAVED:
            tl.store(dz + at + hidden, dvalue.to(dz.dtype.element_ty), mask=stored)
        dh *= raised(value, ACT)
    dh *= slope(gate, ACT)
    if INTERLEAVED:
        made = tl.reshape(tl.join(dh, dvalue), (acc.shape[0], 2 * WIDTH))
        tl.store(dz + at, made.to(dz.dtype.element_ty), mask=stored_both)
    else:
        tl.store(dz + at, dh.to(dz.dtype.element_ty), mask=stored)
    return dot


@triton.jit
def _halves(block, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr):
    """``[BLOCK_M,WIDTH]`` as its left and its right half."""
    return tl.split(tl.permute(tl.reshape(block, (BLOCK_M, 2, WIDTH // 2)), (0, 2, 1)))


@triton.jit(do_not_specialize=["num_tiles", "num_choices", "choices"])
def down_back(
    grad, w, z, weight, dz, wh, dots, order, tiles,
    inner, hidden, num_tiles, num_choices, choices, stride_g, stride_we, stride_wk, stride_wn, stride_dots,
    ACT: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, SAVE_H: tl.constexpr,
    EVEN_K: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr, SUB: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """``dh = grad[token(r)] @ w[e]`` with w = w_out^T; from it dz, ``wh = weight * h`` and ``dots [R,parts]``.

    The epilogue works on 1/SUB of the columns at a time, or its temporaries would not fit the registers.
    """
    column, first, last, matrix = find_tile(tiles, num_tiles, tl.cdiv(hidden, BLOCK_N), GROUP_M)
    if (first >= last) | (matrix < 0):
        return
    r = first + tl.arange(0, BLOCK_M)
    inside = r < last
    row, _known = source_row(order, r, inside, num_choices, choices)
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    e = matrix.to(tl.int64)
    grad += row[:, None].to(tl.int64) * stride_g + k[None, :]
    w += e * stride_we + k[:, None].to(tl.int64) * stride_wk + n[None, :].to(tl.int64) * stride_wn
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k0 in range(0, inner, BLOCK_K):
        left = load_left(grad, inner - k0, BLOCK_K, EVEN_K, UPCAST)
        right = load_right(w, inner - k0, n < hidden, BLOCK_K, EVEN_K, UPCAST)
        acc = tl.dot(left, right, acc, input_precision=PRECISION)
        grad += BLOCK_K
        w += BLOCK_K * stride_wk
    scale = row_weight(weight, order, r, inside, num_choices)
    PART: tl.constexpr = BLOCK_N // SUB
    n = column * BLOCK_N
    if SUB == 1:
        dot = _through_activation(acc, z, dz, wh, scale, r, inside, n, hidden, ACT, GATED, INTERLEAVED, SAVE_H)
    else:
        half, rest = _halves(acc, BLOCK_M, BLOCK_N)
        if SUB == 2:
            dot = _through_activation(half, z, dz, wh, scale, r, inside, n, hidden, ACT, GATED, INTERLEAVED, SAVE_H)
            n += PART
            dot += _through_activation(rest, z, dz, wh, scale, r, inside, n, hidden, ACT, GATED, INTERLEAVED, SAVE_H)
        else:
            part, other = _halves(half, BLOCK_M, BLOCK_N // 2)
            dot = _through_activation(part, z, dz, wh, scale, r, inside, n, hidden, ACT, GATED, INTERLEAVED, SAVE_H)
            n += PART
            dot += _through_activation(other, z, dz, wh, scale, r, inside, n, hidden, ACT, GATED, INTERLEAVED, SAVE_H)
            part, other = _halves(rest, BLOCK_M, BLOCK_N // 2)
            n += PART
            dot += _through_activation(part, z, dz, wh, scale, r, inside, n, hidden, ACT, GATED, INTERLEAVED, SAVE_H)
            n += PART
            dot += _through_activation(other, z, dz, wh, scale, r, inside, n, hidden, ACT, GATED, INTERLEAVED, SAVE_H)
    tl.store(dots + r.to(tl.int64) * stride_dots + column, dot, mask=inside)


@triton.jit(do_not_specialize=["num_tiles", "num_choices", "choices"])
def bias_dots(
    grad, bias, dots, order, tiles, width, num_tiles, num_choices, choices, stride_g, stride_dots, part,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """``dots[r,part] = <grad[token(r)], bias[e]>``: what b_out adds to the gradient of the weights."""
    tile = tl.program_id(0)
    first, last = tl.load(tiles + tile), tl.load(tiles + num_tiles + tile)
    matrix = tl.load(tiles + 2 * num_tiles + tile)
    if (first >= last) | (matrix < 0):
        return
    e = matrix.to(tl.int64)
    for r0 in range(first, last, BLOCK_M):
        r = r0 + tl.arange(0, BLOCK_M)
        inside = r < last
        row, _known = source_row(order, r, inside, num_choices, choices)
        dot = tl.zeros([BLOCK_M], tl.float32)
        for d0 in range(0, width, BLOCK_D):
            d = d0 + tl.arange(0, BLOCK_D)
            g = tl.load(grad + row[:, None].to(tl.int64) * stride_g + d[None, :],
                        mask=inside[:, None] & (d < width)[None, :], other=0.0)  # fmt: skip
            b = tl.load(bias + e * width + d, mask=d < width, other=0.0)
            dot += tl.sum(g.to(tl.float32) * b.to(tl.float32)[None, :], 1)
        tl.store(dots + r.to(tl.int64) * stride_dots + part, dot, mask=inside)


@triton.jit
def _groups_of(written, stride, num_groups, matrix, BLOCK_G: tl.constexpr):
    """First and last + 1 of the groups that write a matrix; usually it is one."""
    begin = num_groups
    end = 0
    for g0 in range(0, num_groups, BLOCK_G):
        g = g0 + tl.arange(0, BLOCK_G)
        hit = tl.load(written + g.to(tl.int64) * stride, mask=g < num_groups, other=-1) == matrix
        begin = tl.minimum(begin, tl.min(tl.where(hit, g, num_groups), 0))
        end = tl.maximum(end, tl.max(tl.where(hit, g + 1, 0), 0))
    return begin, end


@triton.jit
def _span(groups, written, stride, g, matrix, rows):
    """Rows of group g, none if it writes another matrix."""
    first = tl.minimum(tl.maximum(tl.load(groups + 3 * g), 0), rows)
    last = tl.minimum(tl.maximum(tl.load(groups + 3 * g + 1), first), rows)
    mine = tl.load(written + g * stride) == matrix
    return first.to(tl.int32), tl.where(mine, last, first).to(tl.int32)


@triton.jit(do_not_specialize=["rows", "num_choices", "choices"])
def weight_gemm(
    a, b, out, order, groups, written,
    rows, height, width, num_groups, num_choices, choices, stride_a, stride_b, stride_written,
    GATHER_A: tl.constexpr, GATHER_B: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """``out[e] = sum of a[row(r)]^T b[row(r)]`` over the rows of the groups that write e; 0 for none."""
    down, across = tl.cdiv(height, BLOCK_M), tl.cdiv(width, BLOCK_N)
    matrix = tl.program_id(0) // (down * across)
    pid = tl.program_id(0) % (down * across)
    group = pid // (GROUP_M * across)
    size = tl.minimum(down - group * GROUP_M, GROUP_M)
    p = (group * GROUP_M + pid % (GROUP_M * across) % size) * BLOCK_M + tl.arange(0, BLOCK_M)
    q = (pid % (GROUP_M * across)) // size * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_p, inside_q = p < height, q < width
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    begin, end = _groups_of(written, stride_written, num_groups, matrix, BLOCK_G)
    for g in range(begin, end):
        first, last = _span(groups, written, stride_written, g, matrix, rows)
        for r0 in range(first, last, BLOCK_K):
            r = r0 + k
            inside = r < last
            row_a, row_b, of_a, of_b = r, r, inside, inside
            if GATHER_A:
                row_a, of_a = source_row(order, r, inside, num_choices, choices)
            if GATHER_B:
                row_b, of_b = source_row(order, r, inside, num_choices, choices)
            left = tl.load(a + row_a[None, :].to(tl.int64) * stride_a + p[:, None],
                           mask=inside_p[:, None] & of_a[None, :], other=0.0)  # fmt: skip
            right = tl.load(b + row_b[:, None].to(tl.int64) * stride_b + q[None, :],
                            mask=of_b[:, None] & inside_q[None, :], other=0.0)  # fmt: skip
            if UPCAST:
                left = left.to(tl.float32)
                right = right.to(tl.float32)
            acc = tl.dot(left, right, acc, input_precision=PRECISION)
    to = out + matrix.to(tl.int64) * height * width + p[:, None].to(tl.int64) * width + q[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=inside_p[:, None] & inside_q[None, :])


@triton.jit(do_not_specialize=["rows", "num_choices", "choices"])
def bias_sum(
    a, weight, out, order, groups, written, rows, width, num_groups, num_choices, choices, stride_a, stride_written,
    GATHER: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """``out[e] = sum of a[r]`` over the rows that write e; with GATHER of ``weight[r] * a[token(r)]``."""
    across = tl.cdiv(width, BLOCK_D)
    matrix = tl.program_id(0) // across
    d = tl.program_id(0) % across * BLOCK_D + tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    begin, end = _groups_of(written, stride_written, num_groups, matrix, BLOCK_G)
    for g in range(begin, end):
        first, last = _span(groups, written, stride_written, g, matrix, rows)
        for r0 in range(first, last, BLOCK_R):
            r = r0 + tl.arange(0, BLOCK_R)
            row, inside = r, r < last
            if GATHER:
                scale = row_weight(weight, order, r, inside, num_choices)
                row, inside = source_row(order, r, inside, num_choices, choices)
            part = tl.load(a + row[:, None].to(tl.int64) * stride_a + d[None, :],
                           mask=inside[:, None] & (d < width)[None, :], other=0.0).to(tl.float32)  # fmt: skip
            if GATHER:
                part *= scale[:, None]
            acc += part
    to = out + matrix.to(tl.int64) * width + d
    tl.store(to, tl.sum(acc, 0).to(out.dtype.element_ty), mask=d < width)

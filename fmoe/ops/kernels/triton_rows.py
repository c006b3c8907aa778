"""Moving rows in Triton: expand, combine, rowdot. No atomics: every output element is one program's own sum.

`index [T,K]` names a row for each choice, or -1; no row twice. `inverse` turns it round, so that `expand`
gathers and writes each row once, the rows of no choice as 0.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count", "rows"])
def inverse(index, order, count, rows, BLOCK: tl.constexpr):
    """``order[index[i]] = i``."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(index + i, mask=i < count, other=-1)
    tl.store(order + row, i.to(tl.int64), mask=(row >= 0) & (row < rows))


@triton.jit(do_not_specialize=["rows", "num_choices"])
def expand_rows(
    x, order, weight, out, rows, width, num_choices, choices, stride_x, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr
):
    """``out[r] = weight[order[r]] * x[order[r] // K]``, 0 where order[r] is -1."""
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    choice = tl.load(order + r, mask=r < rows, other=-1)
    known = (choice >= 0) & (choice < num_choices)
    token = tl.where(known, choice, 0) // choices
    w = tl.load(weight + choice, mask=known, other=0.0).to(tl.float32)
    row = tl.load(x + token[:, None] * stride_x + d[None, :], mask=known[:, None] & (d < width)[None, :], other=0.0)
    to = out + r[:, None].to(tl.int64) * width + d[None, :]
    made = (row.to(tl.float32) * w[:, None]).to(out.dtype.element_ty)
    tl.store(to, made, mask=(r < rows)[:, None] & (d < width)[None, :])


@triton.jit
def _one_choice(y, index, weight, at, inside, d, rows, width, stride_y, WEIGHTED: tl.constexpr):
    """``weight[at] * y[index[at]]`` in fp32, 0 for a choice of no row whatever NaN its weight holds."""
    row = tl.load(index + at, mask=inside, other=-1)
    known = (row >= 0) & (row < rows)
    part = tl.load(y + row[:, None] * stride_y + d[None, :], mask=known[:, None] & (d < width)[None, :], other=0.0)
    part = part.to(tl.float32)
    if WEIGHTED:
        part *= tl.load(weight + at, mask=known, other=0.0).to(tl.float32)[:, None]
    return part


@triton.jit(do_not_specialize=["tokens", "rows"])
def combine_rows(
    y, index, weight, out, tokens, rows, width, choices, stride_y,
    WEIGHTED: tl.constexpr, UNROLL: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """``out[t] = sum_k weight[t,k] * y[index[t,k]]``, in the order of k; UNROLL is K, or 0 for any K."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    at = t.to(tl.int64) * choices
    acc = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    if UNROLL:
        for k in tl.static_range(UNROLL):
            acc += _one_choice(y, index, weight, at + k, t < tokens, d, rows, width, stride_y, WEIGHTED)
    else:
        for k in range(0, choices):
            acc += _one_choice(y, index, weight, at + k, t < tokens, d, rows, width, stride_y, WEIGHTED)
    to = out + t[:, None].to(tl.int64) * width + d[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=(t < tokens)[:, None] & (d < width)[None, :])


@triton.jit(do_not_specialize=["tokens", "rows"])
def zero_dropped(index, out, tokens, rows, width, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    """``out[t] = 0`` for the tokens whose one choice has no row."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    row = tl.load(index + t, mask=t < tokens, other=0)
    dropped = (t < tokens) & ((row < 0) | (row >= rows))
    if tl.max(dropped.to(tl.int32), 0) == 0:
        return
    for d0 in range(0, width, BLOCK_D):
        d = d0 + tl.arange(0, BLOCK_D)
        to = out + t[:, None].to(tl.int64) * width + d[None, :]
        zero = tl.zeros([BLOCK_T, BLOCK_D], out.dtype.element_ty)
        tl.store(to, zero, mask=dropped[:, None] & (d < width)[None, :])


@triton.jit(do_not_specialize=["count", "rows"])
def row_dots(
    x, y, index, out, count, rows, width, choices, stride_x, stride_y, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr
):
    """``out[t,k] = <x[t], y[index[t,k]]>`` in fp32."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    row = tl.load(index + c, mask=c < count, other=-1)
    known = (row >= 0) & (row < rows)
    left, right = x + (c // choices).to(tl.int64)[:, None] * stride_x, y + row[:, None] * stride_y
    acc = tl.zeros([BLOCK_C, BLOCK_D], tl.float32)
    for d0 in range(0, width, BLOCK_D):
        d = d0 + tl.arange(0, BLOCK_D)
        inside = known[:, None] & (d < width)[None, :]
        a = tl.load(left + d[None, :], mask=inside, other=0.0).to(tl.float32)
        acc += a * tl.load(right + d[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(out + c, tl.sum(acc, 1), mask=c < count)


@triton.jit(do_not_specialize=["count", "rows"])
def score_sums(dots, index, out, count, rows, parts, BLOCK: tl.constexpr):
    """``out[c] = sum_j dots[index[c],j]``: the gradient of each routing weight, 0 for a choice of no row."""
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(index + c, mask=c < count, other=-1)
    known = (row >= 0) & (row < rows)
    acc = tl.zeros([BLOCK], tl.float32)
    for j in range(0, parts):
        acc += tl.load(dots + row * parts + j, mask=known, other=0.0)
    tl.store(out + c, acc.to(out.dtype.element_ty), mask=c < count)

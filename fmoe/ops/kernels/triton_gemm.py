"""Grouped matmuls in Triton: which rows a program works on, and rows times their group's matrix.

Rows stand in groups, each with its own matrix. A program makes one tile of ``BLOCK_M`` rows of one group
and ``BLOCK_N`` columns. `tile_map` finds the rows of every tile once; the number of tiles is bounded on
the host by the number of rows and groups, and what is left over has no rows, so no number is read on the
host. Rows between groups are tiles without a matrix and come out 0.

Row numbers are below 2^31; element offsets are 64 bit. Loads are masked wherever a number may be out of
range, and every store is. Products are taken in fp32 accumulators and rounded once.

Numbers that change with the data of a call (rows, tiles, choices) are never specialised on, so they never
compile a kernel anew.

The interpreter of Triton has no arithmetic in bf16: ``UPCAST`` makes operands fp32 there.
"""

import triton
import triton.language as tl

from .. import activations

RELU, GELU, SILU, PLAIN, OSS = (tl.constexpr(i) for i in range(5))
ALPHA, LIMIT = tl.constexpr(activations.ALPHA), tl.constexpr(activations.LIMIT)


@triton.jit
def _segment(groups, s, num_groups, num_matrices, rows):
    """First row, last + 1 and matrix (-1 for none) of segment s: gap, group 0, gap, group 1, ..., gap."""
    g = s // 2
    in_group = (s % 2 == 1) & (g < num_groups)
    in_gap = (s % 2 == 0) & (g <= num_groups)
    start = tl.load(groups + 3 * g, mask=g < num_groups, other=rows)
    stop = tl.load(groups + 3 * g + 1, mask=in_group, other=0)
    before = tl.load(groups + 3 * g - 2, mask=in_gap & (g > 0), other=0)
    matrix = tl.load(groups + 3 * g + 2, mask=in_group, other=-1)
    first = tl.where(in_group, start, before)
    last = tl.where(in_group, stop, tl.where(in_gap, start, 0))
    first = tl.minimum(tl.maximum(first, 0), rows)
    last = tl.minimum(tl.maximum(last, first), rows)
    known = (matrix >= 0) & (matrix < num_matrices)
    return first.to(tl.int32), last.to(tl.int32), tl.where(known, matrix, -1).to(tl.int32)


@triton.jit(do_not_specialize=["rows", "num_tiles"])
def tile_map(
    groups, tiles, rows, num_groups, num_matrices, num_tiles,
    BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """``tiles [3,num_tiles]``: first row, last row + 1 and matrix of each tile; unused tiles have no rows."""
    tile = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    segments = 2 * num_groups + 1
    segment = tl.zeros([BLOCK_T], tl.int32)
    before = tl.zeros([BLOCK_T], tl.int32)  # tiles of earlier segments
    total = 0
    for s0 in range(0, segments, BLOCK_S):
        s = s0 + tl.arange(0, BLOCK_S)
        first, last, matrix = _segment(groups, s, num_groups, num_matrices, rows)
        count = (last - first + BLOCK_M - 1) // BLOCK_M
        ends = total + tl.cumsum(count, 0)
        passed = (ends[None, :] <= tile[:, None]) & (s < segments)[None, :]
        segment += tl.sum(passed.to(tl.int32), 1)
        before = tl.maximum(before, tl.max(tl.where(passed, ends[None, :], 0), 1))
        total += tl.sum(count, 0)
    first, last, matrix = _segment(groups, segment, num_groups, num_matrices, rows)
    first += (tile - before) * BLOCK_M
    used = tile < num_tiles
    tl.store(tiles + tile, tl.minimum(first, last), mask=used)
    tl.store(tiles + num_tiles + tile, tl.minimum(first + BLOCK_M, last), mask=used)
    tl.store(tiles + 2 * num_tiles + tile, matrix, mask=used)


@triton.jit
def find_tile(tiles, num_tiles, num_columns, GROUP_M: tl.constexpr):
    """This program's column tile, rows and matrix; programs of nearby rows share columns in the cache."""
    pid = tl.program_id(0)
    width = GROUP_M * num_columns
    group = pid // width
    size = tl.minimum(num_tiles - group * GROUP_M, GROUP_M)
    tile = group * GROUP_M + (pid % width) % size
    first = tl.load(tiles + tile)
    last = tl.load(tiles + num_tiles + tile)
    return (pid % width) // size, first, last, tl.load(tiles + 2 * num_tiles + tile)


@triton.jit
def source_row(order, r, inside, num_choices, choices):
    """The token of row r, and whether it has one."""
    choice = tl.load(order + r, mask=inside, other=-1)
    known = (choice >= 0) & (choice < num_choices)
    return tl.where(known, choice, 0).to(tl.int32) // choices, known


@triton.jit
def row_weight(weight, order, r, inside, num_choices):
    """The fp32 weight of row r; 0 for a row of no choice."""
    choice = tl.load(order + r, mask=inside, other=-1)
    known = (choice >= 0) & (choice < num_choices)
    return tl.load(weight + choice, mask=known, other=0.0).to(tl.float32)


@triton.jit
def load_left(a, k_left, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, UPCAST: tl.constexpr):
    """The next ``[BLOCK_M,BLOCK_K]`` of rows."""
    if EVEN_K:  # noqa: SIM108  kernels branch on constants in statements
        block = tl.load(a)
    else:
        block = tl.load(a, mask=(tl.arange(0, BLOCK_K) < k_left)[None, :], other=0.0)
    if UPCAST:
        block = block.to(tl.float32)
    return block


@triton.jit
def load_right(w, k_left, inside_n, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, UPCAST: tl.constexpr):
    """The next ``[BLOCK_K,BLOCK_N]`` of a matrix."""
    if EVEN_K:
        block = tl.load(w, mask=inside_n[None, :], other=0.0)
    else:
        block = tl.load(w, mask=(tl.arange(0, BLOCK_K) < k_left)[:, None] & inside_n[None, :], other=0.0)
    if UPCAST:
        block = block.to(tl.float32)
    return block


@triton.jit
def activate(z, ACT: tl.constexpr):
    """The activation of a number, or of a gate."""
    if ACT == RELU:
        z = tl.where((z > 0) | (z != z), z, 0.0)
    elif ACT == GELU:
        z = 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))
    elif ACT == SILU:
        z = z * tl.sigmoid(z)
    elif ACT == OSS:
        z = tl.where(z > LIMIT, LIMIT, z)  # a NaN stays
        z = z * tl.sigmoid(z * ALPHA)
    return z


@triton.jit
def raised(value, ACT: tl.constexpr):
    """What the activation of the gate is multiplied by."""
    if ACT == OSS:
        value = tl.where(value > LIMIT, LIMIT, tl.where(value < -LIMIT, -LIMIT, value)) + 1.0
    return value


@triton.jit
def through_raised(value, grad, ACT: tl.constexpr):
    """The gradient of `value`, of that of `raised`."""
    if ACT == OSS:
        grad = tl.where(tl.abs(value) <= LIMIT, grad, 0.0)
    return grad


@triton.jit
def slope(z, ACT: tl.constexpr):
    """The derivative of `activate`."""
    if ACT == RELU:
        d = tl.where(z > 0, 1.0, 0.0)
    elif ACT == GELU:
        d = 0.5 * (1.0 + tl.erf(z * 0.7071067811865476)) + z * 0.3989422804014327 * tl.exp(-0.5 * z * z)
    elif ACT == OSS:
        s = tl.sigmoid(z * ALPHA)
        d = tl.where(z <= LIMIT, s + z * ALPHA * s * (1.0 - s), 0.0)
    else:
        s = tl.sigmoid(z)
        d = s + z * s * (1.0 - s)
    return d


@triton.jit
def turns(block):
    """The even and the odd columns of ``[m,2n]``."""
    return tl.split(tl.reshape(block, (block.shape[0], block.shape[1] // 2, 2)))


@triton.jit(do_not_specialize=["num_tiles", "num_choices", "choices"])
def rows_gemm(
    a, w, bias, z, out, weight, order, tiles,
    inner, columns, num_tiles, num_choices, choices, stride_a, stride_we, stride_wk, stride_wn,
    GATHER: tl.constexpr, SCATTER: tl.constexpr, SCALE: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, BIAS: tl.constexpr, SAVE_Z: tl.constexpr,
    EVEN_K: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """``out[r] = act(a[row(r)] @ w[e] + bias[e])`` for r of group e, and what is activated into z.

    With GATHER, row(r) is the token of row r; with SCATTER that is what is written to, with SCALE times the
    weight of r. GATED takes w of ``[E,inner,2*columns]``, gate first; with INTERLEAVED gate and up take turns, and one
    product of twice the width makes both. A tile without a matrix takes no products: it is 0, also after the
    activation.
    """
    column, first, last, matrix = find_tile(tiles, num_tiles, tl.cdiv(columns, BLOCK_N), GROUP_M)
    if first >= last:
        return
    r = first + tl.arange(0, BLOCK_M)
    inside = r < last
    if GATHER:
        row, _known = source_row(order, r, inside, num_choices, choices)
    else:
        row = tl.where(inside, r, first)
    WIDTH: tl.constexpr = 2 * BLOCK_N if INTERLEAVED else BLOCK_N
    wide = columns * 2 if GATED else columns
    n = column * WIDTH + tl.arange(0, WIDTH)
    width = wide if INTERLEAVED else columns
    inside_n = n < width
    k = tl.arange(0, BLOCK_K)
    known = matrix >= 0
    e = tl.maximum(matrix, 0).to(tl.int64)
    a += row[:, None].to(tl.int64) * stride_a + k[None, :]
    w += e * stride_we + k[:, None].to(tl.int64) * stride_wk + n[None, :].to(tl.int64) * stride_wn
    acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    if GATED and not INTERLEAVED:
        second = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        across = tl.cast(columns, tl.int64) * stride_wn
    for k0 in range(0, tl.where(known, inner, 0), BLOCK_K):
        left = load_left(a, inner - k0, BLOCK_K, EVEN_K, UPCAST)
        right = load_right(w, inner - k0, inside_n, BLOCK_K, EVEN_K, UPCAST)
        acc = tl.dot(left, right, acc, input_precision=PRECISION)
        if GATED and not INTERLEAVED:
            right = load_right(w + across, inner - k0, inside_n, BLOCK_K, EVEN_K, UPCAST)
            second = tl.dot(left, right, second, input_precision=PRECISION)
        a += BLOCK_K
        w += BLOCK_K * stride_wk
    stored = inside[:, None] & inside_n[None, :]
    if BIAS:
        biased = n < tl.where(known, width, 0)
        b = bias + e * wide + n
        acc += tl.load(b, mask=biased, other=0.0).to(tl.float32)[None, :]
        if GATED and not INTERLEAVED:
            second += tl.load(b + columns, mask=biased, other=0.0).to(tl.float32)[None, :]
    if SAVE_Z:
        to = z + r[:, None].to(tl.int64) * wide + n[None, :]
        tl.store(to, acc.to(z.dtype.element_ty), mask=stored)
        if GATED and not INTERLEAVED:
            tl.store(to + columns, second.to(z.dtype.element_ty), mask=stored)
    if INTERLEAVED:
        acc, second = turns(acc)
        n = column * BLOCK_N + tl.arange(0, BLOCK_N)
        inside_n = n < columns
        stored = inside[:, None] & inside_n[None, :]
    acc = activate(acc, ACT)
    if GATED:
        acc *= raised(second, ACT)
    row = r
    if SCALE:
        acc *= row_weight(weight, order, r, inside, num_choices)[:, None]
    if SCATTER:
        row, known_row = source_row(order, r, inside, num_choices, choices)
        stored = known_row[:, None] & inside_n[None, :]
    to = out + row[:, None].to(tl.int64) * columns + n[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["num_tiles"])
def zero_gaps(out, tiles, width, num_tiles, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of no group become 0."""
    tile = tl.program_id(0)
    first, last = tl.load(tiles + tile), tl.load(tiles + num_tiles + tile)
    if (first >= last) | (tl.load(tiles + 2 * num_tiles + tile) >= 0):
        return
    r = first + tl.arange(0, BLOCK_M)
    for d0 in range(0, width, BLOCK_D):
        d = d0 + tl.arange(0, BLOCK_D)
        to = out + r[:, None].to(tl.int64) * width + d[None, :]
        zero = tl.zeros([BLOCK_M, BLOCK_D], out.dtype.element_ty)
        tl.store(to, zero, mask=(r < last)[:, None] & (d < width)[None, :])

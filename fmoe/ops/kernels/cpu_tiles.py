"""How the CPU kernels cut the rows of experts into pieces of work, and sum gradients over them.

The sizes here are the only tuned numbers of the CPU kernels; each says what it was chosen by.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from ..._typing import accumulation_dtype
from ..grouped import is_transposed

#: Rows per tile. Larger tiles feed the matmul better, smaller ones stay in cache. A group is cut only if
#: it is larger: every further piece packs the same weights again.
TILE = 1536
#: In bf16 a matmul of few rows is bound by its set-up. So all groups go into one batched matmul, padded to
#: the largest, if none has more than `FEW_ROWS` rows (padding then costs nothing: reading the weights takes
#: all the time), or none more than `SOME_ROWS` and padding makes at most `PADDING` times the rows. In fp32 a
#: batched matmul of more than 4 rows is slower than a loop.
FEW_ROWS, SOME_ROWS, PADDING = 16, 256, 1.5
#: Up to `FEW_ROWS` rows, a matrix that lies column by column is faster as the left factor, transposed.
#: A matmul of up to `FEWEST_ROWS` rows in fp32 only reads its matrix, and reads it a third faster in strips of
#: `STRIP` rows, one small matmul each: a thread then reads whole rows, not its share of every row.
FEWEST_ROWS, STRIP = 6, 32


def few_rows_matmul(rows: Tensor, w: Tensor) -> Tensor:
    """``rows @ w`` for a few rows: in bf16 the matrix is read as it lies, which is faster by a third."""
    if w.dtype != torch.bfloat16 or w.stride(0) != 1:
        return torch.mm(rows, w)
    return torch.mv(w.t(), rows[0]).unsqueeze(0) if len(rows) == 1 else torch.mm(w.t(), rows.t()).t()


class Stack:
    """Stacked matrices as kernels read them: all of them, each by itself, and each in strips if it can be."""

    def __init__(self, w: Tensor, dtype: torch.dtype):
        self.all = w.to(dtype)
        self.each = self.all.unbind(0)
        inner = w.shape[1]
        in_strips = dtype == torch.float32 and inner % STRIP == 0 and inner > STRIP and self.all.is_contiguous()
        self.strips = self.all.unflatten(1, (-1, STRIP)).unbind(0) if in_strips else None
        self.turned = self.all.transpose(1, 2) if dtype == torch.bfloat16 and is_transposed(self.all) else None


class Tile:
    """Consecutive rows ``first <= r < last``, whose matmuls are done segment by segment.

    A segment is (from, to, matrix, written matrix), with rows counted from `first`.
    """

    def __init__(self, first: int, last: int, segments: list[tuple[int, int, int, int]]):
        self.first, self.last, self.segments = first, last, segments
        self.size = last - first
        self.sizes = [b - a for a, b, _, _ in segments]
        self.matrices = [e for _, _, e, _ in segments]

    def gather(self, source: Tensor, token: Tensor, out: Tensor) -> Tensor:
        """The tokens' rows of `source`."""
        return torch.index_select(source, 0, token[self.first : self.last], out=out)

    def take(self, rows: Tensor, out: Tensor) -> Tensor:
        """This tile's part of ``[N,...]`` rows, in the tile's own arrangement."""
        return rows[self.first : self.last].to(out.dtype)

    def put(self, part: Tensor, rows: Tensor) -> None:
        """The reverse of `take`."""
        rows[self.first : self.last] = part

    def clear_padding(self, *parts: Tensor) -> None:
        """Makes padding rows 0: weights may be NaN, and so may 0 times them."""

    def add_to_tokens(self, part: Tensor, token: Tensor, y: Tensor) -> None:
        """Adds each row to its token's row of y."""
        y.index_add_(0, token[self.first : self.last], part)

    def matmul(self, left: Tensor, w: Stack, out: Tensor) -> None:
        """``out[r] = left[r] @ w[e]``."""
        for part, e, to in zip(left.split(self.sizes), self.matrices, out.split(self.sizes), strict=True):
            if w.strips is not None and len(part) <= FEWEST_ROWS:
                torch.sum(torch.bmm(part.unflatten(1, (-1, STRIP)).transpose(0, 1), w.strips[e]), 0, out=to)
            elif w.turned is not None and len(part) <= FEW_ROWS:
                to.copy_(few_rows_matmul(part, w.each[e]))
            else:
                torch.mm(part, w.each[e], out=to)

    def add_bias(self, rows: Tensor, bias: Tensor | None) -> None:
        """``rows[r] += bias[e]``."""
        if bias is not None:
            for a, b, e, _ in self.segments:
                rows[a:b] += bias[e]

    def add_products(self, left: Tensor, right: Tensor, sums: Sums) -> None:
        """Adds ``left^T @ right`` of each segment to its matrix."""
        for a, b, _, to in self.segments:
            sums.add(to, left[a:b].t(), right[a:b])

    def add_rows(self, rows: Tensor, sums: Sums) -> None:
        """Adds the sum of each segment's rows to its vector."""
        for a, b, _, to in self.segments:
            sums.add(to, rows[a:b].sum(0, dtype=sums.total))

    def dot_bias(self, rows: Tensor, bias: Tensor) -> Tensor:
        """``<rows[r], bias[e]>``."""
        return torch.cat([torch.mv(rows[a:b], bias[e].to(rows.dtype)) for a, b, e, _ in self.segments])


class Batch(Tile):
    """All groups at once, each padded to the largest, one group for each matrix in their order.

    Padding rows are 0 after `gather`, `take` and `clear_padding`, so they add nothing to any product.
    """

    def __init__(self, sizes: list[int], first: int):
        super().__init__(first, first + sum(sizes), [])
        self.groups, self.width = len(sizes), max(sizes)
        self.size = self.groups * self.width
        start = torch.arange(self.groups).mul(self.width)
        counts = torch.tensor(sizes)
        before = (counts.cumsum(0) - counts).repeat_interleave(counts)
        self.place = start.repeat_interleave(counts) + torch.arange(sum(sizes)) - before  # of each real row

    def gather(self, source: Tensor, token: Tensor, out: Tensor) -> Tensor:
        rows = torch.full((self.size,), source.shape[0]).index_copy_(0, self.place, token[self.first : self.last])
        with_zero = torch.cat([source, source.new_zeros(1, source.shape[1])])  # the row that padding reads
        return torch.index_select(with_zero, 0, rows, out=out)

    def take(self, rows: Tensor, out: Tensor) -> Tensor:
        part = rows[self.first : self.last].to(out.dtype)
        return torch.zeros(self.size, *part.shape[1:], dtype=out.dtype).index_copy_(0, self.place, part)

    def put(self, part: Tensor, rows: Tensor) -> None:
        rows[self.first : self.last] = part.index_select(0, self.place)

    def clear_padding(self, *parts: Tensor) -> None:
        padding = torch.ones(self.size, dtype=torch.bool).index_fill_(0, self.place, False).nonzero().squeeze(1)
        for part in parts:
            part.index_fill_(0, padding, 0)

    def add_to_tokens(self, part: Tensor, token: Tensor, y: Tensor) -> None:
        super().add_to_tokens(part.index_select(0, self.place), token, y)

    def _stacked(self, rows: Tensor) -> Tensor:
        return rows.view(self.groups, self.width, rows.shape[1])

    def matmul(self, left: Tensor, w: Stack, out: Tensor) -> None:
        if w.turned is not None and self.width <= FEW_ROWS:
            self._stacked(out).copy_(torch.bmm(w.turned, self._stacked(left).transpose(1, 2)).transpose(1, 2))
        else:
            torch.bmm(self._stacked(left), w.all, out=self._stacked(out))

    def add_bias(self, rows: Tensor, bias: Tensor | None) -> None:
        if bias is not None:
            self._stacked(rows).add_(bias.unsqueeze(1))

    def add_products(self, left: Tensor, right: Tensor, sums: Sums) -> None:
        sums.fill(self._stacked(left).transpose(1, 2), self._stacked(right))

    def add_rows(self, rows: Tensor, sums: Sums) -> None:
        sums.fill(self._stacked(rows).sum(1, dtype=sums.total))

    def dot_bias(self, rows: Tensor, bias: Tensor) -> Tensor:
        return torch.bmm(self._stacked(rows), bias.to(rows.dtype).unsqueeze(2)).flatten()


def cut(groups: list[list[int]], written: list[int], matrices: int, dtype: torch.dtype) -> list[Tile]:
    """One batch if the groups are small, else the groups' rows cut into tiles."""
    sizes = [last - first for first, last, _ in groups]
    rows, width = sum(sizes), max(sizes, default=0)
    mostly_used = 2 * sum(size > 0 for size in sizes) > len(sizes)
    small = (width <= FEW_ROWS and mostly_used) or (width <= SOME_ROWS and width * len(sizes) <= PADDING * rows)
    in_order = [matrix for *_, matrix in groups] == written == list(range(matrices))
    if dtype == torch.bfloat16 and rows and small and in_order and groups[-1][1] - groups[0][0] == rows:
        return [Batch(sizes, groups[0][0])]
    tiles: list[Tile] = []
    start = end = 0
    segments: list[tuple[int, int, int, int]] = []
    for (first, last, matrix), target in zip(groups, written, strict=True):
        for take in _parts(first, last):
            if segments and (first != end or take - start > TILE):
                tiles.append(Tile(start, end, segments))
                segments = []
            if not segments:
                start = first
            segments.append((first - start, take - start, matrix, target))
            first = end = take
    if segments:
        tiles.append(Tile(start, end, segments))
    return tiles


def _parts(first: int, last: int) -> list[int]:
    """Where the pieces of a group end: one piece, or as few equal ones of at most `TILE` rows as will do."""
    count = -(-(last - first) // TILE)
    return [first + (last - first) * (i + 1) // count for i in range(count)]


class Scratch:
    """A reused row buffer: ``scratch(tile)`` is as many of its rows as the tile needs."""

    def __init__(self, tiles: list[Tile], dim: int, dtype: torch.dtype):
        self.buffer = torch.empty(max((tile.size for tile in tiles), default=0), dim, dtype=dtype)

    def __call__(self, tile: Tile) -> Tensor:
        return self.buffer[: tile.size]


class Sums:
    """Gradients of stacked parameters, summed over segments.

    The first term of a matrix is written, not added to zeros. A half-precision gradient of several segments is
    summed in fp32 and rounded once. (In bf16 a segment's product is rounded too: no bf16 matmul of a CPU returns
    fp32, and one in fp32 takes four times as long. In fp16 products are made in fp32.) They lie in memory as the
    parameters do: those of matrices that lie column by column are summed as their transposes.
    """

    def __init__(self, experts: int, like: Tensor, tiles: list[Tile]):
        self.transposed = is_transposed(like)
        shape = like.transpose(1, 2).shape if self.transposed else like.shape
        self.result = torch.empty(experts, *shape[1:], dtype=like.dtype)
        self.total = accumulation_dtype(like.dtype)
        terms = Counter(to for tile in tiles for *_, to in tile.segments)
        self.several = {to for to, count in terms.items() if count > 1} if like.dtype != self.total else set()
        self.wide: dict[int, Tensor] = {}  # sums of the matrices in `several`
        self.seen: set[int] = set()

    def add(self, to: int, left: Tensor, right: Tensor | None = None) -> None:
        """Adds ``left @ right``, or ``left`` itself, to entry `to`."""
        if right is not None and self.transposed:
            left, right = right.t(), left.t()
        first, target = to not in self.seen, self.result[to]
        self.seen.add(to)
        if to in self.several:
            term = left if right is None else left @ right
            self.wide[to] = term.to(self.total) if first else self.wide[to].add_(term)
        elif right is None:
            target.copy_(left if first else target + left)
        elif right.dtype != target.dtype:
            target.copy_(left @ right)
        else:
            torch.mm(left, right, out=target) if first else target.addmm_(left, right)

    def fill(self, left: Tensor, right: Tensor | None = None) -> None:
        """Sets all entries at once, to ``left @ right`` or ``left`` itself."""
        if right is not None:
            left = torch.bmm(right.mT, left.mT) if self.transposed else torch.bmm(left, right)
        self.result = left.to(self.result.dtype)
        self.seen = set(range(len(left)))

    def out(self) -> Tensor:
        """The gradients, with zeros for entries that no segment named."""
        for to, total in self.wide.items():
            self.result[to] = total
        for to in set(range(self.result.shape[0])) - self.seen:
            self.result[to] = 0
        return self.result.transpose(1, 2) if self.transposed else self.result

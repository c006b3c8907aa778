"""The expert layer on the CPU, forward and backward, in tiles of rows.

On a CPU the arithmetic of routing is nothing; first-touch page faults on large fresh tensors cost
more. So rows go through a few scratch tensors that stay in cache, a tile at a time. A tile may span
several experts: only its matmuls are done expert by expert.

    forward   gather -> w_in -> activation -> w_out -> scale by weight -> add into y
    backward  gather x and dy -> w_out^T -> activation' -> w_in^T -> add into dx; add into dw_in, dw_out

Sums over choices are kept in fp32 or wider, with the weights in their own precision, and rounded
once. fp16 computes in fp32: the CPU's fp16 matmul is far slower. Order of addition is fixed, so
results are the same in every run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..._typing import accumulation_dtype
from ..activations import ACTIVATIONS, Activation

#: Rows per tile. Larger tiles feed the matmul better, smaller ones stay in cache.
TILE = 1024


@dataclass(frozen=True)
class _Tile:
    """Rows ``first <= r < last``, and the segments (from, to, matrix, written matrix) inside, from 0."""

    first: int
    last: int
    segments: list[tuple[int, int, int, int]]


def _tiles(groups: list[list[int]], written: list[int]) -> list[_Tile]:
    """Cuts the groups' rows into tiles; rows of one tile are consecutive."""
    tiles: list[_Tile] = []
    start = end = 0
    segments: list[tuple[int, int, int, int]] = []

    def close() -> None:
        if segments:
            tiles.append(_Tile(start, end, list(segments)))
            segments.clear()

    for (first, last, matrix), target in zip(groups, written, strict=True):
        while first < last:
            if not segments or first != end or end - start >= TILE:
                close()
                start = end = first
            take = min(last, start + TILE)
            segments.append((first - start, take - start, matrix, target))
            first = end = take
    close()
    return tiles


class _Scratch:
    """A reused row buffer: ``scratch(n)`` is its first n rows."""

    def __init__(self, tiles: list[_Tile], dim: int, dtype: torch.dtype):
        rows = max((tile.last - tile.first for tile in tiles), default=0)
        self.buffer = torch.empty(rows, dim, dtype=dtype)

    def __call__(self, rows: int) -> Tensor:
        return self.buffer[:rows]


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.float16 else dtype


def _tokens_and_weights(order: Tensor, w: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The token ``[N]`` and the weight ``[N,1]`` of each row; rows of no choice get token 0."""
    choice = order.clamp(min=0)
    token = torch.div(choice, max(w.shape[1], 1), rounding_mode="floor")
    return token, w.flatten().index_select(0, choice).to(dtype).unsqueeze(1)


def _activate(act: Activation, z: Tensor, out: Tensor) -> None:
    if act.gated:
        half = z.shape[1] // 2
        act.into(z[:, :half], out)
        out.mul_(z[:, half:])
    else:
        act.into(z, out)


def _zero_uncovered(z: Tensor, tiles: list[_Tile]) -> None:
    row = 0
    for tile in sorted(tiles, key=lambda tile: tile.first):
        z[row : tile.first].zero_()
        row = tile.last
    z[row:].zero_()


def ffn_cpu(
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
) -> tuple[Tensor, Tensor]:
    """``y [T,M]``, and the pre-activation ``z [N,D]`` if `keep` (else ``[0,D]``)."""
    act, total, compute = ACTIVATIONS[activation], accumulation_dtype(x.dtype), _compute_dtype(x.dtype)
    spans = groups.tolist()
    tiles = _tiles(spans, [0] * len(spans))
    dim, hidden, out_dim = w_in.shape[2], w_out.shape[1], w_out.shape[2]
    source = x.to(compute).contiguous()
    token, weight = _tokens_and_weights(order, w, total)
    y = torch.zeros(x.shape[0], out_dim, dtype=total)
    z = torch.empty(order.shape[0] if keep else 0, dim, dtype=x.dtype)
    direct = keep and compute == x.dtype
    if keep:
        _zero_uncovered(z, tiles)
    xs, hs, ys = (_Scratch(tiles, d, compute) for d in (x.shape[1], hidden, out_dim))
    zs, scaled = _Scratch([] if direct else tiles, dim, compute), _Scratch(tiles, out_dim, total)
    for tile in tiles:
        first, last, n = tile.first, tile.last, tile.last - tile.first
        ids, x_n, h_n, y_n = token[first:last], xs(n), hs(n), ys(n)
        z_n = z[first:last] if direct else zs(n)
        torch.index_select(source, 0, ids, out=x_n)
        for a, b, e, _ in tile.segments:
            torch.mm(x_n[a:b], w_in[e].to(compute), out=z_n[a:b])
            if b_in is not None:
                z_n[a:b] += b_in[e]
        if keep and not direct:
            z[first:last] = z_n
        _activate(act, z_n, h_n)
        for a, b, e, _ in tile.segments:
            torch.mm(h_n[a:b], w_out[e].to(compute), out=y_n[a:b])
            if b_out is not None:
                y_n[a:b] += b_out[e]
        y.index_add_(0, ids, torch.mul(y_n, weight[first:last], out=scaled(n)))
    return y.to(x.dtype), z


def ffn_backward_cpu(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, w, w_in, b_in, w_out and b_out (empty for a bias that is None)."""
    act, total, compute = ACTIVATIONS[activation], accumulation_dtype(x.dtype), _compute_dtype(x.dtype)
    tiles = _tiles(groups.tolist(), written.tolist())
    dim, hidden, out_dim = w_in.shape[2], w_out.shape[1], w_out.shape[2]
    source, dy = x.to(compute).contiguous(), grad.to(compute).contiguous()
    token, weight = _tokens_and_weights(order, w, compute)
    dx = torch.zeros(x.shape, dtype=total)
    score = torch.zeros(order.shape[0], dtype=total)
    dw_in, dw_out = _Sums(experts, w_in), _Sums(experts, w_out)
    db_in, db_out = _Sums(experts, b_in), _Sums(experts, b_out)
    xs, gs, dxs = (_Scratch(tiles, d, compute) for d in (x.shape[1], out_dim, x.shape[1]))
    hs, gh, spare = (_Scratch(tiles, hidden, compute) for _ in range(3))
    dzs = _Scratch(tiles, dim, compute)
    for tile in tiles:
        first, last, n = tile.first, tile.last, tile.last - tile.first
        ids, z_n, scale = token[first:last], z[first:last].to(compute), weight[first:last]
        x_n, g_n, h_n, gh_n, dz_n, dx_n, spare_n = xs(n), gs(n), hs(n), gh(n), dzs(n), dxs(n), spare(n)
        torch.index_select(source, 0, ids, out=x_n)
        torch.index_select(dy, 0, ids, out=g_n)
        for a, b, e, _ in tile.segments:
            torch.mm(g_n[a:b], w_out[e].to(compute).t(), out=gh_n[a:b])
        _activate(act, z_n, h_n)
        torch.sum(torch.mul(gh_n, h_n, out=spare_n), 1, dtype=total, out=score[first:last])
        gh_n.mul_(scale)
        h_n.mul_(scale)
        if act.gated:
            gate, value = z_n[:, :hidden], z_n[:, hidden:]
            act.backward_into(torch.mul(gh_n, value, out=spare_n), gate, dz_n[:, :hidden])
            act.into(gate, spare_n)
            torch.mul(gh_n, spare_n, out=dz_n[:, hidden:])
        else:
            act.backward_into(gh_n, z_n, dz_n)
        for a, b, e, to in tile.segments:
            torch.mm(dz_n[a:b], w_in[e].to(compute).t(), out=dx_n[a:b])
            dw_in.add(to, x_n[a:b].t(), dz_n[a:b])
            dw_out.add(to, h_n[a:b].t(), g_n[a:b])
            if b_in is not None:
                db_in.add(to, dz_n[a:b].sum(0, dtype=total))
            if b_out is not None:
                score[first + a : first + b] += torch.mv(g_n[a:b], b_out[e].to(compute))
                db_out.add(to, torch.mul(g_n[a:b], scale[a:b]).sum(0, dtype=total))
        dx.index_add_(0, ids, dx_n.to(total))
    rows = index.clamp(min=0).flatten()
    dw = torch.where(index >= 0, score.index_select(0, rows).view(index.shape), 0).to(w.dtype)
    return dx.to(x.dtype), dw, dw_in.out(), db_in.out(), dw_out.out(), db_out.out()


class _Sums:
    """Gradients of stacked parameters, summed over segments.

    The first term of a matrix is written, not added to zeros. A half-precision gradient of several
    segments is summed in fp32 and rounded once.
    """

    def __init__(self, experts: int, like: Tensor | None):
        self.like = torch.empty(0) if like is None else like
        shape = (0,) if like is None else (experts, *like.shape[1:])
        self.result = torch.empty(shape, dtype=self.like.dtype)
        self.total = accumulation_dtype(self.like.dtype)
        self.wide: dict[int, Tensor] = {}  # sums of the matrices that have more than one segment
        self.seen: set[int] = set()

    def add(self, to: int, left: Tensor, right: Tensor | None = None) -> None:
        """Adds ``left @ right``, or ``left`` itself, to entry `to`."""
        target = self.result[to]
        if to not in self.seen:
            self.seen.add(to)
            if right is not None and right.dtype == target.dtype:
                torch.mm(left, right, out=target)
            else:
                target.copy_(left if right is None else left @ right)
        elif target.dtype == self.total and right is not None:
            target.addmm_(left, right)
        else:
            if to not in self.wide:
                self.wide[to] = target.to(self.total)
            self.wide[to] += left if right is None else left @ right

    def out(self) -> Tensor:
        """The gradients, with zeros for entries that no segment named."""
        for to, total in self.wide.items():
            self.result[to] = total
        for to in set(range(self.result.shape[0])) - self.seen:
            self.result[to] = 0
        return self.result

"""The expert layer on the CPU, forward and backward, in tiles of rows.

On a CPU the arithmetic of routing is nothing; first-touch page faults on large fresh tensors cost
more. So each expert's rows go through a few scratch tensors that stay in cache:

    forward   gather -> w_in -> activation -> w_out -> scale by weight -> add into y
    backward  gather x and dy -> w_out^T -> activation' -> w_in^T -> add into dx; add into dw_in, dw_out

Sums over choices are kept in fp32 or wider, with the weights in their own precision, and rounded
once. fp16 computes in fp32: the CPU's fp16 matmul is far slower. Order of addition is fixed, so
results are the same in every run.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..._typing import accumulation_dtype
from ..activations import ACTIVATIONS, Activation

#: Rows per tile. Larger tiles feed the matmul better, smaller ones stay in cache.
TILE = 1024


class _Scratch:
    """Reused row buffers: ``scratch(n)`` gives the first n rows of one of them."""

    def __init__(self, rows: int, dim: int, dtype: torch.dtype):
        self.buffer = torch.empty(rows, dim, dtype=dtype)

    def __call__(self, rows: int) -> Tensor:
        return self.buffer[:rows]


def _tiles(groups: list[list[int]]) -> Iterator[tuple[int, int, int, int]]:
    """(position of the group, first row, last row + 1, matrix) of each tile."""
    for position, (first, last, matrix) in enumerate(groups):
        for start in range(first, last, TILE):
            yield position, start, min(start + TILE, last), matrix


def _activate(act: Activation, z: Tensor, out: Tensor) -> None:
    if act.gated:
        half = z.shape[1] // 2
        act.into(z[:, :half], out)
        out.mul_(z[:, half:])
    else:
        act.into(z, out)


def _cover(z: Tensor, groups: list[list[int]]) -> None:
    """Zeroes the rows of z that no group covers."""
    row = 0
    for first, last, _ in sorted(groups):
        z[row:first].zero_()
        row = max(row, last)
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
    tile = min(TILE, max((last - first for first, last, _ in spans), default=0))
    dim, hidden, out_dim = w_in.shape[2], w_out.shape[1], w_out.shape[2]
    source = x.to(compute).contiguous()
    token, weight = _tokens_and_weights(order, w, total)
    y = torch.zeros(x.shape[0], out_dim, dtype=total)
    z = torch.empty(order.shape[0] if keep else 0, dim, dtype=x.dtype)
    xs, zs, hs = (_Scratch(tile, d, compute) for d in (x.shape[1], dim, hidden))
    ys, scaled = _Scratch(tile, out_dim, compute), _Scratch(tile, out_dim, total)
    direct = keep and compute == x.dtype
    if keep:
        _cover(z, spans)
    for _, first, last, e in _tiles(spans):
        n = last - first
        ids = token[first:last]
        pre = z[first:last] if direct else zs(n)
        torch.mm(torch.index_select(source, 0, ids, out=xs(n)), w_in[e].to(compute), out=pre)
        if b_in is not None:
            pre.add_(b_in[e])
        if keep and not direct:
            z[first:last] = pre
        _activate(act, pre, hs(n))
        torch.mm(hs(n), w_out[e].to(compute), out=ys(n))
        if b_out is not None:
            ys(n).add_(b_out[e])
        y.index_add_(0, ids, torch.mul(ys(n), weight[first:last], out=scaled(n)))
    return y.to(x.dtype), z


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.float16 else dtype


def _tokens_and_weights(order: Tensor, w: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The token ``[N]`` and the weight ``[N,1]`` of each row; rows of no choice get token 0."""
    choice = order.clamp(min=0)
    token = torch.div(choice, max(w.shape[1], 1), rounding_mode="floor")
    return token, w.flatten().index_select(0, choice).to(dtype).unsqueeze(1)


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
    spans, targets = groups.tolist(), written.tolist()
    tile = min(TILE, max((last - first for first, last, _ in spans), default=0))
    dim, hidden, out_dim = w_in.shape[2], w_out.shape[1], w_out.shape[2]
    source, dy = x.to(compute).contiguous(), grad.to(compute).contiguous()
    token, weight = _tokens_and_weights(order, w, compute)
    dx = torch.zeros(x.shape, dtype=total)
    score = torch.zeros(order.shape[0], dtype=total)
    dw_in, dw_out = _Sums(experts, w_in, x.dtype), _Sums(experts, w_out, x.dtype)
    db_in, db_out = _Sums(experts, b_in, x.dtype), _Sums(experts, b_out, x.dtype)
    xs, gs, dxs = (
        _Scratch(tile, x.shape[1], compute),
        _Scratch(tile, out_dim, compute),
        _Scratch(tile, x.shape[1], compute),
    )
    hs, gh, dz = _Scratch(tile, hidden, compute), _Scratch(tile, hidden, compute), _Scratch(tile, dim, compute)
    spare = _Scratch(tile, hidden, compute)
    for position, first, last, e in sorted(_tiles(spans), key=lambda tile: targets[tile[0]]):
        n, to = last - first, targets[position]
        ids, rows, scale = token[first:last], z[first:last].to(compute), weight[first:last]
        x_n, g_n, h_n, gh_n, dz_n = xs(n), gs(n), hs(n), gh(n), dz(n)
        torch.index_select(source, 0, ids, out=x_n)
        torch.index_select(dy, 0, ids, out=g_n)
        torch.mm(g_n, w_out[e].to(compute).t(), out=gh_n)
        _activate(act, rows, h_n)
        torch.sum(torch.mul(gh_n, h_n, out=spare(n)), 1, dtype=total, out=score[first:last])
        if b_out is not None:
            score[first:last] += torch.mv(g_n, b_out[e].to(compute)).to(total)
        gh_n.mul_(scale)
        if act.gated:
            gate, value = rows[:, :hidden], rows[:, hidden:]
            act.backward_into(torch.mul(gh_n, value, out=spare(n)), gate, dz_n[:, :hidden])
            act.into(gate, spare(n))
            torch.mul(gh_n, spare(n), out=dz_n[:, hidden:])
        else:
            act.backward_into(gh_n, rows, dz_n)
        h_n.mul_(scale)
        dw_in.add(to, x_n, dz_n)
        dw_out.add(to, h_n, g_n)
        if b_in is not None:
            db_in.add_rows(to, dz_n)
        if b_out is not None:
            db_out.add_rows(to, g_n * scale)
        torch.mm(dz_n, w_in[e].to(compute).t(), out=dxs(n))
        dx.index_add_(0, ids, dxs(n).to(total))
    kept = index >= 0
    dw = torch.where(kept, score[index.clamp(min=0)] if score.numel() else 0, 0).to(w.dtype)
    return dx.to(x.dtype), dw, dw_in.close(), db_in.close(), dw_out.close(), db_out.close()


class _Sums:
    """Gradients of stacked parameters, summed over tiles that arrive sorted by matrix.

    A half-precision gradient of several tiles is summed in fp32 and rounded once.
    """

    def __init__(self, experts: int, like: Tensor | None, dtype: torch.dtype):
        shape = (0,) if like is None else (experts, *like.shape[1:])
        self.out = torch.empty(shape, dtype=dtype)
        self.total = accumulation_dtype(dtype)
        self.current: int | None = None
        self.sum: Tensor | None = None
        self.next = 0  # matrices before this one are done

    def _start(self, to: int) -> bool:
        """Moves on to matrix `to`; True if this is its first tile."""
        if to == self.current:
            return False
        self._flush()
        self.out[self.next : to] = 0
        self.current, self.next = to, to + 1
        return True

    def _flush(self) -> None:
        if self.sum is not None:
            self.out[self.current] = self.sum
            self.sum = None

    def add(self, to: int, left: Tensor, right: Tensor) -> None:
        """Adds ``left^T @ right`` to matrix `to`."""
        target = self.out[to]
        if self._start(to):
            if left.dtype == target.dtype:
                torch.mm(left.t(), right, out=target)
            else:
                target.copy_(left.t() @ right)
        elif target.dtype == self.total:
            target.addmm_(left.t(), right)
        else:
            self.sum = target.to(self.total) if self.sum is None else self.sum
            self.sum += left.t() @ right

    def add_rows(self, to: int, rows: Tensor) -> None:
        """Adds the sum of `rows` to vector `to`."""
        part = rows.sum(0, dtype=self.total)
        if self._start(to):
            self.sum = part
        elif self.sum is not None:
            self.sum += part

    def close(self) -> Tensor:
        """The gradients, with zeros for matrices that no tile named."""
        self._flush()
        self.out[self.next :] = 0
        return self.out

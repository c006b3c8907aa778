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

import torch
from torch import Tensor

from ..._typing import accumulation_dtype
from ..activations import Activation, form_of
from ..grouped import matmul_dtype
from .cpu_tiles import Batch, Scratch, Stack, Sums, Tile, cut


def _tokens_and_weights(order: Tensor, w: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The token ``[N]`` and the weight ``[N,1]`` of each row; rows of no choice get token 0."""
    choice = order.clamp(min=0)
    token = torch.div(choice, max(w.shape[1], 1), rounding_mode="floor")
    return token, w.flatten().index_select(0, choice).to(dtype).unsqueeze(1)


def _activate(act: Activation, z: Tensor, out: Tensor, spare: Tensor) -> None:
    if not act.gated:
        act.into(z, out)
        return
    gate, value = act.halves(z)
    act.into(gate, out)
    if act.up is not None:
        act.up.into(value, spare)
        value = spare
    out.mul_(value)


def _zero_uncovered(z: Tensor, tiles: list[Tile]) -> None:
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
    act, total, compute = form_of(activation), accumulation_dtype(x.dtype), matmul_dtype(x.dtype, x.device)
    spans, experts, dim = groups.tolist(), w_in.shape[0], w_in.shape[2]
    tiles = cut(spans, [matrix for *_, matrix in spans], experts, compute)
    up, down = Stack(w_in, compute), Stack(w_out, compute)
    source = x.to(compute).contiguous()
    token, weight = _tokens_and_weights(order, w, total)
    y = torch.zeros(x.shape[0], w_out.shape[2], dtype=total)
    z = torch.empty(order.shape[0] if keep else 0, dim, dtype=x.dtype)
    if keep:
        _zero_uncovered(z, tiles)
    hidden = w_out.shape[1]
    xs, zs, hs, ys = (Scratch(tiles, d, compute) for d in (x.shape[1], dim, hidden, w_out.shape[2]))
    spares = Scratch(tiles if act.up else [], hidden, compute)
    scaled = Scratch(tiles, w_out.shape[2], total)
    for tile in tiles:
        x_n, h_n, y_n = tile.gather(source, token, xs(tile)), hs(tile), ys(tile)
        direct = keep and compute == x.dtype and not isinstance(tile, Batch)
        z_n = tile.take(z, x_n) if direct else zs(tile)
        tile.matmul(x_n, up, z_n)
        tile.add_bias(z_n, b_in)
        if keep and not direct:
            tile.put(z_n, z)
        _activate(act, z_n, h_n, spares(tile))
        tile.matmul(h_n, down, y_n)
        tile.add_bias(y_n, b_out)
        weighted = scaled(tile).copy_(y_n).mul_(tile.take(weight, scaled(tile)))
        tile.add_to_tokens(weighted, token, y)
    return y.to(x.dtype), z


class _Through:
    """The activation of a tile, forward and then backward, in scratch rows of its own."""

    def __init__(self, act: Activation, tiles: list[Tile], hidden: int, dtype: torch.dtype):
        self.act = act
        used = (act.gated, act.up is not None, act.interleaved, act.interleaved)
        self.opened, self.raised, self.gates, self.values = (Scratch(tiles if u else [], hidden, dtype) for u in used)

    def forward(self, tile: Tile, z: Tensor, h: Tensor) -> None:
        """Writes ``h = act(z)``."""
        act = self.act
        if not act.gated:
            self.z = z
            act.into(z, h)
            return
        gate, value = act.halves(z)
        if act.interleaved:  # once, as every second number is slow to read
            gate, value = self.gates(tile).copy_(gate), self.values(tile).copy_(value)
        opened = self.opened(tile)
        act.into(gate, opened)
        raised = value if act.up is None else act.up.into(value, self.raised(tile))
        torch.mul(opened, raised, out=h)
        self.halves = gate, value, opened, raised

    def backward(self, gh: Tensor, spare: Tensor, dz: Tensor) -> None:
        """Writes the gradient of z, of that of h; once after `forward`, whose scratch it uses up."""
        act = self.act
        if not act.gated:
            act.backward_into(gh, self.z, dz)
            return
        gate, value, opened, raised = self.halves
        dgate, dvalue = (opened, raised) if act.interleaved else act.halves(dz)
        torch.mul(gh, raised, out=spare)
        torch.mul(gh, opened, out=dvalue)
        if act.up is not None:
            act.up.backward_into(dvalue, value, dvalue)
        act.backward_into(spare, gate, dgate)
        if act.interleaved:
            for half, made in zip(act.halves(dz), (dgate, dvalue), strict=True):
                half.copy_(made)


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
    needs: list[bool],
) -> tuple[Tensor, ...]:
    """Gradients of x, w, w_in, b_in, w_out and b_out; empty where `needs` says no."""
    act, total, compute = form_of(activation), accumulation_dtype(x.dtype), matmul_dtype(x.dtype, x.device)
    dim, hidden, out_dim = w_in.shape[2], w_out.shape[1], w_out.shape[2]
    tiles = cut(groups.tolist(), written.tolist(), experts, compute)
    up_t, down_t = Stack(w_in.transpose(1, 2), compute), Stack(w_out.transpose(1, 2), compute)
    source, dy = x.to(compute).contiguous(), grad.to(compute).contiguous()
    token, weight = _tokens_and_weights(order, w, compute)
    need_x, need_w, *need_parameters = needs
    dx = torch.zeros(x.shape if need_x else (0,), dtype=total)
    score = torch.zeros(order.shape[0] if need_w else 0, dtype=total)
    wanted = zip((w_in, b_in, w_out, b_out), need_parameters, strict=True)
    dw_in, db_in, dw_out, db_out = (Sums(experts, p, tiles) if need and p is not None else None for p, need in wanted)
    xs, gs, dxs = (Scratch(tiles, d, compute) for d in (x.shape[1], out_dim, x.shape[1]))
    hs, ghs, spares, dzs = (Scratch(tiles, d, compute) for d in (hidden, hidden, hidden, dim))
    through = _Through(act, tiles, hidden, compute)
    for tile in tiles:
        x_n, g_n = tile.gather(source, token, xs(tile)), tile.gather(dy, token, gs(tile))
        h_n, gh_n, dz_n, dx_n, spare = hs(tile), ghs(tile), dzs(tile), dxs(tile), spares(tile)
        z_n, scale = tile.take(z, dz_n), tile.take(weight, dz_n)
        tile.matmul(g_n, down_t, gh_n)
        through.forward(tile, z_n, h_n)
        if need_w:
            dot = torch.sum(torch.mul(gh_n, h_n, out=spare), 1, dtype=total)
            if b_out is not None:
                dot += tile.dot_bias(g_n, b_out)
            tile.put(dot, score)
        gh_n.mul_(scale)
        h_n.mul_(scale)
        through.backward(gh_n, spare, dz_n)
        tile.clear_padding(h_n, dz_n)
        if need_x:
            tile.matmul(dz_n, up_t, dx_n)
            tile.add_to_tokens(dx_n.to(total), token, dx)
        if dw_in is not None:
            tile.add_products(x_n, dz_n, dw_in)
        if dw_out is not None:
            tile.add_products(h_n, g_n, dw_out)
        if db_in is not None:
            tile.add_rows(dz_n, db_in)
        if db_out is not None:
            tile.add_rows(g_n.mul_(scale), db_out)
    dw = torch.zeros(0, dtype=w.dtype)
    if need_w:
        rows = index.clamp(min=0).flatten()
        dw = torch.where(index >= 0, score.index_select(0, rows).view(index.shape), 0).to(w.dtype)
    sums = (x.new_zeros(0) if each is None else each.out() for each in (dw_in, db_in, dw_out, db_out))
    return dx.to(x.dtype), dw, *sums

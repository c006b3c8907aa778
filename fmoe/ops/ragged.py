"""Equations that exchange rows without padding: each peer gets as many as its experts were chosen for.

`rows [R,M]` stand by expert. An expert on dp ranks cuts its n rows into dp pieces, of which piece j,
rows ``[n*j//dp, n*(j+1)//dp)``, goes to dp rank ``(j + source) % dp``: small loads then spread over the
ranks. Each of its mp slices gets a copy. Chunk i of d holds rows ``[n*i//d, n*(i+1)//d)`` of each
peer's n. Sizes of messages are needed as numbers; `to_host` alone reads them, once for the whole layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._axes import Axes, Place
from .._errors import refuse
from ..program import Type, operation
from .differentiable import host_numbers
from .rearrange import combine, expand
from .transfers import array_on

Array = Any
_WHAT = "the number of rows for each rank"
_WAY_OUT = 'use a plan with layout="padded" under vmap, compile and export.'


@dataclass(frozen=True)
class Splits:
    """Rows of each peer's experts: ``sends [W,e]`` from here, ``receives [W,e]`` to here."""

    sends: Array
    receives: Array


@operation(
    "cut_sizes",
    lambda sizes, *, ep, mp, dp: [Type(torch.int64, (ep * mp * dp, sizes.dims[0] // ep))],
    shown=("mp", "dp"),
)
def _cut_sizes(place: Place, sizes: Tensor, *, ep: int, mp: int, dp: int) -> Tensor:
    piece = (torch.arange(dp, device=sizes.device) - place.rank) % dp  # which piece each dp rank gets
    n = sizes.view(ep, 1, 1, -1)
    first = torch.div(n * piece.view(1, 1, dp, 1), dp, rounding_mode="floor")
    last = torch.div(n * (piece.view(1, 1, dp, 1) + 1), dp, rounding_mode="floor")
    return (last - first).expand(ep, mp, dp, sizes.shape[0] // ep).flatten(0, 2)


@operation("to_host", lambda sent, received: [Type(torch.int64, (2, *sent.dims), kind="host")])
def _to_host(place: Place, sent: Tensor, received: Tensor) -> Splits:
    if torch.compiler.is_compiling():
        refuse("to_host", [f"{_WHAT} is needed as a number, and inside a transform it has none: {_WAY_OUT}"])
    with host_numbers(_WHAT, _WAY_OUT):
        both = torch.stack([sent, received]).tolist()
    sends, receives = np.array(both, dtype=np.int64).reshape(2, *sent.shape)
    return Splits(sends, receives)


def chunk_splits(sizes: Array, chunk: int, chunks: int) -> list[int]:
    """Rows of each peer in one chunk."""
    return [int(n) for n in sizes * (chunk + 1) // chunks - sizes * chunk // chunks]


def chunk_receives(receives: Array, chunk: int, chunks: int) -> Array:
    """``[W,e]``: rows of each peer's experts in one chunk."""
    last = receives.cumsum(1)
    n = last[:, -1:]
    low, high = n * chunk // chunks, n * (chunk + 1) // chunks
    return np.clip(last, low, high) - np.clip(last - receives, low, high)


def _is_plain(axes: Axes) -> bool:
    return axes.mp == 1 and axes.dp == 1


def fan_out_rows(place: Place, rows: Tensor, plan: Splits) -> Tensor:
    """``[R,M]`` by expert -> ``[S,M]`` by peer."""
    count = int(plan.sends.sum())
    if _is_plain(place.axes):
        return rows[:count]
    index = array_on(_send_index(place, rows.shape[0], plan), rows.device)
    return expand(rows, index, torch.ones_like(index, dtype=rows.dtype), count)


def fan_in_rows(place: Place, back: Tensor, plan: Splits) -> Tensor:
    """``[S,M]`` by peer -> rows by expert, the copies of each added up."""
    if _is_plain(place.axes):
        return back
    axes = place.axes
    rows = int(plan.sends.reshape(axes.ep, axes.mp, -1)[:, 0].sum())
    index = array_on(_send_index(place, rows, plan), back.device)
    return combine(back, index, torch.ones_like(index, dtype=back.dtype))


def _send_index(place: Place, rows: int, plan: Splits) -> Tensor:
    """``[R,mp]``: where each row of an expert stands in what is sent, -1 past the last row."""
    axes = place.axes
    sends = plan.sends.reshape(axes.ep, axes.mp, axes.dp, -1)
    start = (plan.sends.ravel().cumsum() - plan.sends.ravel()).reshape(sends.shape)
    index = np.full((rows, axes.mp), -1, dtype=np.int64)
    row = 0
    for ep in range(axes.ep):
        for e in range(sends.shape[3]):
            for j in range(axes.dp):
                q = (j + place.rank) % axes.dp
                n = int(sends[ep, 0, q, e])
                for m in range(axes.mp):
                    first = int(start[ep, m, q, e])
                    index[row : row + n, m] = np.arange(first, first + n)
                row += n
    return torch.from_numpy(index)


def split_rows(send: Tensor, sizes: Array, chunks: int) -> tuple[Tensor, ...]:
    """Cuts each peer's rows into chunks."""
    index = array_on(torch.from_numpy(_chunk_order(sizes, chunks)), send.device)
    counts = [sum(chunk_splits(sizes, i, chunks)) for i in range(chunks)]
    return send.index_select(0, index).split(counts)


def join_rows(parts: Sequence[Tensor], sizes: Array) -> Tensor:
    """Puts the chunks of each peer's rows together again."""
    order = _chunk_order(sizes, len(parts))
    back = np.empty_like(order)
    back[order] = np.arange(order.size)
    return torch.cat(list(parts)).index_select(0, array_on(torch.from_numpy(back), parts[0].device))


def _chunk_order(sizes: Array, chunks: int) -> Array:
    """For each row in the order of chunks, then peers, its place in the order of peers."""
    first = sizes.cumsum() - sizes
    pieces = [
        np.arange(s + n * i // chunks, s + n * (i + 1) // chunks)
        for i in range(chunks)
        for s, n in zip(first, sizes, strict=True)
    ]
    return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int64)


def expert_order(receives: Array) -> tuple[Tensor, Tensor]:
    """``[R,1]`` and ``[e,3]``: for rows by peer then expert, their places by expert, and the experts' groups."""
    ranks, experts = receives.shape
    by_expert = receives.T.ravel()  # expert-major
    start = (by_expert.cumsum() - by_expert).reshape(experts, ranks).T.ravel()  # of each (peer, expert) block
    sizes = receives.ravel()
    within = np.arange(sizes.sum()) - np.repeat(sizes.cumsum() - sizes, sizes)
    index = np.repeat(start, sizes) + within
    last = receives.sum(0).cumsum()
    groups = np.stack([last - receives.sum(0), last, np.arange(experts)], axis=1)
    return torch.from_numpy(index.astype(np.int64)).unsqueeze(1), torch.from_numpy(groups.astype(np.int64))

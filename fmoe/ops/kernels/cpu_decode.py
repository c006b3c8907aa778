"""The expert layer on the CPU for a handful of rows, as generation makes one token at a time.

There the arithmetic is nothing and reading the weights takes all the time, so what is left to save is the number
of operations: this is the layer in the fewest, without the bookkeeping of `cpu_ffn` and without a gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..._errors import refuse
from ..._typing import accumulation_dtype
from ..activations import form_of
from .cpu_tiles import few_rows_matmul

#: Choices up to which it is faster than `cpu_ffn`, whose batched matmuls then win in bf16.
MOST_CHOICES = 32


def decode_cpu(
    x: Tensor,
    w: Tensor,
    w_in: Tensor,
    b_in: Tensor | None,
    w_out: Tensor,
    b_out: Tensor | None,
    experts: Tensor,
    activation: str,
) -> Tensor:
    """The same function as `ffn` with every choice kept: ``[T,M], [T,K] -> [T,M]``.

    Args:
        x: ``[T,M]``.
        w: ``[T,K]``.
        w_in: ``[E,M,D]``.
        b_in: ``[E,D]`` or None.
        w_out: ``[E,H,M]``.
        b_out: ``[E,M]`` or None.
        experts: ``[T,K]``.
        activation: a name that `form_of` knows.

    Raises:
        ValueError: if an expert is not from 0 to E-1.
    """
    ids, tokens, total = experts.flatten().tolist(), len(x), accumulation_dtype(x.dtype)
    if min(ids) < 0 or max(ids) >= len(w_in):
        refuse("decode_cpu", [f"experts has ids from {min(ids)} to {max(ids)}, but there are E={len(w_in)}."])
    weights, chosen = w.flatten().to(total), experts.flatten()
    if tokens == 1:  # each expert has the one row
        spans = [(e, row, row + 1) for row, e in enumerate(ids)]
        rows = x.expand(len(ids), -1)
    else:
        order = sorted(range(len(ids)), key=ids.__getitem__)
        spans = _spans([ids[choice] for choice in order])
        by_expert = torch.tensor(order, device=x.device)
        token = by_expert // experts.shape[1]
        weights, chosen = weights.index_select(0, by_expert), chosen.index_select(0, by_expert)
        rows = x.index_select(0, token)
    z = torch.cat([few_rows_matmul(rows[a:b], w_in[e]) for e, a, b in spans])
    if b_in is not None:
        z = z + b_in.index_select(0, chosen)
    h = form_of(activation)(z)
    made = torch.cat([few_rows_matmul(h[a:b], w_out[e]) for e, a, b in spans])
    if b_out is not None:
        made = made + b_out.index_select(0, chosen)
    if tokens == 1:
        return (weights.unsqueeze(0) @ made.to(total)).to(x.dtype)
    y = made.new_zeros(tokens, made.shape[1], dtype=total)
    return y.index_add(0, token, made.to(total) * weights.unsqueeze(1)).to(x.dtype)


def _spans(ids: list[int]) -> list[tuple[int, int, int]]:
    """Runs of equal ids: (id, first, last + 1)."""
    ends = [i for i in range(1, len(ids)) if ids[i] != ids[i - 1]]
    return [(ids[a], a, b) for a, b in zip([0, *ends], [*ends, len(ids)], strict=True)]

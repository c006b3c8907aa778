"""Grouped matmuls on a GPU: products of rows, and sums of products over the rows of a matrix.

Nothing here reads a number on the host. `Pass` is what the products of one pass over the rows share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor

from ..activations import INTERLEAVED, form_of
from .choice import Blocks, Target, target, why_not_library
from .cuda_rows import combine_into
from .launch import cdiv, interpreted, launch, unit_rows

#: Row tiles that share columns of a matrix in the cache.
GROUP_M = 8
PLAIN = "plain"
_FUNCTIONS = {"relu": 0, "gelu": 1, "silu": 2, "swiglu": 2, "geglu": 1, PLAIN: 3, "swiglu_oss": 4}


def activation_constants(activation: str) -> dict[str, Any]:
    """What kernels take of an activation: the number of its function, and where its halves stand."""
    form = None if activation == PLAIN else form_of(activation)
    return {
        "ACT": _FUNCTIONS[activation.removesuffix(INTERLEAVED)],
        "GATED": form is not None and form.gated,
        "INTERLEAVED": form is not None and form.interleaved,
    }


@dataclass(frozen=True)
class Pass:
    """Rows in groups on their way through kernels: ``groups [G,3]`` and the tiles that cover the rows."""

    to: Target
    groups: Tensor
    rows: int
    matrices: int
    block: int
    tiles: Tensor

    @classmethod
    def over(cls, to: Target, groups: Tensor, rows: int, matrices: int) -> Pass:
        """Makes the tile map, in one launch."""
        groups = groups.contiguous()
        count = groups.shape[0]
        block = to.blocks("rows", rows, count).m
        num_tiles = num_tiles_of(rows, count, block)
        tiles = torch.empty(3, num_tiles, dtype=torch.int32, device=groups.device)
        launch(
            "gemm.tile_map", (cdiv(num_tiles, 32),), groups, tiles, rows, count, matrices, num_tiles,
            BLOCK_M=block, BLOCK_T=32, BLOCK_S=128, warps=4,
        )  # fmt: skip
        return cls(to, groups, rows, matrices, block, tiles)

    @property
    def num_tiles(self) -> int:
        """How many tiles are launched for each column tile; some have no rows."""
        return self.tiles.shape[1]

    def blocks(self, kernel: str) -> Blocks:
        """The configuration of a kernel in this pass."""
        return self.to.blocks(kernel, self.rows, self.groups.shape[0])

    def product(
        self,
        a: Tensor,
        w: Tensor,
        bias: Tensor | None = None,
        *,
        order: Tensor | None = None,
        choices: int = 1,
        activation: str = PLAIN,
        z: Tensor | None = None,
    ) -> Tensor:
        """``act(a[row(r)] @ w[e] + bias[e])`` as ``[R,columns]``; `z` is filled with what is activated.

        With `order`, row(r) is the token of row r.
        """
        gated = activation != PLAIN and form_of(activation).gated
        out = a.new_empty(self.rows, w.shape[2] // 2 if gated else w.shape[2])
        self._launch(a, w, bias, out, order, choices, activation, z)
        return out

    def to_tokens(
        self, a: Tensor, w: Tensor, bias: Tensor | None, index: Tensor, order: Tensor, weight: Tensor | None
    ) -> Tensor:
        """``out[t] = sum over the choices of t of weight * (a[r] @ w[e] + bias[e])``; no weight is 1.

        A token of one choice needs no sum: its row is stored where it belongs, already weighted.
        """
        library = bias is None and not why_not_grouped_mm(self.to, a, w, self.groups)
        if index.shape[1] != 1 or library:
            return combine_into(self.plain_product(a, w) if library else self.product(a, w, bias), index, weight)
        (tokens, choices), width = index.shape, w.shape[2]
        out = a.new_empty(tokens, width)
        self._launch(a, w, bias, out, order, choices, PLAIN, None, scatter=True, weight=weight)
        launch(
            "rows.zero_dropped", (cdiv(tokens, 16),), index.contiguous(), out, tokens, self.rows, width,
            BLOCK_T=16, BLOCK_D=64, warps=4,
        )  # fmt: skip
        return out

    def _launch(
        self,
        a: Tensor,
        w: Tensor,
        bias: Tensor | None,
        out: Tensor,
        order: Tensor | None,
        choices: int,
        activation: str,
        z: Tensor | None,
        *,
        scatter: bool = False,
        weight: Tensor | None = None,
    ) -> None:
        a = unit_rows(a)
        inner, columns = w.shape[1], out.shape[1]
        act = activation_constants(activation)
        blocks = self.blocks("up" if act["GATED"] else "rows" if activation == PLAIN else "act")
        tokens = out.shape[0] if scatter else a.shape[0]
        launch(
            "gemm.rows_gemm", (self.num_tiles * cdiv(columns, blocks.n),),
            a, w, w if bias is None else bias.contiguous(), out if z is None else z, out,
            out if weight is None else weight.contiguous(), self.groups if order is None else order, self.tiles,
            inner, columns, self.num_tiles, tokens * choices, choices, a.stride(0), *w.stride(),
            GATHER=order is not None and not scatter, SCATTER=scatter, SCALE=weight is not None,
            BIAS=bias is not None, SAVE_Z=z is not None, **act,
            **self.constants(blocks, inner),
        )  # fmt: skip

    def constants(self, blocks: Blocks, inner: int) -> dict[str, Any]:
        """Arguments that every matmul over rows takes."""
        return {
            "EVEN_K": inner % blocks.k == 0,
            "BLOCK_M": self.block,
            "BLOCK_N": blocks.n,
            "BLOCK_K": blocks.k,
            **dot_constants(self.to, blocks),
        }

    def plain_product(self, a: Tensor, w: Tensor) -> Tensor:
        """``a[r] @ w[e]``; rows of no group hold anything."""
        if why_not_grouped_mm(self.to, a, w, self.groups):
            return self.product(a, w)
        return nnf.grouped_mm(a, w, offs=self.groups[:, 1].to(torch.int32))


def dot_constants(to: Target, blocks: Blocks) -> dict[str, Any]:
    """Arguments that every matmul takes."""
    return {
        "PRECISION": to.precision,
        "UPCAST": interpreted(),
        "GROUP_M": GROUP_M,
        "warps": blocks.warps,
        "stages": blocks.stages,
    }


def num_tiles_of(rows: int, groups: int, block: int) -> int:
    """A bound on the tiles of groups and of the gaps around them, whatever their sizes."""
    return rows // block + min(2 * groups + 1, rows)


def why_not_grouped_mm(to: Target, a: Tensor, w: Tensor, groups: Tensor) -> str:
    """`why_not_library` for tensors, whose memory must fit too."""
    why = why_not_library(to, a.dtype, a.shape[0], groups.shape[0], w.shape[0], *w.shape[1:])
    if not why and not (_aligned(a) and _aligned(w)):
        return "takes rows that begin at multiples of 16 bytes"
    return why


def _aligned(t: Tensor) -> bool:
    """Whether one of the last two dims is contiguous, and all else starts at multiples of 16 bytes."""
    *outer, last = t.stride()
    if last != 1:
        *outer, last = (*outer[:-1], last, outer[-1])
    whole = 16 // t.element_size()
    return last == 1 and t.data_ptr() % 16 == 0 and all(s > 0 and s % whole == 0 for s in outer)


def weights_product(
    to: Target,
    a: Tensor,
    b: Tensor,
    groups: Tensor,
    written: Tensor,
    matrices: int,
    rows: int,
    *,
    order: Tensor | None = None,
    gathered: str = "",
    choices: int = 1,
) -> Tensor:
    """``out[e] = sum of a[row(r)]^T b[row(r)]`` as ``[E,P,Q]``; `gathered` is the side ``"a"`` or ``"b"`` that is."""
    a, b, groups = unit_rows(a), unit_rows(b), groups.contiguous()
    height, width, count = a.shape[1], b.shape[1], groups.shape[0]
    blocks = to.blocks("weights", rows, count)
    out = a.new_empty(matrices, height, width)
    launch(
        "backward.weight_gemm", (matrices * cdiv(height, blocks.m) * cdiv(width, blocks.n),),
        a, b, out, groups if order is None else order, groups, written,
        rows, height, width, count, (b if gathered == "b" else a).shape[0] * choices, choices,
        a.stride(0), b.stride(0), written.stride(0),
        GATHER_A=gathered == "a", GATHER_B=gathered == "b",
        BLOCK_M=blocks.m, BLOCK_N=blocks.n, BLOCK_K=blocks.k, BLOCK_G=128, **dot_constants(to, blocks),
    )  # fmt: skip
    return out


def gmm_cuda(x: Tensor, w: Tensor, groups: Tensor) -> Any:
    """``[R,F]``; NotImplemented where the reference is to run."""
    to, _ = target(x.device, x.dtype, w.dtype, alike=True)
    if to is None:
        return NotImplemented
    if 0 in (*x.shape, *w.shape, groups.shape[0]):
        return x.new_zeros(x.shape[0], w.shape[2])
    over = Pass.over(to, groups, x.shape[0], w.shape[0])
    if why_not_grouped_mm(to, x, w, groups):
        return over.product(x, w)
    out = over.plain_product(x, w)
    launch(
        "gemm.zero_gaps", (over.num_tiles,), out, over.tiles, out.shape[1], over.num_tiles,
        BLOCK_M=over.block, BLOCK_D=64, warps=4,
    )  # fmt: skip
    return out


def gmm_t_cuda(dy: Tensor, w: Tensor, groups: Tensor) -> Any:
    """``[R,D]``; NotImplemented where the reference is to run."""
    return gmm_cuda(dy, w.transpose(1, 2), groups)


def gmm_dw_cuda(x: Tensor, dy: Tensor, groups: Tensor, experts: int) -> Any:
    """``[E,D,F]``; NotImplemented where the reference is to run."""
    to, _ = target(x.device, x.dtype, dy.dtype, alike=True)
    if to is None:
        return NotImplemented
    if 0 in (*x.shape, dy.shape[1], groups.shape[0], experts):
        return x.new_zeros(experts, x.shape[1], dy.shape[1])
    groups = groups.contiguous()
    return weights_product(to, x, dy, groups, groups[:, 2], experts, x.shape[0])

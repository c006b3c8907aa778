"""Dispatched tokens: a small expression that `combine` evaluates in one fused operation."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from .._errors import refuse
from .._typing import ExpertFn
from .._value import static, value
from ..ops.activations import INTERLEAVED, form_of
from ..ops.differentiable import host_numbers
from ..ops.ffn import gather_rows, up
from ..ops.rearrange import combine
from ..values import ExpertParams


@value
class Tokens:
    """Tokens on their way through the experts, opaque to the user.

    Nothing moves before it must: `dispatch` notes where each row comes from, `expert_apply` notes what
    the experts will do, and `combine` runs both at once. Reading `data` runs them there and then.

    In the *ragged* layout `data` is ``[N,M]``, sorted by expert, N = T*K; rows past the sum of
    `group_sizes` are exactly 0. In the *padded* layout it is ``[E,C,M]``; slots past an expert's
    `group_sizes` are exactly 0.

    Attributes:
        x: ``[T,M]`` the tokens, while the rows are not gathered.
        rows: the data itself, once an expert function of the user has made it.
        experts: parameters of the experts to apply, once `expert_apply` has been called.
        index: ``[T,K]`` the ragged row of each choice, -1 if dropped.
        order: ``[N]`` the choice ``t*K + k`` of each ragged row, -1 past the last.
        groups: ``[E,3]`` first row, last row + 1 and number of each expert.
        layout: ``"ragged"`` or ``"padded"``.
        activation: name of the activation to apply.
        capacity: slots per expert that suffice, or None when that depends on the data.
        dtype: dtype of the result of `combine`.
        fn: the user's expert function to apply, under a spec.
        spec: the sharding spec under which `combine` will exchange and run all of it; `data` is then
            not to be read.
    """

    index: Tensor
    order: Tensor
    groups: Tensor
    x: Tensor | None = None
    rows: Tensor | None = None
    experts: Any = None
    layout: str = static(default="ragged")
    activation: str | None = static(default=None)
    capacity: int | None = static(default=None)
    dtype: torch.dtype = static(default=torch.float32)
    fn: ExpertFn | None = static(default=None)
    spec: Any = static(default=None)

    @property
    def group_sizes(self) -> Tensor:
        """``[E]`` int64: rows of each expert, after drops."""
        return self.groups[:, 1] - self.groups[:, 0]

    @property
    def num_experts(self) -> int:
        """E."""
        return self.groups.shape[0]

    @property
    def held(self) -> Tensor:
        """The tensor that holds the features: ``x``, or ``rows`` once they are made."""
        held = self.x if self.rows is None else self.rows
        assert held is not None
        return held

    @property
    def dim(self) -> int:
        """M of `data`."""
        return self.held.shape[-1] if self.experts is None else self.experts.w_out.shape[-1]

    @property
    def data(self) -> Tensor:
        """The rows as they stand in the layout: ``[N,M]`` or ``[E,C,M]``.

        Raises:
            ValueError: under a spec, where rows are on their way between ranks.
        """
        if self.spec is not None:
            refuse("Tokens.data", ["these tokens were dispatched under a spec: only combine can read them."])
        if self.rows is not None:
            return self.rows
        if self.layout == "ragged":
            return self.ragged_rows()
        return self._padded(self.ragged_rows())

    def ragged_rows(self) -> Tensor:
        """``[N,M]``: gathered, and through the experts if they were applied."""
        if self.rows is not None:
            return self.rows if self.layout == "ragged" else self._unpadded(self.rows)
        assert self.x is not None
        rows = gather_rows(self.x, self.index, self.order.shape[0])
        if self.experts is None:
            return rows
        assert self.activation is not None
        return apply_experts(rows, self.experts, self.activation, self.groups)

    def with_rows(self, ragged: Tensor) -> Tokens:
        """These tokens with ``[N,M]`` rows in place of what they held."""
        rows = ragged if self.layout == "ragged" else self._padded(ragged)
        return dataclasses.replace(self, x=None, experts=None, rows=rows)

    def any_row(self) -> Tensor:
        """``[M]``: the first finite row that is dispatched, without gradient; ones if there is none."""
        if self.x is not None and self.experts is None:
            rows, dispatched = self.x.detach(), (self.index >= 0).any(1)
        else:
            rows, dispatched = self.ragged_rows().detach(), self.order >= 0
        if not rows.shape[0]:
            return rows.new_ones(rows.shape[1])
        usable = (dispatched & rows.isfinite().all(1)).to(torch.int64)
        first = usable.argmax(0, keepdim=True)
        return torch.where(usable.gather(0, first) > 0, rows.index_select(0, first), 1).squeeze(0)

    def _padded(self, ragged: Tensor) -> Tensor:
        rows = gather_rows(ragged, self.padded_slot(), self.num_experts * self.width())
        return rows.unflatten(0, (self.num_experts, self.width()))

    def _unpadded(self, padded: Tensor) -> Tensor:
        slot = self.padded_slot()
        return combine(padded.flatten(0, 1), slot, torch.ones_like(slot, dtype=padded.dtype))

    def width(self) -> int:
        """C, the slots per expert of the padded layout."""
        if self.capacity is not None:
            return self.capacity
        with host_numbers("the largest load of an expert", "give gate a capacity factor, or as_needed with a maximum."):
            return int(self.group_sizes.max()) if self.num_experts else 0

    def padded_slot(self) -> Tensor:
        """``[N,1]``: the slot ``e*C + c`` of each ragged row, -1 past the last."""
        row = torch.zeros_like(self.order) + torch.arange(self.order.shape[0], device=self.order.device)
        expert = torch.searchsorted(self.groups[:, 1].contiguous(), row, right=True).clamp(max=self.num_experts - 1)
        slot = expert * self.width() + row - self.groups[:, 0][expert]
        return torch.where(self.order >= 0, slot, -1).unsqueeze(1)


def apply_experts(rows: Tensor, experts: ExpertParams, activation: str, groups: Tensor) -> Tensor:
    """``[N,M] -> [N,M]``: each row through its expert, by operations that keep every row."""
    p, activation = flat_experts(experts, activation)
    hidden = form_of(activation)(up(rows, p.w_in, p.b_in, groups))
    return up(hidden, p.w_out, p.b_out, groups)


def flat_experts(experts: ExpertParams, activation: str) -> tuple[ExpertParams, str]:
    """The parameters as kernels read them, ``w_in [E,M,D]`` and ``b_in [E,D]`` with D = H or 2H, and the activation.

    Weights whose halves lie interleaved in memory are not copied: they are read as they lie, by the
    interleaved form of the activation.
    """
    w_in, b_in = experts.w_in, experts.b_in
    if w_in.dim() != 4:
        return experts, activation
    _, _, half, step = w_in.stride()
    if w_in.shape[3] > 1 and step == 2 * half:
        w_in, activation = w_in.transpose(2, 3), activation + INTERLEAVED
        b_in = None if b_in is None else b_in.transpose(1, 2)
    flat = ExpertParams(w_in.flatten(2), experts.w_out, None if b_in is None else b_in.flatten(1), experts.b_out)
    return flat, activation

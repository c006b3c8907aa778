"""Everything about one MoE layer that is not a tensor."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch

from .._errors import is_whole, refuse
from .._typing import ExpertFn
from ..ops.activations import ACTIVATIONS
from .capacity import Capacity, as_capacity
from .dispatch import LAYOUTS
from .routers.base import Router
from .routers.topk import TopK


@dataclass(frozen=True)
class MoEConfig:
    """Sizes and choices of one MoE layer, checked once.

    Args:
        num_experts: E.
        model_dim: M.
        hidden_dim: H of each expert.
        router: for example ``TopK(2)``.
        activation: of the built-in experts: relu, gelu, silu, swiglu, geglu or swiglu_oss.
        bias: whether the built-in experts have biases.
        fn: your own expert function (see `expert_apply`); `init` then makes the router only, and
            ``params.experts`` is yours.
        capacity: None to drop nothing, a capacity factor, ``"as_needed"``, or a `Capacity`.
        layout: ``"ragged"`` or ``"padded"``; by default ragged without a capacity, padded with one.
        dtype: dtype the experts compute in; by default that of x. The parameters keep theirs.

    Raises:
        ValueError: if a value is out of range.

    Example:
        >>> config = MoEConfig(num_experts=8, model_dim=512, hidden_dim=1024)
        >>> config.replace(router=TopK(4)).router.choices(8)
        4
    """

    num_experts: int
    model_dim: int
    hidden_dim: int
    router: Router = field(default_factory=lambda: TopK(2))
    activation: str = "swiglu"
    bias: bool = False
    fn: ExpertFn | None = None
    capacity: Capacity | float | Fraction | str | None = None
    layout: str | None = None
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        problems = []
        for name in ("num_experts", "model_dim", "hidden_dim"):
            size = getattr(self, name)
            if not is_whole(size, 1):
                problems.append(f"{name}={size!r}, but it must be a whole number of at least 1.")
        if not isinstance(self.router, Router):
            problems.append(f"router={self.router!r}, but it must be a router, such as fmoe.TopK(2).")
        else:
            if is_whole(self.num_experts, 1):
                problems += self.router.misfits(self.num_experts)
            if self.capacity is not None and not self.router.takes_capacity:
                problems.append(
                    f"capacity={self.capacity!r}, but {type(self.router).__name__} gives every expert its number of "
                    "tokens: leave it out."
                )
        if self.activation not in ACTIVATIONS:
            names = ", ".join(map(repr, ACTIVATIONS))
            problems.append(f"activation={self.activation!r}: choose one of {names}, or give your own fn.")
        if self.layout is not None and self.layout not in LAYOUTS:
            problems.append(f"layout={self.layout!r}: choose one of {', '.join(map(repr, LAYOUTS))}.")
        if self.dtype is not None and not (isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point):
            problems.append(f"dtype={self.dtype!r}, but it must be a floating dtype or None.")
        refuse("MoEConfig", problems)
        object.__setattr__(self, "capacity", as_capacity(self.capacity))

    def replace(self, **changes: Any) -> MoEConfig:
        """A copy with some fields changed, checked again."""
        return dataclasses.replace(self, **changes)

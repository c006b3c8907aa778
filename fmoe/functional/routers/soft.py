"""Soft mixtures: no choice at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..._errors import refuse
from .base import Router, whole


@dataclass(frozen=True)
class SoftMoE(Router):
    """Every slot of every expert is a mixture of all tokens of a sequence, every token one of all slots.

    With L tokens X ``[L,M]`` of a sequence, E experts of p slots each, and unit rows and columns,

        logits = scale * unit(X) @ unit(weight)             [L, E*p]
        D = softmax of logits over tokens                   slots  = D^T X
        C = softmax of logits over slots                    Y      = C expert(slots)

    There is no routing, so `gate` does not take it: give it to `moe`, or to `functional.soft_moe`. Not
    causal. Each sequence (all dims of x but the last two) is mixed by itself.

    Args:
        slots_per_expert: p, slots per expert and sequence.

    Raises:
        ValueError: if it is not a whole number of at least 1.

    Example:
        >>> import fmoe, torch
        >>> config = fmoe.MoEConfig(num_experts=4, model_dim=8, hidden_dim=16, router=SoftMoE(2))
        >>> y, aux = fmoe.moe(fmoe.init(config, seed=0), torch.ones(3, 5, 8), config)
        >>> y.shape, aux.counts
        (torch.Size([3, 5, 8]), tensor([6, 6, 6, 6]))

    References:
        Puigcerver et al., "From sparse to soft mixtures of experts" (arXiv 2308.00951, section 2.1).
    """

    slots_per_expert: int = 1

    whole_batch: ClassVar[bool] = True
    causal: ClassVar[bool] = False
    takes_capacity: ClassVar[bool] = False
    routes: ClassVar[bool] = False

    def __post_init__(self) -> None:
        refuse("SoftMoE", whole("slots_per_expert", self.slots_per_expert))

    def choices(self, num_experts: int) -> int:
        """A row of an expert is one slot's."""
        return 1

    def rows(self, tokens: int, num_experts: int) -> int:
        """E*p for a sequence of any length."""
        return num_experts * self.slots_per_expert

    def parameters(self, model_dim: int, num_experts: int) -> dict[str, tuple[int, ...]]:
        """A direction for each slot, and one scale."""
        return {"weight": (model_dim, num_experts, self.slots_per_expert), "scale": ()}

    def initial(self) -> dict[str, float]:
        """The scale at first."""
        return {"scale": 1.0}

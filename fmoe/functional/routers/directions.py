"""Softmax routers over other logits than one product: cosines, and prototypes of experts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..._errors import refuse
from ..._typing import accumulation_dtype
from ...ops.routing import top_k
from ...values import RouterParams
from .base import (
    Given,
    Router,
    Scope,
    Scores,
    adds_up,
    flag,
    is_number,
    k_misfits,
    k_problems,
    linear,
    option,
    pick,
    shares,
    unit,
    whole,
)  # fmt: skip


@dataclass(frozen=True)
class Cosine(Router):
    """Top-k of cosines, which no token's length and no expert's norm can sway.

        z = cos(x @ projection, weight[:, e]) / tau        weights: softmax over the chosen (k > 1)

    tau is `temperature`, or ``exp(-log_scale)`` where it is learned, and never below 0.01. A row of
    zeros has cosine 0 with everything.

    Args:
        k: experts per token, from 1 to E.
        dim: P of ``projection [M,P]`` and ``weight [P,E]``; None for no projection and ``weight [M,E]``.
        temperature: at first, or for good; at least 0.01.
        learned: whether the parameters hold a ``log_scale``.
        normalize: as in `TopK`.
        scope: as in `TopK`.

    Raises:
        ValueError: if a value is out of range.

    Example:
        >>> import fmoe
        >>> params = fmoe.RouterParams(torch.tensor([[3.0, 0.0], [0.0, 0.1]]))
        >>> router = Cosine(1, dim=None, temperature=1.0, learned=False)
        >>> fmoe.functional.gate(params, torch.tensor([[2.0, 9.0]]), router).experts
        tensor([[1]])

    References:
        X-MoE (arXiv 2204.09179, section 3); Tutel (arXiv 2206.03382, section 5.3).
    """

    k: int
    dim: int | None = 256
    temperature: float = 0.5
    learned: bool = True
    normalize: bool | None = None
    scope: Scope = "global"

    FLOOR: ClassVar[float] = 0.01

    def __post_init__(self) -> None:
        problems = k_problems(self.k) + ([] if self.dim is None else whole("dim", self.dim))
        if not is_number(self.temperature) or self.temperature < self.FLOOR:
            problems.append(
                f"temperature={self.temperature!r}, but it must be a number of at least {self.FLOOR}: logits are "
                "cosines divided by it."
            )
        if self.normalize not in (True, False, None):
            problems.append(f"normalize={self.normalize!r}: choose True, False or None.")
        refuse("Cosine", problems + flag("learned", self.learned) + option("scope", self.scope, Scope))

    def choices(self, num_experts: int) -> int:
        """K."""
        return self.k

    def misfits(self, num_experts: int) -> list[str]:
        """That there are k experts."""
        return k_misfits(self.k, num_experts)

    def parameters(self, model_dim: int, num_experts: int) -> dict[str, tuple[int, ...]]:
        """The experts' directions, the projection, and the scale if it is learned."""
        leaves: dict[str, tuple[int, ...]] = {"weight": (self.dim or model_dim, num_experts)}
        if self.dim is not None:
            leaves["projection"] = (model_dim, self.dim)
        return {**leaves, "log_scale": ()} if self.learned else leaves

    def initial(self) -> dict[str, float]:
        """The scale at first."""
        return {"log_scale": -math.log(self.temperature)}

    def scores(self, params: RouterParams, given: Given) -> Scores:
        """Cosines over the temperature."""
        dtype = accumulation_dtype(given.x.dtype, params.weight.dtype)
        x = given.x if params.projection is None or self.dim is None else linear(given.x, params.projection)
        cosines = linear(unit(x.to(dtype), 1), unit(params.weight.to(dtype), 0))
        if self.learned:
            assert params.log_scale is not None
            logits = cosines * params.log_scale.to(dtype).clamp(max=-math.log(self.FLOOR)).exp()
        else:
            logits = cosines / self.temperature
        probs = logits.softmax(dim=-1)
        return Scores(logits, logits, probs, probs)

    def weigh(self, scores: Scores, experts: Tensor) -> Tensor:
        """The softmax of the chosen."""
        weights = pick(scores.gates, experts)
        return shares(weights, experts) if adds_up(self.normalize, self.k) else weights


@dataclass(frozen=True)
class Prototypes(Router):
    """k top-1 gates, each over its own part of the experts.

    The experts are split into k prototypes of E/k in a row. A token goes to the best expert of each
    prototype, weighed by the softmax inside that prototype; the losses use these softmaxes over k.
    (Gates that take turns need no router of their own: give `gate` the parameters and the router that
    are wanted at that step.)

    Args:
        k: prototypes; divides E.
        scope: as in `TopK`.

    Raises:
        ValueError: if a value is out of range.

    Example:
        >>> import fmoe
        >>> params = fmoe.RouterParams(torch.tensor([[3.0, 4.0, 0.0, -1.0]]))
        >>> fmoe.functional.gate(params, torch.ones(1, 1), Prototypes(2)).experts
        tensor([[1, 2]])

    References:
        M6-T (arXiv 2105.15082, section 3.2).
    """

    k: int
    scope: Scope = "global"

    def __post_init__(self) -> None:
        refuse("Prototypes", k_problems(self.k) + option("scope", self.scope, Scope))

    def choices(self, num_experts: int) -> int:
        """K."""
        return self.k

    def misfits(self, num_experts: int) -> list[str]:
        """That prototypes have equally many experts."""
        if num_experts % self.k == 0:
            return []
        return [f"k={self.k} prototypes, but num_experts={num_experts} is not a multiple of it."]

    def scores(self, params: RouterParams, given: Given) -> Scores:
        """A softmax inside each prototype."""
        logits = linear(given.x, params.weight)
        gates = logits.unflatten(1, (self.k, -1)).softmax(dim=-1).flatten(1)
        return Scores(logits, logits, gates, gates / self.k)

    def select(self, scores: Scores, given: Given) -> Tensor:
        """The best of each prototype."""
        tokens, num_experts = scores.ranking.shape
        each = num_experts // self.k
        best = top_k(scores.ranking.detach().reshape(tokens * self.k, each), 1).view(tokens, self.k)
        return best + torch.arange(0, num_experts, each, device=best.device)

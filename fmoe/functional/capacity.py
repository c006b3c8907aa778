"""How many rows an expert keeps per group of tokens."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal, get_args

import torch
from torch import Tensor

from .._errors import is_whole, refuse

Priority = Literal["token", "batch"]
_AS_NEEDED = "as_needed"
_DIGITS = 10**6  # factors are exact to six decimals


@dataclass(frozen=True)
class Capacity:
    """The most rows of one group that an expert keeps.

    For a group of ``T_g`` unmasked tokens that choose K of E experts,

        C_g = min(T_g, max(minimum, ceil(factor * K * T_g / E)))

    in exact arithmetic: a float is read as the decimal number it prints as, so 1.1 is 11/10 (to six
    decimals). With
    ``factor="as_needed"``, C_g is the load of the fullest expert, so nothing is dropped, unless
    `maximum` caps it. Where the number of choices depends on the token (`TopP`, `ReLU`), ``K * T_g`` is the
    number of choices there are. Drops depend on the tokens of the group alone, never on how the layer is run.

    Args:
        factor: a number of at least 0 (a `fractions.Fraction` too), or ``"as_needed"``.
        minimum: the least capacity; with a factor only.
        maximum: the greatest capacity; with ``"as_needed"`` only.
        priority: who comes first in an expert's queue. First choices always stand before second ones;
            among them ``"token"`` is token order, and ``"batch"`` puts the tokens of the group with the largest
            score first (the largest of a token's weights before they are normalized; ties in token
            order), so that the least certain are dropped. That is not causal.

    Raises:
        ValueError: if a value is out of range.

    Example:
        >>> Capacity(1.2).of(tokens=128, k=1, num_experts=5)
        31
        >>> Capacity("as_needed", maximum=16).of(tokens=128, k=1, num_experts=5)
        16

    References:
        GShard (arXiv 2006.16668, section 2.2); Tutel (arXiv 2206.03382, section 3.1); V-MoE (arXiv
        2106.05974, section 4.1) for batch priority.
    """

    factor: float | Fraction | str = 1.0
    minimum: int = 0
    maximum: int | None = None
    priority: Priority = "token"
    ratio: tuple[int, int] | None = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        problems = []
        if self.factor == _AS_NEEDED:
            if self.minimum:
                problems.append(f'minimum={self.minimum!r}, but factor="as_needed" has no minimum: leave it out.')
            if self.maximum is not None and not is_whole(self.maximum, 0):
                problems.append(f"maximum={self.maximum!r}, but it must be a whole number of at least 0, or None.")
        else:
            number = isinstance(self.factor, numbers.Real) and not isinstance(self.factor, bool)
            if not number or not self.factor >= 0:  # type: ignore[operator]
                problems.append(
                    f'factor={self.factor!r}, but it must be a number of at least 0, or "as_needed"; '
                    "capacity=None drops nothing."
                )
            if not is_whole(self.minimum, 0):
                problems.append(f"minimum={self.minimum!r}, but it must be a whole number of at least 0.")
            if self.maximum is not None:
                problems.append(f'maximum={self.maximum!r} goes with factor="as_needed" only: leave it out.')
        if self.priority not in get_args(Priority):
            problems.append(f"priority={self.priority!r}: choose one of {', '.join(map(repr, get_args(Priority)))}.")
        refuse("Capacity", problems)
        if not self.as_needed and not math.isinf(self.factor):  # type: ignore[arg-type]
            # whole numbers, which torch.compile can follow
            given = self.factor if isinstance(self.factor, numbers.Rational) else repr(float(self.factor))
            exact = Fraction(given).limit_denominator(_DIGITS)
            if self.factor > 0:  # type: ignore[operator]
                exact = max(exact, Fraction(1, _DIGITS))
            object.__setattr__(self, "ratio", (exact.numerator, exact.denominator))

    @property
    def as_needed(self) -> bool:
        """Whether the capacity follows the load."""
        return self.factor == _AS_NEEDED

    def _per_token(self, k: int, num_experts: int) -> tuple[int, int]:
        """``min(factor * K / E, 1)`` as a fraction: counts times its numerator stay far from 2^63."""
        assert self.ratio is not None
        denominator = self.ratio[1] * num_experts
        return min(self.ratio[0] * k, denominator), denominator

    def of(self, *, tokens: int, k: int, num_experts: int) -> int:
        """C_g for a group of `tokens` tokens; an upper bound of it if as needed."""
        if self.ratio is None:
            return tokens if self.maximum is None else min(tokens, self.maximum)
        numerator, denominator = self._per_token(k, num_experts)
        return min(tokens, max(self.minimum, -(-numerator * tokens // denominator)))

    def of_counts(self, tokens: Tensor, *, k: int, num_experts: int) -> Tensor:
        """`of` for a tensor of token counts."""
        if self.ratio is None:
            return tokens if self.maximum is None else tokens.clamp(max=self.maximum)
        numerator, denominator = self._per_token(k, num_experts)
        wanted = (tokens * numerator + denominator - 1).div(denominator, rounding_mode="floor")
        return torch.minimum(tokens, wanted.clamp(min=self.minimum))


def slots_bound(rule: Capacity | None, sizes: list[int]) -> Callable[[int, int], int | None]:
    """Of (K, E): the slots per expert that suffice for groups of these sizes, or None if the data decides."""
    if rule is None or (rule.as_needed and rule.maximum is None):
        return lambda k, num_experts: None
    return lambda k, num_experts: sum(rule.of(tokens=size, k=k, num_experts=num_experts) for size in sizes)


def as_capacity(capacity: Capacity | float | Fraction | str | None) -> Capacity | None:
    """The rule that a ``capacity=`` argument stands for: None, a factor, ``"as_needed"``, or a rule."""
    return capacity if capacity is None or isinstance(capacity, Capacity) else Capacity(capacity)

"""The one way to refuse a call: every broken rule at once, each with its argument, value and way out."""

from __future__ import annotations

import numbers
from collections.abc import Iterable


def refuse(call: str, problems: Iterable[str]) -> None:
    """Raises `ValueError` listing `problems`, or returns if there are none.

    Args:
        call: the function or class as the user wrote it, such as ``gate``.
        problems: one sentence for each broken rule.

    Raises:
        ValueError: if there is any problem.

    Example:
        >>> refuse("TopK", [])
        >>> refuse("TopK", ["k=0, but k must be at least 1."])
        Traceback (most recent call last):
        ...
        ValueError: TopK: k=0, but k must be at least 1.
    """
    found = list(problems)
    if not found:
        return
    if len(found) == 1:
        raise ValueError(f"{call}: {found[0]}")
    raise ValueError("\n  ".join([f"{call}: {len(found)} arguments do not fit.", *found]))


def is_whole(number: object, least: int) -> bool:
    """Whether `number` is an integer of any kind (but not a bool) and at least `least`.

    Example:
        >>> is_whole(2, 1), is_whole(True, 1), is_whole(2.0, 1)
        (True, False, False)
    """
    return isinstance(number, numbers.Integral) and not isinstance(number, bool) and number >= least  # type: ignore[operator]


class ProgramError(ValueError):
    """A program that is not well typed."""


class TraceError(ValueError):
    """A function that cannot be captured as a program."""


class PlanError(ValueError):
    """A plan that is not available for this layer on this mesh."""


class SpecError(ValueError):
    """A sharding spec that does not fit."""


class CollectiveError(RuntimeError):
    """An exchange between ranks that failed: a rank did not take part, or took part with other shapes."""

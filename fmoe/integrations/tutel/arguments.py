"""Tutel's dict arguments, checked: every unknown or impossible entry is named at once."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..._errors import is_whole, refuse

EXPERT_KEYS = {
    "ffn": (
        "hidden_size_per_expert", "output_dim", "activation_fn", "activation_fn_with_self", "has_fc1_bias",
        "has_fc2_bias",
    ),
    "llama_ffn": ("hidden_size_per_expert", "activation_fn"),
}  # fmt: skip
_COMMON = ("capacity_factor", "gate_noise")
GATE_KEYS = {
    "top": ("k", "fp32_gate", *_COMMON),
    "cosine_top": ("k", "fp32_gate", "proj_dim", "init_t", *_COMMON),
}
_COUNTS = ("num_experts_per_device", "count_per_node")


@dataclass(frozen=True)
class Asked:
    """One gate or the experts, as the dict asked for them: `type`, `module` if custom, and all other entries."""

    type: str
    module: Callable[..., Any] | None
    options: dict[str, Any]


def _asked(name: str, given: Any, known: Mapping[str, Sequence[str]], counts: Sequence[str]) -> Asked:
    """Reads one dict; the caller's own stays as it is."""
    if not isinstance(given, Mapping):
        refuse("moe_layer", [f"{name} is a {type(given).__name__}, but it must be a dict with a 'type'."])
    options = dict(given)
    kind, types = options.pop("type", None), (*known, "custom")
    if kind not in types:
        refuse("moe_layer", [f"{name} has type={kind!r}: choose one of {', '.join(map(repr, types))}."])
    if kind == "custom":
        module = options.pop("module", None)
        if not callable(module):
            refuse("moe_layer", [f"{name} has module={module!r}, but a custom one needs module=, a class of its own."])
        return Asked(kind, module, options)
    allowed = (*known[kind], *counts)
    unknown = [key for key in options if key not in allowed]
    refuse(
        "moe_layer",
        [f"{name} has the unknown entry {key!r}: type {kind!r} takes {', '.join(allowed)}." for key in unknown],
    )
    return Asked(kind, None, options)


def experts_asked(given: Any) -> tuple[Asked, Any]:
    """The experts, and the number of them per device as it was given."""
    asked = _asked("experts", given, EXPERT_KEYS, _COUNTS)
    both = [key for key in _COUNTS if key in asked.options]
    if len(both) > 1:
        refuse("moe_layer", [f"experts has both {both[0]!r} and {both[1]!r}, two names of one number: leave one out."])
    count = asked.options.pop(both[0]) if both else 1
    if asked.type != "custom":
        _check_experts(asked)
    return asked, count


def _check_experts(asked: Asked) -> None:
    problems = []
    for name, least in (("hidden_size_per_expert", 1), ("output_dim", 1)):
        value = asked.options.get(name)
        optional = name == "output_dim"
        if not is_whole(value, least) and not (optional and value is None):
            problems.append(f"experts has {name}={value!r}, but it must be a whole number of at least {least}.")
    for name in ("activation_fn", "activation_fn_with_self"):
        fn = asked.options.get(name)
        if fn is not None and not callable(fn):
            problems.append(f"experts has {name}={fn!r}, but it must be a function of a tensor.")
    if asked.options.get("activation_fn") is not None and asked.options.get("activation_fn_with_self") is not None:
        problems.append("experts has both activation_fn and activation_fn_with_self: leave one out.")
    refuse("moe_layer", problems)


def gates_asked(given: Any) -> list[Asked]:
    """The gates, in order."""
    if isinstance(given, str):
        found = re.fullmatch(r"Top([0-9]+)Gate", given)
        if found is None:
            refuse("moe_layer", [f"gate_type={given!r}: give a dict, such as {{'type': 'top', 'k': 2}}."])
        assert found is not None
        given = {"type": "top", "k": int(found[1])}
    many = list(given) if isinstance(given, (list, tuple)) else [given]
    if not many:
        refuse("moe_layer", ["gate_type is an empty list: give one dict for each gate."])
    names = [f"gate_type[{i}]" if isinstance(given, (list, tuple)) else "gate_type" for i in range(len(many))]
    gates = [_asked(name, one, GATE_KEYS, ()) for name, one in zip(names, many, strict=True)]
    problems: list[str] = []
    for name, gate in zip(names, gates, strict=True):
        if gate.type != "custom":
            problems += [f"{name} has {text}" for text in _gate_problems(gate.options)]
    refuse("moe_layer", problems)
    return gates


def _gate_problems(options: Mapping[str, Any]) -> list[str]:
    problems = []
    for name in ("k", "proj_dim"):
        if name in options and not is_whole(options[name], 1):
            problems.append(f"{name}={options[name]!r}, but it must be a whole number of at least 1.")
    for name, least in (("gate_noise", 0), ("capacity_factor", None), ("init_t", None)):
        value = options.get(name, 1.0)
        if not is_number(value) or (least is not None and value < least):
            problems.append(f"{name}={value!r}, but it must be a number{'' if least is None else ' of at least 0'}.")
        elif name == "init_t" and value <= 0:
            problems.append(f"init_t={value!r}, but a temperature is above 0.")
    return problems


def is_number(value: Any) -> bool:
    """Whether `value` is a finite real number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def split_of(count: Any, world: int) -> tuple[int, int]:
    """Experts in all, and how many ranks share one of them.

    Args:
        count: Tutel's num_experts_per_device: n for n experts on each rank, -n (or 1/n) for an expert on n ranks.
        world: ranks of the group.

    Raises:
        ValueError: if it is not such a number, or n does not divide the ranks.

    Example:
        >>> split_of(2, 4), split_of(-2, 4), split_of(0.5, 4)
        ((8, 1), (2, 2), (2, 2))
    """
    if isinstance(count, float) and 0 < count < 1 and abs(1 / count - round(1 / count)) < 1e-3:
        count = -round(1 / count)
    if not is_whole(count, -(2**31)) or count == 0:
        refuse(
            "moe_layer",
            [f"num_experts_per_device={count!r}, but it must be n for n experts on each rank, or -n for one expert on "
             "n ranks."],
        )  # fmt: skip
    if count > 0:
        return count * world, 1
    if world % -count:
        choices = ", ".join(str(-n) for n in range(1, world + 1) if world % n == 0)
        refuse(
            "moe_layer",
            [f"num_experts_per_device={count} puts one expert on {-count} ranks, but the group has {world}: choose one "
             f"of {choices}, or a number above 0."],
        )  # fmt: skip
    return world // -count, -count

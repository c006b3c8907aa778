"""What a call's arguments are, apart from their data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .program import Type
from .sharding.placement import Mark, marks_of
from .trace import Call, type_of


@dataclass(frozen=True)
class Constant:
    """A leaf that is not a tensor; 1, 1.0 and True are three."""

    kind: type
    value: Any


def paths_of(call: Call) -> tuple[str, ...]:
    """The way to each leaf of a call's arguments: what tells apart trees that hold the same types."""
    return tuple(pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(call)[0])


def plain_signature(call: Call) -> tuple[Any, ...]:
    """What tells a call from another, in a way that torch.compile can follow."""
    leaves = tuple(
        (tuple(leaf.shape), str(leaf.dtype)) if isinstance(leaf, Tensor) else (type(leaf).__name__, leaf)
        for leaf in pytree.tree_leaves(call)
    )
    return len(call[0]), tuple(call[1]), leaves


@dataclass(frozen=True)
class Signature:
    """What a call's arguments are, apart from their data: what programs are kept by."""

    treespec: Any
    leaves: tuple[Any, ...]  # a (whole type, mark, device) for a tensor, or the leaf itself
    autocast: Any

    @classmethod
    def of(cls, call: Call) -> Signature:
        """The signature of arguments.

        Raises:
            TypeError: if a leaf is neither a tensor nor hashable.
        """
        leaves, treespec = pytree.tree_flatten(call)
        described: list[Any] = []
        device = "cpu"
        for leaf, mark in zip(leaves, marks_of(call), strict=True):
            if isinstance(leaf, Tensor):
                device = leaf.device.type
                described.append((mark.whole(type_of(leaf)), mark, device))
            elif getattr(leaf, "__hash__", None) is None:
                raise TypeError(f"an argument holds a {type(leaf).__name__}: give tensors, numbers, strings or None.")
            else:
                described.append(Constant(type(leaf), leaf))
        on = device != "meta" and torch.is_autocast_enabled(device)
        return cls(treespec, tuple(described), torch.get_autocast_dtype(device) if on else None)

    @property
    def types(self) -> list[Type]:
        """Whole types of the tensors."""
        return [leaf[0] for leaf in self.leaves if isinstance(leaf, tuple)]

    def shown(self) -> list[str]:
        """Each leaf as text: a whole type and its device, or the leaf itself."""
        return [
            f"{leaf[0]}" + (f" on {leaf[2]}" if leaf[2] != "cpu" else "")
            if isinstance(leaf, tuple)
            else repr(leaf.value)
            for leaf in self.leaves
        ]

    @property
    def marks(self) -> list[Mark]:
        """What the tensors are."""
        return [leaf[1] for leaf in self.leaves if isinstance(leaf, tuple)]


def difference_of(name: str, expected: Signature, found: Signature) -> str:
    """What differs between what was planned for and a call, or an empty string."""
    want, have = expected.shown(), found.shown()
    lines = [f"planned for {a}, called with {b}" for a, b in zip(want, have, strict=False) if a != b]
    if len(want) != len(have):
        lines.append(f"planned for {len(want)} arguments, called with {len(have)}")
    if expected.autocast != found.autocast:
        lines.append(f"planned with autocast {expected.autocast}, called with {found.autocast}")
    if not lines:
        return ""
    return "\n  ".join([f"{name}: the arguments are not those it was planned for; plan it again for these.", *lines])

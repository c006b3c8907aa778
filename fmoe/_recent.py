"""A cache of the entries used last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

V = TypeVar("V")


class Recent(OrderedDict[Any, V]):
    """A dict that keeps the `size` entries used last."""

    def __init__(self, size: int = 256) -> None:
        super().__init__()
        self.size = size

    def find(self, key: Any, make: Callable[[], V]) -> V:
        """The entry of a key; made if there is none."""
        if key in self:
            self.move_to_end(key)
        else:
            self[key] = make()
            if len(self) > self.size:
                self.popitem(last=False)
        return self[key]

    def replace(self, key: Any, entry: V) -> None:
        """Puts an entry in the place of what the key had."""
        self.pop(key, None)
        self.find(key, lambda: entry)

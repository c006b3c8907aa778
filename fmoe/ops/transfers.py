"""Numbers of the host on a device, without making the host wait.

``torch.tensor(numbers, device="cuda")`` copies from pageable memory: the host waits for everything that
runs, and a CUDA graph cannot be captured. These two do not.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor


def numbers_on(numbers: Sequence[int], device: torch.device) -> Tensor:
    """A few whole numbers as int64, written by kernels: nothing is copied.

    Example:
        >>> numbers_on([3, 3, 1], torch.device("cpu"))
        tensor([3, 3, 1])
    """
    runs = [(value, len(list(same))) for value, same in itertools.groupby(numbers)]
    parts = [torch.full((count,), value, dtype=torch.int64, device=device) for value, count in runs]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device=device)


def array_on(array: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device: from pinned memory, which the allocator keeps until it was read."""
    return array if device.type == "cpu" else array.pin_memory().to(device, non_blocking=True)

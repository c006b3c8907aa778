"""Numbers of the host on a device, without making the host wait.

``torch.tensor(numbers, device="cuda")`` copies from pageable memory: the host waits for everything that
runs, and a CUDA graph cannot be captured. These two avoid both.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def numbers_on(numbers: Sequence[int], device: torch.device) -> Tensor:
    """A few whole numbers as int64, written by kernels: nothing is copied.

    Example:
        >>> numbers_on([3, 3, 1], torch.device("cpu"))
        tensor([3, 3, 1])
    """
    if device.type == "cpu":
        return torch.tensor(numbers, dtype=torch.int64)
    if all(number == numbers[0] for number in numbers):
        return torch.full((len(numbers),), numbers[0] if numbers else 0, dtype=torch.int64, device=device)
    return torch.cat([torch.full((1,), number, dtype=torch.int64, device=device) for number in numbers])


def array_on(array: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device: from pinned memory, which the allocator keeps until it was read."""
    return array if device.type == "cpu" else array.pin_memory().to(device, non_blocking=True)

"""The one rule on autocast: experts compute in its dtype, as `torch.nn.Linear` does; nothing else changes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """The dtype autocast wants for `tensor`; None if it is off, or leaves the tensor alone (float64)."""
    device = tensor.device.type
    if tensor.dtype == torch.float64 or not _is_on(device):
        return None
    return torch.get_autocast_dtype(device)


def without_autocast(device: str) -> AbstractContextManager[None]:
    """A context in which autocast is off on `device`."""
    return torch.autocast(device, enabled=False) if _is_on(device) else nullcontext()


def _is_on(device: str) -> bool:
    return device != "meta" and torch.is_autocast_enabled(device)  # torch knows no autocast of meta tensors

"""Starts Triton kernels; the only place that does, and that imports them, on the first launch."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor


def launch(
    where: str, programs: tuple[int, ...], *args: Any, warps: int = 4, stages: int = 3, **constants: Any
) -> None:
    """Runs a kernel, such as ``"gemm.rows_gemm"``, on the device of its first argument.

    Nothing is read back and nothing waits. Without programs nothing is launched.
    """
    if 0 in programs:
        return
    module, name = where.split(".")
    kernel = getattr(importlib.import_module(f".triton_{module}", __package__), name)
    with torch.cuda.device_of(args[0]):
        kernel[programs](*args, num_warps=warps, num_stages=stages, enable_fp_fusion=True, **constants)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, which has no arithmetic in bf16."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def cdiv(a: int, b: int) -> int:
    """Division rounded up."""
    return -(-a // b)


def power_of_two(number: int, least: int, most: int) -> int:
    """The smallest power of two that is at least `number`, kept between `least` and `most`."""
    return min(most, max(least, 1 << max(number - 1, 0).bit_length()))


def unit_rows(tensor: Tensor) -> Tensor:
    """The tensor with elements of a row one after another, as kernels read it; a copy only if it is not."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] <= 1 else tensor.contiguous()

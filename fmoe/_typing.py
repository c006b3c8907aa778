"""Letters and short type names, the same in every signature, comment, error and printed value.

T  tokens of one call (all leading dims of x, flattened)     E  experts
M  model dim                                                 K  choices per token (top-k)
H  hidden dim of one expert                                  N  rows of the ragged layout, T*K
C  slots per expert in the padded layout                     D  any feature dim
G  groups of tokens (capacity) or of rows (grouped matmul)   R  any number of rows
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

#: One expert as the user writes it: ``fn(params_of_one_expert, x [n,M]) -> [n,M]``.
ExpertFn = Callable[[Any, Tensor], Tensor]

_SHORT = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "bool",
}


def dtype_text(dtype: torch.dtype) -> str:
    """The short name of a dtype: ``f32``, ``bf16``, ``i64``."""
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))


def type_text(tensor: Tensor) -> str:
    """The type of a tensor as programs print it: ``f32[16,512]``."""
    return f"{dtype_text(tensor.dtype)}[{','.join(map(str, tensor.shape))}]"


def accumulation_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype in which routing and sums are kept: fp32, or wider if an input is wider."""
    widest = torch.float32
    for dtype in dtypes:
        widest = torch.promote_types(widest, dtype)
    return widest

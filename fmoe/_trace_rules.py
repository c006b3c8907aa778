"""Which torch calls a program cannot hold, and the line of the user's that made one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ._errors import TraceError
from .ops.differentiable import is_transformed, under_saved_tensor_hooks

_RANDOM = {
    "alpha_dropout", "bernoulli", "dropout", "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout",
    "gumbel_softmax", "multinomial", "native_dropout", "normal", "poisson", "rand", "rand_like", "randint",
    "randint_like", "randn", "randn_like", "randperm", "rrelu",
}  # fmt: skip
_NUMBERS = {"__bool__", "__int__", "__float__", "__index__", "item", "tolist", "nonzero", "numpy"}
_GRADIENTS = {"backward", "register_hook", "register_post_accumulate_grad_hook", "retain_grad"}


def check_call(name: str, tensors: Sequence[Tensor], args: Any, kwargs: Any) -> None:
    """Refuses a call that a program cannot hold.

    Raises:
        TraceError: with the line and the way out.
    """
    if any(map(is_transformed, tensors)):
        raise TraceError(
            f"{user_line()}: {name} gets a tensor of a torch.func transform. Apply transforms around the captured "
            "function, not inside it, and pass what it uses as arguments."
        )
    if name in _NUMBERS:
        raise TraceError(
            f"{user_line()}: {name} reads the value of a tensor, which a program has not. Use torch.where, or pass the "
            "number as an argument."
        )
    named = name.endswith("_") and (not name.endswith("__") or name in ("__setitem__", "__set__"))
    if named or kwargs.get("inplace") is True:
        raise TraceError(f"{user_line()}: {name} changes a tensor in place. Use its out-of-place form.")
    if kwargs.get("out") is not None:
        raise TraceError(f"{user_line()}: {name} with out= changes a tensor in place. Use the value it returns.")
    if name in _GRADIENTS:
        raise TraceError(f"{user_line()}: {name} acts on gradients, which a program has not. Use torch.func around it.")
    if _is_random(name, args, kwargs):
        raise TraceError(f"{user_line()}: {name} is random. Draw the numbers outside and pass them as an argument.")
    if under_saved_tensor_hooks():
        raise TraceError(
            f"{user_line()}: {name} runs inside torch.utils.checkpoint. Checkpoint around the captured function."
        )


def _is_random(name: str, args: Any, kwargs: Any) -> bool:
    """Whether a call draws random numbers; dropout that is off does not."""
    if name in ("scaled_dot_product_attention", "multi_head_attention_forward"):
        rate = kwargs.get("dropout_p", args[4] if name.startswith("scaled") and len(args) > 4 else 0.0)
        return bool(rate) and kwargs.get("training", True) is not False
    if name not in _RANDOM:
        return False
    if "dropout" in name:
        rate = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
        training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
        return bool(rate) and training is not False
    return True


def user_line() -> str:
    """The innermost line that is neither fmoe's nor torch's."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.split(".")[0] not in ("fmoe", "torch", "einops", "contextlib"):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "in the function"

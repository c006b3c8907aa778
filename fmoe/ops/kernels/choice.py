"""Which kernel runs an operation on a GPU, in which blocks, and why not another.

Triton kernels run on the architectures of `ARCHITECTURES`, for which every configuration of `TABLE` is
compiled in the tests: no spills, matrix instructions where meant. Anything else runs the reference, and
`why` says so. There is no autotuner: it needs a device, and makes the first call and captured graphs
depend on timings.

Checked mode (`checked`) runs the reference for routing on GPUs too: it reads numbers on the host, and
refuses ids, slots and sizes out of range. Otherwise the kernels leave such choices out, and no number is
read on the host.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from ..._typing import dtype_text

ARCHITECTURES = {(8, 0): "sm_80", (9, 0): "sm_90", (10, 0): "sm_100"}
#: Rows per group on average from which the large row tile is used; below, its padding costs more.
MANY = 256
#: Rows per group from which torch's CUTLASS grouped matmul takes the two products that need no gather and no
#: epilogue. It has one tile shape for large groups, set-up launches, and only bf16 on Hopper is fast.
LIBRARY_ROWS, LIBRARY_GROUPS = 1024, 1024


@dataclass(frozen=True)
class Blocks:
    """A configuration: tile sizes, warps, pipeline stages, parts of the epilogue.

    For matmuls over rows ``m`` counts rows, ``n`` columns and ``k`` the inner dim; for dW ``m`` and ``n``
    are the two dims of a matrix and ``k`` counts rows. A gated up projection has two tiles of ``n`` columns.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    sub: int = 1

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"


#: (kernel, arithmetic, architecture) -> configurations for (many, few) rows per group. `up` is the gated up projection,
#: `act` the one without a gate, `rows` any other product of rows, `down_back` the fused transpose of the
#: down projection, `weights` dW. "16" is bf16 and f16; f32 is "tf32" or, by default, "ieee", which has no matrix
#: instructions.
#: Row tiles of one column agree, so that one tile map serves a pass.
TABLE: dict[tuple[str, str, str], tuple[Blocks, Blocks]] = {
    ("up", "16", "sm_80"): (Blocks(128, 64, 32, 8, 4), Blocks(128, 64, 32, 8, 4)),
    ("up", "16", "sm_90"): (Blocks(128, 64, 64, 8, 4), Blocks(64, 64, 64, 4, 4)),
    ("up", "16", "sm_100"): (Blocks(128, 64, 64, 8, 4), Blocks(64, 64, 64, 4, 4)),
    ("act", "16", "sm_80"): (Blocks(128, 128, 32, 8, 4), Blocks(128, 128, 32, 8, 4)),
    ("act", "16", "sm_90"): (Blocks(128, 128, 64, 8, 4), Blocks(64, 64, 64, 4, 4)),
    ("act", "16", "sm_100"): (Blocks(128, 128, 64, 8, 4), Blocks(64, 64, 64, 4, 4)),
    ("rows", "16", "sm_80"): (Blocks(128, 128, 32, 8, 4), Blocks(128, 128, 32, 8, 4)),
    ("rows", "16", "sm_90"): (Blocks(128, 256, 64, 8, 3), Blocks(64, 128, 64, 4, 4)),
    ("rows", "16", "sm_100"): (Blocks(128, 256, 64, 8, 3), Blocks(64, 128, 64, 4, 4)),
    ("down_back", "16", "sm_80"): (Blocks(128, 64, 32, 8, 4, 2), Blocks(128, 64, 32, 8, 4, 2)),
    ("down_back", "16", "sm_90"): (Blocks(128, 128, 64, 8, 3, 4), Blocks(64, 64, 64, 4, 4, 2)),
    ("down_back", "16", "sm_100"): (Blocks(128, 128, 64, 8, 3, 4), Blocks(64, 64, 64, 4, 4, 2)),
    ("weights", "16", "sm_80"): (Blocks(128, 128, 32, 8, 4), Blocks(128, 128, 32, 8, 4)),
    ("weights", "16", "sm_90"): (Blocks(128, 256, 64, 8, 3), Blocks(128, 256, 64, 8, 3)),
    ("weights", "16", "sm_100"): (Blocks(128, 256, 64, 8, 3), Blocks(128, 256, 64, 8, 3)),
}
for _arch in ARCHITECTURES.values():
    for _kernel, _tf32, _ieee in (
        ("up", Blocks(64, 64, 32, 4, 3), Blocks(64, 32, 16, 4, 3)),
        ("act", Blocks(64, 64, 32, 4, 3), Blocks(64, 64, 16, 4, 3)),
        ("rows", Blocks(64, 128, 32, 4, 3), Blocks(64, 64, 16, 4, 3)),
        ("down_back", Blocks(64, 64, 32, 4, 3, 2), Blocks(64, 64, 16, 4, 3, 4)),
        ("weights", Blocks(128, 128, 32, 8, 3), Blocks(64, 64, 16, 4, 3)),
    ):
        TABLE[_kernel, "tf32", _arch] = (_tf32, _tf32)
        TABLE[_kernel, "ieee", _arch] = (_ieee, _ieee)

_checked: ContextVar[bool] = ContextVar("fmoe_checked", default=False)


@contextmanager
def checked() -> Iterator[None]:
    """Refuses wrong ids, slots and sizes on GPUs too, at the price of waiting for the device.

    On a CPU they always are refused. On a GPU a choice of no expert of the layer is left out without it.

    Raises:
        ValueError: inside, by the operation that meets such a number.

    Example:
        >>> import fmoe, torch
        >>> x, w = torch.ones(3, 2), torch.ones(1, 2, 2)
        >>> with fmoe.checked():
        ...     y = fmoe.grouped_matmul(x, w, torch.tensor([5]))
        Traceback (most recent call last):
        ...
        ValueError: grouped_matmul: group_sizes=[5], but sizes must be at least 0 and add up to at most the 3 rows of x.
    """
    token = _checked.set(True)
    try:
        yield
    finally:
        _checked.reset(token)


def is_checked() -> bool:
    """Whether `checked` is in force."""
    return _checked.get()


@dataclass(frozen=True)
class Target:
    """Where kernels run: the architecture, and the kind of arithmetic (``"16"``, ``"tf32"``, ``"ieee"``)."""

    arch: str
    kind: str

    def blocks(self, kernel: str, rows: int, groups: int) -> Blocks:
        """The configuration of a kernel for rows in groups."""
        many, few = TABLE[kernel, self.kind, self.arch]
        return many if rows >= MANY * max(groups, 1) else few

    @property
    def precision(self) -> str:
        """What `tl.dot` makes of fp32 operands."""
        return "tf32" if self.kind == "tf32" else "ieee"


@functools.cache
def machine(device: torch.device) -> tuple[str, str]:
    """The architecture of a GPU and "", or "" and why its kernels cannot run."""
    if torch.version.hip is not None:
        return "", "kernels are for NVIDIA GPUs"
    if importlib.util.find_spec("triton") is None:
        return "", "triton is not installed"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) not in ARCHITECTURES:
        return "", f"no kernels for sm_{major}{minor}, only for {', '.join(ARCHITECTURES.values())}"
    return ARCHITECTURES[major, minor], ""


def target(device: torch.device, *dtypes: torch.dtype, alike: bool = False) -> tuple[Target | None, str]:
    """The target for operands of these floating dtypes and "", or None and why there is none.

    The first dtype decides the arithmetic; with `alike` the others must be the same.
    """
    for dtype in dtypes:
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return None, f"no kernel for {dtype_text(dtype)}"
        if alike and dtype != dtypes[0]:
            return None, f"operands are {dtype_text(dtypes[0])} and {dtype_text(dtype)}"
    arch, why = machine(device)
    if why:
        return None, why
    if dtypes[:1] != (torch.float32,):
        return Target(arch, "16"), ""
    return Target(arch, "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"), ""


def why_not_library(to: Target, dtype: torch.dtype, rows: int, groups: int, matrices: int, *dims: int) -> str:
    """Why `torch.nn.functional.grouped_mm` does not take a product of rows, or "" if it does.

    It wants one group for each matrix in their order, which holds wherever there are as many groups as
    matrices, and rows of all tensors in multiples of 16 bytes.
    """
    if to.arch != "sm_90" or dtype != torch.bfloat16:
        return f"is fast only in bf16 on sm_90, not {dtype_text(dtype)} on {to.arch}"
    if groups != matrices or not 0 < groups < LIBRARY_GROUPS:
        return f"takes one group for each matrix and below {LIBRARY_GROUPS}, not {groups} for {matrices}"
    if any(dim % 8 for dim in dims):
        return f"takes dims in multiples of 8, not {' and '.join(map(str, dims))}"
    if rows < LIBRARY_ROWS * groups:
        return f"pays from {LIBRARY_ROWS} rows a group, not {rows // groups}"
    return ""

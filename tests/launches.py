"""Kernel launches without a GPU: what would be launched, and the machine code of it.

Operations run on meta tensors of any size, their launches are recorded in place of being made, and
each is specialised as Triton's runtime would specialise it (arguments that are 1 or multiples of 16)
and compiled ahead of time. So what is checked is what a GPU would run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import pathlib
import re
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from torch import Tensor

from fmoe.ops.kernels import choice, cuda_ffn, cuda_gemm, cuda_rows, cuda_routing
from fmoe.ops.kernels.launch import launch as real_launch

MODULES = (cuda_gemm, cuda_ffn, cuda_rows, cuda_routing)
TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}


@dataclasses.dataclass(frozen=True)
class Launch:
    """One recorded launch; `args` are tensors and ints in the kernel's order."""

    where: str
    programs: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any]
    warps: int
    stages: int


@contextlib.contextmanager
def recorded(arch: str, made: bool = False):
    """Records the launches of device kernels as if the tensors were on a GPU of `arch`, and makes them if `made`."""
    seen: list[Launch] = []

    def launch(where, programs, *args, warps=4, stages=3, **constants):
        if 0 not in programs:
            seen.append(Launch(where, programs, args, constants, warps, stages))
            if made:
                real_launch(where, programs, *args, warps=warps, stages=stages, **constants)

    kept, machine = [module.launch for module in MODULES], choice.machine
    try:
        for module in MODULES:
            module.launch = launch
        choice.machine = lambda device: (arch, "")
        yield seen
    finally:
        choice.machine = machine
        for module, old in zip(MODULES, kept, strict=True):
            module.launch = old


@dataclasses.dataclass(frozen=True)
class Source:
    """A specialised kernel: what a GPU would compile."""

    where: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[int, ...]
    warps: int
    stages: int
    arch: str


@functools.cache
def _kernel(where: str):
    module, name = where.split(".")
    return getattr(importlib.import_module(f"fmoe.ops.kernels.triton_{module}"), name)


def specialised(launch: Launch, arch: str) -> Source:
    """The source that a launch needs, by the rules of Triton's runtime."""
    names = _kernel(launch.where).arg_names
    signature, constants, aligned = {}, dict(launch.constants), []
    for i, (name, arg) in enumerate(zip(names, launch.args, strict=False)):
        if isinstance(arg, Tensor):
            signature[name] = "*" + TYPES[arg.dtype]
            aligned.append(i)
        elif arg == 1:
            constants[name] = 1
        else:
            signature[name] = "i32" if -(2**31) <= arg < 2**31 else "i64"
            if arg % 16 == 0:
                aligned.append(i)
    assert set(signature) | set(constants) == set(names), launch.where
    full = tuple((name, signature.get(name, "constexpr")) for name in names)
    return Source(
        launch.where, full, tuple(sorted(constants.items())), tuple(aligned), launch.warps, launch.stages, arch
    )


@dataclasses.dataclass(frozen=True)
class Code:
    """What the machine code of a source holds."""

    registers: int
    stack: int
    shared: int
    matrix: int
    wide_loads: int
    loads: int
    seconds: float


#: Instructions of tensor cores: sm_90's warpgroup matmul, the warp matmuls of all, sm_100's in tensor memory.
MATRIX = {"sm_80": ("HMMA",), "sm_90": ("HGMMA",), "sm_100": ("UTCHMMA", "UTCQMMA", "HMMA")}


def compiled(source: Source) -> Code:
    """Compiles a source and reads its machine code."""
    import time

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    start = time.process_time()
    attrs = {(i,): [["tt.divisibility", 16]] for i in source.aligned}
    ast = ASTSource(
        fn=_kernel(source.where), signature=dict(source.signature), constexprs=dict(source.constants), attrs=attrs
    )
    target = GPUTarget("cuda", int(source.arch[3:]), 32)
    options = {"num_warps": source.warps, "num_stages": source.stages, "enable_fp_fusion": True}
    made = triton.compile(ast, target=target, options=options)
    tools = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        run = lambda flag: subprocess.run(  # noqa: E731
            [tools / "cuobjdump", flag, file.name], capture_output=True, text=True, check=True
        )
        usage, sass = run("-res-usage"), run("-sass").stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout + usage.stderr).groups()

    def count(pattern: str) -> int:
        return len(re.findall(pattern, sass))

    return Code(
        int(registers),
        int(stack),
        made.metadata.shared,
        sum(count(rf"\b{name}\b") for name in MATRIX[source.arch]),
        count(r"\b(?:LDGSTS|LDG)\.\S*128\b") + count(r"\bUTMALDG\b"),
        count(r"\b(?:LDGSTS|LDG)\b"),
        time.process_time() - start,
    )


def compiled_all(sources: list[Source], workers: int = 2) -> dict[Source, Code]:
    """`compiled` of each, in processes that see no interpreter."""
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        return dict(zip(sources, pool.map(compiled, sources, chunksize=4), strict=True))

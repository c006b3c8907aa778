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

from fmoe.ops import OPS
from fmoe.ops.activations import form_of
from fmoe.ops.kernels import choice, cuda_ffn, cuda_gemm, cuda_routing, cuda_rows
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
    parameters = _kernel(launch.where).params
    names = [parameter.name for parameter in parameters]
    signature, constants, aligned = {}, dict(launch.constants), []
    for i, (name, arg) in enumerate(zip(names, launch.args, strict=False)):
        if isinstance(arg, Tensor):
            signature[name] = "*" + TYPES[arg.dtype]
            aligned.append(i)
        elif parameters[i].do_not_specialize:
            signature[name] = "i32" if -(2**31) <= arg < 2**31 else "i64"
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


#: Kernels that move rows, which are to do it in wide loads.
WIDE_ROWS = ("rows.combine_rows", "rows.expand_rows", "rows.row_dots")
#: Instructions of tensor cores: sm_90's warpgroup matmul, the warp matmuls of all, sm_100's in tensor memory.
MATRIX = {"sm_80": ("HMMA",), "sm_90": ("HGMMA",), "sm_100": ("UTCHMMA", "UTCQMMA", "HMMA")}


def compiled(source: Source) -> Code:
    """Compiles a source and reads its machine code."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

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

        def read(*command: str) -> str:
            return subprocess.run(
                [tools / command[0], *command[1:], file.name], capture_output=True, text=True, check=True
            ).stdout

        registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", read("cuobjdump", "-res-usage")).groups()
        # to disassemble is a quarter of the work: only where instructions are asked for, by Triton or by a test
        asked = "mma" in made.asm["ptx"] or source.where in WIDE_ROWS
        sass = read("nvdisasm", "-c", "-ndf") if asked else ""

    def count(pattern: str) -> int:
        return len(re.findall(pattern, sass))

    return Code(
        int(registers),
        int(stack),
        made.metadata.shared,
        sum(count(rf"\b{name}\b") for name in MATRIX[source.arch]),
        count(r"\b(?:LDGSTS|LDG)\.\S*128\b") + count(r"\bUTMALDG\b"),
    )


def compiled_all(sources: list[Source], workers: int = 2) -> dict[Source, Code]:
    """`compiled` of each, in processes that see no interpreter."""
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        return dict(zip(sources, pool.map(compiled, sources, chunksize=4), strict=True))


def checked_by_frontend(source: Source) -> None:
    """Types a source up to Triton's first IR, which finds wrong types at a twentieth of the price."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler.compiler import make_backend

    ast = ASTSource(_kernel(source.where), dict(source.signature), dict(source.constants))
    target = GPUTarget("cuda", int(source.arch[3:]), 32)
    backend = make_backend(target)
    options = backend.parse_options({"num_warps": source.warps, "enable_fp_fusion": True})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    made = backend.get_codegen_implementation(options), backend.get_module_map()
    ast.make_ir(target, options, *made, context)


def whole_layer(
    dtype: torch.dtype,
    tokens: int,
    model_dim: int,
    hidden: int,
    experts: int,
    k: int,
    activation: str = "swiglu",
    bias: bool = False,
    device: str = "meta",
) -> None:
    """Routing and both passes of a layer through the GPU kernels of the operations, on tensors without data."""
    wide = hidden * (2 if form_of(activation).gated else 1)

    def real(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    def whole(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.int64, device=device)

    def run(name: str, *args: Any) -> Any:
        made = OPS[name].kernels["cuda"](*args)
        assert made is not NotImplemented, name
        return made

    chosen = run("top_k", real(tokens, experts, dtype=torch.float32), k)
    run("assign_slots", whole(1, tokens, k), whole(1, 1), [tokens], experts)
    index, order, groups = run("row_index", chosen, whole(tokens, k), experts, tokens * k)
    parameters = (
        real(experts, model_dim, wide), real(experts, wide) if bias else None,
        real(experts, hidden, model_dim), real(experts, model_dim) if bias else None,
    )  # fmt: skip
    x, weights = real(tokens, model_dim), real(tokens, k, dtype=torch.float32)
    _, z = run("ffn", x, weights, *parameters, index, order, groups, activation, True)
    needs = [True, True, True, bias, True, bias]
    written = groups[:, 2]
    run("ffn_backward", x, x, weights, *parameters, z, index, order, groups, written, experts, activation, needs)


def single_operations(dtype: torch.dtype, tokens: int, dim: int, columns: int, experts: int, k: int) -> None:
    """The unfused operations: moving rows, and grouped matmuls without gathers."""
    x, y = (torch.empty(n, dim, dtype=dtype, device="meta") for n in (tokens, tokens * k))
    index = torch.empty(tokens, k, dtype=torch.int64, device="meta")
    weights, w = torch.empty(tokens, k, device="meta"), torch.empty(experts, dim, columns, dtype=dtype, device="meta")
    groups = torch.empty(experts, 3, dtype=torch.int64, device="meta")
    dy = torch.empty(tokens * k, columns, dtype=dtype, device="meta")
    for name, args in {
        "combine": (y, index, weights), "expand": (x, index, weights, tokens * k), "rowdot": (x, y, index),
        "gmm": (y, w, groups), "gmm_t": (dy, w, groups), "gmm_dw": (y, dy, groups, experts),
    }.items():  # fmt: skip
        assert OPS[name].kernels["cuda"](*args) is not NotImplemented, name

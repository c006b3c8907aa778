"""The checks of `gpu.py`: what must hold on a device before its times mean anything.

Each takes the device and returns a line of what it found, or raises. References are fp64 on upcast inputs;
inputs are fresh random numbers, and outputs are poisoned.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from gpu_measure import error_of, finish, poisoned, require
from gpu_peers import Shape, chosen_by, draw, oracle
from torch import Tensor
from torch.utils import _pytree as pytree

import fmoe
from fmoe import functional as F
from fmoe.ops import OPS

#: Of ``|found - wanted| / |wanted|``; fp32 kernels may use tf32.
LIMITS = {torch.float32: 1e-3, torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float64: 1e-10}
CHECKS: dict[str, Callable[[torch.device], str]] = {}


def check(run: Callable[[torch.device], str]) -> Callable[[torch.device], str]:
    """Adds a check, named after its function."""
    CHECKS[run.__name__] = run
    return run


class Skipped(Exception):
    """A check that this device or this machine has nothing for."""


def layer(tokens: int, dim: int, hidden: int, experts: int, k: int, activation: str, bias: bool, **more: Any) -> Any:
    """A config, fp64 parameters that no rounding hides in, and tokens."""
    config = fmoe.MoEConfig(experts, dim, hidden, router=fmoe.TopK(k), activation=activation, bias=bias, **more)
    params = pytree.tree_map(lambda p: torch.randn_like(p) * dim**-0.5, fmoe.init(config, dtype=torch.float64, seed=0))
    return config, params, torch.randn(tokens, dim, dtype=torch.float64)


def compare(
    config: fmoe.MoEConfig, params: Any, x: Tensor, dtype: torch.dtype, what: str, sample: Tensor | None = None
) -> float:
    """The layer and its gradients in `dtype` against fp64, where the cotangent is not 0 on `sample` alone."""
    leaf, held = x.detach().requires_grad_(), pytree.tree_map(lambda p: p.detach().requires_grad_(), params)
    experts = chosen_by(held, leaf, config)
    rows = torch.arange(x.shape[0], device=x.device) if sample is None else sample
    cotangent = torch.randn(len(rows), x.shape[1], device=x.device, dtype=torch.float64).to(dtype)
    with poisoned(x.device, 2**28 if sample is None else 2**31):
        y, _ = fmoe.moe(held, leaf, config)
        found = torch.autograd.grad((y[rows] * cotangent).sum(), [leaf, *pytree.tree_leaves(held)])
    require(float(y.isfinite().logical_not().sum()), 0, f"{what}: entries of y that nobody wrote")
    rest = torch.ones_like(x[:, 0]).index_fill(0, rows, 0).unsqueeze(1)
    require(float((found[0] * rest).abs().sum()), 0, f"{what}: dx of tokens without a cotangent")
    wide, part = pytree.tree_map(lambda p: p.detach().double().requires_grad_(), (held, leaf[rows]))
    wanted = oracle(part, wide, experts[rows], config.activation, config.router.normalized)
    leaves, loss = [part, *pytree.tree_leaves(wide)], (wanted * cotangent.double()).sum()
    if loss.requires_grad:
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    else:  # no token at all
        gradients = tuple(map(torch.zeros_like, leaves))
    names = ("y", "dx", "d router", *(f"d {n}" for n in ("w_in", "w_out", "b_in", "b_out")))
    pairs = [(y[rows], wanted), (found[0][rows], gradients[0]), *zip(found[1:], gradients[1:], strict=True)]
    errors = [error_of(a, b) for a, b in pairs]
    for name, error in zip(names, errors, strict=False):
        require(error, LIMITS[dtype] * (1 if name == "y" else 2), f"{what} {str(dtype)[6:]} {name}")
    return max(errors, default=0.0)


#: T, M, H, E, K, activation, bias: no token, one of each, empty experts, odd sizes, sizes of whole tiles.
ODD = [
    (0, 16, 16, 4, 2, "swiglu", False),
    (1, 1, 1, 1, 1, "relu", True),
    (5, 7, 3, 16, 2, "swiglu", True),
    (33, 40, 24, 3, 3, "geglu", False),
    (65, 31, 129, 5, 2, "swiglu", False),
    (130, 64, 72, 6, 1, "gelu", True),
    (257, 128, 96, 64, 8, "swiglu", False),
    (512, 256, 128, 8, 2, "swiglu", True),
]


@check
def odd_shapes(device: torch.device) -> str:
    """Every dtype over odd shapes, contiguous and strided."""
    worst: dict[torch.dtype, float] = {}
    shapes = ODD if device.type == "cuda" else ODD[:4]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for shape in shapes:
            config, params, x = layer(*shape)
            params, x = pytree.tree_map(lambda p: p.to(device, dtype), (params, x))  # noqa: B023
            strided = dataclasses.replace(
                params,
                experts=dataclasses.replace(
                    params.experts,
                    w_in=params.experts.w_in.transpose(0, -1).contiguous().transpose(0, -1),
                    w_out=params.experts.w_out.transpose(1, 2).contiguous().transpose(1, 2),
                ),
            )
            for p, rows in ((params, x), (strided, x.t().contiguous().t())):
                error = compare(config, p, rows, dtype, str(shape))
                worst[dtype] = max(worst.get(dtype, 0.0), error)
    return f"{len(shapes)} shapes, worst " + ", ".join(f"{str(d)[6:]} {e:.1e}" for d, e in worst.items())


def large(shape: Shape, device: torch.device) -> str:
    """A layer of the size that is timed: 256 tokens and every gradient they have, in bf16."""
    problem = draw(shape, device, torch.bfloat16, seed=1)
    config = shape.layer.layer(shape.activation)
    sample = torch.randperm(shape.layer.tokens, device=device)[:256]
    return f"worst error {compare(config, problem.params, problem.x, torch.bfloat16, shape.name, sample):.1e}"


@check
def same_twice(device: torch.device) -> str:
    """Outputs and gradients are the same bits in two runs."""
    config, params, x = layer(300, 64, 48, 8, 2, "swiglu", True)
    params, x = pytree.tree_map(lambda p: p.to(device, torch.bfloat16), (params, x))

    def run() -> list[Tensor]:
        loss = lambda p, x: fmoe.moe(p, x, config)[0].float().square().sum()  # noqa: E731
        return [fmoe.moe(params, x, config)[0], *pytree.tree_leaves(torch.func.grad(loss, (0, 1))(params, x))]

    first, second = run(), run()
    if not all(torch.equal(a, b) for a, b in zip(first, second, strict=True)):
        raise AssertionError("two runs differ")
    return f"{len(first)} tensors"


@check
def transforms(device: torch.device) -> str:
    """vmap(grad) is grad of each, and jvp agrees with vjp, in fp32."""
    config, params, x = layer(24, 32, 24, 4, 2, "swiglu", True)
    params, xs = pytree.tree_map(lambda p: p.to(device, torch.float32), (params, torch.stack([x, -x, 2 * x])))
    loss = lambda p, x: fmoe.moe(p, x, config)[0].square().sum()  # noqa: E731
    both = torch.func.vmap(torch.func.grad(loss), (None, 0))(params, xs)
    each = [torch.func.grad(loss)(params, x) for x in xs]
    errors = []
    for i, one in enumerate(each):
        errors += [error_of(a[i], b) for a, b in zip(*map(pytree.tree_leaves, (both, one)), strict=True)]
    require(max(errors), 1e-3, "vmap(grad)")
    layer_of = lambda p: fmoe.moe(p, xs[0], config)[0]  # noqa: E731
    tangent = pytree.tree_map(torch.randn_like, params)
    y, pull = torch.func.vjp(layer_of, params)
    _, pushed = torch.func.jvp(layer_of, (params,), (tangent,))
    cotangent = torch.randn_like(y)
    there = (pushed * cotangent).double().sum()
    back = sum(
        (a.double() * b).sum() for a, b in zip(*map(pytree.tree_leaves, (tangent, pull(cotangent)[0])), strict=True)
    )
    scale = pushed.double().norm() * cotangent.double().norm()
    require(float((there - back).abs() / scale), 1e-3, "jvp against vjp")
    if not float(pushed.abs().max()) > 1e-3:
        raise AssertionError("jvp gave zero tangents")
    return f"vmap(grad) {max(errors):.1e}"


@check
def bad_ids(device: torch.device) -> str:
    """An id out of range is refused in checked mode, and never written to otherwise."""
    config, params, x = layer(64, 32, 16, 4, 2, "swiglu", False)
    params, x = pytree.tree_map(lambda p: p.to(device, torch.float32), (params, x))
    routing = F.gate(params.router, x, config.router)
    bad = dataclasses.replace(
        routing, experts=routing.experts.clone().index_fill_(0, torch.tensor([3], device=device), 9)
    )

    def run() -> Tensor:
        tokens = F.expert_apply(params.experts, F.dispatch(x, bad), activation="swiglu")
        return F.combine(tokens, bad)

    if hasattr(fmoe, "checked"):
        with fmoe.checked():
            _refused(run)
        if device.type == "cuda":
            guards = [torch.full((2**16,), 7, dtype=torch.int64, device=device) for _ in range(64)]
            y = run()
            finish(device)
            if not all(bool((guard == 7).all()) for guard in guards) or not bool(y.isfinite().all()):
                raise AssertionError("an id out of range was written somewhere")
            return "refused in checked mode; left out otherwise"
    _refused(run)
    return "refused"


def _refused(run: Callable[[], Any]) -> None:
    try:
        run()
    except ValueError as error:
        if "ids from" not in str(error):
            raise AssertionError(f"refused for another reason: {error}") from error
        return
    raise AssertionError("an id out of range was not refused")


@check
def far_rows(device: torch.device) -> str:
    """Rows beyond 2^31 elements are moved to the right place, there and back."""
    dim = 4096
    rows = 2**31 // dim + 640 if device.type == "cuda" else 640
    y = torch.empty(rows, dim, device=device, dtype=torch.bfloat16)
    y[-512:].normal_()
    index = torch.arange(rows - 512, rows, device=device).view(256, 2)
    ones = torch.ones(256, 2, device=device)
    found = OPS["combine"](y, index, ones)
    require(error_of(found, y[index].double().sum(1)), 1e-2, "combine")
    del y
    made = OPS["expand"](found, index, ones, rows)
    require(error_of(made[index], found.unsqueeze(1).expand(-1, 2, -1)), 1e-2, "expand")
    if bool(made[: rows - 512].any()):
        raise AssertionError("expand wrote rows of no choice")
    return f"{rows * dim / 2**31:.2f} times 2^31 elements"


# --- what a graph and several ranks need --------------------------------------------------------------------------


@contextlib.contextmanager
def no_waiting(device: torch.device) -> Iterator[None]:
    """Meanwhile anything that makes the host wait for the device is an error."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _padded(device: torch.device, tokens: int = 96) -> Any:
    config, params, x = layer(tokens, 64, 48, 8, 2, "swiglu", True, capacity=1.25)
    return config, *pytree.tree_map(lambda p: p.to(device, torch.bfloat16), (params, x))


def _train(call: Callable[..., Any], params: Any, x: Tensor) -> list[Tensor]:
    def loss(p: Any, x: Tensor) -> Any:
        y, aux = call(p, x)
        return y.float().square().sum() + aux.balance, y

    gradients, y = torch.func.grad(loss, (0, 1), has_aux=True)(params, x)
    return [y, *pytree.tree_leaves(gradients)]


@check
def no_host_reads(device: torch.device) -> str:
    """Forward and backward never make the host wait, ragged and padded, alone and as a program."""
    if device.type != "cuda":
        raise Skipped("of a GPU; tests/test_host_reads.py is what a CPU can show")
    config, params, x = _padded(device)
    spec = fmoe.ShardingSpec(fmoe.make_mesh(8), plan="ep pipeline=2 layout=padded", max_tokens=len(x))
    step = fmoe.auto(lambda p, x: fmoe.moe(p, x, config), spec)
    calls = {
        "padded": lambda p, x: fmoe.moe(p, x, config),
        "ragged": lambda p, x: fmoe.moe(p, x, config.replace(capacity=None)),
        "program": step,
    }
    for name, call in calls.items():
        _train(call, params, x)
        with no_waiting(device):
            try:
                _train(call, params, x)
            except RuntimeError as error:
                raise AssertionError(f"{name}: {error}") from error
    return ", ".join(calls)


@check
def captured_graph(device: torch.device) -> str:
    """The padded layer, forward and backward, as a CUDA graph replayed on other tokens, bit for bit."""
    if device.type != "cuda":
        raise Skipped("of a GPU")
    config, params, x = _padded(device)
    call = lambda p, x: fmoe.moe(p, x, config)  # noqa: E731
    graph, outputs = capture(lambda: _train(call, params, x))
    fresh = torch.randn_like(x)
    x.copy_(fresh)
    graph.replay()
    for a, b in zip(outputs, _train(call, params, fresh), strict=True):
        if not torch.equal(a, b):
            raise AssertionError(f"a replay differs by {error_of(a, b):.1e}")
    return f"{len(outputs)} tensors"


def capture(run: Callable[[], Any]) -> tuple[Any, Any]:
    """A CUDA graph of `run`, warmed up on a side stream, and the tensors it fills."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run()
    return graph, outputs


@check
def exchanges(device: torch.device) -> str:
    """Every exchange and its halves in a group of one, over NCCL on a GPU, without making the host wait."""
    if dist.is_initialized():
        raise Skipped("a process group is up already")
    backend = "nccl" if device.type == "cuda" else "gloo"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    try:
        x = torch.randn(6, 64, device=device)
        group = dist.group.WORLD.group_name
        sizes = {"all_to_all": ([6], [6]), "all_gather": (1,), "reduce_scatter": (1,)}
        for name, arguments in sizes.items():  # the first makes the communicator, and may wait
            OPS[name](x, *arguments, group, "gpu")
        finish(device)
        with no_waiting(device):
            made = {"all_reduce": OPS["all_reduce"](x, group, "gpu"), "broadcast": OPS["broadcast"](x, 0, group, "gpu")}
            for name, arguments in sizes.items():
                made[name] = OPS[name](x, *arguments, group, "gpu")
                future = OPS[f"start_{name}"](x.t().contiguous().t(), *arguments, group, "gpu")  # a temporary is sent
                noise = [torch.full_like(x, torch.nan) for _ in range(8)]  # would take a freed temporary's memory
                made[f"start and done of {name}"] = OPS[f"done_{name}"](future, *arguments, group, "gpu")
                del noise
        wrong = [name for name, y in made.items() if not torch.equal(y, x)]
        if wrong:
            raise AssertionError(f"wrong: {', '.join(wrong)}")
    finally:
        dist.destroy_process_group()
    return f"{len(made)} exchanges over {backend}"


@check
def compiled(device: torch.device) -> str:
    """torch.compile without a graph break, forward and backward, down to Triton code."""
    if device.type != "cuda":
        raise Skipped("tests/test_compile.py does it on a CPU")
    config, params, x = _padded(device)
    leaves, rows = pytree.tree_map(lambda p: p.float().requires_grad_(), (params, x))
    loss = lambda p, x: fmoe.moe(p, x, config)[0].square().sum()  # noqa: E731
    torch.compile(loss, fullgraph=True)(leaves, rows).backward()
    wanted = torch.func.grad(loss, (0, 1))(leaves, rows)
    pairs = zip(pytree.tree_leaves((leaves, rows)), pytree.tree_leaves(wanted), strict=True)
    worst = max(error_of(leaf.grad, want) for leaf, want in pairs)
    require(worst, 1e-3, "compiled gradients")
    return f"worst error {worst:.1e}"

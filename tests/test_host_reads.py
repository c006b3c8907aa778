"""What runs between the operations' kernels reads no number of a device and copies none to it.

So the padded layout never makes the host wait, and a CUDA graph of it can be captured; the ragged one
waits once, for the sizes of its messages. A meta tensor stands for one whose data the host does not have;
the kernels themselves are checked where there is a GPU (`benchmarks/gpu.py`).
"""

from __future__ import annotations

import functools
import pathlib
import sys

import pytest
import torch
import torch.distributed as dist
from oracle import assert_close
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree

import fmoe
from fmoe.ops import OPS
from fmoe.ops.transfers import array_on, numbers_on

E, M, H, T = 4, 8, 16, 6

#: Calls that read a device's data on the host, or whose result's size depends on it.
READS = (
    "item", "tolist", "numpy", "cpu", "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive",
    "bincount", "equal", "allclose", "__bool__", "__int__", "__float__", "__index__",
)  # fmt: skip
#: Calls that bring numbers of the host to a device.
WRITES = ("tensor", "as_tensor", "from_numpy", "new_tensor", "cuda", "pin_memory")
FMOE = str(pathlib.Path(fmoe.__file__).parent)


def _watched(name, args, kwargs):
    """Whether this call is one to note: of what calls, and of the arguments."""
    frame = sys._getframe(2)
    here = frame.f_code.co_filename
    if not here.startswith((FMOE, __file__)) or here.endswith("ops/transfers.py"):  # which the tests below call
        return False
    while frame is not None:  # a kernel may do what it likes on its device
        if frame.f_code.co_name == "run" and frame.f_code.co_filename.endswith("ops/differentiable.py"):
            return False
        frame = frame.f_back
    if name == "repeat_interleave":
        return "output_size" not in kwargs
    if name == "__getitem__":
        return any(getattr(i, "dtype", None) == torch.bool for i in pytree.tree_leaves(args[1]))
    if name == "to":
        return any(isinstance(a, (str, torch.device)) for a in (*args[1:], *kwargs.values()))
    return True


@pytest.fixture
def seen(monkeypatch):
    """``seen(call) -> reads, writes, result``, in backward's threads and rules too, where no mode is active."""
    found = {"reads": [], "writes": []}

    def watch(owner, name, kind):
        original = getattr(owner, name)

        @functools.wraps(original)
        def noted(*args, **kwargs):
            if _watched(name, args, kwargs):
                found[kind].append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, noted)

    def run(call):
        found["reads"].clear(), found["writes"].clear()
        with monkeypatch.context() as patch:
            for owner in (torch, torch.Tensor):
                for name in (*READS, *WRITES, "repeat_interleave", "__getitem__", "to"):
                    if hasattr(owner, name):
                        watch(owner, name, "writes" if name in (*WRITES, "to") else "reads")
            result = call()
            patch.undo()
        monkeypatch.undo()
        return list(found["reads"]), list(found["writes"]), result

    return run


def layer_of(router=None, fn=None, activation="swiglu", **capacity):
    config = fmoe.MoEConfig(E, M, H, router=router or fmoe.TopK(2), activation=activation, **capacity)
    return config, fmoe.init(config, seed=0)


def on_meta(tree):
    return pytree.tree_map(lambda leaf: torch.empty_like(leaf, device="meta"), tree)


def loss_of(layer):
    def loss(params, x):
        y, aux = layer(params, x)
        return y.square().sum() + aux.balance + aux.z + aux.importance

    return loss


def forward_and_backward(layer, params, x):
    """Under autograd and under torch.func."""
    leaves = pytree.tree_map(lambda leaf: leaf.detach().clone().requires_grad_(), params)
    loss_of(layer)(leaves, x).backward()
    assert all(leaf.grad is not None for leaf in pytree.tree_leaves(leaves))
    torch.func.grad(loss_of(layer), (0, 1))(params, x)


@pytest.fixture
def four_ranks():
    """Rank 0 of four whose exchanges move nothing."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


ROUTERS = [
    fmoe.TopK(2), fmoe.TopK(1, scope="local"), fmoe.TopK(2, scope="group"), fmoe.Sigmoid(2),
    fmoe.TopP(0.5), fmoe.ReLU(2),
]  # fmt: skip


@pytest.mark.parametrize("router", ROUTERS, ids=str)
def test_one_device_padded(seen, router):
    config, params = layer_of(router, capacity=1.25)
    p, x = on_meta(params), on_meta(torch.ones(T, M))
    for arguments in ({}, {"groups": 2}, {"groups": (4, 2)}):
        layer = functools.partial(fmoe.moe, config=config, **arguments)
        reads, writes, _ = seen(functools.partial(forward_and_backward, layer, p, x))
        assert (reads, writes) == ([], [])


def test_one_device_padded_with_a_mask_and_batches(seen):
    config, params = layer_of(capacity=fmoe.Capacity(1.25, priority="batch"))
    mask = torch.ones(T, dtype=torch.bool, device="meta")
    layer = lambda p, x: fmoe.moe(p, x, config, mask=mask)  # noqa: E731
    x, p = on_meta(torch.ones(3, T, M)), on_meta(params)
    reads, writes, _ = seen(lambda: torch.func.vmap(torch.func.grad(loss_of(layer)), (None, 0))(p, x))
    assert (reads, writes) == ([], [])


PLANS = ["dp", "ep layout=padded", "ep pipeline=2 layout=padded", "ep pipeline=2 a2a=2dh layout=padded"]


@pytest.mark.parametrize("fn", [None, lambda p, rows: rows * p], ids=["built in", "function"])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("experts", [E, 2])
def test_padded_programs(seen, four_ranks, plan, fn, experts):
    """On two experts each has two ranks: with r=1 tokens are cut, with r=2 their results are summed."""
    spec = fmoe.ShardingSpec(fmoe.make_mesh(experts, node=2), plan=plan, max_tokens=8)
    config = fmoe.MoEConfig(experts, M, H, router=fmoe.TopK(2), capacity=1.25, fn=fn)
    params = fmoe.init(config.replace(fn=None), seed=0)
    if fn is not None:
        params = fmoe.MoEParams(params.router, torch.ones(experts, M))
    step = fmoe.auto(lambda p, x: fmoe.moe(p, x, config), spec)
    params, x = on_meta(params), on_meta(torch.ones(T, M))
    step(params, x)  # plans, and agrees with the other ranks on the host: once, because of max_tokens
    reads, writes, _ = seen(lambda: forward_and_backward(step, params, x))
    assert (reads, writes) == ([], [])


@pytest.mark.parametrize("fn", [None, lambda p, rows: rows * p], ids=["built in", "function"])
@pytest.mark.parametrize("plan", ["ep layout=ragged", "ep pipeline=2 layout=ragged"])
@pytest.mark.parametrize("experts", [E, 1])
def test_a_ragged_program_reads_its_sizes_once(seen, plan, fn, experts):
    """With data, on both ranks of one process: forward reads once on each, backward nothing."""
    config = fmoe.MoEConfig(experts, M, H, router=fmoe.TopK(min(2, experts)), fn=fn)
    params = fmoe.init(config.replace(fn=None), seed=0)
    if fn is not None:
        params = fmoe.MoEParams(params.router, torch.ones(experts, M))
    xs = [torch.randn(T, M), torch.randn(T - 2, M)]
    spec = fmoe.ShardingSpec(fmoe.make_mesh(experts, world=2), plan=plan)
    planned = fmoe.trace(lambda p, x: fmoe.moe(p, x, config))(params, xs[0]).plan(spec)
    leaves = pytree.tree_map(lambda leaf: leaf.detach().clone().requires_grad_(), params)

    def forward():
        return sum(y.square().sum() + aux.balance for y, aux in fmoe.simulate(planned, leaves, xs))

    reads, writes, loss = seen(forward)
    assert reads == ["tolist"] * 2
    assert set(writes) <= {"from_numpy"}  # arrays on their way through `array_on`, which waits for nothing
    reads, writes, _ = seen(loss.backward)
    assert (reads, writes) == ([], [])
    want = fmoe.moe(params, torch.cat(xs), config)[0]
    assert_close(fmoe.simulate(planned, params, xs)[1][0], want[T:], torch.float32)


def test_a_few_numbers_are_not_copied(monkeypatch):
    """To a device that is not the CPU: its kernels write them."""
    monkeypatch.setattr(torch, "tensor", None)
    full = torch.full
    monkeypatch.setattr(torch, "full", lambda size, value, dtype, device: full(size, value, dtype=dtype))
    for numbers in ([], [3], [3, 3], [3, 3, 1]):
        made = numbers_on(numbers, torch.device("meta"))
        assert (made.tolist(), made.dtype) == (numbers, torch.int64)


def test_arrays_go_through_pinned_memory():
    """To a device that is not the CPU a copy is from pinned memory, and the host does not wait for it."""
    asked = []

    class Array:
        def pin_memory(self):
            return self

        def to(self, device, non_blocking):
            asked.append((device.type, non_blocking))
            return self

    array_on(Array(), torch.device("cuda"))
    assert asked == [("cuda", True)]
    assert array_on(given := torch.ones(2), torch.device("cpu")) is given


def test_routing_references_read_nothing(seen):
    """The routing of a padded program, also where it runs by plain torch operations."""
    scores, experts = torch.randn(T, E), torch.randint(E, (1, T, 2))
    capacity = torch.tensor([[2, 3]])
    reads, writes, _ = seen(lambda: OPS["top_k"].reference(scores, 2))
    assert (reads, writes) == ([], [])
    reads, writes, (_, counts) = seen(lambda: OPS["assign_slots"].reference(experts, capacity, [4, 2], E))
    assert (reads, writes) == ([], [])
    assert counts[0].tolist() == torch.bincount(experts.flatten(), minlength=E).tolist()


def test_the_watch_sees_inside_backward(seen):
    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            grad[grad > 0].sum().item()
            return grad * torch.tensor(2.0) + grad.new_tensor(1)

    x = torch.ones(3, requires_grad=True)
    loss = Reads.apply(x).sum()
    reads, writes, _ = seen(loss.backward)
    assert reads == ["__getitem__", "item"]
    assert writes == ["tensor", "new_tensor"]

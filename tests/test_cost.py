"""`cost()` against the collectives that reach torch.distributed, counted there, at 2,048 ranks.

torch's fake process group stands for the other ranks: it moves nothing, so values are meaningless and
only what was asked of it is looked at.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict

import pytest
import torch
import torch.distributed as dist

import fmoe
from fmoe.ops import collectives

M, H, T = 16, 4096, 64
WORLD, NODE, EXPERTS = 2048, 8, 64


@contextlib.contextmanager
def fake_ranks(world):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def counted(monkeypatch):
    """Calls and bytes received, by collective, as torch.distributed is asked for them."""
    seen = defaultdict(lambda: [0, 0])

    def note(name, size):
        seen[name][0] += 1
        seen[name][1] += size

    def all_to_all(out, x, receives, sends, group, async_op=False):
        rank = dist.get_rank(group)
        row = out[0].numel() * out.element_size() if out.shape[0] else 0
        note("all_to_all", row * (sum(receives) - receives[rank]))
        return original["all_to_all_single"](out, x, receives, sends, group=group, async_op=async_op)

    def gather(out, x, group, async_op=False):
        note("all_gather", (out.numel() - x.numel()) * x.element_size())
        return original["gather"](out, x, group=group, async_op=async_op)

    def scatter(out, x, group, async_op=False):
        note("reduce_scatter", (x.numel() - out.numel()) * x.element_size())
        return original["scatter"](out, x, group=group, async_op=async_op)

    def reduce(x, op=dist.ReduceOp.SUM, group=None):
        note("agree" if x.dtype == torch.int64 else "all_reduce", x.numel() * x.element_size())
        return original["all_reduce"](x, op=op, group=group)

    original = {
        "all_to_all_single": dist.all_to_all_single,
        "all_reduce": dist.all_reduce,
        "gather": collectives._gather_single,
        "scatter": collectives._scatter_single,
    }
    with monkeypatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", all_to_all)
        patch.setattr(dist, "all_reduce", reduce)
        patch.setattr(collectives, "_gather_single", gather)
        patch.setattr(collectives, "_scatter_single", scatter)
        yield seen


def by_collective(cost):
    total = defaultdict(lambda: [0, 0])
    for (name, _), (calls, size) in cost.traffic.items():
        total[name][0] += calls
        total[name][1] += size
    return dict(total)


PLANS = [
    "dp layout=padded",
    "ep r=1 layout=padded",
    "ep r=4 pipeline=2 a2a=2dh layout=padded",
    "ep r=4 mp=gather pipeline=4 layout=padded",
    "ep r=32 layout=padded",
]


@pytest.mark.parametrize("plan", PLANS)
def test_the_collectives_that_are_called_are_those_that_are_priced(plan, monkeypatch):
    config = fmoe.MoEConfig(EXPERTS, M, H, router=fmoe.TopK(2), capacity=1.0, activation="relu")
    spec = fmoe.ShardingSpec(fmoe.make_mesh(EXPERTS, world=WORLD, node=NODE), plan=plan, max_tokens=T)
    experts = fmoe.ExpertParams(torch.zeros(1, M, H // 32), torch.zeros(1, H // 32, M), sharded=(EXPERTS, H))
    params = fmoe.MoEParams(fmoe.RouterParams(torch.zeros(M, EXPERTS)), experts)
    x = torch.zeros(T, M)

    def layer(params, x):
        return fmoe.moe(params, x, config)

    with fake_ranks(WORLD):
        # groups over an axis are made on first use: the fake store makes them without a rendezvous
        monkeypatch.setattr("fmoe.ops.processes._make_groups", own_group)
        started = time.perf_counter()
        planned = fmoe.trace(layer)(params, x).plan(spec)
        text = planned.as_text()
        assert time.perf_counter() - started < 10  # a second on a machine that does nothing else
        assert f"ep={64} " in text
        compiled = planned.compile()
        cost = planned.cost()
        with counted(monkeypatch) as seen:
            compiled(params, x)
        assert dict(seen) == by_collective(cost)
        with counted(monkeypatch) as seen:
            torch.func.grad(lambda p, x: compiled(p, x)[0].sum(), (0, 1))(params, x)
        backward = {name: [calls, size] for name, (calls, size) in seen.items()}
        for name, (calls, size) in by_collective(cost).items():
            backward[name][0] -= calls
            backward[name][1] -= size
        assert {k: v for k, v in backward.items() if v[0]} == transposed(by_collective(cost))


def transposed(forward):
    """Backward: every exchange of rows again, gathers as scatters and the reverse; losses had no gradient."""
    swapped = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather", "all_to_all": "all_to_all"}
    return {swapped[name]: count for name, count in forward.items() if name in swapped}


def own_group(everyone):
    ranks = next(ranks for ranks in everyone if 0 in ranks)
    if len(ranks) == WORLD:
        return dist.group.WORLD.group_name
    return dist.new_group(list(ranks), use_local_synchronization=True).group_name


def test_the_agreement_is_one_small_all_reduce_per_call(monkeypatch):
    config = fmoe.MoEConfig(8, M, 8, capacity=1.0, activation="relu")
    params, x = fmoe.init(config, seed=0), torch.zeros(T, M)
    for max_tokens, calls in ((None, 3), (T, 1)):
        with fake_ranks(8), counted(monkeypatch) as seen:
            spec = fmoe.ShardingSpec(fmoe.make_mesh(8), plan="ep layout=padded", max_tokens=max_tokens)
            step = fmoe.auto(lambda p, x: fmoe.moe(p, x, config), spec)
            for _ in range(3):
                step(params, x)
        assert seen["agree"][0] == calls
        assert seen["agree"][1] == calls * 16 * 8


def test_ragged_rows_are_priced_under_an_even_load():
    config = fmoe.MoEConfig(4, M, 8, router=fmoe.TopK(2))
    params, x = fmoe.init(config, seed=0), torch.zeros(T, M)
    spec = fmoe.ShardingSpec(fmoe.make_mesh(4, world=8), plan="ep r=2")
    planned = fmoe.trace(lambda p, x: fmoe.moe(p, x, config))(params, x).plan(spec)
    cost = planned.cost()
    assert cost.run_time
    rows = T * 2 * 2  # K choices, each to 2 slices
    sizes = 8 * 8 * 7 // 8  # the counts, once
    assert cost.traffic["all_to_all", "world"] == (3, sizes + 2 * (rows * M * 4) * 7 // 8)
    assert cost.flops == 2 * rows * 3 * M * 4  # half of H=8 in each slice


def test_memory_counts_what_is_alive():
    """By hand: x, the four matrices, and the largest set of buffers that live at once."""
    config = fmoe.MoEConfig(4, M, 8, router=fmoe.TopK(1), capacity=1.0, activation="relu")
    params, x = fmoe.init(config, seed=0), torch.zeros(T, M)
    spec = fmoe.ShardingSpec(fmoe.make_mesh(4, world=4), plan="ep layout=padded", max_tokens=T)
    cost = fmoe.trace(lambda p, x: fmoe.moe(p, x, config)[0])(params, x).plan(spec).cost()
    inputs = 4 * (M * 4 + M * 8 + 8 * M + T * M)
    assert cost.resident == inputs
    buffer = 4 * (4 * (T // 4) * M)  # E experts, C slots
    routing = 8 * T * 2 + 4 * T  # index, slots or experts; weights
    assert inputs + 2 * buffer <= cost.peak <= inputs + 2 * buffer + 2 * routing + 1024

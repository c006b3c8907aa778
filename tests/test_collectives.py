"""Each collective on two real processes under every transform, against indexing in one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from oracle import assert_close
from ranks import launch
from torch.func import grad, jvp, vmap
from torch.utils.checkpoint import checkpoint

import fmoe
from fmoe.ops import OPS

SENDS = [[4, 2], [1, 5]]  # rows from rank r to each rank
RECEIVES = [[4, 1], [2, 5]]


def world():
    return dist.group.WORLD.group_name


def halves(name, x, *sizes):
    """start, then done: what one exchange is in two."""
    where = (world(), "test")
    return OPS[f"done_{name}"](OPS[f"start_{name}"](x, *sizes, *where), *sizes, *where)


#: name -> (the collective on this rank, the same on both ranks' tensors at once)
CASES = {
    "all_to_all": (
        lambda x, r: OPS["all_to_all"](x, RECEIVES[r], SENDS[r], world(), "test"),
        lambda a, b, r: torch.cat([a.split(SENDS[0])[r], b.split(SENDS[1])[r]]),
    ),
    "start and done of all_to_all": (
        lambda x, r: halves("all_to_all", x, RECEIVES[r], SENDS[r]),
        lambda a, b, r: torch.cat([a.split(SENDS[0])[r], b.split(SENDS[1])[r]]),
    ),
    "all_gather": (lambda x, r: OPS["all_gather"](x, 2, world(), "test"), lambda a, b, r: torch.cat([a, b])),
    "start and done of all_gather": (lambda x, r: halves("all_gather", x, 2), lambda a, b, r: torch.cat([a, b])),
    "reduce_scatter": (
        lambda x, r: OPS["reduce_scatter"](x, 2, world(), "test"),
        lambda a, b, r: (a + b).chunk(2)[r],
    ),
    "start and done of reduce_scatter": (
        lambda x, r: halves("reduce_scatter", x, 2),
        lambda a, b, r: (a + b).chunk(2)[r],
    ),
    "all_reduce": (lambda x, r: OPS["all_reduce"](x, world(), "test"), lambda a, b, r: a + b),
    "broadcast": (lambda x, r: OPS["broadcast"](x, 1, world(), "test"), lambda a, b, r: b.clone()),
}


def rows(ours, reference, rank, xs):
    """(name, on this rank, reference); gradients are those of the sum over both ranks."""
    x, batch = xs[rank], [torch.stack([x, x + 1, 2 * x]) for x in xs]

    def here(x):
        return ours(x, rank).sin().sum()

    def total(a, b):
        return sum(reference(a, b, r).sin().sum() for r in range(2))

    def second(a, b):
        return sum(g.sin().sum() for g in grad(total, (0, 1))(a, b))

    def recomputed(x):
        leaf = x.clone().requires_grad_()
        checkpoint(here, leaf, use_reentrant=False).backward()
        return leaf.grad

    def mine(x):
        return ours(x, rank)

    def both(a, b):
        return reference(a, b, rank)

    yield "value", mine(x), both(*xs)
    yield "grad", grad(here)(x), grad(total, rank)(*xs)
    yield "grad(grad)", grad(lambda x: grad(here)(x).sin().sum())(x), grad(second, rank)(*xs)
    yield "jvp", jvp(mine, (x,), (x,))[1], jvp(both, tuple(xs), tuple(xs))[1]
    yield "jvp(grad)", jvp(grad(here), (x,), (x,))[1], jvp(grad(total, rank), tuple(xs), tuple(xs))[1]
    yield "vmap", vmap(mine)(batch[rank]), vmap(both)(*batch)
    yield "vmap(grad)", vmap(grad(here))(batch[rank]), vmap(grad(total, rank))(*batch)
    yield "checkpoint", recomputed(x), grad(total, rank)(*xs)


def table(rank):
    xs = [torch.randn(6, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    cells = 0
    for name, (ours, reference) in CASES.items():
        for row, found, wanted in rows(ours, reference, rank, xs):
            assert wanted.abs().sum() > 0 or (name, rank) == ("broadcast", 0)  # whose tensor nobody gets
            assert_close(found, wanted, what=f"{row} of {name}")
            cells += 1
    with pytest.raises(fmoe.CollectiveError) as caught:
        OPS["all_to_all"](xs[0], [3, 3], [3, 2], world(), "moe.0: recv = all_to_all over world")
    assert str(caught.value) == (
        f"moe.0: recv = all_to_all over world: all_to_all on rank {rank}: sizes to send add up to 5, but x is f64[6,2]."
    )
    with pytest.raises(fmoe.CollectiveError, match="dim 0 of f64\\[5,2\\] must be a multiple of 2"):
        OPS["reduce_scatter"](xs[0][:5], 2, world(), "test")
    return cells


def test_every_collective_under_every_transform():
    assert launch(table, 2) == [len(CASES) * 8] * 2


@pytest.fixture
def alone():
    """A process group of one."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["all_to_all", "all_gather", "reduce_scatter"])
def test_an_exchange_in_flight_is_held_until_it_is_done(alone, name):
    """Its work object, which keeps the tensors that it reads and fills, also where nobody else does; see [streams]."""
    in_flight = torch._C._distributed_c10d._get_work_registry_size
    sizes = ([3], [3]) if name == "all_to_all" else (1,)
    x = torch.randn(2, 3, dtype=torch.float64).t().requires_grad_()  # not contiguous: a temporary is sent
    future = OPS[f"start_{name}"](x, *sizes, world(), "test")
    assert in_flight() == 1
    held = [torch.full((3, 2), torch.nan) for _ in range(20)]  # memory of a freed temporary would be taken by these
    y = OPS[f"done_{name}"](future, *sizes, world(), "test")
    assert in_flight() == 0
    assert torch.equal(y, x)
    (2 * y).sum().backward()
    assert in_flight() == 0
    assert torch.equal(x.grad, torch.full_like(x, 2))
    assert len(held) == 20

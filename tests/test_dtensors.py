"""Parameters as DTensors: optimizers, clipping, checkpoints across numbers of ranks, FSDP beside fmoe."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from oracle import assert_close
from ranks import launch
from torch.utils import _pytree as pytree

import fmoe

M, H, E = 6, 10, 4
CONFIG = fmoe.MoEConfig(E, M, H, router=fmoe.TopK(2), bias=True)
OPTIMIZERS = ({"foreach": False}, {"foreach": True}, {"fused": True})


def params_of(seed=0):
    return pytree.tree_map(lambda p: p + 0.01, fmoe.init(CONFIG, seed=seed, dtype=torch.float64))


def tokens_of(step):
    return torch.randn(16, M, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def layer(params, x):
    return fmoe.moe(params, x, CONFIG)


def loss_of(y, aux):
    return y.square().mean() + 0.01 * aux.balance + 0.001 * aux.z


def one_process(steps, **options):
    """Weights and norms of training on all tokens without any sharding."""
    leaves, tree = pytree.tree_flatten(params_of())
    optimizer = torch.optim.AdamW(leaves, lr=0.05, **options)
    norms = []
    for step in range(steps):
        grads = torch.func.grad(lambda p, step=step: loss_of(*layer(p, tokens_of(step))))(
            pytree.tree_unflatten(leaves, tree)
        )
        for leaf, grad in zip(leaves, pytree.tree_leaves(grads), strict=True):
            leaf.grad = grad
        norms.append(float(torch.nn.utils.clip_grad_norm_(leaves, 0.1)))
        optimizer.step()
    return leaves, norms


class Run:
    """Training on this rank's share of the tokens."""

    def __init__(self, plan="dp", **options):
        self.spec = fmoe.ShardingSpec(fmoe.make_mesh(E), plan=plan)
        self.step = fmoe.auto(layer, self.spec)
        self.leaves, self.tree = pytree.tree_flatten(fmoe.distribute(params_of(), self.spec))
        self.optimizer = torch.optim.AdamW(self.leaves, lr=0.05, **options)
        self.norms = []

    def share(self, params, x):
        return self.spec.mean(loss_of(*self.step(params, x)), tokens=len(x))

    def train(self, steps, plans=None, clip=fmoe.clip_grad_norm_):
        for step in steps:
            if plans:
                self.step.use(plans[step % len(plans)])
            x = tokens_of(step).chunk(dist.get_world_size())[dist.get_rank()]
            grads = torch.func.grad(self.share)(pytree.tree_unflatten(self.leaves, self.tree), x)
            for leaf, grad in zip(self.leaves, pytree.tree_leaves(grads), strict=True):
                assert grad.placements == leaf.placements
                leaf.grad = grad
            norm = clip(self.leaves, 0.1)
            self.norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
            self.optimizer.step()

    def state(self):
        """What a checkpoint holds, by name."""
        names = [f"leaf{i}" for i in range(len(self.leaves))]
        moments = {
            n: self.optimizer.state[p] for n, p in zip(names, self.leaves, strict=True) if p in self.optimizer.state
        }
        return {"params": dict(zip(names, self.leaves, strict=True)), "optimizer": moments}


def optimizers(rank):
    """AdamW in all three forms, clipped by torch's function and by ours, equals one process."""
    for options in OPTIMIZERS:
        want, norms = one_process(5, **options)
        for clip in (fmoe.clip_grad_norm_, torch.nn.utils.clip_grad_norm_):
            run = Run(**options)
            run.train(range(5), plans=["dp", "ep", "ep pipeline=2 layout=padded"], clip=clip)
            for a, b in zip(run.leaves, want, strict=True):
                assert_close(a.full_tensor(), b, what=str(options))
            assert run.norms == pytest.approx(norms, rel=1e-10)
    return True


@pytest.mark.parametrize("world", [2, 4])
def test_optimizers(world):
    assert all(launch(optimizers, world))


def save(rank, folder):
    run = Run()
    run.train(range(3))
    dcp.save(run.state(), checkpoint_id=folder)
    return True


def load(rank, folder):
    run = Run(plan="ep")
    run.train(range(1))  # other values, and moments to be replaced
    dcp.load(run.state(), checkpoint_id=folder)
    run.train(range(3, 6))
    want, _ = one_process(6)
    for a, b in zip(run.leaves, want, strict=True):
        assert_close(a.full_tensor(), b)
    metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    shapes = {tuple(item.size) for name, item in metadata.items() if name.startswith("params")}
    assert (E, M, 2, H) in shapes  # a checkpoint holds whole experts, and does not know the number of ranks
    return True


def test_checkpoints_load_on_other_numbers_of_ranks(tmp_path):
    folder = str(tmp_path / "checkpoint")
    assert all(launch(save, 2, folder))
    for world in (1, 2, 4):
        assert all(launch(load, world, folder))


def norms(rank):
    """Squared sums 20 and 100 of two experts, on DTensors of two meshes and plain tensors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    ours = init_device_mesh("cpu", (2, 1), mesh_dim_names=("expert", "shard"))
    other = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))

    def leaf(value, mesh, placements):
        p = distribute_tensor(torch.zeros_like(value), mesh, placements).requires_grad_()
        p.grad = distribute_tensor(value, mesh, placements)
        return p

    def tensors():
        experts = leaf(torch.tensor([[2.0, 4.0], [6.0, 8.0]]), ours, [Shard(0), Replicate()])  # 20 and 100
        empty = leaf(torch.tensor([3.0]), other, [Shard(0)])  # one rank holds none of it
        same = leaf(torch.tensor([2.0, 1.0]), other, [Replicate()])
        plain = torch.zeros(1, requires_grad=True)
        plain.grad = torch.tensor([1.0])
        without = torch.zeros(1, requires_grad=True)
        return [experts, empty, same, plain, without]

    for p, want in ((2.0, 135**0.5), (1.0, 27.0), (float("inf"), 8.0)):
        held = tensors()
        norm = fmoe.clip_grad_norm_(held, 1.0, norm_type=p)
        assert norm.item() == pytest.approx(want)
        after = fmoe.clip_grad_norm_(held, 100.0, norm_type=p)
        assert after.item() == pytest.approx(1.0, rel=1e-5)
        assert isinstance(held[0].grad, DTensor)
    assert fmoe.clip_grad_norm_([tensors()[0]], 1e9).item() == pytest.approx(120**0.5)
    with pytest.raises(Exception, match=r"(mesh|DTensor)"):
        torch.nn.utils.clip_grad_norm_(tensors(), 1.0)
    return True


def test_norms_over_meshes():
    assert all(launch(norms, 2))


def beside_fsdp(rank):
    """The dense part of a model under fully_shard, the MoE part under fmoe, trained together."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def dense():
        torch.manual_seed(1)
        return torch.nn.Sequential(torch.nn.Linear(M, 8), torch.nn.Tanh(), torch.nn.Linear(8, M)).double()

    class Model(torch.nn.Module):
        def __init__(self, moe, params):
            super().__init__()
            self.dense, self.moe = dense(), moe
            leaves, self.tree = pytree.tree_flatten(params)
            self.held = [torch.nn.Parameter(leaf) for leaf in leaves]

        def forward(self, x):
            y, aux = self.moe(pytree.tree_unflatten(self.held, self.tree), self.dense(x))
            return y, aux

    def train(model, spec, share):
        leaves = [*model.dense.parameters(), *model.held]
        optimizer = torch.optim.AdamW(leaves, lr=0.05)
        norms = []
        for step in range(3):
            x = tokens_of(step)
            x = x.chunk(2)[rank] if spec else x
            optimizer.zero_grad()
            share(*model(x), len(x)).backward()
            norms.append(float(fmoe.clip_grad_norm_(leaves, 0.1)))
            optimizer.step()
        return leaves, norms

    whole = Model(layer, params_of())
    want, norms = train(whole, None, lambda y, aux, n: loss_of(y, aux))
    spec = fmoe.ShardingSpec(fmoe.make_mesh(E), plan="ep")
    ours = Model(fmoe.auto(layer, spec), fmoe.distribute(params_of(), spec))
    fully_shard(ours.dense, mesh=init_device_mesh("cpu", (2,)))
    ours.dense.set_gradient_divide_factor(1.0)  # fmoe's losses are shares, so gradients add up
    found, got = train(ours, spec, lambda y, aux, n: spec.mean(loss_of(y, aux), tokens=n))
    for a, b in zip(found, want, strict=True):
        assert_close(a.full_tensor(), b)
    assert got == pytest.approx(norms, rel=1e-9)
    return True


def test_fsdp_beside_fmoe():
    assert all(launch(beside_fsdp, 2))


def edges(rank):
    """Second derivatives through DTensors, uneven shards, and what is refused."""
    config = fmoe.MoEConfig(3, M, 5, router=fmoe.TopK(1))  # 3 experts over 2 ranks
    params = fmoe.init(config, seed=0, dtype=torch.float64)
    spec = fmoe.ShardingSpec(fmoe.make_mesh(3), plan="dp")
    held = fmoe.distribute(params, spec)
    assert held.experts.w_in.to_local().shape[0] == (2, 1)[rank]
    assert fmoe.local(held, spec).experts.w_in.shape[0] == 2  # the ceiling, the rest zeros
    x = tokens_of(0).chunk(2)[rank]
    step = fmoe.auto(lambda p, x: fmoe.moe(p, x, config)[0].sin().sum(), spec)

    def whole(p):
        return fmoe.moe(p, tokens_of(0), config)[0].sin().sum()

    def square_of_parts(p):
        grads = torch.func.grad(lambda p: step(p, x))(p)
        return sum(fmoe.local(g, spec).square().sum() for g in pytree.tree_leaves(grads.router))

    got = torch.func.grad(square_of_parts)(held)
    want = torch.func.grad(lambda p: torch.func.grad(whole)(p).router.weight.square().sum())(params)
    assert_close(got.router.weight.full_tensor(), 2 * want.router.weight)  # each rank squares the same sum
    with pytest.raises(fmoe.SpecError, match=r"make it with fmoe.distribute\(params, spec\)"):
        fmoe.local(held, fmoe.ShardingSpec(fmoe.Mesh(1, 2)))
    with pytest.raises(ValueError, match="which is a DTensor or a part: give whole tensors"):
        fmoe.distribute(held, spec)
    return True


def test_edges():
    assert all(launch(edges, 2))

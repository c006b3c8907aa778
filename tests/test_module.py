"""The layer as a module: state, transforms, copies, compilers, autocast, recomputation, DDP, FSDP2, and plans."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch
from oracle import assert_close
from ranks import launch
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import fmoe
from fmoe.module import call, complete_parameters, data_parallel, params_of
from fmoe.transforms.subjects import E, H, K, M, subjects
from fmoe.transforms.table import ROWS, run_cell

D = torch.float64
CONFIG = fmoe.MoEConfig(4, 6, 5, bias=True)


def rand(*shape, seed=0, dtype=D):
    return torch.randn(shape, dtype=D, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layer(seed=0, **changes):
    return fmoe.MoE(CONFIG.replace(**changes), seed=seed, dtype=D)


def loss_of(made):
    y, aux = made
    return y.sin().sum() + 0.3 * aux.balance + 0.1 * aux.z


# --- what it holds and returns ---------------------------------------------------------------------------------------


def test_it_is_the_pure_function():
    """The same numbers and gradients, nothing stored: the module is the same before and after a call."""
    made, x = layer(seed=3), rand(2, 5, 6)
    before = {name: id(item) for name, item in vars(made).items()}
    y, aux = made(x)
    params = fmoe.init(CONFIG, seed=3, dtype=D)
    wanted, wanted_aux = fmoe.moe(params, x, CONFIG)
    assert torch.equal(y, wanted)
    assert all(map(torch.equal, pytree.tree_leaves(aux), pytree.tree_leaves(wanted_aux)))
    assert {name: id(item) for name, item in vars(made).items()} == before
    assert list(made.buffers()) == []
    loss_of((y, aux)).backward()
    grads = grad(lambda p: loss_of(fmoe.moe(p, x, CONFIG)))(params)
    for p, g in zip(pytree.tree_leaves(made.params), pytree.tree_leaves(grads), strict=True):
        assert torch.equal(p.grad, g)
    masked = made(x, mask=torch.zeros(2, 5, dtype=torch.bool), capacity=1.0)
    assert bool((masked[0] == 0).all())


def test_keys_of_the_state():
    """Stable: they are the paths of the parameters in `MoEParams`, for every router and expert."""
    keys = {
        layer(): ["router.weight", "experts.w_in", "experts.w_out", "experts.b_in", "experts.b_out"],
        layer(bias=False, router=fmoe.Cosine(2, dim=3)): [
            "router.weight", "router.projection", "router.log_scale", "experts.w_in", "experts.w_out",
        ],
    }  # fmt: skip
    for made, wanted in keys.items():
        assert list(made.state_dict()) == wanted
        assert [name for name, _ in made.named_parameters()] == wanted
        paths = [pytree.keystr(path)[1:] for path, _ in pytree.tree_flatten_with_path(made.params)[0]]
        assert paths == wanted
    other = layer(seed=1)
    assert not torch.equal(other.params.router.weight, layer().params.router.weight)
    other.load_state_dict(layer().state_dict())
    assert torch.equal(other(rand(3, 6))[0], layer()(rand(3, 6))[0])


def test_experts_of_the_user():
    def fn(p, rows):
        return (rows @ p["a"]).tanh() @ p["b"]

    config = CONFIG.replace(fn=fn)
    experts = {"a": rand(4, 6, 3), "b": rand(4, 3, 6, seed=1)}
    params = dataclasses.replace(fmoe.init(config, seed=0, dtype=D), experts=experts)
    made, x = fmoe.MoE(config, params=params), rand(7, 6)
    assert list(made.state_dict()) == ["router.weight", "experts.a", "experts.b"]
    assert torch.equal(made(x)[0], fmoe.moe(params, x, config)[0])
    made(x)[0].sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in made.experts.parameters())


def test_what_it_refuses():
    config = CONFIG.replace(fn=lambda p, rows: rows)
    for make, message in (
        (
            lambda: fmoe.MoE(config),
            "MoE: params is None, but with config.fn it must be an MoEParams whose experts is a dict.",
        ),
        (
            lambda: fmoe.MoE(config, params=fmoe.init(CONFIG, seed=0)),
            "MoE: params.experts is a ExpertParams, but it must be a dict of stacked tensors, as config.fn is yours.",
        ),
        (
            lambda: fmoe.MoE(CONFIG, params=fmoe.init(config, seed=0)),
            "MoE: params.experts is a tuple, but it must be an ExpertParams.",
        ),
        (
            lambda: fmoe.MoE(CONFIG)(rand(3, 6, dtype=torch.float32), nois=None),
            "moe: gate() got an unexpected keyword argument 'nois'",
        ),
        (
            lambda: fmoe.MoE(4, fmoe.make_mesh(4)),
            "MoE: 2 arguments do not fit.\n"
            "  config is a int, but it must be an fmoe.MoEConfig.\n"
            "  spec is a Mesh, but it must be an fmoe.ShardingSpec(mesh, plan=...).",
        ),
        (
            lambda: fmoe.MoE(CONFIG, fmoe.ShardingSpec(fmoe.make_mesh(CONFIG.num_experts))),
            "MoE: spec= is given, whose parameters are DTensors, but torch.distributed is not started: call "
            "torch.distributed.init_process_group first, or leave spec= out.",
        ),
    ):
        with pytest.raises((ValueError, TypeError)) as caught:
            make()
        assert str(caught.value).removeprefix("moe: ") == message.removeprefix("moe: ")


# --- transforms, copies, compilers -----------------------------------------------------------------------------------


def test_functional_call_under_every_transform():
    """The table of the layer, with the module in the function's place."""
    subject = subjects()["moe ragged"]
    made = fmoe.MoE(fmoe.MoEConfig(E, M, H, router=fmoe.TopK(K), bias=True), dtype=D)
    names = ["router.weight", "experts.w_in", "experts.b_in", "experts.w_out", "experts.b_out"]

    def function(x, *leaves):
        y, aux = functional_call(made, dict(zip(names, leaves, strict=True)), (x,))
        return y, aux.balance, aux.z, aux.importance, aux.load, aux.entropy

    through = dataclasses.replace(subject, function=function)
    rows = [row for row in ROWS if row not in ("compile(hessian)", "compile(jacfwd)", "export")]
    cells = {row: run_cell(row, through, "aot_eager") for row in rows}
    assert {row: cell for row, cell in cells.items() if cell.outcome != "pass"} == {}


def test_stacked_modules():
    """An ensemble, and its gradients for each sample and each model: those of every module by itself."""
    models, xs = [layer(seed=s) for s in range(3)], rand(2, 5, 6)
    stacked, _ = stack_module_state(models)

    def loss(params, x):
        return loss_of(functional_call(models[0], params, (x,)))

    found = vmap(vmap(grad(loss), (None, 0)), (0, None))(stacked, xs)
    for i, model in enumerate(models):
        for j, x in enumerate(xs):
            wanted = torch.autograd.grad(loss_of(model(x)), list(model.parameters()))
            for (name, _), g in zip(model.named_parameters(), wanted, strict=True):
                assert_close(found[name][i, j], g)


def test_copies():
    made, x = layer(seed=2), rand(5, 6)
    y = made(x)[0]
    for again in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert torch.equal(again(x)[0], y)
        assert not {id(p) for p in again.parameters()} & {id(p) for p in made.parameters()}
    cast = copy.deepcopy(made).to(torch.bfloat16)
    assert {p.dtype for p in cast.parameters()} == {torch.bfloat16}
    assert_close(cast(x.bfloat16())[0], y, torch.bfloat16)


def test_autocast():
    """Experts in bf16, routing in fp32; gradients in the parameters' dtype."""
    made, x = fmoe.MoE(CONFIG), rand(9, 6, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y, aux = made(x)
        wanted = fmoe.moe(made.params, x, CONFIG)[0]
    assert torch.equal(y, wanted)
    assert not torch.equal(y, made(x)[0])
    assert_close(y, made(x)[0], torch.bfloat16)
    loss_of((y, aux)).backward()
    assert {p.grad.dtype for p in made.parameters()} == {torch.float32}


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation(reentrant):
    """Gradients with activation checkpointing are those without, bit by bit.

    torch's reentrant kind sees tensors only, not trees of them: it takes losses out of `aux` inside.
    """
    made, x = layer(), rand(9, 6).requires_grad_()
    plain = torch.autograd.grad(loss_of(made(x)), [x, *made.parameters()])
    if reentrant:
        loss = sum(
            checkpoint(
                lambda x: (made(x)[0].sin().sum(), loss_of(made(x)) - made(x)[0].sin().sum()), x, use_reentrant=True
            )
        )
    else:
        loss = loss_of(checkpoint(made, x, use_reentrant=False))
    loss.backward()
    for leaf, g in zip([x, *made.parameters()], plain, strict=True):
        assert_close(leaf.grad, g) if reentrant else torch.testing.assert_close(leaf.grad, g, rtol=0, atol=0)


def test_compile():
    """One graph, forward and backward, and the state of the compiled module has the same keys."""
    torch._dynamo.reset()
    made, x = layer(), rand(9, 6)
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
    assert_close(compiled(x)[0], made(x)[0])
    wanted = torch.autograd.grad(loss_of(made(x)), list(made.parameters()))
    loss_of(compiled(x)).backward()
    for leaf, g in zip(made.parameters(), wanted, strict=True):
        assert_close(leaf.grad, g)


def test_training():
    """AdamW on a module fits a fixed target."""
    made, x = layer(), rand(64, 6)
    target = rand(64, 6, seed=1).tanh()
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        y, aux = made(x)
        loss = (y - target).square().mean() + 0.01 * aux.balance
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.6 * losses[0]


# --- plans -----------------------------------------------------------------------------------------------------------


class Net(torch.nn.Module):
    """Two layers of the same config with linear maps around: what a client's model looks like."""

    def __init__(self, spec=None):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first, self.last = torch.nn.Linear(6, 6, dtype=D), torch.nn.Linear(6, 6, dtype=D)
        for linear in (self.first, self.last):
            linear.weight.data = torch.randn(6, 6, generator=generator, dtype=D) / 2
            linear.bias.data.zero_()
        self.layers = torch.nn.ModuleList([fmoe.MoE(CONFIG, spec, seed=s, dtype=D) for s in range(2)])

    def forward(self, x):
        h, losses = self.first(x), []
        for made in self.layers:
            y, aux = made(h)
            h = h + y
            losses.append(aux.balance)
        return self.last(h), sum(losses)


@pytest.mark.parametrize("plan", ["dp", "ep r=1", "ep r=2 layout=padded", None])
def test_a_model_is_a_function_of_one_tree(plan):
    """Under every plan, on simulated ranks: outputs and gradients are the model's own."""
    net, xs = Net(), [rand(n, 6, seed=n) for n in (3, 5, 0, 4, 2, 6, 1, 3)]
    spec = fmoe.ShardingSpec(fmoe.make_mesh(4, world=8), plan=plan)
    params = params_of(net)
    assert list(params) == ["layers.0", "layers.1", "first.weight", "first.bias", "last.weight", "last.bias"]
    planned = fmoe.trace(lambda p, x: call(net, p, x))(params, xs[0]).plan(spec)
    outs = fmoe.simulate(planned, params, xs)
    assert sorted(planned.plans) == ["moe.0", "moe.1"]
    for (y, _), x in zip(outs, xs, strict=True):
        assert_close(y, net(x)[0])
    grads = grad(lambda p: sum(y.sin().sum() for y, _ in fmoe.simulate(planned, p, xs)))(params)
    net.zero_grad()
    sum(net(x)[0].sin().sum() for x in xs).backward()
    for p, g in zip(pytree.tree_leaves(params), pytree.tree_leaves(grads), strict=True):
        assert_close(p.grad, g)


def ranks_agree(rank):
    """Everything that takes process groups, in one launch; each part compares with one process."""
    x, target = rand(8, 6), rand(8, 6, seed=1)
    rows = slice(0, 5) if rank == 0 else slice(5, 8)
    alone = Net()

    def mean(net, x, target):
        y, balance = net(x)
        return (y - target).square().mean() + 0.01 * balance

    mean(alone, x, target).backward()
    wanted = {name: p.grad for name, p in alone.named_parameters()}
    spec = fmoe.ShardingSpec(fmoe.make_mesh(4))

    def check(model, names, what):
        for name, p in model.named_parameters():
            whole = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            assert_close(whole, wanted[names(name)], what=f"{what} {name}")

    def share(model):
        loss = mean(model, x[rows], target[rows])
        return spec.mean(loss, tokens=len(x[rows]))

    _under_ddp(alone, share, check, spec, x[rows])
    _under_fsdp(share, check, spec)
    _plain_under_ddp_and_fsdp(wanted, mean, x, target, rows)
    _planned(spec, x[rows], share, check)


def _under_ddp(alone, share, check, spec, x):
    net = Net(spec)
    assert all(hasattr(p, "placements") for p in complete_parameters(net).values())
    assert len(complete_parameters(net)) == 2 * 5
    wrapped = data_parallel(net)
    assert_close(wrapped(x)[0], alone(x)[0])
    for _ in range(2):  # gradients add up, and DDP is ready again
        net.zero_grad()
        share(wrapped).backward()
    check(net, lambda name: name, "ddp")


def _under_fsdp(share, check, spec):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = Net(spec)
    fully_shard(net, mesh=init_device_mesh("cpu", (2,)), ignored_params=set(complete_parameters(net).values()))
    net.set_gradient_divide_factor(1.0)
    share(net).backward()
    check(net, lambda name: name, "fsdp2")
    norm = fmoe.clip_grad_norm_(net, 1e9)
    total = sum(float((p.grad.full_tensor() ** 2).sum()) for p in net.parameters())
    assert float(norm) == pytest.approx(total**0.5)


def _plain_under_ddp_and_fsdp(wanted, mean, x, target, rows):
    """Layers without a spec are modules like any other: equal shares, gradients averaged."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mine = slice(0, 4) if rows.start == 0 else slice(4, 8)
    parts = [slice(0, 4), slice(4, 8)]
    alone = Net()
    (sum(mean(alone, x[p], target[p]) for p in parts) / 2).backward()
    sharded = Net()
    for made in sharded.layers:
        fully_shard(made, mesh=init_device_mesh("cpu", (2,)))
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    for model in (torch.nn.parallel.DistributedDataParallel(Net()), sharded):
        mean(model, x[mine], target[mine]).backward()
        for (name, p), other in zip(model.named_parameters(), alone.parameters(), strict=True):
            whole = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            assert_close(whole, other.grad, what=f"{type(model).__name__} {name}")


def _planned(spec, x, share, check):
    """The module's own `step`: plans change, the planner learns, and a copy plans anew."""
    made = Net(spec).layers[0]
    y, aux = made(x)
    first = y.detach()
    for plan in ("dp", "ep r=1 pipeline=2", "ep layout=padded"):
        made.step.use(plan)
        assert_close(made(x)[0], first)
    made.step.use(None)
    _, aux = made(x)
    made.step.update(aux)
    assert "dp" in made.step.explain()
    assert_close(made(x)[0], first)
    twin = copy.deepcopy(made)
    assert twin.step is not made.step
    assert_close(twin(x)[0], first)


def test_two_processes():
    launch(ranks_agree, 2)

"""Every plan on real processes over gloo: outputs, losses and gradients against one process."""

from __future__ import annotations

import dataclasses
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from oracle import assert_close
from ranks import launch
from torch.nn import functional as nn
from torch.utils import _pytree as pytree

import fmoe
from fmoe import functional as F
from fmoe.ops import processes

M, H = 8, 10
SIZES = (6, 3, 0, 5)  # uneven, and a rank without tokens
EXPERTS = (1, 2, 3, 4, 6, 8)


def config_of(experts, capacity=None):
    return fmoe.MoEConfig(experts, M, H, router=fmoe.TopK(min(2, experts)), bias=True, capacity=capacity)


def params_of(config, seed=0):
    params = fmoe.init(config, seed=seed, dtype=torch.float64)
    return pytree.tree_map(lambda p: p + 0.01, params)  # biases that are not 0


def tokens_of(world):
    generator = torch.Generator().manual_seed(0)
    xs = [torch.randn(t, M, dtype=torch.float64, generator=generator) for t in SIZES[:world]]
    targets = [torch.randint(M, (t,), generator=generator) for t in SIZES[:world]]
    return xs, targets


def objective(y, aux, targets):
    ce = nn.cross_entropy(y, targets) if len(y) else y.sum()
    return ce + 0.01 * aux.balance + 0.001 * aux.z


def plans_everywhere(rank, world):
    """All legal plans of all numbers of experts; returns what must be equal on every rank."""
    xs, targets = tokens_of(world)
    sizes = list(SIZES[:world])
    same = []
    for experts in EXPERTS:
        for capacity in (None, 0.75):
            config = config_of(experts, capacity)
            params = params_of(config)
            groups = sizes if capacity else 1

            def whole(p, x, config=config, groups=groups):
                y, aux = fmoe.moe(p, x, config, groups=groups)
                return objective(y, aux, torch.cat(targets)), (y, aux)

            (want_p, want_x), (y, aux) = torch.func.grad(whole, (0, 1), has_aux=True)(params, torch.cat(xs))
            mesh = fmoe.make_mesh(experts, node=max(1, world // 2))
            spec = fmoe.ShardingSpec(mesh)
            step = fmoe.auto(lambda p, x, config=config: fmoe.moe(p, x, config), spec)
            held = fmoe.distribute(params, spec)

            def share(p, x, step=step, spec=spec):
                y, aux = step(p, x)
                return spec.mean(objective(y, aux, targets[rank]), tokens=len(x)), (y, aux)

            for plan in fmoe.legal_plans(mesh):
                if capacity and plan.pipeline > 2:
                    continue
                step.use(plan)
                gradient = torch.func.grad_and_value(share, (0, 1), has_aux=True)
                (got_p, got_x), (loss, (found, got)) = gradient(held, xs[rank])
                what = f"E={experts} capacity={capacity} {plan}"
                assert_close(found, y.split(sizes)[rank], what=what)
                assert_close(got_x, want_x.split(sizes)[rank], what=what)
                for a, b, p in zip(*map(pytree.tree_leaves, (got_p, want_p, held)), strict=True):
                    assert a.placements == p.placements
                    assert_close(a.full_tensor(), b, what=what)
                assert torch.equal(got.counts, aux.counts)
                assert got.dropped == aux.dropped
                for name in ("balance", "z", "importance", "load", "entropy"):
                    assert_close(getattr(got, name), getattr(aux, name), what=f"{what} {name}")
                total = spec.total(loss)
                assert_close(total, whole(params, torch.cat(xs))[0], what=what)
                same.append((what, step.planned(held, xs[rank]).as_text(), float(total), got.balance.item()))
    return same


@pytest.mark.parametrize("world", [2, 4])
def test_every_plan_on_processes(world):
    results = launch(plans_everywhere, world, world)
    assert len(results[0]) > 100
    assert all(result == results[0] for result in results)


def test_every_plan_on_one_process():
    """Without a process group a mesh of one rank runs every plan there is."""
    xs, _ = tokens_of(1)
    for experts in EXPERTS:
        config = config_of(experts)
        params = params_of(config)
        spec = fmoe.ShardingSpec(fmoe.make_mesh(experts))
        step = fmoe.auto(lambda p, x, config=config: fmoe.moe(p, x, config), spec)
        for plan in fmoe.legal_plans(spec.mesh):
            step.use(plan)
            assert torch.equal(step(params, xs[0])[0], fmoe.moe(params, xs[0], config)[0])


def one_by_one(rank):
    """The four functions and moe under spec=, with DTensors, parts and whole tensors."""
    config = config_of(3)
    params = params_of(config)
    xs, _ = tokens_of(2)
    want, aux = fmoe.moe(params, torch.cat(xs), config)
    x, expected = xs[rank], want.split(list(SIZES[:2]))[rank]
    for plan in ("dp", "ep r=1", "ep r=1 pipeline=2 layout=padded"):
        spec = fmoe.ShardingSpec(fmoe.make_mesh(3), plan=plan)
        held = fmoe.distribute(params, spec)
        for given in (params, held, fmoe.local(held, spec)):
            y, got = fmoe.moe(given, x, config, spec=spec)
            assert_close(y, expected)
            assert_close(got.balance, aux.balance)
            routing = F.gate(given.router, x, config.router, spec=spec)
            tokens = F.dispatch(x, routing, spec=spec)
            tokens = F.expert_apply(given.experts, tokens, activation=config.activation, spec=spec)
            assert_close(F.combine(tokens, routing, spec=spec), expected)
            with pytest.raises(ValueError, match="dispatched under a spec: only combine can read them"):
                _ = tokens.data
            with pytest.raises(ValueError, match="give combine the same spec="):
                F.combine(tokens, routing)

        def z(weight, x, **where):
            return F.gate(fmoe.RouterParams(weight), x, config.router, **where).aux.z

        grad = torch.func.grad(z)(params.router.weight, x, spec=spec).clone()
        torch.distributed.all_reduce(grad)  # a whole tensor is a variable of each rank's own
        alone = torch.func.grad(z)(params.router.weight, torch.cat(xs))
        assert_close(grad, 2 * alone)  # the loss is equal on both ranks, so it counts twice
    batched = x.reshape(1, *x.shape).expand(2, *x.shape)  # leading dims
    y, _ = fmoe.moe(params, batched, config, spec=spec)
    assert_close(y[1], expected)
    with torch.no_grad():
        wide = fmoe.moe(params, x.float(), config.replace(dtype=torch.bfloat16), spec=spec)[0]
    assert wide.dtype == torch.float32
    assert_close(wide, expected.float(), torch.bfloat16)
    return True


def test_the_functions_under_a_spec_one_by_one():
    assert all(launch(one_by_one, 2))


def two_layers(rank):
    """Layers with 4 and 8 experts in one function, each with a plan of its own."""
    configs = [config_of(4), config_of(8)]
    params = [params_of(c, seed=i) for i, c in enumerate(configs)]
    xs, _ = tokens_of(4)

    def model(params, x):
        auxes = []
        for p, config in zip(params, configs, strict=True):
            y, aux = fmoe.moe(p, nn.layer_norm(x, (M,)), config)
            x = x + y
            auxes.append(aux)
        return x, auxes

    mesh = fmoe.make_mesh([4, 8], node=2)
    spec = fmoe.ShardingSpec(mesh, plan={"moe.0": "dp", "moe.1": "ep r=1 pipeline=2 a2a=2dh layout=padded"})
    step = fmoe.auto(model, spec)
    held = fmoe.distribute(params, spec)

    def share(p, x):
        y, auxes = step(p, x)
        return y.square().sum() + auxes[1].z / 4, [aux.counts for aux in auxes]

    def whole(p, x):
        y, auxes = model(p, x)
        return y.square().sum() + auxes[1].z, [aux.counts for aux in auxes]

    wanted, counts = torch.func.grad(whole, has_aux=True)(params, torch.cat(xs))
    found, got = torch.func.grad(share, has_aux=True)(held, xs[rank])
    for a, b in zip(pytree.tree_leaves(found), pytree.tree_leaves(wanted), strict=True):
        assert_close(a.full_tensor(), b)
    for a, b in zip(got, counts, strict=True):  # no state is shared between layers of other sizes
        assert torch.equal(a, b)
    return True


def test_two_layers_of_other_sizes():
    assert all(launch(two_layers, 4))


def in_half(rank):
    """fp32, bf16 and autocast under a plan, by the one table of tolerances."""
    config = config_of(4)
    params = params_of(config)
    xs, _ = tokens_of(2)
    want = fmoe.moe(params, torch.cat(xs), config)[0].split(list(SIZES[:2]))[rank]
    for plan in ("dp", "ep layout=ragged", "ep pipeline=2 layout=padded"):
        spec = fmoe.ShardingSpec(fmoe.make_mesh(4), plan=plan, max_tokens=8)
        for dtype in (torch.float32, torch.bfloat16):
            held = fmoe.distribute(params.to(dtype), spec)
            y, aux = fmoe.moe(held, xs[rank].to(dtype), config, spec=spec)
            assert (y.dtype, aux.balance.dtype) == (dtype, torch.float32)
            assert_close(y, want, dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y, _ = fmoe.moe(params.to(torch.float32), xs[rank].float(), config, spec=spec)
            assert_close(y, want, torch.bfloat16)
    return True


def test_half_precision_and_autocast():
    assert all(launch(in_half, 2))


def switching(rank):
    """Programs are kept: a second round of the same plans captures and lowers nothing."""
    config = config_of(4)
    params = params_of(config)
    xs, _ = tokens_of(2)
    made = []

    def layer(p, x):
        made.append("captured")
        return fmoe.moe(p, x, config)[0]

    spec = fmoe.ShardingSpec(fmoe.make_mesh(4))
    step = fmoe.auto(layer, spec)
    held = fmoe.distribute(params, spec)
    plans = fmoe.legal_plans(spec.mesh, pipelines=(1, 2))
    outputs = []
    for _ in range(2):
        for plan in plans:
            step.use(plan)
            outputs.append(step(held, xs[rank]))
            programs = step.planned(held, xs[rank]).program
            assert step.planned(held, xs[rank]).program is programs
    for y in outputs:
        assert_close(y, outputs[0])
    return made


def test_programs_are_kept():
    assert launch(switching, 2) == [["captured"], ["captured"]]


def replaced(rank):
    """`dataclasses.replace` of parts keeps the whole sizes."""
    config = config_of(4)
    spec = fmoe.ShardingSpec(fmoe.make_mesh(4))
    part = fmoe.local(params_of(config), spec)
    assert part.experts.sharded == (4, H)
    silenced = dataclasses.replace(part, experts=dataclasses.replace(part.experts, w_out=part.experts.w_out * 0))
    x = tokens_of(2)[0][rank]
    y, _ = fmoe.moe(silenced, x, config, spec=spec)
    bias_only = fmoe.moe(silenced_whole(config), x, config)[0]
    assert_close(y, bias_only)
    return True


def silenced_whole(config):
    params = params_of(config)
    return dataclasses.replace(params, experts=dataclasses.replace(params.experts, w_out=params.experts.w_out * 0))


def test_parts_can_be_changed():
    assert all(launch(replaced, 2))


def test_a_destroyed_group_is_not_held(tmp_path):
    """What was made for it goes with it: a group that stays has threads when the interpreter ends."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    group = weakref.ref(dist.group.WORLD)
    try:
        made = processes.made_once()
        made["anything"] = object()
        assert processes._control() is group()
        assert processes.made_once() is made
    finally:
        dist.destroy_process_group()
    gc.collect()
    assert group() is None
    assert made == {}

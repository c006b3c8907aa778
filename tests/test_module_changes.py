"""The layer as a module where it changes, is copied or shared: each call sees what is there now, and nothing else."""

from __future__ import annotations

import io

import pytest
import torch
from oracle import assert_close
from ranks import launch
from torch import nn
from torch.utils import _pytree as pytree

import fmoe
from fmoe.module import call, data_parallel, params_of

D = torch.float64
CONFIG = fmoe.MoEConfig(4, 6, 5, bias=True)


def rand(*shape, seed=0):
    return torch.randn(shape, dtype=D, generator=torch.Generator().manual_seed(seed))


def layer(seed=0, **changes):
    return fmoe.MoE(CONFIG.replace(**changes), seed=seed, dtype=D)


class Twice(nn.Module):
    """A layer, then another or the same."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x):
        for part in (self.first, self.second):
            made = part(x)
            x = made[0] if isinstance(made, tuple) else made
        return x


def test_parameters_are_copied():
    """A layer that trains changes neither what it was given nor another layer of the same; the layout is kept."""
    given = fmoe.init(CONFIG, seed=0, dtype=D)
    w_in = given.experts.w_in.transpose(1, 3).contiguous().transpose(1, 3)
    given = fmoe.MoEParams(given.router, fmoe.ExpertParams(w_in, *pytree.tree_leaves(given.experts)[1:]))
    before = pytree.tree_map(torch.clone, given)
    one, two = fmoe.MoE(CONFIG, params=given), fmoe.MoE(CONFIG, params=given)
    with torch.no_grad():
        for leaf in one.parameters():
            leaf.add_(1)
    for wanted, *same in zip(*map(pytree.tree_leaves, (before, given, two.params)), strict=True):
        assert all(torch.equal(wanted, leaf) for leaf in same)
    assert two.experts.w_in.stride() == w_in.stride()


# --- models as functions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [layer, lambda: nn.Linear(6, 6, dtype=D)])
def test_a_module_under_two_names(make):
    """It is one set of parameters, with the gradients of both uses, and the model keeps its own."""
    made = make()
    model, x = Twice(made, made), rand(5, 6)
    held, params = dict(model.named_parameters()), params_of(model)
    before = model(x)
    zeros = pytree.tree_map(torch.zeros_like, params)
    assert_close(call(model, zeros, x), torch.zeros(5, 6, dtype=D))
    assert all(held[name] is leaf for name, leaf in model.named_parameters())
    assert torch.equal(model(x), before)
    grads = torch.func.grad(lambda p: call(model, p, x).sin().sum())(params)
    before.sin().sum().backward()
    for leaf, found in zip(pytree.tree_leaves(params), pytree.tree_leaves(grads), strict=True):
        assert_close(found, leaf.grad)


def test_a_parameter_of_two_modules():
    """Outside of layers it is given once, under its first name, and stands in both."""
    model, x = Twice(nn.Linear(6, 6, dtype=D), nn.Linear(6, 6, dtype=D)), rand(5, 6)
    model.second.weight = model.first.weight
    params = params_of(model)
    assert list(params) == ["first.weight", "first.bias", "second.bias"]
    params["first.weight"] = torch.eye(6, dtype=D)
    assert_close(call(model, params, x), x + model.first.bias + model.second.bias)


def test_what_is_no_leaf_of_a_tree():
    model = Twice(layer(), layer(1))
    model.second.experts = model.first.experts
    with pytest.raises(
        ValueError, match=r"params_of: 4 arguments do not fit\.\n  first\.experts\.w_in and second\.experts\.w_in"
    ):
        params_of(model)
    model = Twice(layer(), layer(1))
    model.second.experts.w_in = model.first.experts.w_in
    with pytest.raises(ValueError) as caught:
        params_of(model)
    assert str(caught.value) == (
        "params_of: first.experts.w_in and second.experts.w_in are one parameter, which an MoEParams of each layer "
        "would hold as two: use one MoE under both names, or torch.func.functional_call, which takes parameters by "
        "name."
    )
    made = layer()
    nn.utils.parametrize.register_parametrization(made.experts, "w_in", nn.Identity())
    with pytest.raises(ValueError) as caught:
        params_of(made)
    assert str(caught.value) == (
        "params_of: experts is parametrized, so its parameters are not those of the layer: call "
        "torch.nn.utils.parametrize.remove_parametrizations, or use torch.func.functional_call."
    )


# --- what it refuses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("leaf", "problem"),
    [
        ({"names": rand(4, 2)}, "['names']: the name is one of torch.nn.Module's own or of fmoe's: choose another."),
        (
            {"tensors": rand(4, 2)},
            "['tensors']: the name is one of torch.nn.Module's own or of fmoe's: choose another.",
        ),
        ({"training": rand(4)}, "['training']: the name is one of torch.nn.Module's own or of fmoe's: choose another."),
        (
            {"a.b": rand(4, 2)},
            "['a.b']: the name must be a word without dots, as it is a part of the state_dict's keys.",
        ),
        (
            {"a": {"b": rand(4, 2)}},
            "['a'] is a dict, but it must be a tensor stacked over experts: give one flat dict.",
        ),
    ],
)
def test_names_of_the_users_own(leaf, problem):
    config = CONFIG.replace(fn=lambda p, rows: rows)
    with pytest.raises(ValueError) as caught:
        fmoe.MoE(config, params=fmoe.MoEParams(fmoe.init(CONFIG, seed=0).router, leaf))
    assert str(caught.value) == f"MoE: params.experts{problem}"


def test_a_bias_that_nothing_adds():
    biased = fmoe.RouterParams(rand(6, 4), logit_bias=rand(4))
    params = fmoe.MoEParams(biased, fmoe.init(CONFIG, seed=0, dtype=D).experts)
    text = "router_params.logit_bias is f64[4], but {} does not add it: {}, or leave it out."
    topk, way = fmoe.TopK(2), "choose TopK(..., logit_bias=True)"
    for make, where in (
        (lambda: fmoe.functional.gate(biased, rand(3, 6), topk), "gate"),
        (lambda: fmoe.MoE(CONFIG.replace(router=topk), params=params), "MoE"),
    ):
        with pytest.raises(ValueError) as caught:
            make()
        assert str(caught.value) == f"{where}: {text.format(topk, way)}"
    sigmoid = fmoe.Sigmoid(2)
    with pytest.raises(ValueError) as caught:
        fmoe.functional.gate(biased, rand(3, 6), sigmoid)
    assert str(caught.value) == f"gate: {text.format(sigmoid, 'route by TopK(logit_bias=True)')}"
    added = fmoe.functional.gate(biased, rand(3, 6), fmoe.TopK(2, logit_bias=True))
    wanted = (rand(3, 6) @ biased.weight + biased.logit_bias).topk(2).indices
    assert torch.equal(added.experts, wanted)


# --- copies, another config, another group ---------------------------------------------------------------------------


def test_a_compiled_layer_is_saved():
    made, x, file = layer(), rand(5, 6), io.BytesIO()
    made.compile(backend="eager")
    y = made(x)[0]
    torch.save(made, file)
    file.seek(0)
    assert_close(torch.load(file, weights_only=False)(x)[0], y)


def test_another_config():
    made, x = layer(), rand(5, 6)
    assert int(made(x)[1].counts.sum()) == 10
    made.config = CONFIG.replace(router=fmoe.TopK(1))
    assert int(made(x)[1].counts.sum()) == 5
    with pytest.raises(ValueError, match=r"config is a int, but it must be an fmoe\.MoEConfig"):
        made.config = 1


def two_ranks(rank):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("apart", "alone"))
    for name, wanted in (("alone", rank + 1.0), ("apart", 3.0)):
        for group in ({"device_mesh": mesh[name]}, {"process_group": mesh.get_group(name)}):
            linear = nn.Linear(1, 1, bias=False)
            wrapped = data_parallel(linear, **group)
            wrapped(torch.full((1, 1), rank + 1.0)).sum().backward()
            assert float(linear.weight.grad) == wanted, (name, group, linear.weight.grad)
    layers = Twice(nn.Linear(6, 6, dtype=D), fmoe.MoE(CONFIG, fmoe.ShardingSpec(fmoe.make_mesh(4)), dtype=D))
    data_parallel(layers, device_mesh=mesh["apart"])
    assert all(hasattr(leaf, "placements") for leaf in layers.second.parameters())  # DDP leaves DTensors alone
    spec = fmoe.ShardingSpec(fmoe.make_mesh(4), plan="dp")
    made, x = fmoe.MoE(CONFIG, spec, dtype=D), rand(5, 6, seed=rank)
    assert int(made(x)[1].counts.sum()) == 20
    made.step.use("ep")
    made.config = CONFIG.replace(router=fmoe.TopK(1))
    y, aux = made(x)
    assert int(aux.counts.sum()) == 10
    assert made.step.spec.plan == spec.replace(plan="ep").plan
    assert_close(y, fmoe.moe(fmoe.init(CONFIG, seed=0, dtype=D), x, made.config)[0])


def test_two_processes():
    """DDP over the group it was given, and a layer that is planned anew for another config."""
    launch(two_ranks, 2)

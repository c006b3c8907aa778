"""What is public: documented, with an example; values are pytrees that print well."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import types

import optree
import pytest
import torch
from torch.utils import _pytree as pytree

import fmoe
from fmoe import functional as F

CONFIG = fmoe.MoEConfig(num_experts=4, model_dim=6, hidden_dim=5, bias=True)
PARAMS = fmoe.init(CONFIG, seed=0)
X = torch.ones(2, 3, 6)
ROUTING = F.gate(PARAMS.router, X, CONFIG.router, capacity=1.0)
TOKENS = F.expert_apply(PARAMS.experts, F.dispatch(X, ROUTING))
VALUES = [PARAMS, PARAMS.experts, PARAMS.router, ROUTING, ROUTING.aux, TOKENS, dataclasses.replace(ROUTING, aux=None)]

CHOICES = [
    CONFIG, fmoe.TopK(2), fmoe.Capacity(1.25), fmoe.Capacity(1.0, priority="batch"), fmoe.NoisyTopK(2), fmoe.GShard(),
    fmoe.Cosine(2), fmoe.Sigmoid(2, expert_groups=2), fmoe.SqrtSoftplus(2), fmoe.TopP(0.5), fmoe.ReLU(2), fmoe.Hash(),
    fmoe.ExpertChoice(), fmoe.Base(), fmoe.Sinkhorn(), fmoe.Prototypes(2), fmoe.SoftMoE(2),
]  # fmt: skip


@pytest.mark.parametrize("module", [fmoe, F])
def test_every_name_is_declared(module):
    public = {
        name
        for name, item in vars(module).items()
        if not name.startswith("_") and not isinstance(item, types.ModuleType)
    }
    assert public | ({"functional"} if module is fmoe else set()) == set(module.__all__)


@pytest.mark.parametrize("name", [*(n for n in fmoe.__all__ if n != "functional"), *F.__all__])
def test_every_name_is_documented(name):
    item = getattr(fmoe, name, None) or getattr(F, name)
    text = inspect.getdoc(item)
    assert text
    if inspect.isfunction(item):
        assert ">>> " in text
        for argument in inspect.signature(item).parameters:
            assert argument in text, f"{name} does not explain {argument}"


@pytest.mark.parametrize("held", VALUES, ids=lambda v: type(v).__name__)
def test_values_are_pytrees_of_tensors(held):
    for flatten, unflatten in (
        (pytree.tree_flatten, lambda leaves, spec: pytree.tree_unflatten(leaves, spec)),
        (optree.tree_flatten, lambda leaves, spec: optree.tree_unflatten(spec, leaves)),
    ):
        leaves, spec = flatten(held)
        assert leaves
        assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
        again = unflatten(leaves, spec)
        assert type(again) is type(held)
        assert repr(again) == repr(held)
        assert all(a is b for a, b in zip(flatten(again)[0], leaves, strict=True))
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(held, dataclasses.fields(held)[0].name, None)
    assert hash(held) == hash(held)


def test_key_paths_name_the_fields():
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(PARAMS)[0]]
    assert paths == [".router.weight", ".experts.w_in", ".experts.w_out", ".experts.b_in", ".experts.b_out"]
    assert optree.tree_paths(PARAMS)[1] == ("experts", "w_in")


def test_static_fields_must_agree():
    other = F.gate(PARAMS.router, torch.ones(6, 6), CONFIG.router, capacity=1.0)
    with pytest.raises(ValueError, match="Mismatch custom node data"):
        optree.tree_map(torch.add, ROUTING, other)


def test_values_print_their_types():
    assert repr(PARAMS.experts) == "ExpertParams(w_in=f32[4,6,2,5], w_out=f32[4,5,6], b_in=f32[4,2,5], b_out=f32[4,6])"
    assert repr(ROUTING.aux).startswith("Aux(balance=")
    assert repr(ROUTING).startswith(
        "Routing(experts=i64[6,2], weights=f32[6,2], slots=i64[6,2], counts=i64[4], aux=Aux("
    )
    assert "shape=(2, 3), capacity=3" in repr(ROUTING)
    shown = []
    torch.func.vmap(lambda aux: shown.append(repr(aux)) or aux)(optree.tree_map(lambda t: t[None], ROUTING.aux))
    assert shown == [
        "Aux(balance=f32[], z=f32[], importance=f32[], load=f32[], entropy=f32[], counts=i64[4], dropped=i64[])"
    ]


@pytest.mark.parametrize("held", [*CHOICES])
def test_choices_compare_hash_copy_and_pickle(held):
    again = eval(repr(held), {**vars(fmoe), "torch": torch})
    assert again == held
    assert hash(again) == hash(held)
    assert pickle.loads(pickle.dumps(held)) == held == copy.deepcopy(held)


def test_parameters_copy_and_pickle():
    again = pickle.loads(pickle.dumps(copy.deepcopy(PARAMS)))
    assert all(torch.equal(a, b) for a, b in zip(*map(pytree.tree_leaves, (again, PARAMS)), strict=True))
    assert {leaf.dtype for leaf in pytree.tree_leaves(PARAMS.to(torch.float64))} == {torch.float64}


def test_initialisation_is_the_same_everywhere():
    """An expert's numbers depend on the seed, the leaf and its id alone."""
    more = fmoe.init(CONFIG.replace(num_experts=7), seed=0)
    assert torch.equal(more.experts.w_in[:4], PARAMS.experts.w_in)
    assert torch.equal(more.experts.w_out[:4], PARAMS.experts.w_out)
    narrow = fmoe.init(CONFIG, seed=0, dtype=torch.bfloat16)
    assert torch.equal(narrow.experts.w_in, PARAMS.experts.w_in.bfloat16())
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    assert torch.equal(fmoe.init(CONFIG, seed=0).router.weight, PARAMS.router.weight)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not torch.equal(fmoe.init(CONFIG, seed=1).router.weight, PARAMS.router.weight)
    flat = PARAMS.experts.w_in.flatten(1)
    assert (flat @ flat.t()).fill_diagonal_(0).abs().max() < 0.9 * flat.square().sum(1).min()


def test_initialisation_has_the_documented_scale():
    params = fmoe.init(fmoe.MoEConfig(num_experts=3, model_dim=400, hidden_dim=100), seed=0)
    assert float(params.router.weight.std()) == pytest.approx(400**-0.5, rel=0.06)
    assert float(params.experts.w_in.std()) == pytest.approx(400**-0.5, rel=0.02)
    assert float(params.experts.w_out.std()) == pytest.approx(100**-0.5, rel=0.02)

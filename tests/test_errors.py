"""Every refusal, word for word: argument, value, rule and way out; all mismatches at once."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

import fmoe
from fmoe import functional as F

X = torch.zeros(5, 6)
ROUTER = fmoe.RouterParams(torch.zeros(6, 4))
ROUTING = F.gate(ROUTER, X, fmoe.TopK(2))
TOKENS = F.dispatch(X, ROUTING)
SIZES = {"num_experts": 4, "model_dim": 6, "hidden_dim": 5}
CONFIG = fmoe.MoEConfig(**SIZES)
PARAMS = fmoe.init(CONFIG, seed=0)


def experts(**shapes):
    return fmoe.ExpertParams(**{name: torch.zeros(shape) for name, shape in shapes.items()})


def gate(**changes):
    arguments = {"router_params": ROUTER, "x": X, "router": fmoe.TopK(2)} | changes
    return F.gate(arguments.pop("router_params"), arguments.pop("x"), arguments.pop("router"), **arguments)


def by_hand(ids, slots):
    return fmoe.Routing(
        torch.tensor(ids), torch.ones(5, 2), torch.tensor(slots), torch.zeros(4, dtype=torch.int64),
        num_experts=4, shape=(5,),
    )  # fmt: skip


CASES = {
    "k below 1": (lambda: fmoe.TopK(0), "TopK: k=0, but k must be a whole number of at least 1."),
    "k not whole": (lambda: fmoe.TopK(1.5), "TopK: k=1.5, but k must be a whole number of at least 1."),
    "k is a bool": (lambda: fmoe.TopK(True), "TopK: k=True, but k must be a whole number of at least 1."),
    "several": (
        lambda: fmoe.TopK(2, order="topk", noise_std=0, scope="batch"),
        "TopK: 3 arguments do not fit.\n"
        "  order='topk': choose one of 'softmax_topk', 'topk_softmax'.\n"
        "  noise_std=0, but it must be a finite number above 0.\n"
        "  scope='batch': choose one of 'global', 'group', 'local'.",
    ),
    "normalize contradicts": (
        lambda: fmoe.TopK(2, order="topk_softmax", normalize=False),
        'TopK: normalize=False, but order="topk_softmax" adds up to 1: choose order="softmax_topk".',
    ),
    "k above E": (lambda: gate(router=fmoe.TopK(5)), "gate: k=5 > num_experts=4: choose k from 1 to 4."),
    "k above E in the config": (
        lambda: fmoe.MoEConfig(**SIZES, router=fmoe.TopK(5)),
        "MoEConfig: k=5 > num_experts=4: choose k from 1 to 4.",
    ),
    "sizes": (
        lambda: fmoe.MoEConfig(num_experts=0, model_dim=-1, hidden_dim=2.0, activation="tanh", layout="dense"),
        "MoEConfig: 5 arguments do not fit.\n"
        "  num_experts=0, but it must be a whole number of at least 1.\n"
        "  model_dim=-1, but it must be a whole number of at least 1.\n"
        "  hidden_dim=2.0, but it must be a whole number of at least 1.\n"
        "  activation='tanh': choose one of 'relu', 'gelu', 'silu', 'swiglu', 'geglu', 'swiglu_oss', "
        "or give your own fn.\n"
        "  layout='dense': choose one of 'ragged', 'padded'.",
    ),
    "dtype": (
        lambda: fmoe.MoEConfig(**SIZES, dtype=torch.int64),
        "MoEConfig: dtype=torch.int64, but it must be a floating dtype or None.",
    ),
    "negative capacity": (
        lambda: gate(capacity=-1.0),
        'Capacity: factor=-1.0, but it must be a number of at least 0, or "as_needed"; capacity=None drops nothing.',
    ),
    "NaN capacity": (
        lambda: fmoe.MoEConfig(**SIZES, capacity=math.nan),
        'Capacity: factor=nan, but it must be a number of at least 0, or "as_needed"; capacity=None drops nothing.',
    ),
    "misspelt capacity": (
        lambda: fmoe.Capacity("as needed"),
        "Capacity: factor='as needed', but it must be a number of at least 0, or \"as_needed\"; "
        "capacity=None drops nothing.",
    ),
    "capacity minimum": (
        lambda: fmoe.Capacity(1.0, minimum=-1, maximum=4),
        "Capacity: 2 arguments do not fit.\n"
        "  minimum=-1, but it must be a whole number of at least 0.\n"
        "  maximum=4 goes with factor=\"as_needed\" only: leave it out.",
    ),
    "capacity maximum": (
        lambda: fmoe.Capacity("as_needed", minimum=1, maximum=-1),
        "Capacity: 2 arguments do not fit.\n"
        '  minimum=1, but factor="as_needed" has no minimum: leave it out.\n'
        "  maximum=-1, but it must be a whole number of at least 0, or None.",
    ),
    "mask shape": (
        lambda: gate(mask=torch.ones(5, 1, dtype=torch.bool)),
        "gate: mask is bool[5,1], but it must be bool of x's leading shape [5], True to keep.",
    ),
    "mask dtype": (
        lambda: gate(mask=torch.ones(5)),
        "gate: mask is f32[5], but it must be bool of x's leading shape [5], True to keep.",
    ),
    "noise": (
        lambda: gate(noise=torch.zeros(5, 3)),
        "gate: noise is f32[5,3], but it must be x's leading shape and E: [5, 4].",
    ),
    "x dim": (
        lambda: gate(x=torch.zeros(5, 7)),
        "gate: x is f32[5,7] and router_params.weight is f32[6,4]: the last dim of x must be M=6, the first of the "
        "weight.",
    ),
    "x dtype": (
        lambda: gate(x=torch.zeros(5, 6, dtype=torch.int64)),
        "gate: x is i64 and router_params.weight f32: both must be floating.",
    ),
    "no experts": (
        lambda: gate(router_params=fmoe.RouterParams(torch.zeros(6, 0))),
        "gate: router_params.weight is f32[6,0], but it must be [M,E] with E at least 1.",
    ),
    "router": (lambda: gate(router=2), "gate: router=2, but it must be a router, such as fmoe.TopK(2)."),
    "unused arguments": (
        lambda: gate(token_ids=torch.zeros(5), bias=torch.zeros(4), spec="mesh"),
        "gate: 3 arguments do not fit.\n"
        "  token_ids was given, but TopK does not use it: leave it out.\n"
        "  bias was given, but TopK does not use it: leave it out.\n"
        "  spec='mesh', but it must be an fmoe.ShardingSpec, or None for one device.",
    ),
    "groups": (
        lambda: gate(groups=2),
        "gate: groups=2, but it must be at least 1 and divide T=5; or give sizes.",
    ),
    "group sizes": (
        lambda: gate(groups=[3, 3]),
        "gate: groups=[3, 3], but sizes must be whole, at least 0 and add up to T=5.",
    ),
    "group sizes not whole": (
        lambda: gate(groups=[2.5, 2.5]),
        "gate: groups=[2.5, 2.5], but sizes must be whole, at least 0 and add up to T=5.",
    ),
    "groups not whole": (
        lambda: gate(groups=1.0),
        "gate: groups=1.0, but it must be at least 1 and divide T=5; or give sizes.",
    ),
    "mask is a list": (
        lambda: gate(mask=[True] * 5),
        "gate: mask is a list, but it must be bool of x's leading shape [5], True to keep.",
    ),
    "router parameters": (
        lambda: gate(router_params=ROUTER.weight),
        "gate: router_params is a Tensor: give an fmoe.RouterParams(weight).",
    ),
    "routing shapes": (
        lambda: F.dispatch(X, dataclasses.replace(ROUTING, weights=ROUTING.weights.t(), slots=ROUTING.slots[:, :1])),
        "dispatch: 2 arguments do not fit.\n"
        "  routing.weights is f32[2,5], but T=5 and K=2 make it [5, 2].\n"
        "  routing.slots is i64[5,1], but T=5 and K=2 make it [5, 2].",
    ),
    "routing capacity": (
        lambda: F.dispatch(X, dataclasses.replace(ROUTING, capacity=3)),
        "dispatch: routing.slots gives an expert 5 rows, but routing.capacity is 3.",
    ),
    "weights of other shape": (
        lambda: F.combine(TOKENS, dataclasses.replace(ROUTING, weights=ROUTING.weights.t())),
        "combine: tokens were dispatched with T,K=[5, 2] and E=4, but routing has T,K=[2, 5] and E=4: give the same "
        "routing to both.",
    ),
    "other tokens": (
        lambda: F.dispatch(torch.zeros(4, 6), ROUTING),
        "dispatch: x is f32[4,6], but tokens of leading shape [5] were routed.",
    ),
    "layout": (
        lambda: F.dispatch(X, ROUTING, layout="sorted"),
        "dispatch: layout='sorted': choose one of 'ragged', 'padded'.",
    ),
    "expert id": (
        lambda: F.dispatch(X, by_hand([[0, 1]] * 4 + [[0, 4]], [[i, i] for i in range(4)] + [[4, 0]])),
        "dispatch: routing.experts has ids from 0 to 4 with slots, but an id is at least 0 and below num_experts=4; "
        "a choice of no expert has slot -1.",
    ),
    "negative expert id": (
        lambda: F.dispatch(X, by_hand([[0, 1]] * 4 + [[0, -2]], [[i, i] for i in range(4)] + [[4, 0]])),
        "dispatch: routing.experts has ids from -2 to 1 with slots, but an id is at least 0 and below num_experts=4; "
        "a choice of no expert has slot -1.",
    ),
    "repeated slot": (
        lambda: F.dispatch(X, by_hand([[0, 1]] * 5, [[i, 0] for i in range(5)])),
        "dispatch: routing.slots must number the rows kept by each expert 0, 1, 2, ... without gaps or repeats.",
    ),
    "slot too large": (
        lambda: F.dispatch(X, by_hand([[0, 1]] * 5, [[i, 10**6] for i in range(5)])),
        "dispatch: routing.slots must number the rows kept by each expert 0, 1, 2, ... without gaps or repeats.",
    ),
    "expert shapes": (
        lambda: F.expert_apply(experts(w_in=(4, 6, 10), w_out=(3, 10, 6), b_in=(4, 2, 9), b_out=(4, 5)), TOKENS),
        "expert_apply: 4 arguments do not fit.\n"
        "  w_in is f32[4,6,10], but for E=4, M=6 and activation 'swiglu' it must be [4, 6, 2, 10] ([E,M,2,H]).\n"
        "  w_out is f32[3,10,6], but for E=4, M=6 and activation 'swiglu' it must be [4, 10, 6] ([E,H,M]).\n"
        "  b_in is f32[4,2,9], but for E=4, M=6 and activation 'swiglu' it must be [4, 2, 10] ([E,2,H]).\n"
        "  b_out is f32[4,5], but for E=4, M=6 and activation 'swiglu' it must be [4, 6] ([E,M]).",
    ),
    "expert dtype": (
        lambda: F.expert_apply(
            fmoe.ExpertParams(torch.zeros(4, 6, 5).double(), torch.zeros(4, 5, 6)), TOKENS, activation="relu"
        ),
        "expert_apply: w_in is f64, but the tokens are f32: cast one of them, for example with params.to(x.dtype).",
    ),
    "activation": (
        lambda: F.expert_apply(experts(w_in=(4, 6, 5), w_out=(4, 5, 6)), TOKENS, activation="tanh"),
        "expert_apply: activation='tanh': choose one of 'relu', 'gelu', 'silu', 'swiglu', 'geglu', "
        "'swiglu_oss', or give your own fn.",
    ),
    "not expert parameters": (
        lambda: F.expert_apply((torch.zeros(4),), TOKENS),
        "expert_apply: expert_params is a tuple: without fn it must be an ExpertParams.",
    ),
    "function parameters": (
        lambda: F.expert_apply({"a": torch.zeros(4), "b": torch.zeros(3, 2)}, TOKENS, fn=lambda p, rows: rows),
        "expert_apply: expert_params has f32[3,2]: every leaf of a function's parameters is a tensor stacked over "
        "num_experts=4 in dim 0.",
    ),
    "function output": (
        lambda: F.expert_apply(torch.zeros(4), TOKENS, fn=lambda p, rows: rows[:1]),
        "expert_apply: fn made f32[1,6] of rows f32[5,6]: it must return one row for each row.",
    ),
    "other routing": (
        lambda: F.combine(TOKENS, F.gate(ROUTER, X, fmoe.TopK(3))),
        "combine: tokens were dispatched with T,K=[5, 2] and E=4, but routing has T,K=[5, 3] and E=4: give the same "
        "routing to both.",
    ),
    "seed": (
        lambda: fmoe.init(fmoe.MoEConfig(**SIZES), seed=-1, dtype=torch.int64),
        "init: 2 arguments do not fit.\n"
        "  seed=-1, but it must be a whole number of at least 0.\n"
        "  dtype=torch.int64, but it must be a floating dtype.",
    ),
    "negative group size": (
        lambda: fmoe.grouped_matmul(X, torch.zeros(2, 6, 3), torch.tensor([3, -1])),
        "grouped_matmul: group_sizes=[3, -1], but sizes must be at least 0 and add up to at most the 5 rows of x.",
    ),
    "group sizes too large": (
        lambda: fmoe.grouped_matmul(X, torch.zeros(2, 6, 3), torch.tensor([3, 3])),
        "grouped_matmul: group_sizes=[3, 3], but sizes must be at least 0 and add up to at most the 5 rows of x.",
    ),
    "grouped shapes": (
        lambda: fmoe.grouped_matmul(X, torch.zeros(2, 5, 3).double(), torch.tensor([1.0])),
        "grouped_matmul: 4 arguments do not fit.\n"
        "  x is f32[5,6] and w is f64[2,5,3]: dim 1 of both must be the same D.\n"
        "  w has 2 matrices and group_sizes 1 entries: give one for each.\n"
        "  x is f32 and w is f64: cast both to one floating dtype.\n"
        "  group_sizes is f32: give integers.",
    ),
    "grouped dims": (
        lambda: fmoe.grouped_matmul(X[0], torch.zeros(2, 6, 3), torch.tensor([1, 1])),
        "grouped_matmul: x is f32[6], w is f32[2,6,3] and group_sizes is i64[2]: give x [R,D], w [E,D,F] and "
        "group_sizes [E].",
    ),
    "sizes inside vmap": (
        lambda: torch.func.vmap(lambda x: _own(x, layout="ragged"))(X[None]),
        "the number of rows of each expert is needed as a number, and inside a transform it has none: use "
        'layout="padded" and a capacity.',
    ),
    "width inside vmap": (
        lambda: torch.func.vmap(lambda x: _own(x, layout="padded"))(X[None]),
        "the largest load of an expert is needed as a number, and inside a transform it has none: give gate a "
        "capacity factor, or as_needed with a maximum.",
    ),
    "x is a list": (lambda: gate(x=[1, 2]), "gate: x is a list, but it must be a tensor [..., M]."),
    "arguments in another order": (
        lambda: fmoe.moe(X, PARAMS, CONFIG),
        "moe: params is a Tensor: give an fmoe.MoEParams, as fmoe.init makes.",
    ),
    "parameters of another config": (
        lambda: fmoe.moe(PARAMS, X, CONFIG.replace(num_experts=8, model_dim=5, hidden_dim=7)),
        "moe: 2 arguments do not fit.\n"
        "  params.router.weight is f32[6,4], but config has model_dim=5 and num_experts=8.\n"
        "  params.experts.w_out is f32[4,5,6], but config has hidden_dim=7.",
    ),
}  # fmt: skip


def _own(x, layout):
    routing = F.gate(ROUTER, x, fmoe.TopK(2), capacity="as_needed")
    tokens = F.dispatch(x, routing, layout=layout)
    return F.combine(F.expert_apply(torch.ones(4), tokens, fn=lambda p, rows: p * rows), routing)


@pytest.mark.parametrize("name", CASES)
def test_message(name):
    call, message = CASES[name]
    with pytest.raises(ValueError) as caught:
        call()
    assert str(caught.value) == message


def test_a_bound_makes_the_width_a_shape():
    routing = torch.func.vmap(lambda x: F.gate(ROUTER, x, fmoe.TopK(2), capacity=fmoe.Capacity("as_needed", maximum=5)))
    assert routing(X[None]).capacity == 5

"""Every refusal of routers, word for word: argument, value, rule and way out."""

from __future__ import annotations

import math

import pytest
import torch

import fmoe
from fmoe import functional as F

X = torch.zeros(5, 6)
WEIGHT = torch.zeros(6, 4)
PARAMS = fmoe.RouterParams(WEIGHT)

SOFT = fmoe.MoEConfig(4, 6, 5, router=fmoe.SoftMoE())


def gate(router, params=PARAMS, **given):
    return F.gate(params, X, router, **given)


CASES = {
    "groups do not divide E": (
        lambda: gate(fmoe.Sigmoid(2, expert_groups=3)),
        "gate: expert_groups=3 does not divide num_experts=4: groups have equally many experts.",
    ),
    "groups do not divide E in the config": (
        lambda: fmoe.MoEConfig(4, 6, 5, router=fmoe.Sigmoid(2, expert_groups=3)),
        "MoEConfig: expert_groups=3 does not divide num_experts=4: groups have equally many experts.",
    ),
    "more groups than there are": (
        lambda: fmoe.Sigmoid(2, expert_groups=2, top_groups=3),
        "Sigmoid: top_groups=3 > expert_groups=2: choose top_groups from 1 to 2.",
    ),
    "k above what groups allow": (
        lambda: fmoe.MoEConfig(4, 6, 5, router=fmoe.SqrtSoftplus(3, expert_groups=2, top_groups=1)),
        "MoEConfig: k=3, but top_groups=1 of 2 experts allow 2: choose a smaller k or more groups.",
    ),
    "k above E": (lambda: gate(fmoe.Sigmoid(5)), "gate: k=5 > num_experts=4: choose k from 1 to 4."),
    "k of a noisy router above E": (
        lambda: gate(fmoe.NoisyTopK(5), fmoe.RouterParams(WEIGHT, noise_weight=WEIGHT)),
        "gate: k=5 > num_experts=4: choose k from 1 to 4.",
    ),
    "two experts of one": (
        lambda: fmoe.MoEConfig(1, 6, 5, router=fmoe.GShard()),
        "MoEConfig: k=2 > num_experts=1: choose k from 1 to 1.",
    ),
    "several": (
        lambda: fmoe.Sigmoid(0, expert_groups=0, route_scale=0, normalize="yes", scope="all"),
        "Sigmoid: 5 arguments do not fit.\n"
        "  k=0, but k must be a whole number of at least 1.\n"
        "  expert_groups=0, but it must be a whole number of at least 1.\n"
        "  route_scale=0, but it must be a finite number above 0.\n"
        "  scope='all': choose one of 'global', 'group', 'local'.\n"
        "  normalize='yes': choose True, False or None.",
    ),
    "p of 0": (lambda: fmoe.TopP(0.0), "TopP: p=0.0, but it must be above 0 and at most 1."),
    "p above 1": (lambda: fmoe.TopP(1.5), "TopP: p=1.5, but it must be above 0 and at most 1."),
    "p is NaN": (lambda: fmoe.TopP(math.nan), "TopP: p=nan, but it must be above 0 and at most 1."),
    "max_k above E": (
        lambda: gate(fmoe.TopP(0.5, max_k=5)),
        "gate: max_k=5 > num_experts=4: choose max_k from 1 to 4.",
    ),
    "max_k below k": (lambda: fmoe.ReLU(3, max_k=2), "ReLU: max_k=2 < k=3: choose a max_k of at least k."),
    "temperature of 0": (
        lambda: fmoe.Cosine(2, temperature=0),
        "Cosine: temperature=0, but it must be a number of at least 0.01: logits are cosines divided by it.",
    ),
    "cosine without a projection": (
        lambda: gate(fmoe.Cosine(2, dim=3)),
        "gate: 3 arguments do not fit.\n"
        "  router_params.weight is f32[6,4], but Cosine needs [3, 4].\n"
        "  router_params.projection is None, but Cosine needs [6, 3].\n"
        "  router_params.log_scale is None, but Cosine needs [].",
    ),
    "no noise weight": (
        lambda: gate(fmoe.NoisyTopK(2)),
        "gate: router_params.noise_weight is None, but NoisyTopK needs [6, 4].",
    ),
    "hash without token ids": (
        lambda: gate(fmoe.Hash()),
        "gate: token_ids=None, but Hash routes by it: give token_ids= of x's leading shape.",
    ),
    "token ids of another shape": (
        lambda: gate(fmoe.Hash(), token_ids=torch.zeros(4, dtype=torch.int64)),
        "gate: token_ids is i64[4], but it must be whole numbers of x's leading shape [5].",
    ),
    "token ids that are not whole": (
        lambda: gate(fmoe.Hash(), token_ids=torch.zeros(5)),
        "gate: token_ids is f32[5], but it must be whole numbers of x's leading shape [5].",
    ),
    "noise that is not used": (
        lambda: gate(fmoe.Sigmoid(2), noise=torch.zeros(5, 4)),
        "gate: noise was given, but Sigmoid does not use it: leave it out.",
    ),
    "narrow bias": (
        lambda: gate(fmoe.Sigmoid(2), bias=torch.zeros(4, dtype=torch.bfloat16)),
        "gate: bias is bf16[4], but it must be [E=4] in fp32 or fp64: steps of 1e-3 are lost in less.",
    ),
    "bias of another size": (
        lambda: gate(fmoe.Sigmoid(2), bias=torch.zeros(3)),
        "gate: bias is f32[3], but it must be [E=4] in fp32 or fp64: steps of 1e-3 are lost in less.",
    ),
    "bias update": (
        lambda: F.bias_update(torch.zeros(4, dtype=torch.float16), torch.zeros(4)),
        "bias_update: 2 arguments do not fit.\n"
        "  bias is f16[4], but it must be [E] in fp32 or fp64: steps of 1e-3 are lost in less.\n"
        "  counts is f32[4], but it must be whole numbers [4], as aux.counts.",
    ),
    "rate of the L1 update": (
        lambda: F.l1_update(torch.tensor(1.0), torch.tensor([1]), k=1, tokens=1, rate=1.0),
        "l1_update: rate=1.0, but it must be above 1.",
    ),
    "capacity of expert choice": (
        lambda: gate(fmoe.ExpertChoice(), capacity=1.0),
        "gate: capacity=1.0, but ExpertChoice gives every expert its number of tokens: leave it out.",
    ),
    "capacity of expert choice in the config": (
        lambda: fmoe.MoEConfig(4, 6, 5, router=fmoe.ExpertChoice(), capacity=1.0),
        "MoEConfig: capacity=1.0, but ExpertChoice gives every expert its number of tokens: leave it out.",
    ),
    "factor of expert choice": (
        lambda: fmoe.ExpertChoice(0),
        "ExpertChoice: factor=0, but it must be a finite number above 0.",
    ),
    "prototypes": (
        lambda: gate(fmoe.Prototypes(3)),
        "gate: k=3 prototypes, but num_experts=4 is not a multiple of it.",
    ),
    "priority": (
        lambda: fmoe.Capacity(1.0, priority="probs"),
        "Capacity: priority='probs': choose one of 'token', 'batch'.",
    ),
    "iterations": (
        lambda: fmoe.Sinkhorn(iterations=0),
        "Sinkhorn: iterations=0, but it must be a whole number of at least 1.",
    ),
    "seed": (lambda: fmoe.Hash(seed=-1), "Hash: seed=-1, but it must be a whole number of at least 0."),
    "balanced": (lambda: fmoe.Base(balanced="no"), "Base: balanced='no': choose True or False."),
    "epsilon": (
        lambda: fmoe.NoisyTopK(2, epsilon=0.0),
        "NoisyTopK: epsilon=0.0, but it must be a finite number above 0.",
    ),
    "gate of soft slots": (
        lambda: gate(fmoe.SoftMoE()),
        "gate: router=SoftMoE(slots_per_expert=1) mixes tokens and chooses no experts: give it to moe or soft_moe.",
    ),
    "capacity of soft slots": (
        lambda: fmoe.MoEConfig(4, 6, 5, router=fmoe.SoftMoE(), capacity=1.0),
        "MoEConfig: capacity=1.0, but SoftMoE gives every expert its number of tokens: leave it out.",
    ),
    "groups of soft slots": (
        lambda: fmoe.moe(fmoe.init(SOFT, seed=0), X, SOFT, groups=5),
        "moe: groups was given, but SoftMoE does not use it: leave it out.",
    ),
    "soft slots of one token": (
        lambda: F.soft_moe(fmoe.init(SOFT, seed=0), X[0], SOFT.router),
        "soft_moe: x is f32[6], but it must be floating sequences [..., L, M].",
    ),
    "soft slots of another number": (
        lambda: F.soft_moe(fmoe.init(SOFT, seed=0), X, fmoe.SoftMoE(3), mask=torch.ones(5)),
        "soft_moe: 2 arguments do not fit.\n"
        "  params.router.weight is f32[6,4,1], but M=6 and slots_per_expert=3 make it [M,E,p].\n"
        "  mask is f32[5], but it must be bool of x's leading shape [5], True to keep.",
    ),
    "slots": (
        lambda: fmoe.SoftMoE(0),
        "SoftMoE: slots_per_expert=0, but it must be a whole number of at least 1.",
    ),
    "replay of other tokens": (
        lambda: gate(fmoe.TopK(2), replay=F.gate(PARAMS, X[:3], fmoe.TopK(2))),
        "gate: replay has experts i64[3,2], but T=5 tokens make it i64[5,K].",
    ),
    "replay of what is no routing": (
        lambda: gate(fmoe.TopK(2), replay=[1]),
        "gate: replay is a list, but it must be a Routing, or its experts [T,K].",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_message(name):
    call, message = CASES[name]
    with pytest.raises(ValueError) as caught:
        call()
    assert str(caught.value) == message

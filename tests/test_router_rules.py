"""Losses, priorities, bias updates and replays: the values that users of other systems miss, and what routers say."""

from __future__ import annotations

import pytest
import torch
from oracle import assert_close
from torch.utils import _pytree as pytree

import fmoe
from fmoe import functional as F


def rand(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def gate(logits, router, **given):
    """The routing of given logits."""
    return F.gate(fmoe.RouterParams(torch.eye(logits.shape[-1], dtype=logits.dtype)), logits, router, **given)


# --- selection bias and groups -----------------------------------------------------------------------------------


def test_the_bias_selects_and_never_weighs():
    """vllm#12002, transformers#41647."""
    s = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64)
    bias = torch.tensor([0.0, 0.0, 5.0, 5.0])
    routing = gate(s.logit(), fmoe.Sigmoid(2), bias=bias)
    assert routing.experts.tolist() == [[2, 3]]
    assert_close(routing.weights, torch.tensor([[2 / 3, 1 / 3]]).double(), torch.float32)
    grad = torch.func.grad(lambda b: gate(s.logit(), fmoe.Sigmoid(2), bias=b).weights.square().sum())(bias)
    assert grad.tolist() == [0, 0, 0, 0]


def test_masked_groups_lose_to_negative_scores():
    """DeepSeek-V3#741, vllm#13474, ktransformers#1148: -inf, not 0, stands for the experts of other groups."""
    s = torch.tensor([[0.9, 0.8, 0.1, 0.2]]).logit()
    routing = gate(s, fmoe.Sigmoid(2, expert_groups=2, top_groups=1), bias=torch.full((4,), -5.0))
    assert routing.experts.tolist() == [[0, 1]]


def test_bias_update():
    """torchtitan#1506: once per step, of summed counts; Megatron-LM#7081: counts stay whole numbers."""
    zero, first, second = torch.zeros(4), torch.tensor([4, 0, 0, 0]), torch.tensor([0, 4, 0, 0])
    assert torch.equal(F.bias_update(zero, first + second, rate=0.5), torch.tensor([-0.5, -0.5, 0.5, 0.5]))
    each = F.bias_update(F.bias_update(zero, first, rate=0.5), second, rate=0.5)
    assert torch.equal(each, torch.tensor([0.0, 0.0, 1.0, 1.0]))
    one_more = torch.tensor([2**40 + 1, 2**40])
    assert torch.equal(F.bias_update(torch.zeros(2), one_more, rate=1.0), torch.tensor([-1.0, 1.0]))
    centred = F.bias_update(zero, first, rate=1.0, center=True)
    assert_close(centred, torch.tensor([-1.5, 0.5, 0.5, 0.5]))
    assert F.bias_update(torch.ones(4), first).dtype == torch.float32
    assert float(F.bias_update(torch.ones(2), torch.tensor([0, 2]))[0]) == pytest.approx(1.001, rel=1e-7)


def test_a_bias_evens_out_a_skewed_router():
    logits = rand(256, 8) + torch.linspace(0, 2, 8)
    router, bias = fmoe.Sigmoid(2), torch.zeros(8)
    before = F.max_violation(gate(logits, router, bias=bias).counts)
    for _ in range(300):
        bias = F.bias_update(bias, gate(logits, router, bias=bias).counts, rate=5e-3)
    assert float(before) > 1
    assert float(F.max_violation(gate(logits, router, bias=bias).counts)) < 0.2


def test_an_l1_coefficient_reaches_the_wanted_number():
    coefficient = torch.tensor(1e-8)
    assert float(F.l1_update(coefficient, torch.tensor([9, 0]), k=1, tokens=8)) == pytest.approx(1.2e-8)
    assert float(F.l1_update(coefficient, torch.tensor([7, 0]), k=1, tokens=8)) == pytest.approx(1e-8 / 1.2)
    assert torch.equal(F.l1_update(coefficient, torch.tensor([8, 0]), k=1, tokens=8), coefficient)


# --- priority and capacity -----------------------------------------------------------------------------------------


def test_batch_priority_drops_the_least_certain():
    """All to expert 0: with a capacity of 3, the three largest scores stay; ties in token order."""
    score = torch.tensor([1.0, 5.0, 2.0, 5.0, 3.0, 0.5], dtype=torch.float64)
    logits = torch.stack([score, torch.zeros_like(score)], 1)
    for priority, kept in (("token", [0, 1, 2]), ("batch", [1, 3, 4])):
        routing = gate(logits, fmoe.TopK(1), capacity=fmoe.Capacity(1.0, priority=priority))
        assert (routing.slots[:, 0] >= 0).nonzero().flatten().tolist() == kept
        assert int(routing.aux.dropped) == 3
    tied = gate(torch.zeros(6, 2), fmoe.TopK(1), capacity=fmoe.Capacity(1.0, priority="batch"))
    assert tied.slots.flatten().tolist() == [0, 1, 2, -1, -1, -1]


def test_batch_priority_restated():
    """Groups, masks, two choices: by score inside each group, all first choices before any second one."""
    logits, sizes = rand(30, 4, seed=1), [12, 0, 18]
    mask = torch.arange(30) % 7 != 2
    routing = gate(logits, fmoe.TopK(2), capacity=fmoe.Capacity(0.7, priority="batch"), groups=sizes, mask=mask)
    p = logits.softmax(-1)
    first = 0
    for size in sizes:
        here = [t for t in range(first, first + size) if mask[t]]
        first += size
        limit = min(len(here), -(-7 * 2 * len(here) // 40))
        here.sort(key=lambda t: (-float(p[t].max()), t))
        used = [0] * 4
        for k in range(2):
            for t in here:
                e = int(routing.experts[t, k])
                assert bool(routing.slots[t, k] >= 0) == (used[e] < limit)
                used[e] += 1


def test_batch_priority_as_needed_drops_nothing():
    """Tutel: T=64, E=4, k=1 gives a capacity of 4 where 19 is needed."""
    logits = rand(64, 4, seed=2)
    logits[:19, 3] += 50
    routing = gate(logits, fmoe.TopK(1), capacity=fmoe.Capacity("as_needed", priority="batch"))
    assert int(routing.aux.dropped) == 0
    assert int(routing.counts.max()) >= 19
    config = fmoe.MoEConfig(4, 4, 3, router=fmoe.TopK(1), capacity=fmoe.Capacity(0.5, priority="batch"))
    params = fmoe.init(config, seed=0, dtype=torch.float64)
    y, aux = torch.func.vmap(lambda x: fmoe.moe(params, x, config))(rand(3, 10, 4))
    for i, x in enumerate(rand(3, 10, 4)):
        assert_close(y[i], fmoe.moe(params, x, config)[0])
        assert int(aux.dropped[i]) == int(fmoe.moe(params, x, config)[1].dropped)


def test_capacity_follows_the_choices_there_are():
    """A router with a variable number of choices is not given room for max_k of each token."""
    logits = torch.tensor([[9.0, 0, 0, 0]]).expand(8, 4)  # top-p needs one expert each
    routing = gate(logits, fmoe.TopP(0.5), capacity=1.0)
    assert int(routing.counts.sum()) == 8
    assert int((routing.slots >= 0).sum()) == 2  # ceil(8 choices / 4 experts)


# --- losses --------------------------------------------------------------------------------------------------------


def test_values_of_losses():
    one_hot = torch.eye(2, dtype=torch.float64).repeat_interleave(4, 0)
    ids = one_hot.argmax(1, keepdim=True)
    for scope, value in (("global", 1.0), ("group", 2.0)):
        aux = gate(60 * one_hot, fmoe.TopK(1, scope=scope), groups=2).aux
        assert float(aux.balance) == pytest.approx(value)
    assert float(F.sequence_loss(one_hot.view(2, 4, 2), ids.view(2, 4, 1))) == 2
    logits = rand(12, 4)
    routing = gate(logits, fmoe.GShard())
    assert_close(routing.aux.balance, F.gshard_loss(logits.softmax(-1), routing.experts))
    assert_close(gate(logits, fmoe.TopK(1)).aux.balance, F.gshard_loss(logits.softmax(-1), routing.experts))


def test_the_sequence_wise_loss_is_the_balance_of_groups():
    """DeepSeek-V3's: affinities divided by their sum, each sequence by itself, masked tokens left out."""
    logits, mask = rand(4, 6, 8), torch.arange(24).view(4, 6) % 5 != 0
    router = fmoe.Sigmoid(3, scope="group")
    routing = gate(logits, router, groups=4, mask=mask)
    s = logits.sigmoid()
    ids = routing.experts.view(4, 6, 3)
    assert_close(routing.aux.balance, F.sequence_loss(s / s.sum(-1, keepdim=True), ids, mask=mask))
    total = 0.0
    for b in range(4):
        kept = [t for t in range(6) if mask[b, t]]
        f = [8 / (3 * len(kept)) * sum(int((ids[b, t] == e).any()) for t in kept) for e in range(8)]
        p = [sum(float(s[b, t, e] / s[b, t].sum()) for t in kept) / len(kept) for e in range(8)]
        total += len(kept) * sum(a * b for a, b in zip(f, p, strict=True))
    assert float(routing.aux.balance) == pytest.approx(total / int(mask.sum()))


def test_statistics():
    counts = torch.tensor([[4, 2, 2, 0], [0, 0, 0, 0], [2, 2, 2, 2]])
    assert F.max_violation(counts).tolist() == [1, 0, 0]
    assert F.dead_experts(counts).tolist() == [1, 4, 0]
    assert F.choice_counts(torch.tensor([[0, -1], [3, 3]]), 4, mask=torch.tensor([True, False])).tolist() == [
        1,
        0,
        0,
        0,
    ]


# --- replay ------------------------------------------------------------------------------------------------------

GIVEN = {
    "TopK": (fmoe.TopK(2), {}),
    "Sigmoid": (fmoe.Sigmoid(2), {"bias": torch.tensor([0.1, 0, 0.2, 0])}),
    "GShard": (fmoe.GShard(), {"noise": rand(9, 4, seed=4)}),
    "TopP": (fmoe.TopP(0.6), {}),
    "ReLU": (fmoe.ReLU(2), {}),
    "ExpertChoice": (fmoe.ExpertChoice(), {}),
    "Base": (fmoe.Base(), {}),
}


@pytest.mark.parametrize("name", GIVEN)
def test_replay_keeps_the_experts_and_renews_the_weights(name, tmp_path):
    """Saved, loaded with weights_only, replayed: the same routing; under other weights the same experts."""
    router, given = GIVEN[name]
    x = rand(9, 4)
    params = fmoe.RouterParams(rand(4, 4, seed=1))
    capacity = None if name == "ExpertChoice" else 1.0
    routing = F.gate(params, x, router, capacity=capacity, **given)
    torch.save(routing, tmp_path / "routing.pt")
    saved = torch.load(tmp_path / "routing.pt", weights_only=True)
    assert repr(saved) == repr(routing)
    again = F.gate(params, x, router, capacity=capacity, replay=saved)
    for a, b in zip(pytree.tree_leaves(again), pytree.tree_leaves(routing), strict=True):
        assert torch.equal(a, b)
    other = fmoe.RouterParams(params.weight + 0.5 * rand(4, 4, seed=2))
    moved = F.gate(other, x, router, capacity=capacity, replay=saved)
    assert torch.equal(moved.experts, routing.experts)
    assert torch.equal(moved.slots, routing.slots)
    assert not torch.equal(moved.weights, routing.weights)
    config = fmoe.MoEConfig(4, 4, 3, router=router, capacity=capacity)
    layer = fmoe.MoEParams(params, fmoe.init(config, seed=0, dtype=torch.float64).experts)
    spec = fmoe.ShardingSpec(fmoe.make_mesh(4, world=2), plan="ep")
    planned = fmoe.trace(lambda p, held: fmoe.moe(p, held[0], config, replay=held[1]))(layer, (x, saved.experts))
    outs = fmoe.simulate(planned.plan(spec), layer, [(x, saved.experts), (x.flip(0), saved.experts)])
    for (y, _), tokens in zip(outs, (x, x.flip(0)), strict=True):
        assert_close(y, fmoe.moe(layer, tokens, config, replay=saved)[0])


def test_replay_in_recomputation():
    """A checkpointed layer that replays its routing has the gradients of one that does not."""
    config = fmoe.MoEConfig(4, 4, 3, router=fmoe.Sigmoid(2))
    params = fmoe.init(config, seed=0, dtype=torch.float64)
    x = rand(9, 4)
    routing = F.gate(params.router, x, config.router)
    plain = torch.func.grad(lambda p: fmoe.moe(p, x, config)[0].sin().sum())(params)
    replayed = torch.func.grad(lambda p: fmoe.moe(p, x, config, replay=routing)[0].sin().sum())(params)
    for a, b in zip(pytree.tree_leaves(plain), pytree.tree_leaves(replayed), strict=True):
        assert torch.equal(a, b)


# --- what routers say of themselves --------------------------------------------------------------------------------


def test_data_on_routers():
    told = {
        fmoe.TopK(2): (True, True, 20),
        fmoe.Sigmoid(2): (True, True, 20),
        fmoe.TopP(0.5, max_k=3): (True, True, 30),
        fmoe.ReLU(2): (True, True, 40),
        fmoe.ExpertChoice(2.0): (False, False, 20),
        fmoe.Base(): (False, False, 10),
        fmoe.Base(balanced=False): (True, True, 10),
        fmoe.Sinkhorn(): (False, False, 10),
        fmoe.Hash(): (True, True, 10),
    }
    for router, (splits, causal, rows) in told.items():
        assert (router.splits, router.causal, router.rows(10, 4)) == (splits, causal, rows), router


@pytest.mark.parametrize("router", [fmoe.TopK(2), fmoe.Sigmoid(2), fmoe.TopP(0.6), fmoe.ReLU(2), fmoe.Prototypes(2)])
def test_routers_that_split_choose_the_same_for_a_part(router):
    logits = rand(10, 4)
    whole = gate(logits, router).experts
    assert torch.equal(torch.cat([gate(part, router).experts for part in logits.split([3, 7])]), whole)


def test_expert_choice_keeps_few_rows():
    """E * n rows, not T * K: the padded buffer has n slots per expert."""
    routing = gate(rand(12, 4), fmoe.ExpertChoice(1.0), groups=[7, 5])
    assert routing.capacity == 2 + 2
    assert routing.counts.tolist() == [4] * 4
    tokens = F.dispatch(rand(12, 4), routing, layout="padded")
    assert tokens.data.shape == (4, 4, 4)
    assert F.dispatch(rand(12, 4), routing).data.shape == (16, 4)

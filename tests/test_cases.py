"""Faults that users of other Mixture-of-Experts systems reported, each with its right value here.

A reference such as ``pytorch#172439`` is the public report of the fault.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from fractions import Fraction

import numpy as np
import oracle
import pytest
import torch
from torch.func import functional_call, grad, jvp, vmap
from torch.utils.checkpoint import checkpoint

import fmoe
from fmoe import functional as F

D = torch.float64


def routed(logits, router, **arguments):
    """Routes tokens whose logits are given: x = logits and the router is the identity."""
    return F.gate(fmoe.RouterParams(torch.eye(logits.shape[-1], dtype=logits.dtype)), logits, router, **arguments)


def small(num_experts=4, k=2, activation="swiglu", model_dim=6, hidden_dim=5, dtype=D, **options):
    config = fmoe.MoEConfig(
        num_experts=num_experts,
        model_dim=model_dim,
        hidden_dim=hidden_dim,
        router=fmoe.TopK(k),
        activation=activation,
        **options,
    )
    return config, fmoe.init(config, seed=1, dtype=dtype)


def one_hot_logits(experts, num_experts, scale=5.0):
    return scale * torch.nn.functional.one_hot(torch.tensor(experts), num_experts).to(D)


class TestRouterNumerics:
    def test_balance_loss_of_a_collapsed_router(self):
        """transformers#45120: a second softmax makes the loss nearly flat (1.53 here)."""
        logits = 4 * torch.randn(1000, 8, generator=torch.Generator().manual_seed(0))
        logits[:, 0] += 20
        assert float(routed(logits, fmoe.TopK(2)).aux.balance) == pytest.approx(3.99, abs=0.03)

    def test_scope_of_the_balance_loss_is_explicit(self):
        """megablocks#85: the mean of local losses is 2 where the global loss is 1."""
        logits = one_hot_logits([0, 0, 0, 0, 1, 1, 1, 1], 2, scale=50.0)
        assert float(routed(logits, fmoe.TopK(1), groups=2).aux.balance) == pytest.approx(1.0, abs=1e-12)
        local = routed(logits, fmoe.TopK(1, scope="group"), groups=2).aux
        assert float(local.balance) == pytest.approx(2.0, abs=1e-12)
        assert float(local.importance) == pytest.approx(1.0, abs=1e-12)
        assert float(routed(logits, fmoe.TopK(1), groups=2).aux.importance) == pytest.approx(0.0, abs=1e-12)

    def test_group_losses_are_weighted_by_tokens(self):
        logits = torch.randn(7, 3, dtype=D)
        parts = [routed(part, fmoe.TopK(2)).aux for part in logits.split([5, 0, 2])]
        whole = routed(logits, fmoe.TopK(2, scope="group"), groups=[5, 0, 2]).aux
        for name in ("balance", "importance", "load"):
            expected = (5 * getattr(parts[0], name) + 2 * getattr(parts[2], name)) / 7
            torch.testing.assert_close(getattr(whole, name), expected)

    @pytest.mark.parametrize("capacity", [None, 1.0])
    def test_padding_tokens_count_for_nothing(self, capacity):
        """Megatron-LM#5542: padded tokens in losses, counts and capacity. NaN in them does no harm."""
        config, params = small(capacity=capacity)
        x = torch.randn(8, 6, dtype=D)
        mask = torch.arange(8) < 2
        x[2:] = math.nan

        def run(params, x, mask):
            y, aux = fmoe.moe(params, x, config, mask=mask)
            return y.square().sum() + aux.balance + aux.z + aux.importance + aux.load, (y, aux)

        (grads, (y, aux)) = grad(run, argnums=(0, 1), has_aux=True)(params, x, mask)
        (short, (y2, aux2)) = grad(run, argnums=(0, 1), has_aux=True)(params, x[:2], None)
        assert torch.equal(y[2:], torch.zeros(6, 6, dtype=D))
        assert torch.equal(grads[1][2:], torch.zeros(6, 6, dtype=D))
        torch.testing.assert_close(y[:2], y2)
        for a, b in zip(
            *(torch.utils._pytree.tree_leaves(t) for t in ((grads[0], aux), (short[0], aux2))), strict=True
        ):
            torch.testing.assert_close(a, b)

    @pytest.mark.parametrize("k", [1, 2, 4])
    def test_perfect_balance_is_one_for_every_k(self, k):
        """OLMoE#40: is it 1, k or 1/k?"""
        logits = torch.zeros(8, 4, dtype=D)
        counts = torch.full((4,), 8 * k // 4)
        assert float(F.balance_loss(logits.softmax(-1), counts)) == pytest.approx(1.0, abs=1e-14)

    def test_balance_uses_the_full_softmax(self):
        """Logits that are not selected get a gradient too."""
        logits = torch.randn(4, 4, dtype=D)
        slope = grad(lambda z: routed(z, fmoe.TopK(1)).aux.balance)(logits)
        assert slope.abs().min() > 1e-6

    def test_both_orders_of_softmax_and_top_k(self):
        """Megatron-LM#955: checkpoints silently give other outputs under the other order."""
        logits = torch.randn(100, 8, dtype=D)
        normalized = routed(logits, fmoe.TopK(2, order="softmax_topk", normalize=True)).weights
        after = routed(logits, fmoe.TopK(2, order="topk_softmax")).weights
        plain = routed(logits, fmoe.TopK(2, order="softmax_topk", normalize=False)).weights
        torch.testing.assert_close(normalized, after)
        assert (plain - after).abs().max() > 0.2
        expected = logits.softmax(-1).sort(descending=True).values[:, :2]
        torch.testing.assert_close(plain, expected)

    def test_one_expert_per_token_still_trains_the_router(self):
        """A single normalized weight is always 1, with gradient exactly 0."""
        config, params = small(k=1)
        x = torch.randn(5, 6, dtype=D)

        def slope(router):
            c = config.replace(router=router)
            return grad(lambda p: fmoe.moe(p, x, c)[0].square().sum())(params).router.weight.abs().max()

        assert fmoe.TopK(1).normalized is False
        assert slope(fmoe.TopK(1)) > 1e-3
        assert slope(fmoe.TopK(1, normalize=True)) < 1e-15

    def test_tiny_scores_are_not_lost_in_half_precision(self):
        """DeepSpeed#5156: fp16 scores of 2e-8 and 1e-8 normalize to NaN."""
        logits = torch.tensor([[17.0, 0.0, 0.0, -0.6931]], dtype=torch.float16)
        weights = routed(logits, fmoe.TopK(3)).weights
        assert weights.dtype == torch.float32
        p = logits.double().softmax(-1)[0, :3]
        torch.testing.assert_close(weights[0].double(), p / p.sum(), rtol=1e-5, atol=0)

    def test_z_loss_of_large_fp16_logits_is_finite(self):
        logits = torch.full((2, 4), 300.0, dtype=torch.float16)
        assert float(routed(logits, fmoe.TopK(1)).aux.z) == pytest.approx((300 + math.log(4)) ** 2, rel=1e-6)

    @pytest.mark.parametrize("autocast", [False, True])
    def test_narrow_tokens_are_routed_in_fp32(self, autocast):
        """vllm#14027: a bf16 router chooses other experts."""
        x = torch.randn(512, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
        weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(1)) / 4
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            routing = F.gate(fmoe.RouterParams(weight), x, fmoe.TopK(8))
        expected = (x.double() @ weight.double()).sort(dim=-1, descending=True, stable=True).indices[:, :8]
        assert torch.equal(routing.experts.sort().values, expected.sort().values)
        assert not torch.equal(expected.sort().values, (x @ weight.bfloat16()).topk(8).indices.sort().values)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    @pytest.mark.parametrize(("experts", "k"), [(8, 2), (64, 6), (3, 3), (65, 64)])
    def test_ties_go_to_the_lowest_id(self, dtype, experts, k):
        """pytorch#27542: torch.topk of eight equal values gives [6, 5]."""
        routing = routed(torch.zeros(5, experts, dtype=dtype), fmoe.TopK(k))
        assert routing.experts.tolist() == [list(range(k))] * 5

    def test_partial_ties_at_the_cut(self):
        logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0], [0.0, 5.0, 5.0, 5.0, 5.0], [-0.0, 0.0, -0.0, 0.0, 1.0]])
        routing = routed(logits, fmoe.TopK(2))
        assert routing.experts.tolist() == [[1, 2], [1, 2], [4, 0]]
        assert vmap(lambda z: routed(z, fmoe.TopK(2)).experts)(logits[None]).tolist() == [routing.experts.tolist()]

    def test_the_same_call_gives_the_same_experts(self):
        """DeepSpeed#8620: noise is drawn in evaluation too. Here it is an argument."""
        x, (config, params) = torch.randn(12, 6, dtype=D), small()
        first = F.gate(params.router, x, config.router)
        assert all(torch.equal(F.gate(params.router, x, config.router).experts, first.experts) for _ in range(3))
        noise = torch.randn(12, 4, dtype=D)
        noisy = F.gate(params.router, x, config.router, noise=noise)
        expected = (x @ params.router.weight + noise / 4).softmax(-1)
        torch.testing.assert_close(noisy.aux.importance, F.importance_loss(expected))

    def test_outputs_are_a_weighted_sum(self):
        """Two experts that give -1 and 3, weights 1/2: 1.0 (mixture-of-experts#19 takes a log of a sum)."""
        x = torch.zeros(1, 2, dtype=D)
        routing = routed(x, fmoe.TopK(2))
        tokens = F.dispatch(x, routing)
        values = torch.tensor([-1.0, 3.0], dtype=D)
        tokens = F.expert_apply(values, tokens, fn=lambda p, rows: rows + p)
        assert F.combine(tokens, routing).tolist() == [[1.0, 1.0]]

    def test_weights_apply_after_the_expert(self):
        """torchtitan#4095: a weight on the input is another model unless the expert is linear."""
        config, params = small(num_experts=2, k=2)
        x = torch.randn(5, 6, dtype=D)
        routing = F.gate(params.router, x, config.router)
        rows = F.expert_apply(params.experts, F.dispatch(x, routing)).data
        index = F.dispatch(x, routing).index
        expected = (routing.weights.unsqueeze(-1) * rows[index]).sum(1)
        torch.testing.assert_close(fmoe.moe(params, x, config)[0], expected)

    def test_counts_are_exact_integers(self):
        """Megatron-LM#7081: 256 + 1 is 256 in bf16."""
        x = torch.ones(257, 2, dtype=torch.bfloat16)
        routing = F.gate(fmoe.RouterParams(torch.eye(2, dtype=torch.bfloat16)), x, fmoe.TopK(1))
        assert routing.counts.dtype == torch.int64
        assert routing.counts.tolist() == [257, 0]


class TestCapacityAndDrops:
    @pytest.mark.parametrize(
        ("factor", "tokens", "k", "experts", "capacity"),
        [(1.2, 128, 1, 5, 31), (1.1, 10, 1, 1, 10), (1.1, 100, 1, 10, 11), (0.7, 10, 1, 1, 7), (4, 4, 2, 2, 4)],
    )
    def test_capacity_is_exact(self, factor, tokens, k, experts, capacity):
        """fastmoe#199: capacity not divided by E. In floats 1.1 * 100 / 10 rounds up to 12."""
        assert fmoe.Capacity(factor).of(tokens=tokens, k=k, num_experts=experts) == capacity
        counted = fmoe.Capacity(factor).of_counts(torch.tensor([tokens]), k=k, num_experts=experts)
        assert counted.tolist() == [capacity]

    @pytest.mark.parametrize("tokens", [3, 4])
    def test_a_capacity_above_the_tokens_drops_nothing(self, tokens):
        """DeepSpeed#5353: topk k out of range."""
        config, params = small(num_experts=2, k=2)
        x = torch.randn(tokens, 6, dtype=D)
        y, aux = fmoe.moe(params, x, config, capacity=8)
        torch.testing.assert_close(y, fmoe.moe(params, x, config)[0], rtol=0, atol=0)
        assert int(aux.dropped) == 0

    def test_dropless_with_many_choices(self):
        """DeepSpeed#7138: k > 2 without drops. T=8, E=8, k=3."""
        config, params = small(num_experts=8, k=3)
        x = torch.randn(8, 6, dtype=D)
        experts = {"w_in": params.experts.w_in, "w_out": params.experts.w_out}
        expected, _, _ = oracle.layer(x, params.router.weight, experts, k=3)
        oracle.assert_close(fmoe.moe(params, x, config)[0], expected)

    def test_dropped_tokens_give_zero(self):
        """transformers#37017: dropped tokens return p * x."""
        config, params = small(num_experts=2, k=1, capacity=0.5)
        x = torch.ones(4, 6, dtype=D)
        weight = torch.zeros(6, 2, dtype=D)
        weight[:, 0] = 1
        params = fmoe.MoEParams(fmoe.RouterParams(weight), params.experts)
        y, aux = fmoe.moe(params, x, config)
        assert y[0].abs().min() > 0
        assert torch.equal(y[1:], torch.zeros(3, 6, dtype=D))
        assert int(aux.dropped) == 3
        last = grad(lambda p: fmoe.moe(p, x, config)[0][1:].sum())(params)
        assert all(not leaf.any() for leaf in torch.utils._pytree.tree_leaves(last))

    def test_capacity_belongs_to_the_group(self):
        """fastmoe#141: one group per process keeps 4 tokens where one group for all keeps 8."""
        logits = one_hot_logits([0, 0, 0, 0, 1, 1, 1, 1], 2)
        assert int(routed(logits, fmoe.TopK(1), capacity=1.0, groups=2).aux.dropped) == 4
        assert int(routed(logits, fmoe.TopK(1), capacity=1.0).aux.dropped) == 0

    def test_first_choices_come_before_second(self):
        logits = torch.tensor([[1.0, 2.0, 0.0], [2.0, 1.0, 0.0], [2.0, 0.0, 1.0]], dtype=D)
        routing = routed(logits, fmoe.TopK(2), capacity=fmoe.Capacity(0.5, minimum=2))
        assert routing.slots.tolist() == [[0, -1], [0, 1], [1, 0]]

    def test_capacity_as_needed_drops_nothing(self):
        """Tutel takes 4 where 19 is needed."""
        x = torch.randn(64, 4, generator=torch.Generator().manual_seed(2), dtype=D)
        routing = routed(x, fmoe.TopK(1), capacity="as_needed")
        largest = int(routing.counts.max())
        assert largest > 16
        assert int(routing.aux.dropped) == 0
        assert F.dispatch(x, routing, layout="padded").data.shape == (4, largest, 4)
        capped = routed(x, fmoe.TopK(1), capacity=fmoe.Capacity("as_needed", maximum=10))
        assert capped.aux.dropped == (routing.counts - 10).clamp(min=0).sum()
        assert F.dispatch(x, capped, layout="padded").data.shape == (4, 10, 4)


class TestEmptyAndOdd:
    @pytest.mark.parametrize("layout", ["ragged", "padded"])
    @pytest.mark.parametrize("capacity", [None, 1.0, "as_needed"])
    def test_no_tokens(self, layout, capacity):
        """sglang#38780: an empty batch asserts, divides by zero or loses its graph."""
        config, params = small(capacity=capacity, layout=layout, bias=True)
        x = torch.randn(3, 0, 6, dtype=D, requires_grad=True)
        leaves = [leaf.requires_grad_() for leaf in torch.utils._pytree.tree_leaves(params)]
        y, aux = fmoe.moe(params, x, config)
        assert y.shape == (3, 0, 6)
        assert [float(getattr(aux, n).detach()) for n in ("balance", "z", "importance", "load", "entropy")] == [0.0] * 5
        assert aux.counts.tolist() == [0] * 4
        grads = torch.autograd.grad(y.sum() + aux.balance + aux.z + aux.importance + aux.load, [x, *leaves])
        for leaf, g in zip([x, *leaves], grads, strict=True):
            assert torch.equal(g, torch.zeros_like(leaf))

    @pytest.mark.parametrize("sizes", [[2, 0, 4], [0, 0, 0], [0, 6, 0], [1, 1, 1]])
    def test_gradient_of_an_empty_group_is_zero(self, sizes):
        """pytorch#172439, #193633: garbage in the gradient of an empty group and in rows past the last."""
        x, w = torch.randn(6, 16, requires_grad=True), torch.randn(3, 16, 32, requires_grad=True)
        for _ in range(3):
            junk = [torch.full((6, 32), math.nan), torch.full((3, 16, 32), math.nan), torch.full((6, 16), math.nan)]
            del junk  # dirties what the allocator hands out next
            y = fmoe.grouped_matmul(x, w, torch.tensor(sizes))
            dx, dw = torch.autograd.grad(y.sum(), [x, w])
            total = sum(sizes)
            assert torch.equal(y[total:], torch.zeros(6 - total, 32))
            assert torch.equal(dx[total:], torch.zeros(6 - total, 16))
            first = 0
            for e, size in enumerate(sizes):
                part = x[first : first + size].detach()
                torch.testing.assert_close(y[first : first + size], part @ w[e])
                torch.testing.assert_close(dw[e], part.t() @ torch.ones(size, 32))
                first += size

    def test_any_stride_and_size(self):
        """pytorch#172440: grouped_mm needs strides of 16 bytes even on the CPU."""
        sizes = torch.tensor([1, 3, 2])
        cases = [
            (torch.randn(6, 6), torch.randn(3, 6, 5)),
            (torch.randn(6, 10).bfloat16(), torch.randn(3, 10, 3).bfloat16()),
            (torch.randn(6, 33)[:, 1:17], torch.randn(3, 5, 16).transpose(1, 2)),
            (torch.randn(16, 6).t(), torch.randn(5, 16, 3).permute(2, 1, 0)),
            (torch.randn(1, 4).expand(6, 4), torch.randn(1, 4, 4).expand(3, 4, 4)),
        ]
        for x, w in cases:
            expected = torch.cat([part @ w[e] for e, part in enumerate(x.split([1, 3, 2]))])
            torch.testing.assert_close(fmoe.grouped_matmul(x, w, sizes), expected)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
    def test_grouped_matmul_in_every_dtype(self, dtype):
        x, w = torch.randn(7, 5).to(dtype), torch.randn(2, 5, 3).to(dtype)
        sizes = torch.tensor([3, 4], dtype=torch.int32)

        def run(x, w):
            return fmoe.grouped_matmul(x, w, sizes)

        expected = torch.cat([x[:3].double() @ w[0].double(), x[3:].double() @ w[1].double()])
        oracle.assert_close(run(x, w), expected, dtype)
        slopes = grad(lambda x, w: run(x, w).sum(), (0, 1))(x, w)  # a stride-0 cotangent
        oracle.assert_close(slopes[1][0], x[:3].double().sum(0)[:, None].expand(5, 3), dtype)
        _, tangent = jvp(run, (x, w), (x, w))
        oracle.assert_close(tangent, 2 * expected, dtype)
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        oracle.assert_close(compiled(x, w), expected, dtype)

    def test_one_token_one_expert_one_feature(self):
        config, params = small(num_experts=1, k=1, model_dim=1, hidden_dim=1)
        y, _ = fmoe.moe(params, torch.ones(1, dtype=D), config)
        assert y.shape == (1,)


class TestCheckpointing:
    @pytest.mark.parametrize("x", [torch.zeros(5, 6, dtype=D), torch.randn(5, 6, dtype=D)])
    def test_recomputation_routes_alike(self, x):
        """torchtitan#1117: recomputation routes differently. With all logits equal, too."""
        config, params = small(capacity=1.0)
        leaves = [leaf.requires_grad_() for leaf in torch.utils._pytree.tree_leaves(params)]

        def loss(*leaves):
            p = fmoe.MoEParams(fmoe.RouterParams(leaves[0]), fmoe.ExpertParams(*leaves[1:]))
            y, aux = fmoe.moe(p, x + 1, config)
            return y.square().sum() + aux.balance

        plain = torch.autograd.grad(loss(*leaves), leaves)
        again = torch.autograd.grad(checkpoint(loss, *leaves, use_reentrant=False), leaves)
        assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))

    def test_counts_are_outputs(self):
        """torchtitan#4772: counts kept in a module are doubled by recomputation."""
        config, params = small()
        x = torch.randn(5, 6, dtype=D, requires_grad=True)
        y, aux = checkpoint(lambda x: fmoe.moe(params, x, config), x, use_reentrant=False)
        y.sum().backward()
        assert int(aux.counts.sum()) == 10


class TestMixedPrecision:
    def test_autocast(self):
        """pytorch#174763: grouped_mm does not follow autocast."""
        config, params = small(dtype=torch.float32)
        x = torch.randn(5, 6)
        leaves = [leaf.requires_grad_() for leaf in torch.utils._pytree.tree_leaves(params)]
        with torch.autocast("cpu", torch.bfloat16):
            y, aux = fmoe.moe(params, x, config)
        assert y.dtype == torch.float32  # x's dtype
        assert aux.balance.dtype == torch.float32
        narrow = fmoe.moe(params, x, config.replace(dtype=torch.bfloat16))[0]
        assert torch.equal(y, narrow)  # the experts computed in bf16
        assert (y - fmoe.moe(params, x, config)[0]).abs().max() > 0
        assert all(g.dtype == torch.float32 for g in torch.autograd.grad(y.sum(), leaves))

    def test_sums_over_choices_are_kept_in_fp32(self):
        """torchtitan#1974: a running bf16 sum of 8 outputs is off by 0.075."""
        y = torch.randn(8000, 16).bfloat16()
        w = torch.rand(1000, 8).softmax(-1)
        index = torch.arange(8000).view(1000, 8)
        exact = (y.double()[index] * w.double().unsqueeze(-1)).sum(1)
        found = fmoe.ops.OPS["combine"](y, index, w).double()
        assert (found - exact).abs().max() <= (exact.bfloat16().double() - exact).abs().max() * 1.01

    def test_fused_and_separate_operations_agree(self):
        """TransformerEngine#2409: the grouped path gives another loss and gradient norm."""
        for dtype, tolerance in ((torch.float32, 1e-5), (D, 1e-10)):
            config, params = small(dtype=dtype, bias=True)
            x = torch.randn(9, 6, dtype=dtype)

            def fused(p, x, config=config):
                return fmoe.moe(p, x, config)[0].square().sum()

            def separate(p, x, config=config):
                routing = F.gate(p.router, x, config.router)
                tokens = F.expert_apply(p.experts, F.dispatch(x, routing))
                rows = F.expert_apply(torch.ones(4), tokens, fn=lambda _, rows: rows)  # materializes the rows
                return F.combine(rows, routing).square().sum()

            a, b = (torch.func.grad_and_value(f, (0, 1))(params, x) for f in (fused, separate))
            for p, q in zip(*map(torch.utils._pytree.tree_leaves, (a, b)), strict=True):
                torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)


class TestDeterminism:
    def test_every_run_gives_the_same_bits(self):
        """transformers#43583, Megatron-LM#7221."""
        config, params = small(num_experts=8, k=3, dtype=torch.float32, model_dim=64, hidden_dim=48)
        x = torch.randn(700, 64)
        torch.use_deterministic_algorithms(True)
        try:
            runs = [torch.func.grad_and_value(lambda p: sum(_loss(p, x, config)))(params) for _ in range(3)]
        finally:
            torch.use_deterministic_algorithms(False)
        for other in runs[1:]:
            for a, b in zip(*map(torch.utils._pytree.tree_leaves, (runs[0], other)), strict=True):
                assert torch.equal(a, b)


def _loss(p, x, config):
    y, aux = fmoe.moe(p, x, config)
    return y.square().mean(), aux.balance, aux.z


class TestTransforms:
    def test_vmap_routes_each_sample(self):
        """functorch#257: no nonzero, no boolean index, no item. vmap over x [4,T=3,D=4]."""
        config, params = small(model_dim=4, capacity=0.7)
        xs = torch.randn(4, 3, 4, dtype=D)
        y, aux = vmap(lambda x: fmoe.moe(params, x, config))(xs)
        for i, x in enumerate(xs):
            expected, one = fmoe.moe(params, x, config)
            torch.testing.assert_close(y[i], expected, rtol=0, atol=1e-14)
            assert torch.equal(aux.counts[i], one.counts)
            assert aux.dropped[i] == one.dropped

    def test_noise_is_an_argument_under_vmap(self):
        """Random operations inside vmap raise; a batch of noise does not."""
        config, params = small()
        xs, noise = torch.randn(3, 5, 6, dtype=D), torch.randn(3, 5, 4, dtype=D)
        y = vmap(lambda x, n: fmoe.moe(params, x, config, noise=n)[0])(xs, noise)
        torch.testing.assert_close(y[1], fmoe.moe(params, xs[1], config, noise=noise[1])[0])

    def test_few_graphs_for_many_sizes(self):
        """torchtitan#1364: a graph for every number of tokens, or a break."""
        config, params = small()
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        run = torch.compile(lambda x: fmoe.moe(params, x, config)[0], fullgraph=True, backend=counter)
        for tokens in (8, 12, 0, 1, 5, 7, 20):
            x = torch.randn(tokens, 6, dtype=D)
            torch.testing.assert_close(run(x), fmoe.moe(params, x, config)[0])
        assert counter.frame_count <= 4

    def test_module_state(self):
        """A module that holds the leaves goes through functional_call."""
        config, params = small()

        class Layer(torch.nn.Module):
            def __init__(self):
                super().__init__()
                leaves, self.spec = torch.utils._pytree.tree_flatten(params)
                self.leaves = torch.nn.ParameterList(leaves)

            def forward(self, x):
                return fmoe.moe(torch.utils._pytree.tree_unflatten(list(self.leaves), self.spec), x, config)[0]

        layer, x = Layer(), torch.randn(5, 6, dtype=D)
        state = {name: leaf.detach() for name, leaf in layer.named_parameters()}
        slopes = grad(lambda s: functional_call(layer, s, (x,)).sum())(state)
        direct = grad(lambda p: fmoe.moe(p, x, config)[0].sum())(params)
        torch.testing.assert_close(slopes["leaves.1"], direct.experts.w_in)

    def test_inference_mode_and_no_grad(self):
        config, params = small()
        x = torch.randn(5, 6, dtype=D)
        expected = fmoe.moe(params, x, config)[0]
        with torch.no_grad():
            assert torch.equal(fmoe.moe(params, x, config)[0], expected)
        with torch.inference_mode():
            assert torch.equal(fmoe.moe(params, x, config)[0], expected)


class TestMemory:
    def test_largest_tensor(self):
        """DeepSpeed#3535: a T*E*C mask. Here nothing exceeds T*k*max(M, 2H) elements, forward or backward."""
        tokens, k, dim, hidden = 512, 2, 24, 16
        for capacity in (None, 1.25):
            config, params = small(64, k, model_dim=dim, hidden_dim=hidden, dtype=torch.float32, capacity=capacity)
            x = torch.randn(tokens, dim)
            limit = tokens * k * max(dim, 2 * hidden) * 4
            assert params.experts.w_in.nbytes > limit  # only the shape of a parameter may exceed it
            sizes = _allocations(lambda p, x, c=config: sum(_loss(p, x, c)), params, x)
            exempt = {params.experts.w_in.nbytes, params.experts.w_out.nbytes}
            assert 0.9 * limit < max(sizes - exempt) <= limit
            assert exempt <= sizes  # so the profiler does see what kernels allocate

    def test_frozen_parameters_get_no_gradient(self):
        """The gradient of each leaf by itself is that of all together, and frozen experts cost no memory."""
        config, params = small(8, bias=True, activation="geglu")
        x = torch.randn(9, 6, dtype=D)
        leaves, spec = torch.utils._pytree.tree_flatten((x, params))

        def loss(*leaves):
            x, params = torch.utils._pytree.tree_unflatten(list(leaves), spec)
            return sum(_loss(params, x, config))

        together = grad(loss, tuple(range(len(leaves))))(*leaves)
        for i, expected in enumerate(together):
            torch.testing.assert_close(grad(loss, i)(*leaves), expected, rtol=0, atol=0)
        config, params = small(64, 2, model_dim=24, hidden_dim=16, dtype=torch.float32)
        x = torch.randn(64, 24)
        assert params.experts.w_in.nbytes in _allocations(lambda p, x: sum(_loss(p, x, config)), params, x)
        frozen = _allocations(lambda x, p: sum(_loss(p, x, config)), x, params)
        assert params.experts.w_in.nbytes not in frozen


def _allocations(loss, trained, frozen) -> set[int]:
    """Bytes of every allocation of a forward and backward pass."""
    leaves, spec = torch.utils._pytree.tree_flatten(trained)
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    with torch.profiler.profile(profile_memory=True, acc_events=True) as recorded:
        torch.autograd.grad(loss(torch.utils._pytree.tree_unflatten(leaves, spec), frozen), leaves)
    events = recorded.profiler.kineto_results.events()
    return {event.nbytes() for event in events if event.name() == "[memory]" and event.nbytes() > 0}


class TestReviewed:
    """Corners in which a reviewer found other values."""

    def test_huge_and_tiny_factors(self):
        config, params = small()
        x, mask = torch.randn(7, 6, dtype=D), torch.ones(7, dtype=torch.bool)
        for factor in (sys.maxsize, 1e18, math.inf, 4):
            assert int(fmoe.moe(params, x, config, capacity=factor, mask=mask)[1].dropped) == 0
        assert fmoe.Capacity(Fraction(1, 10**7)).of(tokens=100, k=1, num_experts=2) == 1
        assert fmoe.Capacity(np.float64(1.25)) == fmoe.Capacity(1.25)
        assert repr(fmoe.TopK(np.int64(2))) == repr(fmoe.TopK(2))

    def test_autocast_leaves_float64_alone(self):
        config, params = small()
        x = torch.randn(7, 6, dtype=D)
        expected = fmoe.moe(params, x, config)[0]
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(fmoe.moe(params, x, config)[0], expected)

    def test_autocast_does_not_reach_into_kernels(self):
        x, w, sizes = torch.randn(6, 32), torch.randn(2, 32, 8), torch.tensor([2, 4])
        config, params = small(dtype=torch.float32)
        leaves = [leaf.requires_grad_() for leaf in torch.utils._pytree.tree_leaves(params)]
        expected = fmoe.grouped_matmul(x, w, sizes)
        y = fmoe.moe(params, x[:, :6], config)[0].sum()
        slopes = torch.autograd.grad(y, leaves, retain_graph=True)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(fmoe.grouped_matmul(x, w, sizes), expected)
            again = torch.autograd.grad(y, leaves)
        assert torch.equal(again[1], slopes[1])  # w_in: made by the kernel alone

    def test_entropy_of_a_certain_router(self):
        """A softmax entry that underflows has entropy 0 and gradient 0, not NaN."""
        slope = grad(lambda w: F.gate(fmoe.RouterParams(w), torch.ones(1, 1), fmoe.TopK(1)).aux.entropy)
        assert torch.equal(slope(torch.tensor([[200.0, 0.0]])), torch.zeros(1, 2))

    def test_padding_of_a_batch_does_not_meet_nan(self):
        """An expert without tokens gets gradient 0, whatever its weights hold, in every dtype and path."""
        for dtype in (torch.bfloat16, D):
            config, params = small(k=3, dtype=dtype)
            params = dataclasses.replace(params, router=fmoe.RouterParams(torch.zeros(6, 4, dtype=dtype)))
            params.experts.w_out[3] = math.nan
            params.experts.w_in[3] = math.nan
            slopes = grad(lambda p, x, c=config: fmoe.moe(p, x, c)[0].sum())(params, torch.randn(7, 6).to(dtype))
            for leaf in torch.utils._pytree.tree_leaves(slopes.experts):
                assert torch.isfinite(leaf[:3]).all()
                assert torch.equal(leaf[3], torch.zeros_like(leaf[3]))

    def test_nan_of_one_token_stays_with_its_experts(self):
        x = torch.tensor([[math.nan, 0.0, 0.0], [0.0, 0.0, 5.0]], dtype=D)
        values = torch.ones(3, 3, 3, dtype=D)

        def loss(values, layout):
            tokens = F.dispatch(x, routed(x, fmoe.TopK(1), capacity=2.0), layout=layout)
            return F.expert_apply(values, tokens, fn=lambda w, rows: (rows @ w).tanh()).data.sum()

        for layout in ("ragged", "padded"):
            slopes = grad(lambda v, layout=layout: loss(v, layout))(values)
            assert slopes.isnan().flatten(1).any(1).tolist() == [True, False, False]

    @pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch 2.11, of its own file
    def test_an_exported_program_with_values_saves_and_loads(self, tmp_path):
        config, params = small(layout="padded", capacity=1.0)
        x = torch.randn(5, 6, dtype=D)

        class Layer(torch.nn.Module):
            def forward(self, params, x):
                return fmoe.moe(params, x, config)[0]

        torch.export.save(torch.export.export(Layer(), (params, x)), tmp_path / "layer.pt2")
        again = torch.export.load(tmp_path / "layer.pt2").module()
        torch.testing.assert_close(again(params, x), fmoe.moe(params, x, config)[0])

    def test_choices_left_open_stay_open(self):
        """Replacing k or the capacity resolves what was not chosen anew."""
        config, _ = small(fn=lambda p, rows: p * rows)
        assert dataclasses.replace(config.router, k=1).normalized is False
        params = fmoe.MoEParams(fmoe.RouterParams(torch.randn(6, 4, dtype=D)), torch.ones(4))
        x = torch.randn(5, 6, dtype=D)
        y = vmap(lambda x: fmoe.moe(params, x, config, capacity=1.0)[0])(x[None])
        torch.testing.assert_close(y[0], fmoe.moe(params, x, config.replace(capacity=1.0))[0])

    def test_double_backward_under_saved_tensor_hooks(self):
        config, params = small()
        x = torch.randn(5, 6, dtype=D)

        def penalty(w):
            p = dataclasses.replace(params, experts=dataclasses.replace(params.experts, w_in=w))
            (slope,) = torch.autograd.grad(fmoe.moe(p, x, config)[0].square().sum(), w, create_graph=True)
            return slope.square().sum()

        w = params.experts.w_in.requires_grad_()
        (expected,) = torch.autograd.grad(penalty(w), w)
        (again,) = torch.autograd.grad(checkpoint(penalty, w, use_reentrant=False), w)
        with torch.autograd.graph.save_on_cpu():
            (offloaded,) = torch.autograd.grad(penalty(w), w)
        torch.testing.assert_close(again, expected)
        torch.testing.assert_close(offloaded, expected)

    def test_vmap_over_no_samples(self):
        config, params = small(capacity=1.0)
        xs = torch.zeros(0, 3, 6, dtype=D)
        y, aux = vmap(lambda x: fmoe.moe(params, x, config))(xs)
        assert (y.shape, aux.counts.shape) == ((0, 3, 6), (0, 4))
        slopes = vmap(grad(lambda p, x: fmoe.moe(p, x, config)[0].sum()), (None, 0))(params, xs)
        assert slopes.experts.w_in.shape == (0, 4, 6, 2, 5)

    def test_meta_tensors_have_shapes(self):
        config, params = small()
        y, aux = fmoe.moe(params.to(device="meta"), torch.empty(7, 6, dtype=D, device="meta"), config)
        assert (y.shape, y.device.type, aux.counts.shape) == ((7, 6), "meta", (4,))

    def test_experts_in_a_row_of_other_widths(self):
        x = torch.randn(5, 6, dtype=D)
        routing = routed(torch.randn(5, 4, dtype=D), fmoe.TopK(2))
        first = fmoe.ExpertParams(torch.randn(4, 6, 5, dtype=D), torch.randn(4, 5, 3, dtype=D))
        second = fmoe.ExpertParams(torch.randn(4, 3, 7, dtype=D), torch.randn(4, 7, 2, dtype=D))
        for layout in ("ragged", "padded"):
            tokens = F.expert_apply(first, F.dispatch(x, routing, layout=layout), activation="relu")
            y = F.combine(F.expert_apply(second, tokens, activation="silu"), routing)
            expected = torch.zeros(5, 2, dtype=D)
            for t in range(5):
                for j, e in enumerate(routing.experts[t].tolist()):
                    row = (x[t] @ first.w_in[e]).relu() @ first.w_out[e]
                    row = torch.nn.functional.silu(row @ second.w_in[e]) @ second.w_out[e]
                    expected[t] += routing.weights[t, j] * row
            torch.testing.assert_close(y, expected)

    def test_integer_leaves_keep_their_dtype(self):
        params = fmoe.MoEParams(fmoe.RouterParams(torch.zeros(2, 2)), {"scale": torch.ones(2), "id": torch.arange(2)})
        assert params.to(D).experts["id"].dtype == torch.int64
        assert params.to(D).experts["scale"].dtype == D


class TestLayouts:
    def test_dispatched_rows_are_copies_of_tokens(self):
        x = torch.randn(6, 3, dtype=D)
        routing = routed(x, fmoe.TopK(2), capacity=0.5)
        ragged, padded = F.dispatch(x, routing, layout="ragged"), F.dispatch(x, routing, layout="padded")
        assert padded.data.shape == (3, 2, 3)
        assert ragged.data.shape == (12, 3)
        kept = int(ragged.group_sizes.sum())
        assert kept == 12 - int(routing.aux.dropped)
        assert torch.equal(ragged.data[kept:], torch.zeros(12 - kept, 3, dtype=D))
        for t in range(6):
            for j in range(2):
                e, slot = int(routing.experts[t, j]), int(routing.slots[t, j])
                if slot >= 0:
                    assert torch.equal(padded.data[e, slot], x[t])
                    assert torch.equal(ragged.data[int(ragged.index[t, j])], x[t])
        for e, size in enumerate(ragged.group_sizes.tolist()):
            assert torch.equal(padded.data[e, size:], torch.zeros(2 - size, 3, dtype=D))

    def test_wrong_weight_layout_is_refused(self):
        """peft#2527: [E,in,out] read as [E,out,in]."""
        x = torch.randn(4, 3, dtype=D)
        routing = routed(x, fmoe.TopK(1))
        swapped = fmoe.ExpertParams(torch.randn(3, 5, 3, dtype=D), torch.randn(3, 3, 5, dtype=D))
        with pytest.raises(ValueError, match=r"w_in is f64\[3,5,3\], but for E=3, M=3"):
            F.expert_apply(swapped, F.dispatch(x, routing), activation="relu")

    @pytest.mark.parametrize("layout", ["ragged", "padded"])
    def test_an_expert_function_of_the_user(self, layout):
        config, params = small(capacity=0.7, layout=layout, bias=True)
        x = torch.randn(9, 6, dtype=D)

        def swiglu(p, rows):
            gate, up = torch.einsum("nm,mgh->gnh", rows, p.w_in) + p.b_in.unsqueeze(1)
            return (torch.nn.functional.silu(gate) * up) @ p.w_out + p.b_out

        own = config.replace(fn=swiglu)
        a, b = (torch.func.grad(lambda p, c=c: fmoe.moe(p, x, c)[0].square().sum())(params) for c in (config, own))
        for p, q in zip(*map(torch.utils._pytree.tree_leaves, (a, b)), strict=True):
            torch.testing.assert_close(p, q)

    def test_an_expert_function_need_not_be_finite_at_zero(self):
        """An inert slot never sees a zero row: 0 * NaN would reach the gradient of the scale."""
        x = torch.randn(5, 3, dtype=D)
        scale = torch.ones(3, 3, dtype=D)

        def loss(scale, x):
            routing = routed(x, fmoe.TopK(1), capacity="as_needed")
            tokens = F.dispatch(x, routing, layout="padded")
            tokens = F.expert_apply(scale, tokens, fn=lambda p, rows: p * rows / rows.norm(dim=-1, keepdim=True))
            return F.combine(tokens, routing).sum()

        assert all(torch.isfinite(g).all() for g in grad(loss, (0, 1))(scale, x))

    def test_nan_stays_in_its_token(self):
        """Tutel: one NaN token changes other rows when capacity is limited. An unused expert's NaN is not read."""
        for capacity in (None, 1.0):
            config, params = small(capacity=capacity)
            x = torch.randn(8, 6, dtype=D)
            expected, _ = fmoe.moe(params, x[1:], config, groups=[7])
            bad = x.clone()
            bad[0] = math.nan
            y, _ = fmoe.moe(params, bad, config, groups=[1, 7])
            assert y[0].isnan().all()
            torch.testing.assert_close(y[1:], expected)
        x = one_hot_logits([0, 1, 0], 3)
        values = torch.tensor([1.0, 2.0, math.nan], dtype=D)
        for layout in ("ragged", "padded"):
            routing = routed(x, fmoe.TopK(1))
            tokens = F.expert_apply(values, F.dispatch(x, routing, layout=layout), fn=lambda p, rows: p * rows)
            assert torch.isfinite(F.combine(tokens, routing)).all()

"""The clamped activation of gpt-oss, and weights as other libraries store them: interleaved halves, columns first."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from oracle import assert_close

import fmoe
from fmoe import functional as F
from fmoe.ops.activations import ACTIVATIONS, form_of
from fmoe.ops.ffn import ffn_backward
from fmoe.transforms.subjects import subjects
from fmoe.transforms.table import ROWS, run_cell

E, M, H, K, T = 4, 6, 10, 2, 9


def rand(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_the_clamped_activation():
    """``(up + 1) * gate * sigmoid(1.702 * gate)`` with gate at most 7 and up within 7, token by token."""
    z = torch.tensor([[9.0, -9.0, 0.5, 7.5, 2.0, 8.0, -8.0, 0.25]], dtype=torch.float64)
    gate, up = [7.0, -9.0, 0.5, 7.0], [2.0, 7.0, -7.0, 0.25]
    wanted = [(u + 1) * g / (1 + math.exp(-1.702 * g)) for g, u in zip(gate, up, strict=True)]
    assert_close(ACTIVATIONS["swiglu_oss"](z), torch.tensor([wanted], dtype=torch.float64))
    turns = z.view(2, 4).t().reshape(1, 8)
    assert_close(form_of("swiglu_oss.interleaved")(turns), torch.tensor([wanted], dtype=torch.float64))


@pytest.mark.parametrize("activation", [n for n, a in ACTIVATIONS.items() if a.gated])
def test_slopes_are_those_of_autograd(activation):
    """The kernel's, and those of the composition, far beyond where halves are cut off."""
    for name in (activation, f"{activation}.interleaved"):
        act, z = form_of(name), 6 * rand(5, 2 * H)
        grad = rand(5, H, seed=1)
        gate, value = act.halves(z)
        (wanted,) = torch.autograd.grad(act(z.requires_grad_()), z, grad)
        z = z.detach()
        gate, value = act.halves(z)
        up = value if act.up is None else act.up.function(value)
        dgate, dvalue = act.slope(gate, grad * up), grad * act.function(gate)
        assert_close(act.joined(dgate, dvalue if act.up is None else act.up.slope(value, dvalue)), wanted)
        found = torch.empty_like(z)
        opened, raised = torch.empty_like(grad), value if act.up is None else torch.empty_like(grad)
        act.into(gate, opened)
        if act.up is not None:
            act.up.into(value, raised)
        assert_close(opened * raised, act(z))
        first, second = act.halves(found)
        act.backward_into(grad * raised, gate, first)
        second.copy_(grad * opened)
        if act.up is not None:
            act.up.backward_into(second, value, second)
        assert_close(found, wanted)


def stored(how, w_in, w_out, b_in, leaf):
    """``[E,M,2,H]`` parameters as views of leaves that lie in memory in another order."""
    if how == "interleaved":  # [E,M,H,2], as gpt-oss
        a, c = leaf(w_in.transpose(2, 3).contiguous()), leaf(b_in.transpose(1, 2).contiguous())
        b = leaf(w_out)
        return (a, b, c), (a.transpose(2, 3), b, c.transpose(1, 2))
    a, b, c = leaf(w_in.permute(0, 2, 3, 1).contiguous()), leaf(w_out.mT.contiguous()), leaf(b_in)
    return (a, b, c), (a.permute(0, 3, 1, 2), b.mT, c)  # [E,2,H,M] and [E,M,H], as torch.nn.Linear


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ["interleaved", "columns first"])
@pytest.mark.parametrize("activation", ["swiglu", "swiglu_oss"])
def test_strided_weights_are_those_of_contiguous_ones(activation, how, dtype, monkeypatch):
    """Outputs and gradients; and the gradients lie as the parameters, so that autograd need not copy them."""
    w_in, w_out, b_in = rand(E, M, 2, H, seed=1), rand(E, H, M, seed=2), 3 * rand(E, 2, H, seed=3)
    x, weight, b_out = rand(T, M, seed=4).to(dtype), rand(M, E, seed=5), rand(E, M, seed=6).to(dtype)
    routing = F.gate(fmoe.RouterParams(weight.to(dtype)), x, fmoe.TopK(K))

    def layer(w_in, w_out, b_in):
        tokens = F.expert_apply(
            fmoe.ExpertParams(w_in, w_out, b_in, b_out), F.dispatch(x, routing), activation=activation
        )
        return F.combine(tokens, routing)

    cast = [p.to(dtype) for p in (w_in, w_out, b_in)]
    plain = [p.clone().requires_grad_() for p in cast]
    wanted = layer(*plain)
    wanted.sin().sum().backward()
    leaves, views = stored(how, *cast, lambda p: p.clone().requires_grad_())
    strides = []
    run = ffn_backward.op

    def watched(*args):
        made = run(*args)
        strides.extend((grad.stride(), w.stride()) for w, grad in zip(args[3:7:2], made[2:6:2], strict=True))
        return made

    monkeypatch.setattr(ffn_backward, "op", watched)
    y = layer(*views)
    assert_close(y, wanted, dtype)
    y.sin().sum().backward()
    for leaf, grad in zip(leaves, stored(how, *(p.grad for p in plain), lambda p: p)[0], strict=True):
        assert_close(leaf.grad, grad, dtype)
    assert strides
    assert all(found == kept for found, kept in strides)


@pytest.mark.parametrize("how", ["interleaved", "columns first"])
def test_strided_weights_are_not_copied(how):
    """No tensor as large as one of the weights is made, but their gradients."""
    _, views = stored(
        how,
        rand(E, M, 2, H, seed=1),
        rand(E, H, M, seed=2),
        rand(E, 2, H, seed=3),
        lambda p: p.clone().requires_grad_(),
    )
    x = rand(2, M, seed=4)
    routing = F.gate(fmoe.RouterParams(rand(M, E, seed=5)), x, fmoe.TopK(1))

    def sizes(fn):
        with torch.profiler.profile(profile_memory=True, acc_events=True) as recorded:
            fn()
        events = recorded.profiler.kineto_results.events()
        return sorted((e.nbytes() for e in events if e.name() == "[memory]"), reverse=True)

    def forward():
        return F.combine(F.expert_apply(fmoe.ExpertParams(*views), F.dispatch(x, routing)), routing)

    y = forward()
    small = E * M * H * 8
    assert max(sizes(forward)) < small
    found = [n for n in sizes(lambda: y.sum().backward()) if n >= small]
    assert found == [2 * small, small]


@pytest.mark.parametrize("how", ["interleaved", "columns first"])
def test_strided_weights_under_every_transform(how):
    """The table of the layer, its weights as other libraries store them."""
    subject = subjects()["moe ragged"]

    def function(x, weight, w_in, b_in, w_out, b_out):
        _, (w_in, w_out, b_in) = stored(how, w_in, w_out, b_in, lambda p: p)
        return subject.function(x, weight, w_in, b_in, w_out, b_out)

    through = dataclasses.replace(subject, function=function)
    rows = [row for row in ROWS if not row.startswith(("compile(", "export"))]
    cells = {row: run_cell(row, through) for row in rows}
    assert {row: cell for row, cell in cells.items() if cell.outcome != "pass"} == {}

"""The layer against the per-token oracle: outputs, losses and every gradient."""

from __future__ import annotations

from unittest import mock

import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fmoe
from fmoe.functional.routers.base import linear
from fmoe.ops.kernels import cpu_tiles

ACTIVATIONS = ("relu", "gelu", "silu", "swiglu", "geglu", "swiglu_oss")
LOSSES = ("balance", "z", "importance", "load", "entropy")


def make_params(config: fmoe.MoEConfig, seed: int, dtype=torch.float64) -> fmoe.MoEParams:
    params = fmoe.init(config, seed=seed, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)

    def bumped(leaf):
        return None if leaf is None else leaf + 0.3 * torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype)

    e = params.experts
    experts = fmoe.ExpertParams(bumped(e.w_in), bumped(e.w_out), bumped(e.b_in), bumped(e.b_out))
    return fmoe.MoEParams(fmoe.RouterParams(bumped(params.router.weight)), experts).to(dtype)


def as_dict(experts: fmoe.ExpertParams) -> dict[str, torch.Tensor]:
    named = {name: getattr(experts, name) for name in ("w_in", "w_out", "b_in", "b_out")}
    return {name: leaf for name, leaf in named.items() if leaf is not None}


def leaves_of(params: fmoe.MoEParams) -> dict[str, torch.Tensor]:
    return {"router": params.router.weight, **as_dict(params.experts)}


def rebuilt(leaves: dict[str, torch.Tensor]) -> fmoe.MoEParams:
    rest = {name: leaf for name, leaf in leaves.items() if name != "router"}
    return fmoe.MoEParams(fmoe.RouterParams(leaves["router"]), fmoe.ExpertParams(**rest))


def compare(config: fmoe.MoEConfig, x: torch.Tensor, seed: int, *, strides=False, **gate_arguments) -> None:
    """y, losses and the gradients of a scalar that uses them all, of x and of every parameter."""
    dtype = x.dtype
    base = {name: leaf.detach() for name, leaf in leaves_of(make_params(config, seed, dtype)).items()}
    wide = {name: leaf.double().requires_grad_() for name, leaf in base.items()}
    mine = {name: leaf.clone().requires_grad_() for name, leaf in base.items()}
    if strides:  # the same numbers in other strides
        mine = {
            n: leaf.detach().transpose(0, -1).contiguous().transpose(0, -1).requires_grad_() for n, leaf in base.items()
        }
    xw, xm = x.double().requires_grad_(), x.detach().requires_grad_()
    generator = torch.Generator().manual_seed(seed + 1)
    cotangent = torch.randn(x.shape, generator=generator, dtype=torch.float64)

    given_mask, given_noise = gate_arguments.get("mask"), gate_arguments.get("noise")
    rule, router, groups = config.capacity, config.router, gate_arguments.get("groups", 1)
    tokens = x[..., 0].numel()
    sizes = [tokens // groups] * groups if isinstance(groups, int) else list(groups)
    factor = None if rule is None or rule.as_needed else rule.factor
    y, aux, facts = oracle.layer(
        xw.reshape(-1, x.shape[-1]),
        wide["router"],
        {name: leaf for name, leaf in wide.items() if name != "router"},
        k=router.k,
        activation=config.activation,
        order=router.order,
        normalize=router.normalized,
        factor=factor,
        minimum=0 if rule is None else rule.minimum,
        groups=sizes,
        mask=None if given_mask is None else given_mask.reshape(-1),
        noise=None if given_noise is None else given_noise.reshape(tokens, config.num_experts).double(),
    )
    got, got_aux = fmoe.moe(rebuilt(mine), xm, config, **gate_arguments)
    assert got.dtype == dtype
    assert got.shape == x.shape
    assert got_aux.counts.tolist() == facts["counts"]
    assert int(got_aux.dropped) == facts["dropped"]
    oracle.assert_close(got, y.reshape(x.shape), dtype, "y")
    for name in LOSSES:
        oracle.assert_close(getattr(got_aux, name), aux[name], dtype, name)

    def scalar(out, losses):
        total = (out.double().reshape(cotangent.shape) * cotangent).sum()
        return total + 0.3 * losses["balance"] + 0.2 * losses["z"] + 0.1 * losses["importance"] + 0.1 * losses["load"]

    nothing = 0.0 * sum(leaf.sum() for leaf in [xw, *wide.values()])  # the loop over no tokens has no graph
    expected = torch.autograd.grad(scalar(y, aux) + nothing, [xw, *wide.values()])
    actual = torch.autograd.grad(
        scalar(got, {name: getattr(got_aux, name) for name in LOSSES}), [xm, *mine.values()], allow_unused=True
    )
    for name, a, b, leaf in zip(["x", *wide], actual, expected, [xm, *mine.values()], strict=True):
        assert a is not None, name
        assert a.shape == leaf.shape, name
        oracle.assert_close(a, b, dtype, f"grad of {name}")


@st.composite
def cases(draw):
    experts = draw(st.integers(1, 5))
    k = draw(st.integers(1, experts))
    order = draw(st.sampled_from(["softmax_topk", "topk_softmax"]))
    normalize = draw(st.sampled_from([None, True] if order == "topk_softmax" else [None, True, False]))
    sizes = draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))
    kind = draw(st.sampled_from(["none", "factor", "as_needed"]))
    capacity = None
    if kind == "factor":
        capacity = fmoe.Capacity(
            draw(st.sampled_from([0, 0.3, 0.5, 1.0, 1.1, 2.0, 8.0])), minimum=draw(st.integers(0, 2))
        )
    elif kind == "as_needed":
        capacity = fmoe.Capacity("as_needed")
    config = fmoe.MoEConfig(
        num_experts=experts,
        model_dim=draw(st.integers(1, 5)),
        hidden_dim=draw(st.integers(1, 4)),
        router=fmoe.TopK(k, order=order, normalize=normalize),
        activation=draw(st.sampled_from(ACTIVATIONS)),
        bias=draw(st.booleans()),
        capacity=capacity,
        layout=draw(st.sampled_from([None, "ragged", "padded"])),
    )
    flags = [draw(st.booleans()) for _ in range(4)]
    return config, sizes, *flags, draw(st.integers(0, 10**6))


@settings(max_examples=250, deadline=None, derandomize=True)
@given(cases())
def test_matches_oracle(case):
    config, sizes, masked, noisy, strides, tiled, seed = case
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(sizes)
    x = torch.randn(tokens, config.model_dim, generator=generator, dtype=torch.float64)
    if strides:
        x = x.t().contiguous().t()
    arguments: dict[str, object] = {"groups": sizes}
    if masked:
        arguments["mask"] = torch.rand(tokens, generator=generator) < 0.7
    if noisy:
        arguments["noise"] = torch.randn(tokens, config.num_experts, generator=generator, dtype=torch.float64)
    with kernels(tiled):
        compare(config, x, seed, strides=strides, **arguments)


def test_few_rows_in_strips():
    """Wide matrices of which each expert has few rows, as in decoding."""
    config = fmoe.MoEConfig(num_experts=6, model_dim=128, hidden_dim=192, bias=True)
    with mock.patch.object(cpu_tiles, "FEW_ROWS", 0):
        compare(config, torch.randn(7, 128, generator=torch.Generator().manual_seed(5)), seed=5)


def kernels(tiled: bool):
    """The CPU kernels at sizes that reach all of their paths: one batch of small groups, or tiles of 3 rows."""
    return mock.patch.multiple(cpu_tiles, TILE=3, FEW_ROWS=0 if tiled else 16, SOME_ROWS=0 if tiled else 256)


def test_large_groups_are_summed_before_they_are_rounded():
    """In fp16, gradients of 1500 rows each that are out of range by themselves, and 0 together."""
    config = fmoe.MoEConfig(num_experts=1, model_dim=1, hidden_dim=1, router=fmoe.TopK(1), activation="relu", bias=True)
    leaves = [torch.ones(1, 1, 1), torch.ones(1, 1, 1), torch.zeros(1, 1), torch.zeros(1, 1)]
    leaves = [leaf.half().requires_grad_() for leaf in leaves]
    params = fmoe.MoEParams(fmoe.RouterParams(torch.zeros(1, 1)), fmoe.ExpertParams(*leaves))
    dy = torch.full((3000, 1), 64.0).half()
    dy[1500:] = -64
    y, _ = fmoe.moe(params, torch.full((3000, 1), 8.0).half(), config)
    assert [float(g) for g in torch.autograd.grad(y, leaves, dy)] == [0.0] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("capacity", [None, 0.7])
@pytest.mark.parametrize("tiled", [False, True])
def test_narrow_dtypes(dtype, activation, capacity, tiled):
    config = fmoe.MoEConfig(
        num_experts=4, model_dim=16, hidden_dim=12, activation=activation, bias=True, capacity=capacity
    )
    x = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)
    with kernels(tiled):
        compare(config, x, seed=3)


def test_a_router_keeps_its_tokens_as_they_are():
    """In bf16 the logits are in fp32, the bits of a product of upcast operands, but no upcast token is kept."""
    x, weight = torch.randn(40, 16, dtype=torch.bfloat16), torch.randn(16, 5, dtype=torch.bfloat16)
    leaves = [t.clone().requires_grad_() for t in (x, weight)]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        logits = linear(*leaves)
    assert sorted({(tuple(t.shape), t.dtype) for t in kept}, key=str) == [
        ((16, 5), torch.bfloat16),
        ((40, 16), torch.bfloat16),
    ]
    wide = [t.float().requires_grad_() for t in (x, weight)]
    want = wide[0] @ wide[1]
    assert torch.equal(logits, want)
    cotangent = torch.randn_like(want)
    found, gradients = (torch.autograd.grad(y, ts, cotangent) for y, ts in ((logits, leaves), (want, wide)))
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(found, gradients, strict=True))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, pushed = torch.func.jvp(linear, (x, weight), (x, weight))
    assert torch.equal(pushed, 2 * want)

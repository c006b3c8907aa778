"""Experts of transformers whose activation changes, learns or draws, and what watches them run. Skipped without."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("transformers")
    hf = pytest.importorskip("fmoe.integrations.transformers")

from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeExperts

pytestmark = pytest.mark.filterwarnings("ignore")
M, H, E, K = 16, 12, 4, 2


def filled(module, scale):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for leaf in module.parameters():
            leaf.copy_(torch.randn(leaf.shape, generator=generator) * scale)
    return module


def silu():
    return filled(Qwen3MoeExperts(Qwen3MoeConfig(hidden_size=M, num_experts=E, moe_intermediate_size=H)), 0.3)


def clamped():
    return filled(GptOssExperts(GptOssConfig(hidden_size=M, num_local_experts=E, intermediate_size=H)), 1.5)


def given(tokens=9):
    generator = torch.Generator().manual_seed(1)
    weights, ids = torch.rand(tokens, E, generator=generator).topk(K)
    return torch.randn(tokens, M, generator=generator), ids, weights


def run(module, how, *args, with_module=None):
    module.config._experts_implementation = how
    return (module if with_module is None else with_module)(*args)


def assert_eager(module, with_module=None):
    """That fmoe gives eager's numbers now."""
    found = run(module, "fmoe", *given(), with_module=with_module)
    torch.testing.assert_close(found, run(module, "eager", *given()), rtol=1e-5, atol=1e-3 * float(found.abs().max()))


class Swish(nn.Module):
    """Learns how steep it is."""

    def __init__(self):
        super().__init__()
        self.beta = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x * torch.sigmoid(self.beta * x)


# --- another activation after the first call -------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_changed_counts(compiled):
    """Another function or another number: in the next call, and the fused one again when it is changed back."""
    torch._dynamo.reset()
    for made, changes in ((silu, {"act_fn": nn.GELU()}), (clamped, {"limit": 1.0}), (clamped, {"alpha": 0.5})):
        module = made()
        runs = torch.compile(module, backend="aot_eager", fullgraph=True) if compiled else None
        assert_eager(module, runs)
        name = hf.activation_of(module)
        before = {key: getattr(module, key) for key in changes}
        for key, item in changes.items():
            setattr(module, key, item)
        assert hf.activation_of(module) != name
        assert_eager(module, runs)
        for key, item in before.items():
            setattr(module, key, item)
        assert hf.activation_of(module) == name is not None
        assert_eager(module, runs)


def test_a_module_is_not_kept_alive():
    import gc
    import weakref

    module = silu()
    hf.activation_of(module)
    module.itself = module.forward  # as what wraps a module does
    hf.activation_of(module)
    alive = weakref.ref(module)
    del module
    gc.collect()
    assert alive() is None


# --- what is not fused -----------------------------------------------------------------------------------------------


def test_an_activation_that_learns():
    """It equals SiLU at first, but has a gradient, and may then be another."""
    module, grads = silu(), []
    module.act_fn = Swish()
    assert hf.activation_of(module) is None
    for how in ("eager", "fmoe"):
        module.zero_grad()
        run(module, how, *given()).sum().backward()
        grads.append(module.act_fn.beta.grad)
    torch.testing.assert_close(*grads)
    with torch.no_grad():
        module.act_fn.beta.fill_(2.0)
    assert_eager(module)


def test_an_activation_that_draws():
    """Dropout does nothing in eval, and is there in training."""
    module = silu()
    module.act_fn = nn.Sequential(nn.SiLU(), nn.Dropout(0.5))
    assert_eager(module.eval())
    module.train()
    assert not torch.equal(run(module, "fmoe", *given()), run(module, "fmoe", *given()))


# --- what watches ----------------------------------------------------------------------------------------------------


class Wrapped(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args):
        return self.module(*args)


def test_compiled_and_exported_before_any_call():
    torch._dynamo.reset()
    module = silu()
    assert_eager(module, torch.compile(module, backend="aot_eager", fullgraph=True))
    for strict in (False, True):
        module = silu()
        module.config._experts_implementation = "fmoe"
        program = torch.export.export(Wrapped(module), given(), strict=strict)
        x, ids, weights = given()
        other = (x, (ids + 1) % E, weights)
        torch.testing.assert_close(program.module()(*other), run(module, "eager", *other), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 3, 21])
def test_another_default_device(tokens):
    """A CPU module stays one."""
    for module in (silu(), clamped()):
        args = given(tokens)
        with torch.no_grad():
            wanted = run(module, "eager", *args)
            with torch.device("meta"):
                found = run(module, "fmoe", *args)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))

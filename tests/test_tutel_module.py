"""Tutel's layer as a module among modules: its arguments, its state, copies, dtypes, meta, compiled, checkpointed."""

from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as nnf
import tutel_loop
from oracle import assert_close
from test_tutel import E, H, M, T, make

import fmoe
from fmoe.integrations import tutel
from fmoe.integrations.tutel import moe as tutel_moe


def test_arguments_are_tutels():
    """Names, order and defaults of Tutel 0.3, whose users give some by position."""
    construction = [
        "gate_type", "model_dim", "experts=None", "scan_expert_func=None", "result_func=None", "group=None",
        "seeds=None", "a2a_ffn_overlap_degree=1", "is_postscore=True", "batch_prioritized_routing=False",
        "normalize_gate=True", "is_gshard_loss=True", "parallel_type='adaptive:1'", "use_2dh=False", "**kwargs",
    ]  # fmt: skip
    call = [
        "input", "gate_index=0", "capacity_factor=None", "top_k=None", "a2a_ffn_overlap_degree=None",
        "reserve_dims=1", "inequivalent_tokens=False", "adaptive_r=None", "megablocks_size=0",
    ]  # fmt: skip
    for fn, want in ((tutel_moe.moe_layer, construction), (tutel_moe.moe_layer.forward, call)):
        found = [p.replace(annotation=inspect.Parameter.empty) for p in inspect.signature(fn).parameters.values()]
        assert [str(p) for p in found if p.name != "self"] == want


def test_the_environment_changes_nothing(monkeypatch):
    layer, x = make({"capacity_factor": 0.5}), torch.randn(T, M)
    y = layer(x)
    for name in ("CAP_FACTOR", "BATCH_PRIO", "SKIP_MOE", "SKIP_EXPERT", "LOCAL_SIZE"):
        monkeypatch.setenv(name, "1")
    assert torch.equal(layer(x), y)
    again = make({"capacity_factor": 0.5})
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again(x), y)


@pytest.mark.parametrize("gate", [{}, {"type": "cosine_top"}])
def test_a_gate_in_half_precision_computes_in_float32(gate):
    layer = make({"capacity_factor": 0, **gate}).bfloat16()
    x = torch.randn(T, M).bfloat16()
    y = layer(x)
    wide = copy.deepcopy(layer).double()
    logits = tutel_loop.logits_of(wide.gates[0], x.double())
    want, l_aux = tutel_loop.layer(x.double(), logits, tutel_loop.ffn(wide.state_dict()), k=2, factor=0)
    assert_close(y.l_aux, l_aux, torch.float32)
    assert_close(y, want, torch.bfloat16)


def test_state_dict_has_tutels_keys():
    layer = make([{"type": "top"}, {"type": "cosine_top"}])
    keys = {
        "_num_global_experts": [], "experts.batched_fc1_w": [E, H, M], "experts.batched_fc2_w": [E, H, M],
        "experts.batched_fc1_bias": [E, H], "experts.batched_fc2_bias": [E, M], "gates.0.wg.weight": [E, M],
        "gates.1.temperature": [1], "gates.1.cosine_projector.weight": [256, M], "gates.1.cosine_projector.bias": [256],
        "gates.1.sim_matrix": [256, E],
    }  # fmt: skip
    assert {k: list(v.shape) for k, v in layer.state_dict().items()} == keys


def test_copies_have_no_call_behind_them():
    layer = make({"capacity_factor": 0})
    x = torch.randn(T, M)
    y = layer(x)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other.l_aux is None
        assert torch.equal(other(x), y)
    with torch.no_grad():
        other.experts.batched_fc1_w.zero_()
    assert torch.equal(layer(x), y)
    assert not torch.equal(other(x), y)


def test_a_layer_made_on_meta():
    """Runs there, as no number is read from a tensor, and on a device once it has been loaded."""
    with torch.device("meta"):
        empty = torch.nn.Sequential(make())
        y = empty(torch.ones(2, T, M))
    assert (y.shape, y.device.type, y.l_aux.shape) == ((2, T, M), "meta", ())
    empty.to_empty(device="cpu")
    layer = make()
    assert torch.equal(empty[0]._num_global_experts, layer._num_global_experts)
    empty[0].load_state_dict(layer.state_dict())
    x = torch.randn(T, M)
    assert torch.equal(empty[0](x), layer(x))


@pytest.mark.parametrize("arguments", [{}, {"is_postscore": False}, {"batch_prioritized_routing": True}])
@pytest.mark.parametrize("factor", [1.0, 0])
def test_compiled_in_one_graph(factor, arguments):
    layer = make({"capacity_factor": factor}, **arguments)
    x = torch.randn(T, M)
    y = layer(x)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")(x)
    assert torch.equal(compiled, y)
    assert torch.equal(compiled.l_aux, y.l_aux)


def test_dtypes():
    layer = make({"capacity_factor": 0})
    x = torch.randn(T, M)
    y = layer(x)
    half = copy.deepcopy(layer).bfloat16()
    for out in (half(x), half(x.bfloat16()), layer(x.bfloat16())):
        assert_close(out, y, torch.bfloat16)
    assert half(x).dtype == torch.float32
    assert half(x.bfloat16()).dtype == layer(x.bfloat16()).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        mixed = layer(x)
    assert mixed.dtype == torch.float32
    assert 0 < float((mixed - y).detach().abs().max()) < 0.02
    assert mixed.l_aux.item() == y.l_aux.item()  # the gate is not cast
    own = make({"capacity_factor": 0}, {"activation_fn": lambda x: nnf.relu(x)}, is_postscore=False)
    own.load_state_dict(layer.state_dict())
    with torch.autocast("cpu", torch.bfloat16):
        mixed = own(x)
    assert_close(mixed, own(x), torch.bfloat16)


def test_checkpointed_gradients():
    layer = make({"gate_noise": 1.0})
    x = torch.randn(T, M, requires_grad=True)
    gradients = []
    for recompute in (False, True):
        torch.manual_seed(4)
        y = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
        gradients.append(torch.autograd.grad(y.square().sum(), [x, *layer.parameters()]))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_dropout_in_the_activation():
    drop = torch.nn.Dropout(0.5)
    layer = make({"capacity_factor": 0}, {"activation_fn": lambda x: drop(nnf.gelu(x))})
    x = torch.randn(T, M)
    assert not torch.equal(layer(x), layer(x))
    drop.eval()
    plain = make({"capacity_factor": 0}, {"activation_fn": nnf.gelu})
    plain.load_state_dict(layer.state_dict())
    assert_close(layer(x), plain(x), torch.float32)


def test_fmoe_does_not_import_it():
    code = "import sys, fmoe; print([n for n in sys.modules if n.startswith('fmoe.integrations')])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
    assert tutel.moe.moe_layer is tutel.moe_layer is tutel_moe.moe_layer
    assert fmoe.__name__ == "fmoe"

"""torch.compile of a layer without a graph break: alone and as a bound program, forward and backward.

The transform table has more subjects under more transforms; here are the ways a user calls, and what is made
for a GPU, down to Triton code.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest
import torch
from oracle import assert_close
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import fmoe
from fmoe import functional as F

E, M, H, T = 4, 8, 16, 6


def layer_of(layout):
    capacity = 1.25 if layout == "padded" else None
    config = fmoe.MoEConfig(E, M, H, router=fmoe.TopK(2), capacity=capacity, layout=layout)
    params = fmoe.init(config, seed=0, dtype=torch.float64)
    return config, params, torch.randn(T, M, dtype=torch.float64)


def alone(config, params, x):
    return lambda p, x: fmoe.moe(p, x, config)


def bound(config, params, x):
    """A `Compiled`: of the program of one rank, in chunks where the layout is padded."""
    plan = "ep pipeline=2 layout=padded" if config.layout == "padded" else "dp"
    spec = fmoe.ShardingSpec(fmoe.make_mesh(E), plan=plan, max_tokens=T)
    return fmoe.trace(lambda p, x: fmoe.moe(p, x, config))(params, x).plan(spec).compile()


def with_loss(layer):
    def loss(params, x):
        y, aux = layer(params, x)
        return y.square().sum() + aux.balance + aux.z, y

    return loss


def compiled(fn, backend):
    torch._dynamo.reset()
    return torch.compile(fn, fullgraph=True, backend=backend)


CASES = [(make, layout, "aot_eager") for make in (alone, bound) for layout in ("ragged", "padded")]


@pytest.mark.parametrize(("make", "layout", "backend"), CASES)
def test_forward_and_backward(make, layout, backend):
    config, params, x = layer_of(layout)
    loss = with_loss(make(config, params, x))
    (want, y), (dp, dx) = loss(params, x), torch.func.grad(lambda p, x: loss(p, x)[0], (0, 1))(params, x)
    with torch.no_grad():
        assert_close(compiled(loss, backend)(params, x)[1], y)
    p, leaf = pytree.tree_map(lambda leaf: leaf.clone().requires_grad_(), (params, x))
    found, made = compiled(loss, backend)(p, leaf)
    found.backward()
    assert_close(found, want)
    assert_close(made, y)
    for a, b in zip(pytree.tree_leaves((p, leaf)), pytree.tree_leaves((dp, dx)), strict=True):
        assert_close(a.grad, b)


def test_inductor():
    """Of the experts alone: of a whole layer it writes dozens of C++ kernels, a minute to compile here."""
    config, params, x = layer_of("padded")
    routing = F.gate(params.router, x, config.router, capacity=config.capacity)

    def loss(experts, x):
        tokens = F.expert_apply(experts, F.dispatch(x, routing, layout="padded"), activation="swiglu")
        return F.combine(tokens, routing).square().sum()

    experts, leaf = pytree.tree_map(lambda leaf: leaf.clone().requires_grad_(), (params.experts, x))
    compiled(loss, "inductor")(experts, leaf).backward()
    want = torch.func.grad(loss, (0, 1))(params.experts, x)
    for a, b in zip(pytree.tree_leaves((experts, leaf)), pytree.tree_leaves(want), strict=True):
        assert_close(a.grad, b)


def test_grad_of_a_bound_program():
    config, params, x = layer_of("padded")
    loss = with_loss(bound(config, params, x))
    gradient = torch.func.grad(lambda p, x: loss(p, x)[0])
    found = compiled(gradient, "aot_eager")(params, x)
    for a, b in zip(pytree.tree_leaves(found), pytree.tree_leaves(gradient(params, x)), strict=True):
        assert_close(a, b)


def test_a_bound_program_refuses_other_types_when_compiled():
    config, params, x = layer_of("padded")
    with pytest.raises(Exception, match="the arguments are not of the types it was planned for"):
        compiled(bound(config, params, x), "aot_eager")(params, x[:-1])


@pytest.mark.parametrize("layout", ["ragged", "padded"])
def test_a_graph_for_a_device_without_data(layout):
    """As for a GPU that is not there: everything is traced, stays on the device, and is left to five operations."""
    config, params, x = layer_of(layout)
    p, x = pytree.tree_map(lambda leaf: torch.empty_like(leaf, dtype=torch.bfloat16, device="meta"), (params, x))
    loss = with_loss(alone(config, params, x))
    ours = ["wide_linear", "top_k", "assign_slots", "row_index", "ffn"]
    for fn, ops in (
        (loss, ours),
        (torch.func.grad(lambda p, x: loss(p, x)[0], (0, 1)), [*ours, "ffn_backward", "wide_linear", "wide_linear"]),
    ):
        graph = make_fx(fn)(p, x).graph
        values = [node.meta.get("val") for node in graph.nodes]
        devices = {leaf.device.type for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)}
        assert devices == {"meta"}
        names = [node.target.name() for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
        assert [name.split("::")[1] for name in names if name.startswith("fmoe")] == ops


def test_code_for_a_gpu():
    """Inductor lowers forward and backward to Triton, without a GPU; our operations stay as they are."""
    pytest.importorskip("triton")
    script = pathlib.Path(__file__).with_name("gpu_code.py")
    found = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-2000:]
    forward, backward = map(json.loads, found.stdout.splitlines())
    ours = ["wide_linear", "top_k", "assign_slots", "row_index", "ffn"]
    assert (forward["operations"], backward["operations"]) == (
        ours,
        [*ours, "ffn_backward", "wide_linear", "wide_linear"],
    )
    assert forward["devices"] == backward["devices"] == ["cuda:0"]
    assert backward["kernels"] > forward["kernels"] > 4

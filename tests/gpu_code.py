"""Inductor's code for a GPU on a machine without one: ``python tests/gpu_code.py``, a process of its own.

A layer, and its gradient, are traced on meta tensors, set down on "cuda", and lowered. What a driver would
be asked for (a device's properties, Triton's target) is answered for an sm_90 here; nothing is compiled or run.
It prints one line of JSON for each graph: the Triton kernels, the operations that are called between them,
and the devices of all values. Patches of the process stay in it.
"""

from __future__ import annotations

import contextlib
import json
import re
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import fmoe

CUDA = torch.device("cuda", 0)


def traced(fn: Any, leaves: list[torch.Tensor]) -> torch.fx.GraphModule:
    """The graph of `fn` on meta tensors, in Inductor's decompositions, with CUDA for every device named in it."""
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import FakeTensorMode

    module = make_fx(fn, decomposition_table=select_decomp_table())(*leaves)
    mode = FakeTensorMode()

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, torch.device) and leaf.type == "meta":
            return CUDA
        if isinstance(leaf, torch.Tensor):
            with mode:
                return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=CUDA)
        return leaf

    for node in module.graph.nodes:
        node.args, node.kwargs = pytree.tree_map(moved, (node.args, node.kwargs))
        if "val" in node.meta:
            node.meta["val"] = pytree.tree_map(moved, node.meta["val"])
    module.recompile()
    return module


@contextlib.contextmanager
def pretended_gpu() -> Any:
    """Answers for an sm_90 what is asked while code is made."""
    from torch._inductor.runtime.hints import DeviceProperties
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    known = {
        "type": "cuda", "index": 0, "multi_processor_count": 132, "cc": 90, "major": 9, "minor": 0,
        "regs_per_multiprocessor": 65536, "max_threads_per_multi_processor": 2048, "max_threads_per_block": 1024,
        "warp_size": 32,
    }  # fmt: skip
    properties = DeviceProperties(**{name: known.get(name) for name in DeviceProperties._fields})
    target = mock.Mock()
    target.get_current_target.return_value = GPUTarget("cuda", 90, 32)
    driver.set_active(target)
    answers = {
        "torch.cuda.get_device_properties": lambda *_: SimpleNamespace(name="sm_90", gcnArchName="sm_90", **known),
        "torch.cuda.get_device_capability": lambda *_: (9, 0),
        "torch.cuda.current_device": lambda: 0,
        "torch.cuda.device_count": lambda: 1,
        "torch.cuda.is_available": lambda: True,
        "torch.utils._triton.has_triton": lambda: True,
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(DeviceProperties, "create", staticmethod(lambda _: properties)))
        for name, answer in answers.items():
            stack.enter_context(mock.patch(name, answer))
        yield


def code_of(module: torch.fx.GraphModule) -> str:
    """The Python file that Inductor writes for a graph."""
    from torch._inductor.codegen.common import init_backend_registration
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    inputs = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    init_backend_registration()
    graph = GraphLowering(module, example_inputs=inputs)
    mode = inputs[0].fake_mode
    with V.set_graph_handler(graph), V.set_fake_mode(mode), V.set_debug_handler(DebugContext()), torch.no_grad():
        graph.run(*inputs)
        made = graph.codegen()[0]
    return made if isinstance(made, str) else made.value


def main() -> None:
    config = fmoe.MoEConfig(4, 16, 32, router=fmoe.TopK(2), capacity=1.25, layout="padded")
    given = (fmoe.init(config, seed=0), torch.ones(64, 16))
    leaves, tree = pytree.tree_flatten(given)
    leaves = [torch.empty_like(leaf, dtype=torch.bfloat16, device="meta") for leaf in leaves]

    def loss(*leaves: torch.Tensor) -> Any:
        params, x = pytree.tree_unflatten(list(leaves), tree)
        y, aux = fmoe.moe(params, x, config)
        return y.square().sum() + aux.balance + aux.z, y

    def gradients(*leaves: torch.Tensor) -> Any:
        return torch.func.grad(lambda *each: loss(*each)[0], tuple(range(len(leaves))))(*leaves)

    for fn in (loss, gradients):
        module = traced(fn, leaves)
        values = pytree.tree_leaves([node.meta.get("val") for node in module.graph.nodes])
        with pretended_gpu():
            text = code_of(module)
        found = {
            "kernels": len(re.findall(r"^@triton\.jit", text, re.M)),
            "operations": re.findall(r"= torch\.ops\.fmoe_\w+?\.(\w+)\.default\(", re.sub(r"(?m)^\s*#.*$", "", text)),
            "devices": sorted({str(value.device) for value in values if isinstance(value, torch.Tensor)}),
        }
        print(json.dumps(found))


if __name__ == "__main__":
    main()

"""Other code with copied weights: routers and whole blocks of transformers. Skipped where it is not installed."""

from __future__ import annotations

import warnings

import pytest
import torch

import fmoe
from fmoe import functional as F

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")
M, H, E, K, T = 16, 24, 8, 2, 40


def weights_of(module):
    """Random numbers in every parameter, so that nothing is 0 or 1 by chance."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return module


def block_of(model):
    from importlib import import_module

    module = import_module(f"transformers.models.{model}.modeling_{model}")
    settings = {
        "mixtral": ("MixtralConfig", "MixtralSparseMoeBlock", {"intermediate_size": H, "num_local_experts": E}),
        "qwen3_moe": (
            "Qwen3MoeConfig", "Qwen3MoeSparseMoeBlock",
            {"moe_intermediate_size": H, "num_experts": E, "norm_topk_prob": True},
        ),
        "olmoe": ("OlmoeConfig", "OlmoeSparseMoeBlock", {"intermediate_size": H, "num_experts": E}),
        "deepseek_v3": (
            "DeepseekV3Config", "DeepseekV3MoE",
            {"moe_intermediate_size": H, "n_routed_experts": E, "n_shared_experts": 1, "n_group": 4, "topk_group": 2,
             "routed_scaling_factor": 2.5, "norm_topk_prob": True},
        ),
        "gpt_oss": ("GptOssConfig", "GptOssMLP", {"intermediate_size": H, "num_local_experts": E}),
    }  # fmt: skip
    config, block, more = settings[model]
    made = getattr(transformers, config)(hidden_size=M, num_experts_per_tok=ROUTERS[model].k, **more)
    made._experts_implementation = "eager"
    return weights_of(getattr(module, block)(made))


ROUTERS = {
    "mixtral": fmoe.TopK(K),
    "qwen3_moe": fmoe.TopK(K),
    "olmoe": fmoe.TopK(K, normalize=False),
    "deepseek_v3": fmoe.Sigmoid(2 * K, expert_groups=4, top_groups=2, route_scale=2.5),
    "gpt_oss": fmoe.TopK(K, order="topk_softmax", logit_bias=True),
}


def params_of(model, block):
    """The block's weights in the layouts of fmoe, the experts' activation, and its router."""
    router = block.router if model == "gpt_oss" else block.gate
    weight, experts = router.weight.t().contiguous(), block.experts
    if model != "gpt_oss":
        w_in = experts.gate_up_proj.unflatten(1, (2, H)).permute(0, 3, 1, 2).contiguous()  # [E,2H,M]
        held = fmoe.ExpertParams(w_in, experts.down_proj.mT.contiguous())
        return fmoe.MoEParams(fmoe.RouterParams(weight), held), "swiglu", router
    w_in = experts.gate_up_proj.unflatten(2, (H, 2)).transpose(2, 3).contiguous()  # [E,M,2H], interleaved
    b_in = experts.gate_up_proj_bias.unflatten(1, (H, 2)).transpose(1, 2).contiguous()
    held = fmoe.ExpertParams(w_in, experts.down_proj, b_in, experts.down_proj_bias)
    return fmoe.MoEParams(fmoe.RouterParams(weight, logit_bias=router.bias), held), "swiglu_oss", router


@pytest.mark.parametrize("model", ROUTERS)
def test_block(model):
    """Outputs to 1e-5 in fp32, and the same experts."""
    block, router, given, beside = block_of(model), ROUTERS[model], {}, 0.0
    x = torch.randn(1, T, M, generator=torch.Generator().manual_seed(1)) * (8 if model == "gpt_oss" else 1)
    with torch.no_grad():
        if model == "deepseek_v3":  # a bias that changes choices, and a shared expert
            given = {"bias": torch.randn(E, generator=torch.Generator().manual_seed(2)) / 5}
            block.gate.e_score_correction_bias.copy_(given["bias"])
            beside = block.shared_experts(x)
        made = block(x)
        wanted = made[0] if isinstance(made, tuple) else made
        params, activation, gate = params_of(model, block)
        config = fmoe.MoEConfig(E, M, H, router=router, activation=activation, bias=model == "gpt_oss")
        y, _ = fmoe.moe(params, x, config, **given)
        found = F.gate(params.router, x, router, **given).experts.sort(1).values
        ids = gate(x.view(-1, M))[2].sort(1).values
    error = float((y + beside - wanted).abs().max() / wanted.abs().max())
    print(f"{model}: largest difference {error:.1e} of the largest output")
    assert torch.equal(found, ids)
    assert float(wanted.abs().max()) > 0.1
    assert error < 1e-5

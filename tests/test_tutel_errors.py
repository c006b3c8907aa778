"""What Tutel's layer refuses, word for word."""

from __future__ import annotations

import pytest
import torch
from test_tutel import E, H, M, OwnExperts, OwnGate, make

from fmoe.integrations.tutel import moe as tutel_moe

TOP, FFN = {"type": "top"}, {"type": "ffn", "hidden_size_per_expert": H}


class NoGate(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()

    def forward(self, x):
        return x[:, :3]


REFUSED = {
    "moe_layer: the argument capacity= is not known: leave it out.": ({}, {"capacity": 1}),
    "moe_layer: 3 arguments do not fit.\n"
    "  model_dim=0, but it must be a whole number of at least 1.\n"
    "  seeds=(1,), but it must be (of the gates, of the experts, of what comes after).\n"
    "  a2a_ffn_overlap_degree=0, but it must be a whole number of at least 1.":
        ({}, {"model_dim": 0, "seeds": (1,), "a2a_ffn_overlap_degree": 0}),
    "moe_layer: gate_type is a int, but it must be a dict with a 'type'.": ({}, {"gate_type": 3}),
    "moe_layer: gate_type has type='tops': choose one of 'top', 'cosine_top', 'custom'.":
        ({}, {"gate_type": {"type": "tops"}}),
    "moe_layer: gate_type='Top2': give a dict, such as {'type': 'top', 'k': 2}.": ({}, {"gate_type": "Top2"}),
    "moe_layer: gate_type is an empty list: give one dict for each gate.": ({}, {"gate_type": []}),
    "moe_layer: gate_type[1] has the unknown entry 'noise': type 'top' takes k, fp32_gate, capacity_factor, "
    "gate_noise.":
        ({}, {"gate_type": [TOP, {**TOP, "noise": 1}]}),
    "moe_layer: 3 arguments do not fit.\n"
    "  gate_type has k=0, but it must be a whole number of at least 1.\n"
    "  gate_type has gate_noise=-1, but it must be a number of at least 0.\n"
    "  gate_type has capacity_factor='all', but it must be a number.":
        ({}, {"gate_type": {**TOP, "k": 0, "gate_noise": -1, "capacity_factor": "all"}}),
    "moe_layer: gate_type has init_t=0, but a temperature is above 0.":
        ({}, {"gate_type": {"type": "cosine_top", "init_t": 0}}),
    "moe_layer: gate_type has module=None, but a custom one needs module=, a class of its own.":
        ({}, {"gate_type": {"type": "custom"}}),
    "moe_layer: the module of gate_type does not take its options: "
    "OwnGate.__init__() missing 1 required positional argument: 'top_k'":
        ({}, {"gate_type": {"type": "custom", "module": OwnGate}}),
    "moe_layer: experts is a NoneType, but it must be a dict with a 'type'.": ({}, {"experts": None}),
    "moe_layer: experts has type='attention': choose one of 'ffn', 'llama_ffn', 'custom'.":
        ({}, {"experts": {"type": "attention"}}),
    "moe_layer: experts has the unknown entry 'implicit_dropout_p': type 'ffn' takes hidden_size_per_expert, "
    "output_dim, activation_fn, activation_fn_with_self, has_fc1_bias, has_fc2_bias, num_experts_per_device, "
    "count_per_node.":
        ({}, {"experts": {**FFN, "implicit_dropout_p": 0.1}}),
    "moe_layer: experts has hidden_size_per_expert=None, but it must be a whole number of at least 1.":
        ({}, {"experts": {"type": "llama_ffn"}}),
    "moe_layer: experts has activation_fn='relu', but it must be a function of a tensor.":
        ({}, {"experts": {**FFN, "activation_fn": "relu"}}),
    "moe_layer: experts has both 'num_experts_per_device' and 'count_per_node', two names of one number: "
    "leave one out.":
        ({}, {"experts": {**FFN, "count_per_node": 1, "num_experts_per_device": 1}}),
    "moe_layer: num_experts_per_device=0.3, but it must be n for n experts on each rank, or -n for one expert on n "
    "ranks.":
        ({}, {"experts": {**FFN, "num_experts_per_device": 0.3}}),
    "moe_layer: num_experts_per_device=-2 puts one expert on 2 ranks, but the group has 1: choose one of -1, or a "
    "number above 0.": ({}, {"experts": {**FFN, "num_experts_per_device": -2}}),
    "moe_layer: parallel_type='model:1': choose 'adaptive:r' with a degree r, 'data', 'model' or 'auto'.":
        ({}, {"parallel_type": "model:1"}),
    "moe_layer: input is f32[2,5], but a token, its last 1 dims, has model_dim=6 features.": ({"input": (2, 5)}, {}),
    "moe_layer: input is f32[6], but it must be floating [..., M] of more than 1 dims.": ({"input": (6,)}, {}),
    "moe_layer: 4 arguments do not fit.\n"
    "  reserve_dims=0, but it must be a whole number of at least 1.\n"
    "  gate_index=1, but there are 1 gates.\n"
    "  capacity_factor='1', but it must be a number, or None for the gate's.\n"
    "  megablocks_size=-1, but it must be a whole number of at least 0.":
        ({"reserve_dims": 0, "gate_index": 1, "capacity_factor": "1", "megablocks_size": -1}, {}),
    "moe_layer: adaptive_r=2, but 1 ranks share an expert: choose a degree of 0, 1.": ({"adaptive_r": 2}, {}),
    "moe_layer: top_k=0, but it must be a whole number of at least 1: set top_k, or give it per call.":
        ({"top_k": 0}, {}),
    "moe_layer: is_gshard_loss=False needs gate_noise above 0, which its load is measured by, but the gate has "
    "gate_noise=0.0: set it in gate_type.": ({}, {"is_gshard_loss": False}),
    "moe_layer: the gate has no top_k, but it must be a whole number of at least 1: set top_k, or give it per call.":
        ({}, {"gate_type": {"type": "custom", "module": NoGate}}),
    "moe_layer: the gate made f32[2,3] of f32[2,6], but logits are [T,E]: [2, 4].":
        ({"top_k": 1}, {"gate_type": {"type": "custom", "module": NoGate}}),
    "moe_layer: reserve_dims=2 needs output_dim=model_dim for these experts.":
        ({"reserve_dims": 2, "input": (1, 2, 3)}, {"experts": {**FFN, "num_experts_per_device": E, "output_dim": 2}}),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_errors(message):
    call, arguments = REFUSED[message]
    given = {"gate_type": TOP, "model_dim": M, "experts": {**FFN, "num_experts_per_device": E}, **arguments}
    with pytest.raises(ValueError) as info:
        tutel_moe.moe_layer(**given)(
            torch.zeros(call.get("input", (2, M))), **{k: v for k, v in call.items() if k != "input"}
        )
    assert str(info.value) == message


def test_errors_of_the_iterator_and_of_custom_experts():
    with pytest.raises(ValueError) as info:
        make().get_parameter_iterator("expert")
    assert str(info.value) == "get_parameter_iterator: param_type='expert': choose one of 'gate', 'local_experts'."

    class Flat(OwnExperts):
        def forward(self, x, ctx):
            return x.flatten(0, 1)

    experts = {"type": "custom", "module": Flat, "num_experts_per_device": E, "power": 1}
    with pytest.raises(ValueError) as info:
        tutel_moe.moe_layer(TOP, M, experts)(torch.zeros(4, M))
    assert (
        str(info.value)
        == "moe_layer: the custom experts made f32[4,6] of f32[4,1,6]: keep the first two dims of three."
    )

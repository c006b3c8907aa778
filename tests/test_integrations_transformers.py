"""Models of transformers on fmoe's experts beside its own: logits, gradients, generation, memory. Skipped without."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from importlib import import_module
from pathlib import Path

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")
    hf = pytest.importorskip("fmoe.integrations.transformers")

pytestmark = pytest.mark.filterwarnings("ignore")
V, M, H, E, K, LAYERS = 67, 32, 24, 8, 2, 3
COMMON = {
    "vocab_size": V, "hidden_size": M, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_experts_per_tok": K, "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": 0,
}  # fmt: skip
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
#: Class of the model, and what its config is given besides the common sizes.
MODELS = {
    "Mixtral": {"intermediate_size": H, "num_local_experts": E, "sliding_window": None},
    "Qwen2Moe": {"moe_intermediate_size": H, "num_experts": E, "shared_expert_intermediate_size": H},
    "Qwen3Moe": {"moe_intermediate_size": H, "num_experts": E, "norm_topk_prob": True, "head_dim": 8},
    "Olmoe": {"intermediate_size": H, "num_experts": E},
    "DeepseekV2": {
        **LATENT, "moe_intermediate_size": H, "n_routed_experts": E, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
    },
    "DeepseekV3": {
        **LATENT, "moe_intermediate_size": H, "n_routed_experts": E, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "n_group": 4, "topk_group": 2, "num_key_value_heads": 4,
    },
    "GptOss": {"intermediate_size": H, "num_local_experts": E, "head_dim": 8, "sliding_window": 16},
}  # fmt: skip
FIVE = ["Mixtral", "Qwen3Moe", "Olmoe", "DeepseekV3", "GptOss"]


def model_of(name, dtype=torch.float32, **changes):
    """Random weights large enough that every expert matters, and that gpt-oss's activation clamps."""
    config = getattr(transformers, f"{name}Config")(**{**COMMON, **MODELS[name], **changes})
    made = getattr(transformers, f"{name}ForCausalLM")._from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, leaf in made.named_parameters():
            scale = 1.5 if "experts" in key and name == "GptOss" else 0.2
            if leaf.dim() > 1 or "bias" in key:
                leaf.copy_(torch.randn(leaf.shape, generator=generator) * scale)
    return made.to(dtype).eval()


def ids_of(batch=2, length=13):
    return torch.randint(1, V, (batch, length), generator=torch.Generator().manual_seed(1))


def set_to(model, how):
    model.set_experts_implementation(how)
    return model


def counted(monkeypatch):
    """How often fmoe's experts run."""
    calls = []
    for name in ("combine", "decode_cpu"):
        run = getattr(hf, name)
        monkeypatch.setattr(
            hf, name, lambda *args, run=run, name=name, **kwargs: calls.append(name) or run(*args, **kwargs)
        )
    return calls


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients(name, monkeypatch):
    """Logits to 1e-5 and every parameter's gradient to 1e-4 of eager's, in fp32; every MoE layer runs on fmoe."""
    calls, model, ids = counted(monkeypatch), model_of(name), ids_of()
    moe_layers = sum(map(hf._goes_through, model.modules()))
    assert moe_layers >= LAYERS - 1
    found = {}
    for how in ("eager", "fmoe"):
        set_to(model, how).zero_grad()
        calls.clear()
        out = model(ids, labels=ids)
        assert len(calls) == (moe_layers if how == "fmoe" else 0)
        out.loss.backward()
        found[how] = out.logits.detach(), {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    (logits, grads), (wanted, wanted_grads) = found["fmoe"], found["eager"]
    error = float((logits - wanted).abs().max() / wanted.abs().max())
    assert error < 1e-5
    assert list(grads) == list(wanted_grads)
    assert any("experts" in key for key in grads)
    worst = max(float((grads[key] - g).norm() / g.norm().clamp(min=1e-12)) for key, g in wanted_grads.items())
    print(f"{name}: logits {error:.1e}, gradients {worst:.1e}")
    assert worst < 1e-4


@pytest.mark.parametrize("name", FIVE)
def test_greedy_generation(name, monkeypatch):
    """32 tokens, one by one from a cache, are eager's."""
    calls, model, ids = counted(monkeypatch), model_of(name), ids_of(length=5)
    wanted = set_to(model, "eager").generate(ids, max_new_tokens=32, do_sample=False)
    assert not calls
    found = set_to(model, "fmoe").generate(ids, max_new_tokens=32, do_sample=False)
    assert calls.count("combine") < 5 < 31 * 2 <= calls.count("decode_cpu")  # the prompt, then token by token
    assert wanted.shape[1] == 5 + 32
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", FIVE)
def test_bf16(name):
    """Within bf16's rounding: as near to fp32 as eager is, and generation follows the same logits."""
    exact, model, ids = model_of(name), model_of(name, torch.bfloat16), ids_of()
    with torch.no_grad():
        wanted = set_to(exact, "eager")(ids).logits
        eager = set_to(model, "eager")(ids).logits.float()
        found = set_to(model, "fmoe")(ids).logits.float()

    def error(logits):  # of a middling token: a few are routed elsewhere, as a rounded logit may decide
        return float(((logits - wanted).norm(dim=-1) / wanted.norm(dim=-1)).median())

    print(f"{name}: eager {error(eager):.1e}, fmoe {error(found):.1e}")
    assert error(found) < 1.1 * error(eager) + 1e-4
    out = model.generate(
        ids[:, :5], max_new_tokens=16, do_sample=False, return_dict_in_generate=True, output_logits=True
    )
    again = model(out.sequences).logits[:, 4:-1].float()
    steps = torch.stack(out.logits, 1).float()
    apart = ((steps - again).norm(dim=-1) / again.norm(dim=-1)).median()
    assert float(apart) < 2 * error(eager) + 1e-4


def test_frozen_experts_and_training():
    """A few steps of AdamW from the same weights give eager's losses; frozen experts get no gradient."""
    losses = {}
    for how in ("eager", "fmoe"):
        model, ids = set_to(model_of("Mixtral"), how).train(), ids_of(4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses[how] = []
        for _ in range(4):
            loss = model(ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[how].append(float(loss.detach()))
    assert losses["fmoe"] == pytest.approx(losses["eager"], rel=1e-4)
    assert losses["fmoe"][-1] < losses["fmoe"][0]
    for key, leaf in model.named_parameters():
        leaf.requires_grad_("experts" not in key)
        leaf.grad = None
    model(ids, labels=ids).loss.backward()
    assert all((leaf.grad is None) == ("experts" in key) for key, leaf in model.named_parameters())


def test_checkpointing_and_autocast():
    """Gradient checkpointing changes no gradient; autocast computes in bf16."""
    model, ids = set_to(model_of("Qwen3Moe"), "fmoe").train(), ids_of()
    model(ids, labels=ids).loss.backward()
    wanted = {key: p.grad.clone() for key, p in model.named_parameters()}
    model.zero_grad()
    model.gradient_checkpointing_enable()
    model(ids, labels=ids).loss.backward()
    for key, p in model.named_parameters():
        torch.testing.assert_close(p.grad, wanted[key])
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        low = model(ids).logits.float()
    with torch.no_grad():
        high = model(ids).logits
    assert not torch.equal(low, high)
    assert float((low - high).norm() / high.norm()) < 0.05


# --- the experts by themselves ---------------------------------------------------------------------------------------


def experts_of(family, class_name, config_name, dtype=torch.float32, scale=0.3, **sizes):
    module = import_module(f"transformers.models.{family}.modeling_{family}")
    config = getattr(module, config_name)(**sizes)
    config._experts_implementation = "eager"
    made = getattr(module, class_name)(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for leaf in made.parameters():
            leaf.copy_(torch.randn(leaf.shape, generator=generator) * scale)
    return made.to(dtype)


def given(tokens=21, dtype=torch.float32, k=3):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, M, generator=generator).to(dtype)
    weights, ids = torch.rand(tokens, E, generator=generator).topk(k)
    return x, ids, weights.to(dtype)


def run(module, how, x, ids, weights):
    module.config._experts_implementation = how
    return module(x, ids, weights)


SIZES = {"hidden_size": M, "num_experts": E, "moe_intermediate_size": H}
#: Family, class, config, its sizes, and the activation that it is found to have: every layout, gate and norm there is.
KINDS = {
    "rows first": ("qwen3_moe", "Qwen3MoeExperts", "Qwen3MoeConfig", SIZES, "swiglu"),
    "interleaved, with biases": (
        "gpt_oss", "GptOssExperts", "GptOssConfig",
        {"hidden_size": M, "num_local_experts": E, "intermediate_size": H}, "swiglu_oss.interleaved",
    ),
    "exact gelu": ("qwen3_moe", "Qwen3MoeExperts", "Qwen3MoeConfig", {**SIZES, "hidden_act": "gelu"}, "geglu"),
    "another gelu": (
        "qwen3_moe", "Qwen3MoeExperts", "Qwen3MoeConfig", {**SIZES, "hidden_act": "gelu_pytorch_tanh"}, None,
    ),
    "clamped elsewhere": (
        "gpt_oss", "GptOssExperts", "GptOssConfig",
        {"hidden_size": M, "num_local_experts": E, "intermediate_size": H, "swiglu_limit": 3.0}, None,
    ),
    "columns first": (
        "aria", "AriaExperts", "AriaTextConfig", {"hidden_size": M, "moe_num_experts": E, "intermediate_size": H},
        "swiglu",
    ),
    "without a gate": (
        "nemotron_h", "NemotronHExperts", "NemotronHConfig",
        {"hidden_size": M, "n_routed_experts": E, "moe_intermediate_size": H}, None,
    ),
    "relu without a gate": (
        "nemotron_h", "NemotronHExperts", "NemotronHConfig",
        {"hidden_size": M, "n_routed_experts": E, "moe_intermediate_size": H, "mlp_hidden_act": "relu"}, "relu",
    ),
    "a norm behind": (
        "muse_spark", "MuseSparkExperts", "MuseSparkTextConfig",
        {"num_local_experts": E, "moe_hidden_size": M, "moe_intermediate_size": H}, None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_experts(kind):
    """Outputs, and gradients of tokens, weights and parameters: eager's, token counts 1 and 0 too."""
    family, cls, config, sizes, activation = KINDS[kind]
    module = experts_of(family, cls, config, torch.float64, scale=1.0 if "oss" in family else 0.3, **sizes)
    assert hf.activation_of(module) == activation
    for tokens in (21, 1, 0, 5):
        with torch.no_grad():  # few rows without gradient go another way
            few = given(tokens, torch.float64)
            torch.testing.assert_close(run(module, "fmoe", *few), run(module, "eager", *few), rtol=1e-5, atol=1e-5)
        found = {}
        for how in ("eager", "fmoe"):
            x, ids, weights = given(tokens, torch.float64)
            leaves = [x.requires_grad_(), weights.requires_grad_(), *module.parameters()]
            y = run(module, how, x, ids, weights)
            grads = torch.autograd.grad(y.sin().sum(), leaves, allow_unused=True) if tokens else ()
            found[how] = [y, *(torch.zeros_like(p) if g is None else g for p, g in zip(leaves, grads, strict=False))]
        assert found["fmoe"][0].shape == (tokens, M)
        exact = 1e-4 if module.has_post_expert_norm else 1e-9  # that norm computes in fp32
        for a, b in zip(found["fmoe"], found["eager"], strict=True):
            torch.testing.assert_close(a, b, rtol=exact, atol=exact)


def test_experts_of_other_ranks_add_nothing():
    """transformers' expert parallelism numbers them from num_experts on."""
    module = experts_of("qwen3_moe", "Qwen3MoeExperts", "Qwen3MoeConfig", **SIZES)
    x, ids, weights = given()
    wanted = run(module, "fmoe", x, ids, torch.where(ids < 5, weights, 0))
    half = experts_of("qwen3_moe", "Qwen3MoeExperts", "Qwen3MoeConfig", **{**SIZES, "num_experts": 5})
    for leaf, whole in zip(half.parameters(), module.parameters(), strict=True):
        leaf.data = whole.data[:5].clone()
    half._is_expert_parallel = True
    torch.testing.assert_close(run(half, "fmoe", x, ids, weights), wanted)
    half._is_expert_parallel = False
    with pytest.raises(ValueError, match=r"ids from 0 to 7 .* below num_experts=5"):
        run(half, "fmoe", x, ids, weights)
    with torch.no_grad(), pytest.raises(ValueError, match=r"experts has ids from 0 to 7, but there are E=5."):
        run(half, "fmoe", x[:9], ids[:9], weights[:9])


@pytest.mark.parametrize("kind", ["rows first", "interleaved, with biases", "columns first", "another gelu"])
def test_no_copy_of_the_weights(kind):
    """Forward allocates less than one weight; training allocates their gradients, and those once."""
    family, cls, config, sizes, _ = KINDS[kind]
    module = experts_of(family, cls, config, **sizes)
    x, ids, weights = given(2, k=2)
    sizes = sorted(p.nbytes for p in module.parameters() if p.dim() == 3)

    def allocations(fn):
        with torch.profiler.profile(profile_memory=True, acc_events=True) as recorded:
            fn()
        events = recorded.profiler.kineto_results.events()
        return sorted(e.nbytes() for e in events if e.name() == "[memory]" and e.nbytes() >= sizes[0])

    run(module, "fmoe", x, ids, weights)
    with torch.no_grad():
        assert allocations(lambda: run(module, "fmoe", x, ids, weights)) == []
    y = run(module, "fmoe", x, ids, weights)
    assert allocations(lambda: y.sum().backward()) == sizes
    assert [p.grad.stride() for p in module.parameters()] == [p.stride() for p in module.parameters()]


def test_compiled_experts():
    """In one graph with everything around them, by fake tensors; the compiled model gives the same."""
    torch._dynamo.reset()
    model, ids = set_to(model_of("Mixtral"), "fmoe"), ids_of()
    wanted = model(ids).logits
    found = torch.compile(model, backend="aot_eager", fullgraph=True)(ids).logits
    torch.testing.assert_close(found, wanted)


# --- what it refuses -------------------------------------------------------------------------------------------------


def test_a_model_without_the_interface():
    config = transformers.LlamaConfig(vocab_size=V, hidden_size=M, num_hidden_layers=1, num_attention_heads=2)
    with pytest.raises(ValueError) as caught:
        hf.use(transformers.LlamaForCausalLM(config))
    assert str(caught.value) == (
        "use: LlamaForCausalLM has no experts that go through transformers' ExpertsInterface: its MoE, if it has one, "
        "is code of its own. Build the layer with fmoe.MoE instead."
    )
    with pytest.raises(ValueError) as caught:
        hf.use(torch.nn.Sequential(model_of("Mixtral")))
    assert str(caught.value) == (
        "use: model is a Sequential, but it must be a transformers.PreTrainedModel, before it is wrapped."
    )


def test_weights_that_cannot_be_served():
    model = model_of("Mixtral")
    assert hf.use(model) is model
    assert model.get_experts_implementation() == {"": "fmoe"}
    for layer in model.model.layers:
        experts = layer.mlp.experts
        experts.down_proj = torch.nn.Parameter(experts.down_proj.data.to(torch.int8), requires_grad=False)
    message = (
        "down_proj is torch.int8[8,32,24]: quantized experts are not served; load the model without quantization, or "
        "choose experts_implementation='grouped_mm'."
    ).replace("torch.int8", "int8")
    for call, where in ((lambda: hf.use(model), "use"), (lambda: model(ids_of()), "MixtralExperts on fmoe")):
        with pytest.raises(ValueError) as caught:
            call()
        assert str(caught.value) == f"{where}: {message}"
    del experts.down_proj
    with pytest.raises(ValueError, match="down_proj is missing, but it must be one stacked tensor"):
        hf.experts_forward(experts, *given())


@pytest.mark.parametrize(
    ("setup", "found"),
    [
        ("sys.modules['transformers.integrations.moe'] = None", "transformers 4.57.0 has none"),
        ("sys.modules['transformers'] = None", "transformers is not installed"),
    ],
)
def test_another_transformers(setup, found):
    """An old one, or none: the error says which, and what to do; `import fmoe` needs neither."""
    code = (
        "import sys, types; made = types.ModuleType('transformers'); made.__version__ = '4.57.0'; made.__path__ = []; "
        f"sys.modules['transformers'] = made; {setup}; import fmoe\n"
        "try:\n    import fmoe.integrations.transformers\nexcept ImportError as error:\n    print(error)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == (
        f"fmoe.integrations.transformers needs the ExpertsInterface of transformers 5, but {found}: "
        "pip install -U 'transformers>=5'."
    )


def test_import_fmoe_leaves_transformers_alone():
    code = "import sys, fmoe; print([n for n in sys.modules if n.split('.')[0] == 'transformers'])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_benchmark(monkeypatch, tmp_path, capsys):
    """Every cell has a time for each backend and their quotient."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    benchmark = import_module("transformers_experts")
    monkeypatch.setattr(benchmark, "TRAIN", {"M": (32, 16, 24, 8, 2)})
    out = tmp_path / "times.json"
    assert benchmark.main(["--configs", "M", "small", "--rounds", "1", "--clock", "cpu", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(r["mode"], r["config"], r["dtype"]) for r in rows[:4]] == [
        ("train", "M", "fp32"), ("train", "M", "bf16"), ("decode", "small", "fp32"), ("decode", "small", "bf16"),
    ]  # fmt: skip
    assert len(rows) == 8
    assert all(r[name] > 0 for r in rows for name in ("eager", "grouped_mm", "fmoe", "ratio"))
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(rows)

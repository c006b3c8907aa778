"""Tutel's layer in one process: its numbers for its seeds, every argument against a loop over tokens."""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
import torch
import torch.nn.functional as nnf
import tutel_loop
from oracle import assert_close

from fmoe.integrations import tutel
from fmoe.integrations.tutel import moe as tutel_moe

M, E, H, T = 6, 4, 8, 21


@pytest.fixture
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def make(gate=None, experts=None, **arguments):
    gate = {"type": "top", "k": 2, **(gate or {})} if not isinstance(gate, list) else gate
    ffn = {"type": "ffn", "num_experts_per_device": E, "hidden_size_per_expert": H}
    return tutel_moe.moe_layer(gate_type=gate, model_dim=M, experts={**ffn, **(experts or {})}, **arguments)


# --- the numbers of Tutel -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", [None, lambda x: nnf.relu(x)])
def test_the_loss_curve_of_tutel(activation):
    """Measured on Tutel 0.3 with the same seeds."""
    layer = tutel_moe.moe_layer(
        gate_type={"type": "top", "k": 2, "capacity_factor": 1.0},
        model_dim=512,
        experts={
            "type": "ffn",
            "num_experts_per_device": 4,
            "hidden_size_per_expert": 512,
            "activation_fn": activation,
        },
        scan_expert_func=lambda name, param: setattr(param, "skip_allreduce", True),
        seeds=(1, 1, 1),
    )
    torch.manual_seed(0)
    x = torch.randn(1, 512, 512)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-5)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = nnf.nll_loss(nnf.log_softmax(layer(x).sum(2), 1), torch.zeros(1, dtype=torch.long))
        loss.backward()
        optimizer.step()
        losses.append(round(loss.item(), 5))
    assert losses == pytest.approx([4.73300, 4.18432, 3.64468, 3.11823, 2.61261], abs=1.1e-5)


def test_parameters_start_as_tutels_do():
    """Experts first, each as two linear layers, then the gates with a seed each, then the seed of what follows."""
    layer = make(
        [{"type": "top", "k": 1}, {"type": "cosine_top", "k": 1, "proj_dim": 5, "init_t": 0.25}],
        {"output_dim": 3},
        seeds=(10, 20, 30),
    )
    after = torch.randn(2)
    torch.manual_seed(20)
    for i in range(E):
        fc1, fc2 = torch.nn.Linear(M, H), torch.nn.Linear(H, 3)
        assert torch.equal(layer.experts.batched_fc1_w[i], fc1.weight)
        assert torch.equal(layer.experts.batched_fc1_bias[i], fc1.bias)
        assert torch.equal(layer.experts.batched_fc2_w[i], fc2.weight.t())
        assert torch.equal(layer.experts.batched_fc2_bias[i], fc2.bias)
    torch.manual_seed(10)
    assert torch.equal(layer.gates[0].wg.weight, torch.nn.Linear(M, E, bias=False).weight)
    torch.manual_seed(11)
    projector = torch.nn.Linear(M, 5)
    torch.randn(5, E)
    assert torch.equal(layer.gates[1].cosine_projector.bias, projector.bias)
    assert torch.equal(layer.gates[1].sim_matrix, torch.nn.init.normal_(torch.empty(5, E), 0, 0.01))
    assert layer.gates[1].temperature.item() == pytest.approx(math.log(4))
    torch.manual_seed(30)
    assert torch.equal(after, torch.randn(2))


def test_seeds_may_be_left_out():
    torch.manual_seed(3)
    layer = make(seeds=(None, None))
    torch.manual_seed(3)
    experts = [torch.nn.Linear(M, H) if i % 2 == 0 else torch.nn.Linear(H, M) for i in range(2 * E)]
    assert torch.equal(layer.experts.batched_fc1_w[3], experts[6].weight)
    assert torch.equal(layer.gates[0].wg.weight, torch.nn.Linear(M, E, bias=False).weight)
    flat = make(experts={"type": "llama_ffn"}, seeds=(1, 2, 3)).experts
    torch.manual_seed(2)
    for name in ("W_fc1", "W_fc2", "W_fc3"):
        assert torch.equal(getattr(flat, name), torch.empty(E * M * H).normal_(0, 0.01)), name


# --- every argument ---------------------------------------------------------------------------------------------------

CASES = {
    "plain": {},
    "k=1": {"gate": {"k": 1}},
    "k above E": {"gate": {"k": 9}},
    "factor": {"gate": {"capacity_factor": 0.7}},
    "factor cut to whole numbers before k": {"gate": {"capacity_factor": 0.55, "k": 3}},
    "dropless": {"gate": {"capacity_factor": 0}},
    "as needed, capped": {"gate": {"capacity_factor": -0.4}},
    "priority": {"gate": {"capacity_factor": 0.5}, "batch_prioritized_routing": True},
    "priority, dropless": {"gate": {"capacity_factor": 0.0}, "batch_prioritized_routing": True},
    "not normalized": {"normalize_gate": False},
    "prescore": {"is_postscore": False, "gate": {"capacity_factor": 0.7}},
    "importance and load": {"is_gshard_loss": False, "gate": {"gate_noise": 1.5}},
    "noise": {"gate": {"gate_noise": 2.0, "capacity_factor": 0.7}},
    "cosine": {"gate": {"type": "cosine_top", "proj_dim": 7, "init_t": 0.2}},
    "cosine, Swin's": {
        "gate": {"type": "cosine_top", "k": 1, "gate_noise": 1.0, "capacity_factor": 1.25},
        "is_gshard_loss": False, "normalize_gate": False, "batch_prioritized_routing": True,
    },
    "fp32_gate": {"gate": {"fp32_gate": True}},
    "no biases": {"experts": {"has_fc1_bias": False, "has_fc2_bias": False}},
    "one bias": {"experts": {"has_fc1_bias": False, "activation_fn": torch.tanh}},
    "output_dim": {"experts": {"output_dim": 9, "activation_fn": torch.tanh}, "is_postscore": False},
    "narrow output_dim": {"experts": {"output_dim": 3}},
    "gelu": {"experts": {"activation_fn": nnf.gelu}},
    "llama": {"experts": {"type": "llama_ffn"}},
    "llama, tanh": {"experts": {"type": "llama_ffn", "activation_fn": torch.tanh}, "is_postscore": False},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_layer_equals_the_loop(name, double):
    """Outputs, l_aux and every gradient, while training."""
    case = copy.deepcopy(CASES[name])
    layer = make(case.pop("gate", None), experts := case.pop("experts", {}), **case)
    gate = layer.gates[0]
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn_like(p))
    x = torch.randn(3, T // 3, M, requires_grad=True)
    torch.manual_seed(1)
    y = layer(x)
    ((y * y).sum() + y.l_aux).backward()
    gradients = [x.grad, *(p.grad for p in layer.parameters())]
    x2 = x.detach().requires_grad_(True)
    whole = {k: v.detach().clone().requires_grad_(v.is_floating_point()) for k, v in layer.state_dict().items()}
    copied = copy.deepcopy(gate)
    act = experts.get("activation_fn")
    if experts.get("type") == "llama_ffn":
        functions = tutel_loop.llama(whole, E, M, act or nnf.silu)
    else:
        functions = tutel_loop.ffn(whole, act or torch.relu)
    torch.manual_seed(1)
    rows = x2.reshape(T, M)
    noise = torch.randn(T, E) if gate.gate_noise else None
    want, l_aux = tutel_loop.layer(
        rows, tutel_loop.logits_of(copied, rows), functions, k=gate.top_k, factor=gate.capacity_factor,
        noise=noise, gate_noise=gate.gate_noise, postscore=case.get("is_postscore", True),
        priority=case.get("batch_prioritized_routing", False), normalize=case.get("normalize_gate", True),
        gshard=case.get("is_gshard_loss", True),
    )  # fmt: skip
    ((want * want).sum() + l_aux).backward()
    assert_close(y, want.view(3, T // 3, -1))
    assert_close(y.l_aux, l_aux)
    assert y.l_aux is layer.l_aux
    expected = {f"gates.0.{k}": p.grad for k, p in copied.named_parameters()}
    expected |= {k: p.grad for k, p in whole.items() if k.startswith("experts.")}
    names = ["x", *(k for k, _ in layer.named_parameters())]
    for key, grad, other in zip(names, gradients, [x2.grad, *(expected[k] for k in names[1:])], strict=True):
        assert_close(grad, other, torch.float32 if name == "fp32_gate" and key != "x" else torch.float64, key)


def test_noise_is_for_training_alone():
    layer = make({"gate_noise": 5.0, "k": 1, "capacity_factor": 0.0})
    x = torch.randn(T, M)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_gates_take_turns():
    """gate_index picks one of a list; each has its own seed and its own k."""
    layer = make([{"type": "top", "k": 1, "capacity_factor": 0}, {"type": "top", "k": 3, "capacity_factor": 0}])
    x = torch.randn(T, M)
    state = layer.state_dict()
    for index in (0, 1, -1):
        gate = layer.gates[index]
        want, l_aux = tutel_loop.layer(x, x @ gate.wg.weight.t(), tutel_loop.ffn(state), k=gate.top_k, factor=0)
        y = layer(x, gate_index=index)
        assert_close(y, want, torch.float32)
        assert_close(y.l_aux, l_aux, torch.float32)


def test_arguments_of_a_call():
    layer = make({"k": 1, "capacity_factor": 0.3})
    x, state = torch.randn(T, M), layer.state_dict()
    for k, factor in ((None, None), (2, None), (3, 0.0), (None, 1.0), (9, -0.5)):
        want, _ = tutel_loop.layer(
            x,
            x @ layer.gates[0].wg.weight.t(),
            tutel_loop.ffn(state),
            k=k or 1,
            factor=0.3 if factor is None else factor,
        )
        again = layer(x, top_k=k, capacity_factor=factor, megablocks_size=2, inequivalent_tokens=True, adaptive_r=1)
        assert_close(again, want, torch.float32)
    assert layer.adaptive_degree == 1
    layer(x, adaptive_r=0, a2a_ffn_overlap_degree=3)  # they stay, as Tutel's do
    assert (layer.adaptive_degree, layer.a2a_ffn_overlap_degree) == (0, 3)
    layer.gates[0].capacity_factor = 0.0  # and so does what is set on a gate
    want, _ = tutel_loop.layer(x, x @ layer.gates[0].wg.weight.t(), tutel_loop.ffn(state), k=1, factor=0)
    assert_close(layer(x), want, torch.float32)


def test_tokens_of_several_dims():
    layer = make({"capacity_factor": 0})
    x = torch.randn(T, 2, M // 2)
    assert torch.equal(layer(x, reserve_dims=2), layer(x.reshape(T, M)).view(T, 2, M // 2))

    class Norm(torch.nn.Module):
        def __init__(self, model_dim, num_experts_per_device, sharded_count):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.arange(1.0, num_experts_per_device + 1))

        def forward(self, x, ctx):
            return x.norm(dim=-1, keepdim=True) * self.scale[:, None, None, None]

    layer = tutel_moe.moe_layer({"type": "top", "capacity_factor": 0}, M, {"type": "custom", "module": Norm,
                                                                            "num_experts_per_device": E})  # fmt: skip
    y = layer(x, reserve_dims=2)
    scores = (x.reshape(T, M) @ layer.gates[0].wg.weight.t()).softmax(1)
    best, chosen = scores.max(1)
    torch.testing.assert_close(y, best[:, None, None] * (chosen + 1)[:, None, None] * x.norm(dim=-1, keepdim=True))


class OwnGate(torch.nn.Module):
    def __init__(self, model_dim, num_global_experts, top_k, sign=1.0):
        super().__init__()
        self.top_k, self.sign = top_k, sign
        self.my_wg = torch.nn.Linear(model_dim, num_global_experts)

    def forward(self, x):
        logits = self.my_wg(x) * self.sign
        return logits.masked_fill(torch.arange(logits.shape[1]) == 0, -math.inf)  # nobody chooses expert 0


class OwnExperts(torch.nn.Module):
    """Of an older Tutel, which says local_experts."""

    def __init__(self, model_dim, local_experts, sharded_count, power):
        super().__init__()
        self.W, self.power = torch.nn.Parameter(torch.randn(local_experts, model_dim, model_dim)), power

    def forward(self, x, ctx):
        assert (ctx.sharded_count, ctx.num_global_experts, ctx.megablocks_size) == (1, E, 0)
        return torch.matmul(x, self.W) ** self.power


def test_custom_gates_and_experts(double):
    gate = {"type": "custom", "module": OwnGate, "top_k": 2, "sign": -1.0}
    experts = {"type": "custom", "module": OwnExperts, "count_per_node": E, "power": 2}
    layer = tutel_moe.moe_layer(gate_type=gate, model_dim=M, experts=experts)
    assert gate == {"type": "custom", "module": OwnGate, "top_k": 2, "sign": -1.0}  # dicts stay as they are
    assert (layer.gates[0].capacity_factor, layer.gates[0].gate_noise) == (1.0, 0.0)
    x = torch.randn(T, M, requires_grad=True)
    y = layer(x, capacity_factor=0.5)
    functions = [lambda row, e=e: (row @ layer.experts.W[e]) ** 2 for e in range(E)]
    want, l_aux = tutel_loop.layer(x, layer.gates[0](x), functions, k=2, factor=0.5)
    assert_close(y, want)
    assert_close(y.l_aux, l_aux)
    for p in (x, *layer.parameters()):
        ours, theirs = (torch.autograd.grad(out.sum(), p, retain_graph=True)[0] for out in (y, want))
        assert_close(ours, theirs)
    assert int((y - layer(x, capacity_factor=0.0)).abs().sum(1).count_nonzero()) > 0


def test_scan_result_and_iterators():
    seen = []
    layer = make(
        scan_expert_func=lambda name, p: (seen.append(name), setattr(p, "skip_allreduce", True)),
        result_func=lambda y: (y, y.l_aux),
    )
    y, l_aux = layer(torch.randn(T, M))
    assert l_aux is layer.l_aux is y.l_aux
    assert seen == ["batched_fc1_w", "batched_fc2_w", "batched_fc1_bias", "batched_fc2_bias"]
    held = dict(layer.get_parameter_iterator("local_experts"))
    assert list(held) == seen
    assert all(p.skip_allreduce and p._tutel_expert for p in held.values())
    assert [n for n, _ in layer.get_parameter_iterator(param_type="gate")] == ["0.wg.weight"]
    assert not hasattr(layer.gates[0].wg.weight, "skip_allreduce")
    assert not hasattr(make().experts.batched_fc1_w, "skip_allreduce")  # one process holds all
    assert tutel_moe.moe_layer.global_expert_count(E) == layer.num_global_experts == E


def test_what_older_code_says():
    """A gate by name, count_per_node, pad_samples, and arguments by position."""
    old = tutel_moe.moe_layer(
        "Top2Gate", M, {"type": "ffn", "count_per_node": E, "hidden_size_per_expert": H}, None, None, None, (1, 2, 3),
        pad_samples=True,
    )  # fmt: skip
    new = make(seeds=(1, 2, 3))
    x = torch.randn(T, M)
    assert old.gates[0].top_k == 2
    assert torch.equal(old(x), new(x))


def test_activation_that_reads_the_experts():
    layer = make(experts={"activation_fn_with_self": lambda x, experts: x * experts.batched_fc1_w.shape[1]})
    plain = make(experts={"activation_fn": lambda x: x * H})
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(T, M)
    assert torch.equal(layer(x), plain(x))
    other = copy.deepcopy(layer)
    other.experts.batched_fc1_w = torch.nn.Parameter(torch.zeros(E, 1, M))  # the copy reads its own
    assert other.experts.activate(x).equal(x)


@dataclasses.dataclass
class Leaky:
    """A callable that has no hash, and an equality of its own."""

    slope: float = 0.5

    def __call__(self, x):
        return nnf.leaky_relu(x, self.slope)


@pytest.mark.parametrize("kind", ["ffn", "llama_ffn"])
def test_activation_without_a_hash(kind):
    layers = [make({}, {"type": kind, "activation_fn": fn}) for fn in (Leaky(), lambda x: nnf.leaky_relu(x, 0.5))]
    layers[1].load_state_dict(layers[0].state_dict())
    x = torch.randn(T, M)
    assert torch.equal(layers[0](x), layers[1](x))


def test_activation_with_parameters():
    """A module is part of the layer, as in Tutel: trained, saved and copied with it."""
    layer = make({"capacity_factor": 0}, {"activation_fn": torch.nn.PReLU(init=0.5)})
    x = torch.randn(T, M)
    layer(x).sum().backward()
    assert layer.experts.activation_fn.weight.grad.item() != 0
    other = make({"capacity_factor": 0}, {"activation_fn": torch.nn.PReLU()})
    tutel.checkpoint.load(other, layer.state_dict())
    assert torch.equal(copy.deepcopy(other)(x), layer(x))


# --- what Tutel gets wrong --------------------------------------------------------------------------------


def test_no_tokens():
    layer = make(is_gshard_loss=False, gate={"gate_noise": 1.0})
    x = torch.zeros(0, M, requires_grad=True)
    y = layer(x)
    (y.sum() + y.l_aux).backward()
    assert y.shape == (0, M)
    assert y.l_aux.item() == 0.0
    assert all(p.grad is not None and not p.grad.any() for p in layer.experts.parameters())
    assert make()(x).l_aux.item() == 0.0


@pytest.mark.parametrize("experts", [{}, {"type": "llama_ffn"}, {"activation_fn": torch.tanh, "output_dim": 9}])
@pytest.mark.parametrize("gate", [{}, {"capacity_factor": 0}, {"capacity_factor": -1.0}])
def test_no_tokens_with_weights_on_the_input(gate, experts):
    layer = make(gate, experts, is_postscore=False)
    x = torch.zeros(2, 0, M, requires_grad=True)
    y = layer(x)
    (y.sum() + y.l_aux).backward()
    assert y.shape == (2, 0, experts.get("output_dim", M))
    assert y.l_aux.item() == 0.0
    assert x.grad.shape == x.shape
    assert all(p.grad is not None and not p.grad.any() for p in layer.experts.parameters())


def test_second_derivatives(double):
    layer = make({"capacity_factor": 0.7})
    x = torch.randn(5, M, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: layer(x), x)


def test_nan_stays_in_its_token():
    layer = make({"capacity_factor": 0.6, "k": 1})
    x = torch.randn(T, M)
    before = layer(x)
    x[T - 1] = math.nan  # the last in every queue
    assert torch.equal(layer(x)[: T - 1], before[: T - 1])


def test_ties_go_to_the_lowest_expert():
    layer = make({"k": 2, "capacity_factor": 0})
    torch.nn.init.zeros_(layer.gates[0].wg.weight)
    x, functions = torch.randn(T, M), tutel_loop.ffn(layer.state_dict())
    want = torch.stack([(functions[0](row) + functions[1](row)) / 2 for row in x])
    assert_close(layer(x), want, torch.float32)

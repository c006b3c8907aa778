"""Tutel's layer on several processes: every degree, kind of experts and group computes what one process does."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import pytest
import ranks
import torch
import torch.distributed as dist
import tutel_loop
from oracle import assert_close

from fmoe.integrations import tutel
from fmoe.integrations.tutel.layout import Layer, part_of

M, H, WIDE, WORLD = 6, 8, 10, 4


@dataclass(frozen=True)
class Case:
    """One layer over 4 ranks, or over each pair of them."""

    kind: str
    experts: int
    factor: float = 0.0
    layer: dict = field(default_factory=dict)
    options: dict = field(default_factory=dict)
    call: dict = field(default_factory=dict)
    pair: bool = False

    @property
    def world(self) -> int:
        return 2 if self.pair else WORLD

    def state(self) -> dict[str, torch.Tensor]:
        """The whole layer's entries."""
        gen, e, out = torch.Generator().manual_seed(7), self.experts, self.options.get("output_dim", M)
        shapes = {
            "ffn": {"fc1_w": (e, H, M), "fc2_w": (e, H, out), "fc1_bias": (e, H), "fc2_bias": (e, out)},
            "llama_ffn": {f"W_fc{i}": (e * M * H,) for i in (1, 2, 3)},
            "custom": {"W": (e, M, M)},
        }[self.kind]
        shapes = {("batched_" if self.kind == "ffn" else "") + name: shape for name, shape in shapes.items()}
        shapes = {f"experts.{name}": shape for name, shape in shapes.items()} | {"gates.0.wg.weight": (e, M)}
        return {name: torch.randn(shape, generator=gen, dtype=torch.float64) for name, shape in shapes.items()}

    def make(self, group) -> tutel.MOELayer:
        """This rank's layer."""
        count = self.experts // self.world or -(self.world // self.experts)
        experts: dict = {"type": self.kind, "num_experts_per_device": count, **self.options}
        experts |= {"module": Tanh, "seen": []} if self.kind == "custom" else {"hidden_size_per_expert": H}
        gate = {"type": "top", "k": 2, "capacity_factor": self.factor}
        return tutel.moe_layer(gate_type=gate, model_dim=M, experts=experts, group=group, **self.layer)

    def tokens(self, rank: int) -> torch.Tensor:
        """A rank's own, of which there are more on later ranks."""
        return torch.randn(5 + rank, M, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)

    def functions(self, state: dict[str, torch.Tensor]) -> list:
        """Every expert as a function of one row."""
        act = self.options.get("activation_fn")
        if self.kind == "ffn":
            return tutel_loop.ffn(state, act or torch.relu)
        if self.kind == "llama_ffn":
            return tutel_loop.llama(state, self.experts, M, act or torch.nn.functional.silu)
        return [lambda row, e=e: torch.tanh(row @ state["experts.W"][e]) for e in range(self.experts)]


class Tanh(torch.nn.Module):
    """Experts of the user's own, which see the rows of all ranks."""

    def __init__(self, model_dim: int, num_experts_per_device: int, sharded_count: int, seen: list) -> None:
        super().__init__()
        self.W, self.seen = torch.nn.Parameter(torch.zeros(num_experts_per_device, model_dim, model_dim)), seen

    def forward(self, x: torch.Tensor, ctx: tutel.MOELayer) -> torch.Tensor:
        self.seen.append((tuple(x.shape[:1]), ctx.sharded_count, ctx.num_global_experts))
        return torch.tanh(torch.matmul(x, self.W))


CASES = [
    *(Case("ffn", 2, 0.7, {"parallel_type": f"adaptive:{r}"}, {"output_dim": WIDE}) for r in (0, 1, 2)),
    *(Case("ffn", 1, 0.0, {"parallel_type": t}, {"activation_fn": torch.tanh}) for t in ("model", "data")),
    Case("ffn", 2, 0.7, {"parallel_type": "adaptive:2"}, {"activation_fn": torch.tanh, "output_dim": 3}),
    Case("ffn", 8, 0.7, {"parallel_type": "auto", "is_postscore": False}),
    Case("ffn", 4, -0.5, {"a2a_ffn_overlap_degree": 3, "batch_prioritized_routing": True}),
    Case("ffn", 4, 0.5, {"use_2dh": True}, call={"inequivalent_tokens": True}),
    Case("ffn", 1, 0.7, call={"adaptive_r": 2, "a2a_ffn_overlap_degree": 2, "capacity_factor": 0.0}),
    *(Case("llama_ffn", 2, 1.0, {"parallel_type": f"adaptive:{r}"}) for r in (0, 2)),
    Case("llama_ffn", 8, 1.0, {"is_postscore": False}, {"activation_fn": torch.tanh}),
    Case("custom", 8, 0.7),
    Case("custom", 4, 0.0),
    Case("ffn", 4, 1.0, pair=True),
    Case("ffn", 1, 1.0, pair=True),
    Case("custom", 2, 0.0, pair=True),
]  # fmt: skip


def run(case: Case, group) -> dict:
    """One call and its gradients on this rank."""
    layer = case.make(group)
    tutel.checkpoint.load(layer, case.state())
    x = case.tokens(dist.get_rank(group)).requires_grad_(True)
    y = layer(x, **case.call)
    (y.square().sum() + y.l_aux).backward()
    marks = all(p.skip_allreduce for _, p in layer.get_parameter_iterator("local_experts"))
    return {
        "y": y.detach(),
        "l_aux": y.l_aux.detach(),
        "x": x.grad,
        "gate": layer.gates[0].wg.weight.grad,
        "plan": layer._runner and str(layer._runner._auto.spec.plan),
        "marks": marks and not any(hasattr(p, "skip_allreduce") for _, p in layer.get_parameter_iterator("gate")),
        "experts": {name: p.grad for name, p in layer.experts.named_parameters()},
    }


class Scale(torch.nn.Module):
    """Multiplies rows by the number of this rank, from 1 on."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.seen: list = []

    def forward(self, x: torch.Tensor, ctx: tutel.MOELayer) -> torch.Tensor:
        self.seen.append((tuple(x.shape), ctx.adaptive_degree, ctx.sharded_count))
        return x * (dist.get_rank() + 1)


def scaled(r: int) -> tuple:
    """Two experts of the user's own over 4 ranks, and what their module saw."""
    layer = tutel.moe_layer(
        gate_type={"type": "top", "k": 1, "capacity_factor": 1.0},
        model_dim=M,
        experts={"type": "custom", "module": Scale, "num_experts_per_device": -2},
        parallel_type=f"adaptive:{r}",
        normalize_gate=False,
    )
    with torch.no_grad():  # every token to expert 1, half of them in its slots
        layer.gates[0].wg.weight.copy_(torch.tensor([[0.0], [1.0]]).expand(2, M))
        y = layer(torch.ones(8, M))
    return y / torch.tensor([0.0, float(M)]).softmax(0)[1], layer.experts.seen


def test_degrees_of_custom_experts(results):
    """0: no exchange. 1: the ranks of an expert halve its slots. 2: each slot visits both, and the sum comes home."""
    for rank, result in enumerate(results):
        factors = {0: [rank + 1] * 4, 1: [3, 3, 4, 4], 2: [7] * 4}
        seen = {0: (2, 4, M), 1: (1, 8, M), 2: (1, 16, M)}
        for r, (y, calls) in result["scaled"].items():
            want = torch.tensor([*factors[r], 0, 0, 0, 0], dtype=torch.float64).unsqueeze(1).expand(8, M)
            assert_close(y, want, what=f"r={r} on rank {rank}")
            assert calls == [(seen[r], r, 2)]


# --- Swin-MoE's files -------------------------------------------------------------------------------------------------

#: Experts of the layers whose parts 4 ranks wrote: a part of an expert each, one expert each, two each.
SWIN = (2, 4, 8)
NORM = torch.linspace(1, 2, M, dtype=torch.float64), torch.ones(M, dtype=torch.float64)


class Block(torch.nn.Module):
    """A norm and a layer, under the names of Swin-MoE's."""

    def __init__(self, experts: int, world: int) -> None:
        super().__init__()
        count = experts // world or -(world // experts)
        self.norm2, self.mlp = torch.nn.LayerNorm(M), torch.nn.Module()
        self.mlp._moe_layer = tutel.moe_layer(
            gate_type={"type": "top", "k": 1, "capacity_factor": 1.25, "fp32_gate": False, "gate_noise": 1.0},
            model_dim=M,
            experts={"type": "ffn", "count_per_node": count, "hidden_size_per_expert": H,
                     "activation_fn": lambda x: torch.nn.functional.gelu(x)},
            normalize_gate=False, batch_prioritized_routing=True, is_gshard_loss=False,
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.mlp._moe_layer(x)
        return x + self.norm2(y), y.l_aux


def swin_files(folder: str, experts: int) -> dict[str, torch.Tensor]:
    """What 4 ranks of Swin-MoE leave in a folder, cut by hand; and the whole."""
    state = {f"mlp._moe_layer.{k}": v for k, v in Case("ffn", experts).state().items()}
    state |= {"norm2.weight": NORM[0], "norm2.bias": NORM[1]}
    parts = [{} for _ in range(4)]
    for name, entry in list(state.items()):
        if ".experts." not in name:
            continue
        for rank, part in enumerate(parts):
            if experts >= 4:
                n = experts // 4
                part[name] = entry[rank * n : (rank + 1) * n].clone()
            else:  # two ranks share an expert, and cut its hidden units, and fc2's bias of 6 numbers
                half = entry.shape[1] // 2
                part[name] = entry[rank // 2 : rank // 2 + 1, rank % 2 * half : (rank % 2 + 1) * half].clone()
    for rank, part in enumerate(parts):
        torch.save({"model": part}, f"{folder}/swin{experts}.pth.rank{rank}")
    rest = {name: entry for name, entry in state.items() if ".experts." not in name}
    if experts != 8:  # older ones lack it
        rest["mlp._moe_layer._num_global_experts"] = torch.tensor(experts)
    torch.save({"model": rest}, f"{folder}/swin{experts}.pth.master")
    return state


def swin_outputs(rank: int, world: int, folder: str) -> list:
    """What each model makes of the same images on this rank, after it has loaded its part."""
    torch.set_default_dtype(torch.float64)
    outputs = []
    for experts in SWIN:
        model = Block(experts, world).eval()
        tutel.checkpoint.load(model, f"{folder}/swin{experts}.pth")
        with torch.no_grad():
            y, l_aux = model(Case("ffn", experts).tokens(9))
        outputs.append((y, l_aux))
    return outputs


def two(rank: int, folder: str) -> list:
    return swin_outputs(rank, 2, folder)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_swin_files_of_4_ranks_load_on_any_number(world, results, folder):
    if world == 1:
        before = torch.get_default_dtype()
        found = [swin_outputs(0, 1, folder)]
        torch.set_default_dtype(before)
    else:
        found = ranks.launch(two, 2, folder) if world == 2 else [result["swin"] for result in results]
    for i, experts in enumerate(SWIN):
        case = Case("ffn", experts)
        state = case.state()
        x = case.tokens(9)
        y, l_aux = tutel_loop.layer(
            x, x @ state["gates.0.wg.weight"].t(), tutel_loop.ffn(state, torch.nn.functional.gelu),
            k=1, factor=1.25, priority=True, normalize=False, gshard=False, gate_noise=1.0,
        )  # fmt: skip
        norm = torch.nn.functional.layer_norm(y, (M,), *NORM)
        for outputs in found:
            assert_close(outputs[i][0], x + norm, what=f"{experts} experts on {world} ranks")
            assert_close(outputs[i][1], l_aux)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("swin"))
    for experts in SWIN:
        swin_files(path, experts)
    return path


# --- one launch for all -----------------------------------------------------------------------------------------------


def work(rank: int, folder: str) -> dict:
    torch.set_default_dtype(torch.float64)
    os.environ["LOCAL_WORLD_SIZE"] = "2"  # two nodes of two ranks
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    done: dict = {i: run(case, pairs[rank // 2] if case.pair else None) for i, case in enumerate(CASES)}
    done["scaled"] = {r: scaled(r) for r in (0, 1, 2)}
    done["swin"] = swin_outputs(rank, WORLD, folder)
    done["refused"] = []
    for count in (-3, -8, 0):
        with pytest.raises(ValueError) as info:
            tutel.moe_layer({"type": "top"}, M, {"type": "ffn", "num_experts_per_device": count,
                                                 "hidden_size_per_expert": H})  # fmt: skip
        done["refused"].append(str(info.value))
    for bad in ({"parallel_type": "adaptive:3"}, {"hidden_size_per_expert": 9}, {"group": pairs[1 - rank // 2]}):
        experts = {"type": "ffn", "num_experts_per_device": -4,
                   "hidden_size_per_expert": bad.pop("hidden_size_per_expert", H)}  # fmt: skip
        with pytest.raises(ValueError) as info:
            tutel.moe_layer({"type": "top"}, M, experts, **bad)
        done["refused"].append(str(info.value))
    return done


@pytest.fixture(scope="module")
def results(folder):
    return ranks.launch(work, WORLD, folder)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.kind}-{c.experts}")
def test_ranks_compute_what_one_process_does(case, results):
    """Outputs, losses and gradients: those of experts are of the sum over ranks, those of gates of one rank's."""
    factor = case.call.get("capacity_factor", case.factor)
    samples = 4 + case.world if "inequivalent_tokens" in case.call else None
    whole = {name: entry.requires_grad_(True) for name, entry in case.state().items()}
    total, first = 0, WORLD - case.world if case.pair else 0
    expected = []
    for rank in range(case.world):
        x = case.tokens(rank).requires_grad_(True)
        y, l_aux = tutel_loop.layer(
            x, x @ whole["gates.0.wg.weight"].t(), case.functions(whole), k=2, factor=factor, samples=samples,
            postscore=case.layer.get("is_postscore", True),
            priority=case.layer.get("batch_prioritized_routing", False),
        )  # fmt: skip
        loss = y.square().sum() + l_aux
        gradients = torch.autograd.grad(loss, [x, whole["gates.0.wg.weight"]], retain_graph=True)
        expected.append((y, l_aux, *gradients))
        total = total + loss
    total.backward()
    layer = Layer("", case.experts, M)
    for rank in range(case.world):
        found = results[first + rank][CASES.index(case)]
        for name, want in zip(("y", "l_aux", "x", "gate"), expected[rank], strict=True):
            assert_close(found[name], want, what=f"{name} on rank {rank}")
        for name, grad in found["experts"].items():
            want = whole[f"experts.{name}"].grad
            assert_close(grad, part_of(layer, name, want, rank, case.world), what=f"{name} on rank {rank}")
        assert found["marks"]


def test_arguments_choose_the_plan(results):
    plans = [
        "dp", "ep r=1 pipeline=1 a2a=linear", "ep r=2 mp=copies pipeline=1 a2a=linear",
        "ep r=4 mp=copies pipeline=1 a2a=linear", "ep r=1 pipeline=1 a2a=linear",
        "ep r=2 mp=copies pipeline=1 a2a=linear", "None", "ep r=1 pipeline=2 a2a=linear",
        "ep r=1 pipeline=1 a2a=2dh layout=padded", "ep r=2 mp=copies pipeline=2 a2a=linear", "dp",
        "ep r=2 mp=copies pipeline=1 a2a=linear", "ep r=1 pipeline=1 a2a=linear", None, None,
        "ep r=1 pipeline=1 a2a=linear", "ep r=1 pipeline=1 a2a=linear", None,
    ]  # fmt: skip
    assert [results[1][i]["plan"] for i in range(len(CASES))] == plans


def test_what_ranks_refuse(results):
    assert results[0]["refused"] == results[3]["refused"] == [
        "moe_layer: num_experts_per_device=-3 puts one expert on 3 ranks, but the group has 4: choose one of -1, -2, "
        "-4, or a number above 0.",
        "moe_layer: num_experts_per_device=-8 puts one expert on 8 ranks, but the group has 4: choose one of -1, -2, "
        "-4, or a number above 0.",
        "moe_layer: num_experts_per_device=0, but it must be n for n experts on each rank, or -n for one expert on n "
        "ranks.",
        "moe_layer: parallel_type='adaptive:3', but 4 ranks share an expert: choose a degree of 0, 1, 2, 4.",
        "moe_layer: hidden_size_per_expert=9 is split over the 4 ranks that share an expert: choose a multiple of 4.",
        "moe_layer: this process is no member of group=: make the layer on the group's ranks only.",
    ]  # fmt: skip

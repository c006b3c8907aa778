"""Tutel's checkpoints: what is written is what is read, for any number of ranks, and nothing else is read."""

from __future__ import annotations

import os

import pytest
import torch
from oracle import assert_close

import fmoe
from fmoe.integrations import tutel
from fmoe.integrations.tutel import checkpoint

M, E, H, WIDE = 6, 4, 8, 7


class Custom(torch.nn.Module):
    def __init__(self, model_dim, num_experts_per_device, sharded_count):
        super().__init__()
        self.W = torch.nn.Parameter(torch.randn(num_experts_per_device, model_dim, model_dim))

    def forward(self, x, ctx):
        return x @ self.W


EXPERTS = {
    "ffn": {"type": "ffn", "hidden_size_per_expert": H},
    "wide": {"type": "ffn", "hidden_size_per_expert": H, "output_dim": WIDE, "has_fc1_bias": False},
    "llama": {"type": "llama_ffn", "hidden_size_per_expert": 5},
    "custom": {"type": "custom", "module": Custom},
}


def make(kind: str = "ffn", gate: str = "top", experts: int = E) -> tutel.MOELayer:
    return tutel.moe_layer({"type": gate}, M, {**EXPERTS[kind], "num_experts_per_device": experts})


def model(*kinds: str) -> torch.nn.Module:
    return torch.nn.ModuleDict({"head": torch.nn.Linear(M, 2), "blocks": torch.nn.ModuleList(make(k) for k in kinds)})


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def refused(call, *arguments, **named) -> str:
    with pytest.raises(ValueError) as info:
        call(*arguments, **named)
    return str(info.value)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("counted", [True, False])
def test_rank_files_of_any_number_hold_the_whole(ranks, counted, tmp_path):
    net = model("ffn", "wide", "llama", *(["custom"] if ranks <= E else []))
    state = net.state_dict()
    path = str(tmp_path / "of{size}" / "{rank}.pt")
    files = checkpoint.write(state, path, ranks=ranks)
    assert files == [str(tmp_path / f"of{ranks}" / f"{rank}.pt") for rank in range(ranks)]
    if not counted:  # as older versions have it
        for file in files:
            part = torch.load(file, weights_only=True)
            torch.save({key: entry for key, entry in part.items() if "_num_global" not in key}, file)
    assert same(checkpoint.read(path), state)
    again = model("ffn", "wide", "llama", *(["custom"] if ranks <= E else []))
    checkpoint.load(again, path)
    assert same(again.state_dict(), state)


def test_parts_are_cut_as_tutel_cuts_them(tmp_path):
    """The parts of ranks that share an expert, one after another, are the rows of the whole (its gather.py)."""
    state = make("ffn").state_dict()
    parts = [torch.load(f, weights_only=True) for f in checkpoint.write(state, tmp_path / "{rank}", ranks=8)]
    for name in ("batched_fc1_w", "batched_fc2_w", "batched_fc1_bias", "batched_fc2_bias"):
        whole = state[f"experts.{name}"]
        pieces = [part[f"experts.{name}"] for part in parts]
        assert {piece.shape for piece in pieces} == {(1, whole.shape[1] // 2, *whole.shape[2:])}
        assert torch.equal(torch.concat(pieces).view(whole.shape), whole)
    odd = make("wide").state_dict()["experts.batched_fc2_bias"]
    state = make("wide").state_dict() | {"experts.batched_fc2_bias": odd}
    last = torch.load(checkpoint.write(state, tmp_path / "odd{rank}", ranks=8)[7], weights_only=True)
    assert torch.equal(last["experts.batched_fc2_bias"], torch.cat([odd[3:, 4:], torch.zeros(1, 1)], 1))
    flat = make("llama").state_dict()
    one = torch.load(checkpoint.write(flat, tmp_path / "flat{rank}", ranks=16)[5], weights_only=True)
    assert torch.equal(one["experts.W_fc2"], flat["experts.W_fc2"].view(E, M * 5)[1, 8:16])


def test_llama_parts_that_several_sizes_have(tmp_path):
    """Filling is not told from weights where as many ranks as M has numbers share an expert."""

    def layer(m: int, h: int) -> tutel.MOELayer:
        experts = {"type": "llama_ffn", "num_experts_per_device": 1, "hidden_size_per_expert": h}
        return tutel.moe_layer({"type": "top"}, m, experts)

    for m in range(1, 6):
        for h in range(1, 6):
            for ranks in range(1, 8):
                state, path = layer(m, h).state_dict(), str(tmp_path / f"{m}.{h}.{ranks}.{{rank}}")
                checkpoint.write(state, path, ranks=ranks)
                other = layer(m, h)
                checkpoint.load(other, path)
                assert same(other.state_dict(), state)
                held = -(-m * h // ranks) * ranks
                if sum(-(-m * n // ranks) * ranks == held for n in range(1, held + 1)) == 1:
                    assert same(checkpoint.read(path), state)
                else:
                    assert refused(checkpoint.read, path).startswith("read: 3 arguments do not fit.\n  experts.W_fc1 ")
    path = str(tmp_path / "2.3.4.{rank}")
    assert refused(checkpoint.read, path) == "read: 3 arguments do not fit." + "".join(
        f"\n  experts.W_fc{i} of 4 ranks is f32[2]: an expert has any of 6 to 8 numbers, as the last of its 4 "
        "parts may end in filling. checkpoint.load goes by the model; read needs files of fewer ranks."
        for i in (1, 2, 3)
    )
    assert refused(checkpoint.load, layer(2, 5), path) == "read: 3 arguments do not fit." + "".join(
        f"\n  experts.W_fc{i} of 4 ranks is f32[2], but no 4 such parts are those of M*H=10 numbers." for i in (1, 2, 3)
    )
    for rank in range(4):
        file = path.replace("{rank}", str(rank))
        torch.save(torch.load(file) | {"gates.0.wg.weight": torch.ones(1, 9)}, file)
    assert refused(checkpoint.read, path) == "read: 3 arguments do not fit." + "".join(
        f"\n  experts.W_fc{i} of 4 ranks is f32[2], but no 4 such parts are those of a multiple of M=9 numbers."
        for i in (1, 2, 3)
    )


def test_swin_files(tmp_path):
    state = model("ffn").state_dict()
    path = str(tmp_path / "ckpt_epoch_9.pth")
    files = checkpoint.write(state, path, ranks=2)
    assert files == [f"{path}.rank0", f"{path}.rank1", f"{path}.master"]
    master, first = (torch.load(file, weights_only=True)["model"] for file in (files[2], files[0]))
    assert set(first) == {key for key in state if ".experts." in key}
    assert set(master) == set(state) - set(first)
    assert same(checkpoint.read(path), state)
    assert same(checkpoint.read(path, ranks=2), state)
    os.remove(files[2])
    assert refused(checkpoint.read, path) == ("read: nothing says how many experts blocks.0. has: give num_experts=.")
    assert set(checkpoint.read(path, num_experts=E)) == {*first, "blocks.0._num_global_experts"}
    torch.save({"model": state, "epoch": 3, "max_accuracy": 0.5}, f"{path}.global")
    assert same(checkpoint.read(path), state)


def test_one_file_for_all(tmp_path):
    state = model("llama", "ffn").state_dict()
    assert checkpoint.write(state, tmp_path / "all.pt") == [str(tmp_path / "all.pt")]
    assert same(checkpoint.read(tmp_path / "all.pt"), state)


# --- fmoe's parameters --------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "activation"), [("ffn", "relu"), ("llama", "swiglu")])
@pytest.mark.parametrize("gate", ["top", "cosine_top"])
def test_fmoes_parameters_and_back(kind, activation, gate, tmp_path):
    layer = make(kind, gate)
    if gate == "cosine_top":
        torch.nn.init.zeros_(layer.gates[0].cosine_projector.bias)
    torch.save(layer.state_dict(), tmp_path / "one.pt")
    state = checkpoint.read(tmp_path / "one.pt")
    params = checkpoint.moe_params(state)
    router = fmoe.TopK(1) if gate == "top" else fmoe.Cosine(1)
    config = fmoe.MoEConfig(E, M, params.experts.w_out.shape[1], router=router, activation=activation)
    x = torch.randn(9, M)
    assert_close(fmoe.moe(params, x, config)[0], layer(x, capacity_factor=0.0), torch.float32)
    assert same(checkpoint.moe_state(params), state)
    inside = checkpoint.moe_state(params, "blocks.1.moe")
    assert same(checkpoint.moe_state(checkpoint.moe_params(inside, "blocks.1.moe.")), state)


def test_what_has_no_counterpart():
    state = make("ffn", "cosine_top").state_dict()
    assert refused(checkpoint.moe_params, state) == (
        "moe_params: gates.0.cosine_projector.bias is not 0, but fmoe.Cosine has no bias: use moe_layer."
    )
    assert refused(checkpoint.moe_params, make().state_dict(), gate=1) == (
        "moe_params: gates.1.wg.weight is missing, and so is gates.1.sim_matrix: no gate that fmoe has."
    )
    assert refused(checkpoint.moe_params, model("ffn", "llama").state_dict(), "blocks.2") == (
        "moe_params: prefix='blocks.2.' is no MoE layer of the state, which has 'blocks.0', 'blocks.1'."
    )
    assert refused(checkpoint.moe_params, make("custom").state_dict()) == (
        "moe_params: experts are custom ones, or their gate does not tell M: use moe_layer."
    )
    gated = fmoe.init(fmoe.MoEConfig(E, M, H, bias=True), seed=0)
    assert refused(checkpoint.moe_state, gated) == (
        "moe_state: params.experts are gated and have biases, which Tutel's llama_ffn has not."
    )
    noisy = fmoe.init(fmoe.MoEConfig(E, M, H, router=fmoe.NoisyTopK(2), activation="relu"), seed=0)
    assert refused(checkpoint.moe_state, noisy) == (
        "moe_state: params.router=RouterParams(weight=f32[6,4], noise_weight=f32[6,4]) is of no gate that Tutel has: a "
        "linear one, or cosine_top."
    )
    part = fmoe.local(gated, fmoe.ShardingSpec(fmoe.make_mesh(E)))
    assert refused(checkpoint.moe_state, part) == (
        "moe_state: params.experts must be a whole fmoe.ExpertParams: gather what is on several ranks first."
    )


# --- what is refused --------------------------------------------------------------------------------------------------


class Evil:
    """Leaves a file behind where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_no_pickle_is_executed(tmp_path):
    mark, file = tmp_path / "executed", tmp_path / "evil.pt"
    torch.save({"model": make().state_dict(), "config": Evil(str(mark))}, file)
    message = (
        f"read: {file} holds more than tensors (posix.mkdir), and no pickled object is made of a file. Save its state "
        "dict alone where it was written: torch.save(model.state_dict(), path)."
    )
    assert refused(checkpoint.read, file) == message
    assert refused(checkpoint.load, make(), file) == message
    assert not mark.exists()
    torch.save({"weight": torch.ones(1), "epoch": 3}, file)
    assert refused(checkpoint.read, file) == f"read: {file}: epoch is no tensor, but a checkpoint is a dict of tensors."


def test_files_that_do_not_fit_each_other(tmp_path):
    state, path = make().state_dict(), str(tmp_path / "{rank}.pt")
    files = checkpoint.write(state, path, ranks=4)
    assert refused(checkpoint.read, path, ranks=5) == f"read: there is no file {tmp_path}/4.pt."
    assert refused(checkpoint.read, path, ranks=3) == (
        "read: the layer has 4 experts, which 3 ranks cannot hold: one number must divide the other."
    )
    assert refused(checkpoint.read, path, ranks=2) == (
        "read: 4 arguments do not fit.\n"
        "  experts.batched_fc1_w of 2 ranks is f32[1,8,6], but each rank has 2 of 4 experts in dim 0.\n"
        "  experts.batched_fc2_w of 2 ranks is f32[1,8,6], but each rank has 2 of 4 experts in dim 0.\n"
        "  experts.batched_fc1_bias of 2 ranks is f32[1,8], but each rank has 2 of 4 experts in dim 0.\n"
        "  experts.batched_fc2_bias of 2 ranks is f32[1,6], but each rank has 2 of 4 experts in dim 0."
    )
    part = torch.load(files[2], weights_only=True)
    part["extra"] = part.pop("gates.0.wg.weight")
    part["experts.batched_fc1_bias"] = part["experts.batched_fc1_bias"].double()
    torch.save(part, files[2])
    assert refused(checkpoint.read, path) == (
        "read: 3 arguments do not fit.\n"
        f"  {files[2]} lacks gates.0.wg.weight, which {files[0]} has.\n"
        f"  {files[2]} has extra, which {files[0]} lacks.\n"
        f"  experts.batched_fc1_bias is f64[1,8] in {files[2]}, but f32[1,8] in {files[0]}."
    )
    os.remove(files[1])
    assert refused(checkpoint.read, path) == f"read: there is no file {files[1]}."
    checkpoint.write(state, tmp_path / "a{size}.{rank}", ranks=1)
    checkpoint.write(state, tmp_path / "a{size}.{rank}", ranks=2)
    assert refused(checkpoint.read, tmp_path / "a{size}.{rank}") == (
        f"read: {tmp_path}/a{{size}}.{{rank}} is there for 1, 2 ranks: give ranks=."
    )
    assert refused(checkpoint.read, tmp_path / "none.pt") == (
        f"read: there is no file {tmp_path}/none.pt, and no {tmp_path}/none.pt.rank0 of several ranks."
    )


def test_a_wrong_shape_is_never_reshaped(tmp_path):
    """Tutel views any tensor of as many numbers."""
    state, file = make().state_dict(), tmp_path / "one.pt"
    state["experts.batched_fc1_w"] = state["experts.batched_fc1_w"].transpose(1, 2).contiguous()
    state["experts.batched_fc1_bias"] = state["experts.batched_fc1_bias"].unsqueeze(1)
    del state["experts.batched_fc2_w"]
    state["experts.batched_fc3_w"] = torch.ones(1)
    torch.save(state, file)
    problems = (
        " 4 arguments do not fit.\n"
        "  experts.batched_fc2_w is missing.\n"
        "  experts.batched_fc1_w is f32[4,6,8], but it must be [4, 6, 6].\n"
        "  experts.batched_fc1_bias is f32[4,1,8], but it must be [4, 6].\n"
        "  experts.batched_fc3_w is no entry of these experts, which have batched_fc1_w, batched_fc2_w, "
        "batched_fc1_bias, batched_fc2_bias."
    )
    assert refused(checkpoint.read, file) == "read:" + problems
    assert refused(checkpoint.load, make(), state) == "load:" + problems
    assert refused(checkpoint.write, state, tmp_path / "{rank}", ranks=2) == "write:" + problems
    with pytest.raises(RuntimeError) as info:
        make().load_state_dict(state, strict=False)
    assert (
        "experts.batched_fc1_w is f32[4,6,8], but here it is f32[4,8,6]: a file of another number of ranks is read by "
        "fmoe.integrations.tutel.checkpoint.load." in str(info.value)
    )
    flat = make("llama").state_dict()
    flat["experts.W_fc1"] = flat["experts.W_fc1"][:-1]
    assert refused(checkpoint.moe_params, flat) == (
        "moe_params: 3 arguments do not fit.\n"
        "  experts.W_fc2 is f32[120], but it must be [119].\n"
        "  experts.W_fc3 is f32[120], but it must be [119].\n"
        "  experts.W_fc1 is f32[119], but it must be of E*M=24 times H numbers."
    )
    flat = make().state_dict() | {"_num_global_experts": torch.tensor(2)}
    torch.save(flat, file)
    assert refused(checkpoint.read, file) == (
        "read: _num_global_experts says 2 experts; gates.0.wg.weight says 4 experts."
    )


def test_a_model_that_does_not_fit():
    state = model("ffn").state_dict()
    state["tail.weight"] = state.pop("head.weight")
    state["head.bias"] = torch.ones(3)
    assert refused(checkpoint.load, model("ffn"), state) == (
        "load: 3 arguments do not fit.\n"
        "  the checkpoint lacks head.weight, which the model has.\n"
        "  the checkpoint has tail.weight, which the model lacks: delete it.\n"
        "  head.bias is f32[3] in the checkpoint, but f32[2] in the model."
    )
    assert refused(checkpoint.load, make(experts=2), make().state_dict()) == (
        "load: the checkpoint has 4 experts in the layer, but the model has 2."
    )
    without = {key: entry for key, entry in make().state_dict().items() if key != "_num_global_experts"}
    net = make()
    checkpoint.load(net, without)  # the number is the model's own
    assert not net.load_state_dict(without).missing_keys  # as in files of older versions
    with pytest.raises(RuntimeError) as info:
        make().load_state_dict(without | {"_num_global_experts": torch.tensor(8)})
    assert "_num_global_experts is 8, but the layer has 4 experts." in str(info.value)
    assert torch.equal(net.experts.batched_fc1_w, without["experts.batched_fc1_w"])


def test_what_cannot_be_written(tmp_path):
    state = make().state_dict()
    assert refused(checkpoint.write, state, "x.{rank}") == (
        "write: path='x.{rank}' is a pattern for rank files: say for how many, with ranks=."
    )
    assert refused(checkpoint.write, state, tmp_path / "{rank}", ranks=6) == (
        "write: the layer has 4 experts, which 6 ranks cannot hold: one number must divide the other."
    )
    assert refused(checkpoint.write, make().state_dict(), tmp_path / "{rank}", ranks=64) == (
        "write: 3 arguments do not fit.\n"
        "  experts.batched_fc1_w is f32[4,8,6], but the 16 ranks that share an expert cannot split 8 hidden units.\n"
        "  experts.batched_fc2_w is f32[4,8,6], but the 16 ranks that share an expert cannot split 8 hidden units.\n"
        "  experts.batched_fc1_bias is f32[4,8], but the 16 ranks that share an expert cannot split 8 hidden units."
    )
    assert refused(checkpoint.write, make("custom").state_dict(), tmp_path / "{rank}", ranks=8) == (
        "write: experts.W is f32[4,6,6], but how 2 ranks share a custom expert is not known: use at most 4 ranks."
    )
    assert (
        refused(checkpoint.read, "x", ranks=0) == "read: ranks=0, but it must be a whole number of at least 1, or None."
    )

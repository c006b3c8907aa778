"""examples/swin_moe.py: its parts against restatements of them, a whole run, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path

import optree
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

pytest.importorskip("sklearn")

import swin_data
import swin_model as swin
import swin_moe
import swin_training

import fmoe

SMALL = swin.SwinConfig(size=16, dim=8, depths=(2, 2), heads=(2, 2), experts=4, moe_stages=1)


def float64(tree):
    return optree.tree_map(torch.Tensor.double, tree)


# --- windows -----------------------------------------------------------------------------------------------


def test_windows_are_cut_row_by_row_and_put_back():
    x = torch.randn(2, 8, 8, 3)
    windows = swin.to_windows(x, 4)
    assert windows.shape == (2, 4, 16, 3)
    for window in range(4):
        for place in range(16):
            row, column = 4 * (window // 2) + place // 4, 4 * (window % 2) + place % 4
            assert torch.equal(windows[:, window, place], x[:, row, column])
    assert torch.equal(swin.from_windows(windows, 8), x)


@pytest.mark.parametrize(("side", "window", "shift"), [(8, 4, 2), (8, 2, 1), (12, 4, 2), (9, 3, 1), (8, 4, 0)])
def test_shift_mask_separates_what_was_apart(side, window, shift):
    mask = swin.shift_mask(side, window, shift)[:, 0]
    across = side // window
    for index in range(across * across):
        at = [
            ((window * (index // across) + p + shift) % side, (window * (index % across) + q + shift) % side)
            for p in range(window)
            for q in range(window)
        ]  # where the places of this window were before the image was rolled
        for i, (row, column) in enumerate(at):
            for j, (other, beside) in enumerate(at):
                near = abs(row - other) < window and abs(column - beside) < window
                assert mask[index, i, j] == (0 if near else -100)


def test_a_shifted_window_sees_its_neighbours_and_no_further():
    block = swin.blocks_of(dataclasses.replace(SMALL, dim=8))[1]
    assert (block.side, block.window, block.shift) == (8, 4, 2)
    params = swin.init(SMALL, seed=0)["blocks"][1]
    x = torch.randn(1, 8, 8, 8, dtype=torch.float64)
    gradient = torch.func.grad(lambda x: swin.window_attention(x, float64(params), block)[0, 0, 0, 3])(x)
    seen = gradient[0].abs().amax(2) > 1e-12
    corner = torch.zeros(8, 8, dtype=torch.bool)
    corner[:2, :2] = True  # the first two rows and columns are rolled into a window with the last ones
    assert torch.equal(seen, corner)


# --- attention ---------------------------------------------------------------------------------------------


def test_log_distances():
    table = swin.log_distances(4).view(7, 7, 2)
    far, middle, near = math.log2(9) / 3, math.log2(1 + 16 / 3) / 3, math.log2(1 + 8 / 3) / 3
    line = torch.tensor([-far, -middle, -near, 0, near, middle, far])
    torch.testing.assert_close(table[:, 3, 0], line)
    torch.testing.assert_close(table[3, :, 1], line)
    assert torch.equal(table[0, :, 0], table[0, :1, 0].expand(7))


def test_position_bias_is_of_the_distance():
    block = swin.blocks_of(SMALL)[0]
    params = float64(swin.init(SMALL, seed=0)["blocks"][0]["distance"])
    bias = swin.position_bias(params, block)
    for i in (0, 5, 15):
        for j in (0, 6, 12):
            apart = torch.tensor([i // 4 - j // 4, i % 4 - j % 4], dtype=torch.float64) * 8 / 3
            log = apart.sign() * torch.log2(1 + apart.abs()) / 3
            wanted = 16 * torch.sigmoid((log @ params["w_in"] + params["b_in"]).relu() @ params["w_out"])
            torch.testing.assert_close(bias[:, i, j], wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("index", [0, 1])
def test_cosine_attention_against_loops(index):
    block = swin.blocks_of(SMALL)[index]
    params = float64(swin.init(SMALL, seed=1)["blocks"][index])
    # the first head above the limit of log(100), the second one below
    params["log_scale"] = torch.tensor([9.0, 1.5], dtype=torch.float64).view(2, 1, 1)
    params["q_bias"], params["v_bias"] = torch.randn(2, 8, dtype=torch.float64)
    x = torch.randn(2, 4, 16, 8, dtype=torch.float64)
    bias = swin.position_bias(params["distance"], block)
    found = swin.cosine_attention(x, params, block)
    wq, wk, wv = params["qkv"].split(8, 1)
    for b, window in [(0, 0), (1, 3)]:
        rows = x[b, window]
        heads = []
        for head, scale in enumerate((100.0, math.exp(1.5))):
            part = slice(4 * head, 4 * head + 4)
            q = (rows @ wq + params["q_bias"])[:, part]
            k, v = (rows @ wk)[:, part], (rows @ wv + params["v_bias"])[:, part]
            out = []
            for i in range(16):
                scores = torch.stack(
                    [scale * torch.cosine_similarity(q[i], k[j], 0) + bias[head, i, j] for j in range(16)]
                )
                if index == 1:
                    scores = scores + block.mask[window, 0, i]
                out.append(scores.softmax(0) @ v)
            heads.append(torch.stack(out))
        wanted = torch.cat(heads, 1) @ params["out"] + params["out_bias"]
        torch.testing.assert_close(found[b, window], wanted, rtol=1e-8, atol=1e-8)


# --- blocks ------------------------------------------------------------------------------------------------


def test_merging_takes_squares_down_their_columns():
    x = torch.randn(2, 4, 4, 3)
    params = {"weight": torch.eye(12), "norm": {"scale": torch.ones(12), "shift": torch.zeros(12)}}
    parts = [x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]]
    wanted = torch.nn.functional.layer_norm(torch.cat(parts, -1), (12,))
    torch.testing.assert_close(swin.merge(x, params), wanted)


def with_blocks(params, change):
    return {**params, "blocks": [{**block, **change(block)} for block in params["blocks"]]}


def test_norms_stand_behind():
    config = dataclasses.replace(SMALL, experts=0)
    params, images = float64(swin.init(config, seed=0)), torch.randn(3, 16, 16, 1, dtype=torch.float64)
    logits, _ = swin.forward(params, images, config)

    def louder(block):
        ffn = {**block["ffn"], "w_out": 7 * block["ffn"]["w_out"]}
        return {"out": 7 * block["out"], "out_bias": 7 * block["out_bias"], "ffn": ffn}

    # what a block adds is divided by its size, but for the epsilon of the norm
    found, _ = swin.forward(with_blocks(params, louder), images, config)
    torch.testing.assert_close(found, logits, rtol=1e-3, atol=1e-4)

    zero = {"scale": torch.zeros(1), "shift": torch.zeros(1)}

    def silent(block):
        names = ("norm_attention", "norm_ffn")
        return {name: {k: v.expand_as(block[name][k]).double() for k, v in zero.items()} for name in names}

    found, _ = swin.forward(with_blocks(params, silent), images, config)
    x = images.unfold(1, 2, 2).unfold(2, 2, 2)[:, :, :, 0].flatten(3) @ params["patch"]
    x = swin.layer_norm(x, params["patch_norm"])
    x = swin.layer_norm(swin.merge(x, params["merges"][0]), params["norm"]).mean((1, 2))
    torch.testing.assert_close(found, x @ params["head"])


@pytest.mark.parametrize("router", ["linear", "cosine"])
def test_experts_against_a_loop(router):
    config = dataclasses.replace(SMALL, router=router)
    params = float64(swin.init(config, seed=2)["blocks"][3])
    params["norm_ffn"]["shift"] = torch.randn(16, dtype=torch.float64)  # which a dropped place must not get
    moe = params["ffn"]
    x = torch.randn(2, 4, 4, 16, dtype=torch.float64)
    y, routing = swin.experts(x, params, config.moe(16, 0.5), None)
    rows = x.reshape(32, 16)
    if router == "linear":
        logits = rows @ moe.router.weight
    else:
        cosines = torch.cosine_similarity((rows @ moe.router.projection)[:, :, None], moe.router.weight[None], 1)
        logits = cosines * moe.router.log_scale.exp()
    weights, chosen = logits.softmax(1).max(1)
    wanted = torch.zeros_like(rows)
    for expert in range(4):
        queue = [t for t in weights.argsort(descending=True).tolist() if chosen[t] == expert]
        for t in queue[:4]:  # ceil(0.5 * 32 / 4), the most certain first
            w = moe.experts
            hidden = torch.nn.functional.gelu(rows[t] @ w.w_in[expert] + w.b_in[expert])
            wanted[t] = weights[t] * swin.layer_norm(hidden @ w.w_out[expert], params["norm_ffn"])
    torch.testing.assert_close(y.reshape(32, 16), wanted)
    assert int(routing.aux.dropped) == sum(max(0, int((chosen == e).sum()) - 4) for e in range(4)) > 0


def test_the_router_learns_from_the_loss():
    params, images = swin.init(SMALL, seed=0), torch.randn(8, 16, 16, 1)
    labels = torch.arange(8)

    def nats(params):
        return torch.nn.functional.cross_entropy(swin.forward(params, images, SMALL)[0], labels)

    grads = torch.func.grad(nats)(params)
    assert float(grads["blocks"][3]["ffn"].router.weight.norm()) > 1e-4


def test_where_experts_are_and_what_they_cost():
    config = swin.SwinConfig(experts=8)
    assert [block.moe for block in swin.blocks_of(config)] == [False, False, False, True, False, True, False, True]
    assert [block.shift for block in swin.blocks_of(config)] == [0, 2, 0, 0, 0, 0, 0, 0]
    dense, _ = swin.parameter_counts(swin.init(dataclasses.replace(config, experts=0), seed=0))
    params = swin.init(config, seed=0)
    total, active = swin.parameter_counts(params)
    routers = 8 * (64 + 64 + 128)
    assert active == dense + routers
    assert total == active + 7 * sum(2 * c * 4 * c + 4 * c for c in (64, 64, 128))
    assert params["blocks"][3]["ffn"].experts.b_out is None


def test_sizes_that_do_not_fit():
    assert swin.misfits(swin.SwinConfig()) == []
    assert swin.misfits(swin.SwinConfig(size=18)) == ["size 18 is not a multiple of 8, a patch of the last of 3 stages"]
    assert "windows of 4 do not divide" in swin.misfits(swin.SwinConfig(size=24))[0]


# --- the program -------------------------------------------------------------------------------------------


def refused(capsys, *argv):
    """The one line that the program ends with."""
    assert swin_moe.main([str(a) for a in argv]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("swin_moe: ")
    assert shown.err.count("\n") == 1
    return shown.err


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("swin")
    assert swin_moe.main(["--quick", "--steps", "2", "--batch", "48", "--experts", "4", "--out", str(out)]) == 0
    return out


def test_a_run(trained):
    metrics = json.loads((trained / "metrics.json").read_text())
    assert set(metrics["runs"]) == {"dense", "4 experts"}
    moe = metrics["runs"]["4 experts"]
    assert [point["capacity"] for point in moe["inference"]] == [1.25, 1.0, 0.625, 0.5]
    drops = [point["dropped"] for point in moe["inference"]]
    assert drops == sorted(drops)
    assert drops[-1] >= 0.5  # half the slots of balanced experts
    # tokens of the three layers: 48 images of 16, 16 and 4 places
    assert [[sum(layer) for layer in step] for step in moe["counts"]] == [[768, 768, 192]] * 2
    assert all(0 <= run["accuracy"] <= 1 and run["train_images_per_second"] > 0 for run in metrics["runs"].values())
    for name in ("training.png", "loads-4.png", "places-4.png"):
        assert (trained / name).stat().st_size > 10_000


def test_frozen_experts_stay(trained, tmp_path, capsys):
    given = ["--from", str(trained / "4.pt"), "--data", "turned", "--freeze-experts", "--steps", "2", "--quick"]
    assert swin_moe.main([*given, "--out", str(tmp_path)]) == 0
    assert "before" in capsys.readouterr().out
    old, new = (swin_training.load(path / "4.pt")[2] for path in (trained, tmp_path))
    (rest, held), (moved, still) = swin_training.split_experts(old), swin_training.split_experts(new)
    assert all(map(torch.equal, optree.tree_leaves(held), optree.tree_leaves(still)))
    assert not any(map(torch.equal, optree.tree_leaves(rest["head"]), optree.tree_leaves(moved["head"])))
    assert not torch.equal(rest["blocks"][3]["ffn"].router.weight, moved["blocks"][3]["ffn"].router.weight)


def test_frozen_gradients_are_those_of_the_rest():
    params = swin.init(SMALL, seed=0)
    run = swin_training.Run("", SMALL, params)
    images, labels, noise = torch.randn(4, 16, 16, 1), torch.arange(4), swin.draw_noise(SMALL, 4, torch.Generator())
    grads, _ = swin_training.gradient(run, images, labels, noise)
    frozen, _ = swin_training.gradient(dataclasses.replace(run, frozen=True), images, labels, noise)
    expected, _ = swin_training.split_experts(grads)
    assert optree.tree_structure(frozen) == optree.tree_structure(expected)
    for a, b in zip(optree.tree_leaves(frozen), optree.tree_leaves(expected), strict=True):
        torch.testing.assert_close(a, b)


def make_folder(root, classes, count):
    image = pytest.importorskip("PIL.Image")
    for index, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for n in range(count):
            image.new("RGB", (20, 10), (10 + 100 * index, n, 0)).save(root / name / f"{n}.png")
    return root


def test_a_folder_of_images(tmp_path):
    read = swin_data.read(str(make_folder(tmp_path, ["cat", "dog"], 6)), size=16)
    assert read.classes == ("cat", "dog")
    assert (read.train.shape, read.test.shape) == ((9, 16, 16, 3), (3, 16, 16, 3))
    assert abs(float(read.train.mean())) < 1e-4
    red = torch.cat([read.train, read.test])[:, 0, 0, 0]
    labels = torch.cat([read.train_labels, read.test_labels])
    assert float(red[labels == 0].max()) < float(red[labels == 1].min())


def test_turned_digits_are_the_digits_turned():
    straight, turned = (swin_data.read(name, size=16) for name in ("digits", "turned"))
    torch.testing.assert_close(turned.train, straight.train.rot90(1, (1, 2)), rtol=1e-4, atol=1e-4)
    assert len(straight.test) == 449


def test_what_is_refused(trained, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "there is no such folder" in refused(capsys, "--data", tmp_path / "none")
    (tmp_path / "empty").mkdir()
    assert "at least 2 classes, has 0" in refused(capsys, "--data", tmp_path / "empty")
    pets = make_folder(tmp_path / "pets", ["cat", "dog"], 4)
    line = refused(capsys, "--from", trained / "4.pt", "--data", pets)
    assert "has 10 classes (0, 1, 2, ...)" in line
    assert "has 2 (cat, dog, ...): give --new-head" in line
    (pets / "cat" / "broken.png").write_text("not an image")
    assert "cannot read" in refused(capsys, "--data", pets)
    assert "is a dense model" in refused(capsys, "--from", trained / "dense.pt", "--freeze-experts")
    assert "written over --from" in refused(capsys, "--from", trained / "4.pt", "--out", trained)
    assert "--freeze-experts goes with --from" in refused(capsys, "--freeze-experts")
    assert "No such file" in refused(capsys, "--from", tmp_path / "none.pt")
    (tmp_path / "bad.pt").write_text("nothing")
    assert "not a model that swin_moe wrote" in refused(capsys, "--from", tmp_path / "bad.pt")
    held = torch.load(trained / "4.pt", weights_only=True)
    torch.save({**held, "config": {**held["config"], "experts": 5}}, tmp_path / "other.pt")
    assert "damaged" in refused(capsys, "--from", tmp_path / "other.pt")
    assert "not a multiple of 8" in refused(capsys, "--size", 18)
    assert "--steps" in refused(capsys, "--steps", 0)
    assert "--router" in refused(capsys, "--router", "magic")
    assert not (tmp_path / "runs").exists()


def test_a_loss_that_is_lost(tmp_path, capsys):
    given = ["--steps", "3", "--experts", "2", "--lr", "1e30", "--batch", "8", "--out", str(tmp_path)]
    assert swin_moe.main(given) == 1
    assert "choose a smaller --lr" in capsys.readouterr().err


def test_capacity_is_of_the_batch_and_by_score():
    moe = swin.SwinConfig(experts=8).moe(64)
    assert moe.capacity == fmoe.Capacity(1.25, priority="batch")
    assert moe.router == fmoe.TopK(1)

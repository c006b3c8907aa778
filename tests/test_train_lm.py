"""examples/train_lm.py: what it leaves behind, that it goes on exactly, and what it refuses."""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import optree
import pytest
import torch
from torch.nn import functional as nn

import fmoe

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import lm_checkpoint  # noqa: E402
import lm_model  # noqa: E402
import train_lm  # noqa: E402

SIZES = "--dim 8 --layers 2 --heads 2 --experts 4 --hidden 8 --batch 4 --length 8 --max-bytes 9000"
PACE = "--steps 12 --eval-every 4 --eval-batches 2 --checkpoint-every 5 --warmup 2 --lr 0.02 --sample-bytes 5"


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # for tensors this small a second thread only waits
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog, again and again.\n" * 150)
    return path


@pytest.fixture
def no_pictures(monkeypatch):
    """Leaves out the slowest part of a short run."""
    monkeypatch.setattr(train_lm, "draw", lambda *_: None)


def run(text: Path, out: Path, *extra: str) -> int:
    return train_lm.main([*SIZES.split(), *PACE.split(), "--data", str(text), "--out", str(out), *extra])


def curves(out: Path, name: str = "moe") -> dict:
    """All that must not depend on where a run was stopped: everything but the times."""
    found = json.loads((out / "metrics.json").read_text())["runs"][name]
    final = {f"final_{key}": found["final"][key] for key in ("bits_per_byte", "without_experts")}
    return {key: value for key, value in found.items() if key not in ("seconds", "final")} | final


def snapshot(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory) -> Path:
    """A run that nothing stopped, of both models."""
    out = tmp_path_factory.mktemp("whole")
    assert run(text, out, "--compare-dense") == 0
    return out


def test_as_a_program(text, tmp_path):
    out = tmp_path / "runs" / "tiny"
    command = [
        sys.executable,
        "examples/train_lm.py",
        *SIZES.split(),
        *PACE.split(),
        "--data",
        str(text),
        "--out",
        str(out),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for words in ("validation, bits per byte", "the experts are worth", "bits per byte", "imbalance", "dropped"):
        assert words in done.stdout, words


def test_leaves_curves_pictures_and_a_checkpoint(whole):
    from matplotlib import image

    names = {"checkpoint", "checkpoint.dense", "loss.png", "load.png", "metrics.json"}
    assert {path.name for path in whole.iterdir()} == names
    for name in ("loss.png", "load.png"):
        picture = image.imread(whole / name)
        assert picture.shape[0] > 300
        assert picture.shape[1] > 600
        assert picture[..., :3].std() > 0.05, "an empty picture"
    metrics = json.loads((whole / "metrics.json").read_text())
    assert (metrics["format"], metrics["version"], metrics["text"]["bytes"]) == ("fmoe-lm-metrics", 1, 9000)
    moe, dense = metrics["runs"]["moe"], metrics["runs"]["dense"]
    assert len(moe["bits_per_byte"]) == len(moe["seconds"]) == len(moe["learning_rate"]) == 12
    assert [step for step, _ in moe["validation"]] == [4, 8, 12]
    counts = torch.tensor(moe["counts"])
    assert counts.shape == (12, 2, 4)
    assert (counts.sum(2) == 4 * 8 * 2).all()
    assert torch.tensor(moe["dropped"]).eq(0).all()
    assert torch.tensor(dense["counts"]).numel() == 0
    assert moe["final"]["bits_per_byte"] < moe["bits_per_byte"][0] - 1
    assert dense["final"]["bits_per_byte"] < dense["bits_per_byte"][0] - 1
    # the dense layer does the arithmetic of the active experts; the router is all that it lacks
    assert moe["final"]["active_parameters"] - dense["final"]["active_parameters"] == 2 * 8 * 4


@pytest.mark.usefixtures("no_pictures")
def test_drops_are_counted(text, tmp_path):
    assert run(text, tmp_path, "--capacity", "0.5", "--steps", "2") == 0
    counts, dropped = curves(tmp_path)["counts"], curves(tmp_path)["dropped"]
    limit = math.ceil(0.5 * 2 * 32 / 4)
    assert dropped == [[sum(max(0, n - limit) for n in layer) for layer in step] for step in counts]


def interrupt_at(monkeypatch, times: int, count: int = 1, number: int = signal.SIGINT) -> None:
    """Sends Ctrl-C in the middle of the step that evaluates for the `times`-th time."""
    original, calls = lm_model.evaluate, []

    def evaluate(*args, **kwargs):
        calls.append(None)
        if len(calls) == times:
            for _ in range(count):
                signal.raise_signal(number)
        return original(*args, **kwargs)

    monkeypatch.setattr(lm_model, "evaluate", evaluate)


def test_interrupt_saves_and_resume_goes_on_exactly(text, whole, tmp_path, monkeypatch, capsys):
    handler = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patched:
        interrupt_at(patched, times=2)
        assert run(text, tmp_path, "--compare-dense") == 130
    assert signal.getsignal(signal.SIGINT) == handler
    out = capsys.readouterr().out
    assert "stopped" in out
    assert "the experts are worth" in out
    assert len(curves(tmp_path)["bits_per_byte"]) == 8
    assert (tmp_path / "load.png").exists()
    # the options come from the checkpoint; the dense run has not begun
    assert train_lm.main(["--out", str(tmp_path), "--resume", "--compare-dense"]) == 0
    assert curves(tmp_path) == curves(whole)
    assert curves(tmp_path, "dense") == curves(whole, "dense")


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(("times", "step"), [(1, 0), (2, 5)])
def test_goes_on_from_a_periodic_checkpoint(text, whole, tmp_path, monkeypatch, capsys, times, step):
    with monkeypatch.context() as patched:
        interrupt_at(patched, times=times, count=2)  # at step 4 or 8, without a last checkpoint
        assert run(text, tmp_path) == 130
    assert capsys.readouterr().err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    assert json.loads((tmp_path / "checkpoint" / "run.json").read_text())["step"] == step
    assert train_lm.main(["--out", str(tmp_path), "--resume"]) == 0
    assert curves(tmp_path) == curves(whole)
    assert not (tmp_path / "checkpoint.previous").exists()


def test_sigterm_ends_a_run_at_once(text, tmp_path, monkeypatch, capsys):
    handler = signal.getsignal(signal.SIGTERM)
    interrupt_at(monkeypatch, times=1, number=signal.SIGTERM)
    assert "ended by SIGTERM" in refused(
        [*SIZES.split(), *PACE.split(), "--data", str(text), "--out", str(tmp_path)], capsys, code=143
    )
    assert signal.getsignal(signal.SIGTERM) == handler
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("extra", [("--dtype", "float64"), ("--dtype", "bfloat16", "--capacity", "1.0")])
def test_other_precisions_and_capacities_go_on_exactly(text, tmp_path, monkeypatch, extra):
    assert run(text, tmp_path / "whole", *extra) == 0
    with monkeypatch.context() as patched:
        interrupt_at(patched, times=1)
        assert run(text, tmp_path / "parts", *extra) == 130
    assert train_lm.main(["--out", str(tmp_path / "parts"), "--resume"]) == 0
    assert curves(tmp_path / "whole") == curves(tmp_path / "parts")


@pytest.mark.usefixtures("no_pictures")
def test_under_a_plan_one_process_learns_the_same(text, whole, tmp_path, capsys):
    assert run(text, tmp_path, "--plan", "cycle", "--show-program") == 0
    out = capsys.readouterr().out
    assert "pipeline=2" in out
    assert "forward@device" in out
    planned, plain = curves(tmp_path), curves(whole)
    assert planned["bits_per_byte"] == pytest.approx(plain["bits_per_byte"], rel=1e-4)
    assert planned["counts"] == plain["counts"]


@pytest.mark.usefixtures("no_pictures")
def test_a_stop_in_the_dense_run_goes_on_exactly(text, whole, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        interrupt_at(patched, times=4)
        assert run(text, tmp_path, "--compare-dense") == 130
    assert len(curves(tmp_path, "dense")["bits_per_byte"]) == 4
    assert train_lm.main(["--out", str(tmp_path), "--resume", "--compare-dense"]) == 0
    assert curves(tmp_path, "dense") == curves(whole, "dense")


@pytest.mark.usefixtures("no_pictures")
def test_resume_of_a_finished_run_reports_again_and_may_go_further(whole, tmp_path):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    assert train_lm.main(["--out", str(tmp_path), "--resume"]) == 0
    assert curves(tmp_path) == curves(whole)
    assert train_lm.main(["--out", str(tmp_path), "--resume", "--steps", "14"]) == 0
    assert curves(tmp_path)["bits_per_byte"][:12] == curves(whole)["bits_per_byte"]
    assert len(curves(tmp_path)["bits_per_byte"]) == 14


@pytest.mark.usefixtures("no_pictures")
def test_a_new_run_keeps_the_old_checkpoint(text, whole, tmp_path):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    assert run(text, tmp_path, "--steps", "1") == 0
    for name in ("checkpoint", "checkpoint.dense"):
        assert snapshot(tmp_path / f"{name}.previous") == snapshot(whole / name)
    assert not (tmp_path / "checkpoint.dense").exists()
    again = snapshot(tmp_path / "checkpoint")
    assert run(text, tmp_path, "--steps", "1", "--lr", "0.01") == 0
    assert snapshot(tmp_path / "checkpoint.previous") == again
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


def refused(argv: list[str], capsys, code: int = 2) -> str:
    assert train_lm.main(argv) == code
    captured = capsys.readouterr()
    assert captured.err.startswith("train_lm: ")
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ("--steps 0", "argument --steps: 0 is not from 1"),
        ("--steps many", "argument --steps: 'many' is not a whole number"),
        ("--batch -3", "argument --batch: -3 is not from 1"),
        ("--top-k 5", "--top-k 5 is more than --experts 4"),
        ("--heads 3", "--dim 8 over --heads 3 must be an even whole number"),
        ("--heads 8", "--dim 8 over --heads 8 must be an even whole number"),
        ("--capacity full", "argument --capacity: 'full' is not a number"),
        ("--capacity -1", "argument --capacity: -1 is not a finite number of at least 0"),
        ("--lr nan", "argument --lr: nan is not a finite number above 0"),
        ("--lr 0", "argument --lr: 0 is not a finite number above 0"),
        ("--dtype int8", "argument --dtype: 'int8' is not one of float32, float64, bfloat16"),
        ("--temperature -1", "argument --temperature: -1 is not a finite number of at least 0"),
        ("--seed -1", "argument --seed: -1 is not from 0"),
        ("--plan sideways", "argument --plan: Plan.parse('sideways'): it must begin with one of dp, ep"),
        ("--plan ep r=2", "r=2 is not available. 1 ranks hold the experts in 1 parts"),
        ("--timeout 0", "argument --timeout: 0 is not a finite number above 0"),
        ("--colour red", "unrecognized arguments: --colour red"),
        ("--data no/such/place", "--data no/such/place: there is no such file or folder"),
        ("--data /dev/null", "--data /dev/null: there is no such file or folder"),
        ("--length 2000", "9000 bytes are too few: --length 2000 needs at least 20010"),
        ("--resume --dim 16", "was made with --dim 8, which --dim 16 cannot go on from"),
        ("--resume --seed 1", "was made with --seed 0, which --seed 1 cannot go on from"),
        ("--resume --steps 11", "is at step 12, past --steps 11"),
        ("--resume --max-bytes 8999", "was trained on another text"),
    ],
)
def test_refuses_in_one_line_and_touches_nothing(text, whole, capsys, extra, words):
    before = snapshot(whole)
    flag, *values = extra.split(maxsplit=1 if extra.startswith("--plan") else -1)
    argv = [*SIZES.split(), *PACE.split(), "--data", str(text), "--out", str(whole), flag, *values]
    assert words in refused(argv, capsys)
    assert snapshot(whole) == before


def test_refuses_text_that_is_none(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / ".hidden").write_text("not read")
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "short.txt").write_bytes(b"a few words")
    out = tmp_path / "out"
    for name, words in (("empty", "holds no text"), ("empty.txt", "holds no text"), ("short.txt", "too few")):
        assert words in refused([*SIZES.split(), "--data", str(tmp_path / name), "--out", str(out)], capsys)
    assert not out.exists()


def damage(checkpoint: Path, kind: str) -> None:
    """Spoils a good checkpoint: one of its files, or what it says of itself."""
    about = checkpoint / "run.json"
    files = {"run.json": about, "metadata": checkpoint / ".metadata", "tensors": next(checkpoint.glob("*.distcp"))}
    how, _, what = kind.partition(" ")
    if what in files:
        good = files[what].read_bytes()
        spoilt = {"empty": b"", "truncated": good[: len(good) // 2], "noise": b"noise" * 99}
        files[what].unlink() if how == "lost" else files[what].write_bytes(spoilt[how])
        return
    saved = json.loads(about.read_text())
    if kind == "foreign":
        saved = {"a": 1}
    elif kind == "short curve":
        saved["step"] -= 1
    elif kind == "no options":
        del saved["options"]
    elif kind == "bad validation":
        saved["validation"] = [1, 2]
    about.write_text(json.dumps(saved))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        *(
            (f"{how} {what}", "not a checkpoint, or one cut short")
            for how in ("empty", "truncated", "noise", "lost")
            for what in ("run.json", "metadata", "tensors")
        ),
        ("foreign", "not a checkpoint of this program"),
        (
            "short curve",
            "a damaged checkpoint: curves.bits is float64[12], not float64[11]; curves.counts is int64[12,2,4],",
        ),
        ("no options", "a damaged checkpoint"),
        ("bad validation", "a damaged checkpoint"),
    ],
)
def test_refuses_bad_checkpoints(whole, tmp_path, capsys, kind, words):
    shutil.copytree(whole / "checkpoint", tmp_path / "checkpoint")
    shutil.copy(whole / "load.png", tmp_path)
    damage(tmp_path / "checkpoint", kind)
    before = snapshot(tmp_path)
    assert words in refused(["--out", str(tmp_path), "--resume"], capsys)
    assert snapshot(tmp_path) == before


@pytest.mark.usefixtures("no_pictures")
def test_names_every_tensor_of_another_model(text, whole, tmp_path, capsys):
    assert run(text, tmp_path, "--steps", "12", "--layers", "1", "--hidden", "9") == 0
    shutil.copy(whole / "checkpoint" / "run.json", tmp_path / "checkpoint")
    before = snapshot(tmp_path)
    capsys.readouterr()
    message = refused(["--out", str(tmp_path), "--resume"], capsys)
    assert "a checkpoint of another model" in message
    block = ("norm_attention", "qkv", "out", "norm_ffn", "ffn.router.weight", "ffn.experts.w_in", "ffn.experts.w_out")
    for kind in ("params", "exp_avg", "exp_avg_sq"):
        for leaf in block:
            assert f"{kind}.blocks.1.{leaf} is missing" in message
        assert f"{kind}.blocks.0.ffn.experts.w_in is float32[4,8,2,9], not float32[4,8,2,8]" in message
        assert f"{kind}.blocks.0.ffn.experts.w_out is float32[4,9,8], not float32[4,8,8]" in message
    assert "curves.dropped is int64[12,1], not int64[12,2]" in message
    assert message.count(";") == 3 * (len(block) + 2) + 2 - 1, "other tensors are named too"
    assert snapshot(tmp_path) == before


def test_finds_the_checkpoint_in_the_middle_of_its_replacement(whole, tmp_path):
    put = lm_checkpoint.put
    shutil.copytree(whole / "checkpoint", tmp_path / "checkpoint")
    expected = lm_checkpoint.read(tmp_path / "checkpoint").tensors
    (tmp_path / "checkpoint").rename(tmp_path / ".checkpoint.replaced")  # where a kill between two moves leaves it
    assert lm_checkpoint.read(tmp_path / "checkpoint").tensors == expected
    shutil.copytree(whole / "checkpoint", tmp_path / ".checkpoint.new")
    put(tmp_path / ".checkpoint.new", tmp_path / "checkpoint")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    assert lm_checkpoint.read(tmp_path / "checkpoint").tensors == expected


def test_a_full_disk_leaves_the_earlier_checkpoint(whole, tmp_path, capsys):
    shutil.copytree(whole / "checkpoint", tmp_path / "checkpoint")
    before = snapshot(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, limits[1]))  # less than the tensors take
    try:
        assert "cannot write" in refused(["--out", str(tmp_path), "--resume", "--steps", "13"], capsys, code=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert snapshot(tmp_path) == before


def test_refuses_folders_it_cannot_use(text, tmp_path, capsys):
    assert "leave --resume out to begin" in refused(["--out", str(tmp_path / "none"), "--resume"], capsys)
    (tmp_path / "file").write_text("mine")
    argv = [*SIZES.split(), *PACE.split(), "--data", str(text), "--out"]
    assert "File exists" in refused([*argv, str(tmp_path / "file")], capsys)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_loss_that_is_not_finite_ends_the_run(text, tmp_path, capsys):
    assert "choose a smaller --lr" in refused(
        [*SIZES.split(), *PACE.split(), "--data", str(text), "--out", str(tmp_path), "--lr", "1e30"], capsys, code=1
    )


def small_model(dense: int | None = None) -> tuple[lm_model.Params, lm_model.LMConfig]:
    moe = fmoe.MoEConfig(num_experts=4, model_dim=8, hidden_dim=6)
    config = lm_model.LMConfig(8, 2, 2, moe, dense, torch.float64)
    return lm_model.init(config, seed=3), config


@pytest.mark.parametrize("dense", [None, 12])
def test_silenced_experts_leave_attention_alone(dense):
    params, config = small_model(dense)
    tokens = torch.randint(0, 256, (3, 7), generator=torch.Generator().manual_seed(0))
    x = params["embed"][tokens]
    for block in params["blocks"]:
        rotation = lm_model.rotary(7, 4, like=x)
        x = x + lm_model.attention(block, lm_model.rms_norm(x, block["norm_attention"]), rotation, 2)
    expected = lm_model.rms_norm(x, params["norm"]) @ params["head"]
    logits, _ = lm_model.forward(lm_model.without_experts(params), tokens, config)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)
    assert (lm_model.forward(params, tokens, config)[0] - expected).abs().max() > 0.01


def test_is_causal_and_attends():
    params, config = small_model()
    tokens = torch.randint(0, 256, (1, 9), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 4] = (changed[0, 4] + 1) % 256
    a, b = (lm_model.forward(params, t, config)[0][0] for t in (tokens, changed))
    torch.testing.assert_close(a[:4], b[:4], rtol=0, atol=1e-12)
    assert ((a - b).abs().amax(1)[4:] > 1e-6).all()


def test_evaluate_is_the_mean_over_windows():
    params, config = small_model()
    text = torch.randint(0, 256, (50,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    got = lm_model.evaluate(
        lambda windows: lm_model.cross_entropy(params, windows, config)[0], text, batch=2, length=9, batches=9
    )
    nats = []
    for start in range(0, 45, 9):  # all five windows of 9 that fit, though 18 were asked for
        window = text[start : start + 10].long()
        logits, _ = lm_model.forward(params, window[None, :-1], config)
        nats.append(nn.cross_entropy(logits[0], window[1:]))
    assert got == pytest.approx(float(torch.stack(nats).mean()) / math.log(2), rel=1e-12)


def test_gradients_are_those_of_autograd():
    params, config = small_model()
    windows = lm_model.training_windows(torch.arange(200, dtype=torch.uint8), seed=0, step=1, batch=2, length=6)
    grads, _ = torch.func.grad_and_value(lm_model.objective, has_aux=True)(params, windows, config)
    router = params["blocks"][0]["ffn"].router.weight.requires_grad_()
    lm_model.objective(params, windows, config)[0].backward()
    torch.testing.assert_close(grads["blocks"][0]["ffn"].router.weight, router.grad)


def test_gradients_are_the_same_in_every_run_on_two_threads():
    moe = fmoe.MoEConfig(num_experts=2, model_dim=64, hidden_dim=8)
    config = lm_model.LMConfig(64, 1, 2, moe)
    params = lm_model.init(config, seed=0)
    text = torch.frombuffer(bytearray(b"if x:\n    return self\n" * 200), dtype=torch.uint8)
    windows = lm_model.training_windows(text, seed=0, step=0, batch=16, length=128)
    torch.set_num_threads(2)
    try:
        gradient = torch.func.grad(lambda p: lm_model.objective(p, windows, config)[0])
        first, second = (optree.tree_leaves(gradient(params)) for _ in range(2))
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_batches_depend_on_seed_and_step_alone():
    text = torch.arange(250, dtype=torch.uint8)
    draw = {"batch": 512, "length": 200}
    a = lm_model.training_windows(text, seed=1, step=7, **draw)
    assert torch.equal(a, lm_model.training_windows(text, seed=1, step=7, **draw))
    assert not torch.equal(a, lm_model.training_windows(text, seed=1, step=8, **draw))
    assert not torch.equal(a, lm_model.training_windows(text, seed=2, step=7, **draw))
    assert torch.equal(a, a[:, :1] + torch.arange(201))
    assert a[:, 0].min() >= 0
    assert a[:, -1].max() == 249, "the last byte is never seen"


def test_text_of_files_and_folders(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "one.txt").write_bytes(b"222")
    (tmp_path / "a.txt").write_bytes(b"111")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "x").write_bytes(b"no")
    assert lm_model.read_text(str(tmp_path), 100) == b"111222"
    assert lm_model.read_text(str(tmp_path), 4) == b"1112"
    assert lm_model.read_text(str(tmp_path / "a.txt"), 2) == b"11"
    train, validation = lm_model.split_text(bytes(range(100)), "", 9)
    assert torch.cat([train, validation]).tolist() == list(range(100))
    assert len(validation) == 10
    assert b"import" in lm_model.read_text(lm_model.STDLIB, 100_000)


def test_samples_are_seeded_and_as_cold_as_asked():
    params, config = small_model()
    draw = {"length": 6, "temperature": 1.0}
    first = lm_model.generate(params, config, b"ab", 20, seed=0, **draw)
    assert len(first) == 20
    assert first == lm_model.generate(params, config, b"ab", 20, seed=0, **draw)
    assert first != lm_model.generate(params, config, b"ab", 20, seed=1, **draw)
    cold = lm_model.generate(params, config, b"ab", 3, length=6, temperature=0, seed=0)
    logits, _ = lm_model.forward(params, torch.tensor([list(b"ab")]), config)
    assert cold[0] == int(logits[0, -1].argmax())
    assert cold == lm_model.generate(params, config, b"ab", 3, length=6, temperature=1e-6, seed=5)


def test_without_matplotlib_there_are_no_pictures(whole, tmp_path, monkeypatch, capsys):
    shutil.copytree(whole / "checkpoint", tmp_path / "checkpoint")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert train_lm.main(["--out", str(tmp_path), "--resume"]) == 0
    assert "no pictures: matplotlib is not installed" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint", "metrics.json"}

"""examples/train_lm.py on several processes: no plan and no number of them changes what is learned."""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import lm_ranks  # noqa: E402
import train_lm  # noqa: E402

# three sequences: two ranks have 2 and 1 of them, and of four ranks one has none
SIZES = "--dim 8 --layers 2 --heads 2 --experts 4 --hidden 8 --batch 3 --length 8 --max-bytes 9000 --dtype float64"
PACE = "--steps 60 --eval-every 20 --eval-batches 2 --checkpoint-every 25 --warmup 2 --lr 0.02 --sample-bytes 3"
SHORT = ("--experts", "2", "--steps", "4", "--eval-every", "2", "--prompt", "x")
PLANS = ("cycle", "dp", "ep r=1 layout=ragged", "ep r=1 pipeline=2 layout=padded")
TIMEOUT = 60


@dataclass(frozen=True)
class Case:
    """One call of the program on every rank; `send` gives a signal to a rank in the middle of a step."""

    arguments: tuple[str, ...]
    send: tuple[int, int, int] | None = None  # rank, step, signal


@dataclass(frozen=True)
class Ended:
    """How a call ended on one rank."""

    code: int
    out: str
    err: str
    seconds: float


def arguments(text: Path, out: Path, *extra: str) -> tuple[str, ...]:
    return (*SIZES.split(), *PACE.split(), "--data", str(text), "--out", str(out), *extra)


def work(rank: int, world: int, folder: str, cases: Sequence[Case]) -> None:
    """Runs the cases one after another as `rank`, and leaves how each ended in `folder`."""
    torch.set_num_threads(1)
    train_lm.draw = lambda *_: None
    begin = lm_ranks.Runner.begin
    os.environ["LOCAL_WORLD_SIZE"] = str(world)
    for number, case in enumerate(cases):

        def join(timeout: float, number: int = number) -> lm_ranks.Ranks:
            # a file instead of torchrun's store, which has one name for all process groups that follow each other
            limit = datetime.timedelta(seconds=timeout)
            where = f"file://{folder}/store{number}"
            dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world, timeout=limit)
            return lm_ranks.Ranks(world, rank, joined=True)

        def begin_and_send(runner: lm_ranks.Runner, step: int, case: Case = case) -> None:
            begin(runner, step)
            if case.send is not None and case.send[:2] == (rank, step):
                os.kill(os.getpid(), case.send[2])

        lm_ranks.join, lm_ranks.Runner.begin = join, begin_and_send
        out, err, started = io.StringIO(), io.StringIO(), time.monotonic()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = train_lm.main(list(case.arguments))
        ended = [code, out.getvalue(), err.getvalue(), time.monotonic() - started]
        Path(folder, f"ended{number}.{rank}").write_text(json.dumps(ended))


def launch(folder: Path, world: int, cases: Sequence[Case]) -> list[list[Ended | None]]:
    """For each case, how it ended on each rank; None for a rank that was killed."""
    folder.mkdir()
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=work, args=(rank, world, str(folder), cases)) for rank in range(world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
        assert process.exitcode is not None, "a rank hangs"
    files = [[folder / f"ended{number}.{rank}" for rank in range(world)] for number in range(len(cases))]
    return [[Ended(*json.loads(f.read_text())) if f.exists() else None for f in ranks] for ranks in files]


def curves(out: Path) -> tuple[torch.Tensor, list]:
    """Losses in training and validation and at the end, and what each expert was given at each step."""
    found = json.loads((out / "metrics.json").read_text())["runs"]["moe"]
    final = [found["final"]["bits_per_byte"], found["final"]["without_experts"]]
    bits = [*found["bits_per_byte"], *(bits for _, bits in found["validation"]), *final]
    return torch.tensor(bits, dtype=torch.float64), [found["counts"], found["dropped"]]


def assert_same_curves(a: Path, b: Path) -> None:
    (bits, load), (expected, expected_load) = curves(a), curves(b)
    torch.testing.assert_close(bits, expected, rtol=0, atol=1e-8)
    assert load == expected_load


def files(folder: Path) -> dict[str, bytes]:
    found = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog, again and again.\n" * 150)
    return path


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def alone(text, tmp_path_factory) -> Path:
    """One process, no plan: all 60 steps, and a short run of fewer experts."""
    folder = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_lm, "draw", lambda *_: None)
        assert train_lm.main(list(arguments(text, folder / "long"))) == 0
        assert train_lm.main(list(arguments(text, folder / "short", *SHORT))) == 0
        assert train_lm.main(list(arguments(text, folder / "other", "--layers", "1", "--steps", "1"))) == 0
    return folder


@pytest.fixture(scope="module")
def two(text, alone, tmp_path_factory) -> tuple[Path, dict[str, list[Ended | None]]]:
    """Two ranks: every plan, a Ctrl-C that one of them gets, a checkpoint of another model, and a death."""
    folder = tmp_path_factory.mktemp("two")
    other = folder / "other"
    shutil.copytree(alone / "other" / "checkpoint", other / "checkpoint")
    shutil.copy(alone / "long" / "checkpoint" / "run.json", other / "checkpoint")
    cases = {plan: Case(arguments(text, folder / plan, "--plan", plan)) for plan in PLANS}
    both = ("--compare-dense", "--show-program", "--plan", "ep")
    cases["dense"] = Case(arguments(text, folder / "dense", *SHORT, *both))
    cases["stopped"] = Case(arguments(text, folder / "stopped", "--plan", "dp"), send=(1, 12, signal.SIGINT))
    cases["other"] = Case(("--out", str(other), "--resume"))
    cases["refused"] = Case(arguments(text, folder / "refused", "--plan", "ep r=2"))
    killed = arguments(text, folder / "killed", "--plan", "cycle", "--timeout", str(TIMEOUT))
    cases["killed"] = Case(killed, send=(1, 52, signal.SIGKILL))
    return folder, dict(zip(cases, launch(folder / "ranks", 2, list(cases.values())), strict=True))


@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_on_two_ranks_learns_what_one_process_does(alone, two, plan):
    folder, ended = two
    assert [rank.code for rank in ended[plan]] == [0, 0], ended[plan]
    assert_same_curves(folder / plan, alone / "long")
    bits, (counts, _) = curves(folder / plan)
    assert bits[59] < bits[0] - 1
    assert (torch.tensor(counts).sum(2) == 3 * 8 * 2).all(), "the counts are those of all ranks"


def test_only_rank_0_prints(two):
    first, second = two[1]["cycle"]
    assert "the experts are worth" in first.out
    assert first.err == second.out == second.err == ""


def test_the_dense_model_and_the_program(two):
    folder, ended = two
    assert [rank.code for rank in ended["dense"]] == [0, 0], ended["dense"]
    assert "against the dense model" in ended["dense"][0].out
    assert "all_to_all" in ended["dense"][0].out
    dense = json.loads((folder / "dense" / "metrics.json").read_text())["runs"]["dense"]
    assert dense["bits_per_byte"][-1] < dense["bits_per_byte"][0]


def test_ctrl_c_on_one_rank_stops_all(alone, two, tmp_path, monkeypatch):
    folder, ended = two
    assert [rank.code for rank in ended["stopped"]] == [130, 130], ended["stopped"]
    assert "stopped: --resume goes on from here" in ended["stopped"][0].out
    assert json.loads((folder / "stopped" / "checkpoint" / "run.json").read_text())["step"] == 12
    shutil.copytree(folder / "stopped", tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(train_lm, "draw", lambda *_: None)
    assert train_lm.main(["--out", str(tmp_path), "--resume"]) == 0
    assert_same_curves(tmp_path, alone / "long")


def test_refusals_are_the_same_on_every_rank_and_printed_once(two):
    folder, ended = two
    for name, words in (
        ("other", "a checkpoint of another model: "),
        ("refused", "--plan ep r=2: r=2 is not available"),
    ):
        first, second = ended[name]
        assert (first.code, second.code) == (2, 2)
        assert words in first.err
        assert first.err.count("\n") == 1
        assert second.err == ""
    assert sorted(files(folder / "other")) == [
        f"checkpoint/{name}" for name in (".metadata", "__0_0.distcp", "run.json")
    ]
    assert not (folder / "refused").exists()
    message = ended["other"][0].err
    for kind in ("params", "exp_avg", "exp_avg_sq"):
        for leaf in ("norm_attention", "qkv", "out", "norm_ffn", "ffn.router.weight", "ffn.experts.w_in"):
            assert f"{kind}.blocks.1.{leaf} is missing" in message
    assert "blocks.0" not in message


def test_the_death_of_a_rank_ends_the_others(two):
    folder, ended = two
    survivor, killed = ended["killed"]
    assert killed is None
    assert survivor.code == 1
    assert survivor.seconds < TIMEOUT
    assert survivor.err.startswith("train_lm: rank 0: another rank is gone or late; --resume goes on from")
    assert survivor.err.count("\n") == 1
    assert [path.name for path in (folder / "killed").iterdir()] == ["checkpoint"]
    assert json.loads((folder / "killed" / "checkpoint" / "run.json").read_text())["step"] == 50


def test_goes_on_after_a_death_on_one_process(alone, two, tmp_path, monkeypatch):
    shutil.copytree(two[0] / "killed", tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(train_lm, "draw", lambda *_: None)
    assert train_lm.main(["--out", str(tmp_path), "--resume"]) == 0
    assert_same_curves(tmp_path, alone / "long")


def test_goes_on_after_a_death_on_two_processes_of_torchrun(alone, two, tmp_path):
    shutil.copytree(two[0] / "killed", tmp_path, dirs_exist_ok=True)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [*torchrun, "examples/train_lm.py", "--out", str(tmp_path), "--resume"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the experts are worth") == 1
    assert_same_curves(tmp_path, alone / "long")


def test_four_ranks_of_which_one_has_no_tokens(text, alone, two, tmp_path):
    resumed, short = tmp_path / "resumed", ["ep r=2", "ep r=2 mp=gather pipeline=2 layout=padded"]
    shutil.copytree(two[0] / "killed", resumed)
    cases = [Case(("--out", str(resumed), "--resume"))]
    cases += [Case(arguments(text, tmp_path / plan, *SHORT, "--plan", plan)) for plan in short]
    for ended in launch(tmp_path / "ranks", 4, cases):
        assert [rank.code for rank in ended] == [0] * 4, ended
    assert_same_curves(resumed, alone / "long")
    for plan in short:
        assert_same_curves(tmp_path / plan, alone / "short")

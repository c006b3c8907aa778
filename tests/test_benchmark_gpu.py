"""`benchmarks/gpu.py` runs whole on a CPU, in small, so that it is known to work where there is a GPU."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
FAST = ["--device", "cpu", "--seconds", "0", "--rounds", "2"]


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return pytest.importorskip("gpu")


def test_everything_runs_and_is_written(gpu, tmp_path, capsys):
    path = tmp_path / "report.json"
    given = ["--configs", "qwen3", "decode", "--contenders", "fmoe", "dense", "grouped_mm", "--json", str(path)]
    report = gpu.main([*FAST, *given])
    assert json.loads(path.read_text()) == json.loads(json.dumps(report))
    assert report["skipped"] == []
    on_gpus = {"no_host_reads", "captured_graph", "compiled"}
    assert set(report["checks"]) == set(gpu.CHECKS)
    for name, found in report["checks"].items():
        assert found.startswith("skipped: " if name in on_gpus else "ok: "), (name, found)
    assert [(c["config"], c["mode"]) for c in report["cells"]] == [
        ("qwen3", "forward"), ("qwen3", "train"), ("decode", "forward"),
    ]  # fmt: skip
    for cell in report["cells"]:
        assert set(cell["contenders"]) == {"fmoe", "dense", "grouped_mm"}
        for of in cell["contenders"].values():
            assert 0 < of["min"] <= of["q1"] <= of["ms"] <= of["q3"]
            assert of["tflops"] > 0
            assert {"of_matmul", "of_copy"} <= set(of)
    assert [c["check"][:3] for c in report["cells"] if c["mode"] == "forward"] == ["ok:"] * 2
    shape = gpu.shrunk(gpu.SHAPES["qwen3"]).layer
    rows = shape.tokens * shape.k
    memory = report["cells"][1]["contenders"]["fmoe"]["memory"]
    z = 2 * 2 * rows * shape.hidden_dim  # bf16, gated
    assert z <= 1e9 * memory["saved_gb"] < z + 8 * shape.tokens * (shape.model_dim + 8 * shape.experts + 8 * shape.k)
    assert report["cells"][2]["reading"]["gb"] == shape.experts * 3 * shape.model_dim * shape.hidden_dim * 2 / 1e9
    assert [r["op"] for r in report["rows"]] == ["encode", "decode"]
    assert all(r["gb"] == (rows + shape.tokens) * shape.model_dim * 2 / 1e9 for r in report["rows"])
    printed = capsys.readouterr().out
    assert "450 TFLOP/s; 1.5x grouped_mm" in printed
    assert printed.rstrip().endswith("failed: none")


def test_bytes_and_flops_of_the_layers(gpu):
    """As counted by hand for the layers that are timed: forward and training, in TFLOP and GB."""
    wanted = {
        "mixtral": (23.1, 69.3, 12.0, 12.0 + 26.6),
        "qwen3": (2.47, 7.42, 5.23, 5.23 + 9.13),
        "deepseek3": (11.5, 34.6, 9.19, 9.19 + 15.7),
    }
    for name, (forward, train, least, least_train) in wanted.items():
        shape = gpu.SHAPES[name]
        assert gpu.flops("fmoe", shape, False) / 1e12 == pytest.approx(forward, rel=0.01)
        assert gpu.flops("fmoe", shape, True) / 1e12 == pytest.approx(train, rel=0.01)
        assert gpu.least_bytes(shape, False) / 1e9 == pytest.approx(least, rel=0.01)
        assert gpu.least_bytes(shape, True) / 1e9 == pytest.approx(least_train, rel=0.01)


def test_what_does_not_fit_is_skipped_and_said(gpu, capsys):
    report = gpu.main([*FAST, "--budget", "5.5", "--configs", "qwen3", "--contenders", "fmoe"])
    assert report["checks"] == {}
    assert report["cells"] == report["rows"] == []
    assert len(report["skipped"]) == len(gpu.CHECKS) + 3
    assert "skipped qwen3 train: it may take 6 s, and " in capsys.readouterr().out


def test_a_contender_that_fails_stops_no_other(gpu, monkeypatch):
    def broken(problem):
        raise RuntimeError("no kernel\nfor you")

    def other(problem):
        made = gpu.fmoe_layer(problem)
        return dataclasses.replace(made, run=lambda: made.run().flip(0))

    for name, maker in (("transformers", broken), ("grouped_mm", other)):
        monkeypatch.setitem(gpu.CONTENDERS, name, (maker, True, 3))
    monkeypatch.setattr(gpu, "PACKAGES", ())
    given = ["--no-checks", "--configs", "decode", "--contenders", "fmoe", "transformers", "grouped_mm", "dense"]
    (cell,) = gpu.main([*FAST, *given])["cells"]
    numbers = cell["contenders"]
    assert numbers["transformers"] == {"error": "RuntimeError: no kernel"}
    assert numbers["grouped_mm"]["error"].startswith("AssertionError: grouped_mm against fmoe: error ")
    assert numbers["fmoe"]["ms"] > 0
    assert numbers["dense"]["ms"] > 0


def test_checks_find_what_is_wrong(gpu, monkeypatch, capsys):
    import gpu_checks
    from gpu_measure import poisoned

    device = torch.device("cpu")
    with poisoned(device):
        assert torch.empty(3).isnan().all()
    right = gpu_checks.fmoe.moe
    a_row = torch.zeros(1, dtype=torch.int64)
    ways = {
        "error": lambda y: y * 1.05,
        "that nobody wrote": lambda y: y.index_copy(0, a_row, torch.empty_like(y[:1])),
    }
    for message, wrong in ways.items():

        def moe(p, x, config, wrong=wrong, **more):
            y, aux = right(p, x, config, **more)
            return (wrong(y), aux) if len(x) else (y, aux)

        monkeypatch.setattr(gpu_checks.fmoe, "moe", moe)
        found = gpu.outcome(lambda: gpu_checks.odd_shapes(device))
        assert found.startswith("FAILED: AssertionError: ")
        assert message in found
    noisy = lambda p, x, config, **k: (right(p, x, config, **k)[0] + torch.rand(()), None)  # noqa: E731
    monkeypatch.setattr(gpu_checks.fmoe, "moe", noisy)
    assert gpu.outcome(lambda: gpu_checks.same_twice(device)) == "FAILED: AssertionError: two runs differ"


def test_without_rich_the_table_is_plain(gpu, monkeypatch, capsys):
    for name in ("rich", "rich.console", "rich.table"):
        monkeypatch.setitem(sys.modules, name, None)
    report = gpu.main([*FAST, "--no-checks", "--configs", "decode", "--contenders", "fmoe"])
    assert report["cells"][0]["contenders"]["fmoe"]["ms"] > 0
    assert "layer   mode     contender" in capsys.readouterr().out


def test_what_is_missing_is_said_in_a_line(gpu):
    code = "import sys; sys.modules['numpy'] = None; sys.path.insert(0, sys.argv[1]); import gpu"
    found = subprocess.run([sys.executable, "-c", code, str(BENCHMARKS)], capture_output=True, text=True)
    assert found.returncode == 1
    assert found.stderr.strip().splitlines()[-1].startswith("gpu.py: fmoe cannot be imported here: ")
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match="torch sees no GPU here; --device cpu runs the script on small layers"):
            gpu.main([])

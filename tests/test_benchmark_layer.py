"""`benchmarks/layer.py` runs, and its contenders compute the same layer. Nothing here is about time."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
BY_HAND = ["loop", "grouped_mm"]


@pytest.fixture
def layer(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    module = pytest.importorskip("layer")
    monkeypatch.setattr(module, "COPY_BYTES", 2**12)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield module
    torch.set_num_threads(threads)


def tiny(layer):
    return {
        "A": layer.Config("A", 40, 16, 24, 6, 2),
        "D": layer.Config("D", 3, 16, 24, 8, 2, decode=True),
    }


def test_report_has_every_cell_and_field(layer, tmp_path, capsys):
    path = tmp_path / "report.json"
    report = layer.main(["--rounds", "2", "--threads", "1", "--peers", *BY_HAND, "--json", str(path)], tiny(layer))
    assert json.loads(path.read_text()) == json.loads(json.dumps(report))
    assert {"cpu", "cores", "torch", "threads", "environment"} <= set(report["machine"])
    cells = {(c["config"], c["dtype"], c["mode"], c["activation"]): c for c in report["cells"]}
    assert len(cells) == len(report["cells"]) == 2 * 2 * (2 + 1)
    for cell in cells.values():
        assert set(cell["contenders"]) == {"dense", "fmoe", *BY_HAND}
        assert cell["rounds"] == 2
        assert isinstance(cell["others_share"], float)
        assert cell["best_peer"] in BY_HAND
        for numbers in cell["contenders"].values():
            for name in ("ms", "over_dense", "over_fmoe"):
                of = numbers[name]
                assert 0 < of["min"] <= of["q1"] <= of["median"] <= of["q3"]
        assert cell["contenders"]["dense"]["over_dense"]["median"] == 1
        assert (cell["reading"] is not None) == (cell["config"] == "D")
    reading = cells["D", "bf16", "forward", "swiglu"]["reading"]
    assert reading["bytes"] == reading["active_experts"] * 3 * 16 * 24 * 2
    assert {"config", "activation", "dtype", "contender", "errors", "limit"} == set(report["checks"][0])
    assert [len(c["errors"]) for c in report["checks"] if c["dtype"] == "fp32"] == [5] * 6 + [1] * 6
    assert "best peer / fmoe" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_peer_that_computes_something_else_is_found(layer, monkeypatch, dtype):
    loop = layer.PEERS["loop"]

    def wrong(problem):
        peer = loop(problem)
        scale = 1.1 if problem.x.dtype == layer.DTYPES[dtype] else 1
        return dataclasses.replace(peer, run=lambda: scale * peer.run())

    monkeypatch.setitem(layer.PEERS, "loop", wrong)
    with pytest.raises(SystemExit, match=f"loop is not fmoe at A swiglu {dtype}"):
        layer.check(tiny(layer)["A"], "swiglu", ["bf16"], BY_HAND)


def test_profile_prints_ops(layer, capfd):
    argv = "--rounds 1 --threads 1 --configs A --dtypes fp32 --activations relu --peers --profile"
    report = layer.main(argv.split(), tiny(layer))
    assert [c["best_peer"] for c in report["cells"]] == [None, None]
    assert "aten::mm" in capfd.readouterr().out


def test_flops_count_the_matmuls(layer):
    config = tiny(layer)["A"]
    dense, _ = layer.contenders(layer.Problem.draw(config, "swiglu"), [])
    with FlopCounterMode(display=False) as counter:
        layer.once(dense, train=True)
    assert counter.get_total_flops() == config.flops("swiglu", train=True)

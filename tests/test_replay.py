"""`examples/replay_load.py`: a load that swings does not make the plan flap, and what it is worth."""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import sys

import pytest

import fmoe
from fmoe.sharding import presets

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))

import replay_load

SIZES = argparse.Namespace(tokens=4096, model_dim=2048, hidden_dim=2048)


def cluster(layers=1, experts=16, world=8, memory=None):
    traced = replay_load.traced_layers(SIZES, layers, experts, 2)
    spec = fmoe.ShardingSpec(fmoe.make_mesh(experts, world=world, node=8), max_tokens=SIZES.tokens, memory=memory)
    return replay_load.Machine(traced, spec, presets.PRESETS["a100_ndm"])


def way(plan):
    return plan.split()[0]


def crossings(found):
    """How often the better of gathering weights and exchanging tokens changes."""
    better = []
    for step in range(len(found.load)):
        times = {plan: line[step] for plan, line in found.statics.items()}
        better.append(way(min(times, key=times.get)))
    return sum(a != b for a, b in itertools.pairwise(better))


@pytest.fixture(scope="module")
def swung():
    return replay_load.replay(replay_load.make_trace(120, 16, 1), cluster())


def test_a_made_trace_goes_from_the_mean_to_the_bound_and_back():
    trace = replay_load.make_trace(100, 8, 2, ratio=4.0, waves=1.0)
    assert trace[0] == [[1.0] * 8] * 2
    assert max(trace[50][0]) == pytest.approx(4.0)
    assert max(trace[25][1]) == pytest.approx(2.0)
    assert all(sum(layer) == pytest.approx(8) for step in trace for layer in step)


def test_a_swing_across_a_crossover_does_not_flap(swung):
    assert crossings(swung) == 4
    ways = [way(plan) for plan in swung.plans]
    assert sum(a != b for a, b in itertools.pairwise(ways)) == 4
    assert swung.changes <= 6  # and the number of chunks may follow


def test_the_planner_beats_every_single_plan(swung):
    assert sum(swung.seconds) <= min(sum(line) for line in swung.statics.values())
    assert swung.over(swung.best) == sum(swung.statics[swung.best]) / sum(swung.seconds) > 1


def test_a_step_takes_what_its_plan_is_predicted_to(swung):
    assert swung.seconds == [swung.statics[plan][step] for step, plan in enumerate(swung.plans)]


def test_a_fast_swing_about_a_crossover_is_sat_out():
    """Every second step is on the other side: the running mean stays on one."""
    even, full = [[1.0] * 16], [[4.38, *[(16 - 4.38) / 15] * 15]]
    found = replay_load.replay([even, full] * 20, cluster())
    assert crossings(found) == 39
    assert found.changes <= 2


def test_trials_are_made_when_asked_for():
    trace = [[[1.0] * 16]] * 12
    settled, learning = (replay_load.replay(trace, cluster(), trials=trials) for trials in (False, True))
    assert settled.changes == 0
    assert len(set(learning.plans[:6])) == 3
    assert learning.changes <= 3
    assert len(set(learning.plans[6:])) == 1


def test_plans_that_do_not_fit_are_not_compared():
    found = replay_load.replay(replay_load.make_trace(2, 16, 1), cluster(memory=10**9))
    assert found.statics
    assert all("layout=padded" not in plan for plan in found.statics)
    with pytest.raises(fmoe.PlanError, match="no plan fits in memory"):
        replay_load.replay(replay_load.make_trace(2, 16, 1), cluster(memory=1))


def recorded(path, **changes):
    counts = [[[2, 2, 2, 2], [5, 1, 1, 1]], [[3, 3, 1, 1], [8, 0, 0, 0]]] * 3
    held = {"format": "fmoe-lm-metrics", "options": {"top_k": 1}, "runs": {"moe": {"counts": counts}}}
    path.write_text(json.dumps({**held, **changes}))
    return str(path)


def test_a_recorded_trace_is_replayed(tmp_path, capsys):
    path = recorded(tmp_path / "metrics.json")
    assert replay_load.main([path, "--out", str(tmp_path), "--most", "3"]) == 0
    text = capsys.readouterr().out
    assert "3 steps, 2 layers of 4 experts; 8 ranks" in text
    found = json.loads((tmp_path / "replay.json").read_text())
    assert found["steps"] == [1, 3, 5]
    assert found["load"] == [2.5] * 3  # the fullest layer's
    assert len(found["plans"]) == len(found["seconds"]) == 3
    assert all(len(line) == 3 for line in found["statics"].values())
    pytest.importorskip("matplotlib")
    assert (tmp_path / "replay.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "other"}, 'its format is not "fmoe-lm-metrics", as train_lm.py writes it to metrics.json.'),
        ({"runs": {}}, "parts are missing ('moe')."),
        ({"runs": {"moe": {"counts": []}}}, "counts must be [step][layer][expert], but their dims are [0]."),
        ({"runs": {"moe": {"counts": [[[1, "x"]]]}}}, "counts must be numbers, [step][layer][expert]."),
        (
            {"runs": {"moe": {"counts": [[[1, 1]], [[1, -1]]]}}},
            "counts of step 2 are not all finite numbers of at least 0.",
        ),
    ],
)
def test_a_broken_file_is_told_in_one_line(changes, message, tmp_path, capsys):
    path = recorded(tmp_path / "metrics.json", **changes)
    assert replay_load.main([path, "--out", str(tmp_path / "out")]) == 2
    held = capsys.readouterr()
    assert (held.out, held.err) == ("", f"replay_load.py: {path}: {message}\n")
    assert not (tmp_path / "out").exists()


def test_other_bad_input_is_told_in_one_line(tmp_path, capsys):
    def refused(*options):
        assert replay_load.main([*options, "--out", str(tmp_path / "out")]) == 2
        return capsys.readouterr().err

    assert refused("nowhere.json") == "replay_load.py: nowhere.json: there is no such file.\n"
    (tmp_path / "text").write_text("text")
    assert refused(str(tmp_path / "text")).startswith(f"replay_load.py: {tmp_path}/text: not JSON (")
    assert refused() == "replay_load.py: give either the metrics.json of a training or --make.\n"
    assert refused("--make", "--world", "12") == (
        "replay_load.py: Mesh: node=8, but the ranks per node must divide the 12 ranks.\n"
    )
    assert refused("--make", "--experts", "8") == (
        "replay_load.py: experts=8: one of them cannot hold 4.38 times the mean load.\n"
    )
    assert refused("--make", "--profile", "a100") == "replay_load.py: profile a100: there is no such file.\n"

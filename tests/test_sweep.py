"""``fmoe plan`` and ``fmoe sweep``: what they say, against the cost model and the planner."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

import fmoe
from fmoe.__main__ import main
from fmoe.grid import USUAL, Point, filled, grid, point, statics, swing
from fmoe.sharding import planner
from fmoe.sharding.cost import price
from fmoe.sharding.presets import PRESETS
from fmoe.workload import LAYER, Workload

A100 = PRESETS["a100_ndm"]
LIMIT = A100.memory
BASE = Workload(experts=8, world=16, node=8, tokens=1024, model_dim=512, hidden_dim=1024, activation="relu")


def even_planner(workload, memory=None):
    spec = fmoe.ShardingSpec(workload.mesh, max_tokens=workload.tokens, memory=memory)
    widths = {layer.name: layer.slots(workload.tokens) for layer in workload.traced.layers}
    return planner.init(workload.traced, spec, A100, widths, workload.tokens)


# --- points ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", [1.0, 1.5, 3.0])
def test_the_planner_takes_the_least_of_all_plans_at_every_point(load):
    found = point(dataclasses.replace(BASE, imbalance=load), A100, LIMIT)
    assert found.best == min(found.seconds.values()) == found.seconds[found.chosen]
    assert set(found.seconds) == {str(plan) for plan in fmoe.legal_plans(BASE.mesh, layout="ragged")}


@pytest.mark.parametrize("capacity", [None, 1.0, 2.0])
def test_a_point_is_what_the_planner_chooses_and_what_its_program_is_priced_at(capacity):
    workload = dataclasses.replace(BASE, capacity=capacity)
    found = point(workload, A100, LIMIT)
    assert str(dict(even_planner(workload).chosen)[LAYER]) == found.chosen
    planned = workload.traced.plan(fmoe.ShardingSpec(workload.mesh, plan=found.chosen, max_tokens=workload.tokens))
    assert price(planned.program, planned.axes, A100, tokens=workload.tokens).seconds == found.best


def test_the_fullest_part_counts_and_a_capacity_caps_it():
    """One of 8 experts at 3 times the mean; the other 7 share 5."""
    loaded = dataclasses.replace(BASE, imbalance=3.0)
    assert sum(loaded.counts) == pytest.approx(8)
    assert loaded.excess == pytest.approx(3.0)
    four = dataclasses.replace(loaded, world=4, node=4)
    assert four.excess == pytest.approx((3 + 5 / 7) / 2)
    assert dataclasses.replace(loaded, capacity=2.0).excess == pytest.approx(2.0)
    assert dataclasses.replace(loaded, capacity=0.5).excess == 0.5
    assert filled(BASE, 9.0).imbalance == 4.0


def test_load_slows_ragged_exchange_alone():
    even, full = filled(BASE, 1.0), dataclasses.replace(filled(BASE, 4.0), capacity=4.0)
    times = [w.prices(A100) for w in (even, dataclasses.replace(even, imbalance=3.0))]
    assert all(times[0][plan].seconds == times[1][plan].seconds for plan in times[0])  # at most the capacity of 1 stays
    times = [w.prices(A100) for w in (dataclasses.replace(full, imbalance=1.0), full)]
    for plan in times[0]:
        slower = times[1][plan].seconds / times[0][plan].seconds
        assert (slower > 1.2) == (plan.layout == "ragged" and plan.parallelism == "ep"), plan


def test_plans_that_do_not_fit_are_left_out():
    prices = BASE.prices(A100)
    middle = sorted(found.memory for found in prices.values())[len(prices) // 2]
    found = point(BASE, A100, middle)
    assert set(found.too_large) == {str(plan) for plan, p in prices.items() if p.memory > middle} != set()
    assert not set(found.too_large) & set(found.seconds)
    nothing = point(BASE, A100, 1.0)
    assert (nothing.chosen, nothing.seconds) == (None, {})
    assert "seconds" not in nothing.as_data()


# --- static plans ------------------------------------------------------------------------------------------------


def test_static_plans_by_hand():
    class Took:
        def __init__(self, seconds):
            self.seconds = seconds

    def at(**seconds):
        best = min(seconds, key=seconds.get)
        return Point(BASE, seconds, (), best, Took(seconds[best]))

    a, b, c = statics([at(a=1.0, b=2.0), at(a=8.0, b=1.0, c=2.0), Point(BASE, {}, (), None, None)])
    assert (a.plan, a.points, a.everywhere, a.mean, a.most) == ("b", 2, True, pytest.approx(math.sqrt(2)), 2.0)
    assert (b.plan, b.everywhere, b.mean, b.most) == ("a", True, pytest.approx(math.sqrt(8)), 8.0)
    assert (c.plan, c.points, c.everywhere, c.mean) == ("c", 1, False, 2.0)


def test_a_grid_has_every_point_and_no_static_plan_beats_the_planner():
    done = []
    points = grid(
        BASE, A100, LIMIT, worlds=[4, 16], loads=[1.0, 3.0], capacities=[2.0],
        sizes=[(1024, 512, 1024), (256, 64, 128)], done=done.append,
    )  # fmt: skip
    assert len(points) == sum(done) == 2 * 2 * 3
    at = {(p.size, p.workload.world, p.workload.node, p.workload.capacity, p.workload.imbalance) for p in points}
    assert len(at) == 12
    assert ("256x64x128", 4, 4, 2.0, 2.0) in at
    assert ("1024x512x1024", 16, 8, None, 3.0) in at
    for static in statics(points):
        assert static.mean >= 1.0
        assert static.everywhere == (static.points == 12)


# --- the swing ---------------------------------------------------------------------------------------------------


def test_the_swing_is_the_mean_over_its_levels():
    padded, ragged, both = swing(BASE, A100, LIMIT, ratio=4.0, levels=3)
    assert padded.levels == (1.0, 2.0, 4.0)
    times = [point(filled(BASE, level), A100, LIMIT).seconds for level in padded.levels]
    for found, layout in ((padded, "padded"), (ragged, "ragged"), (both, "")):
        kept = [{plan: t for plan, t in at.items() if layout in plan} for at in times]
        assert found.planner == pytest.approx(sum(min(at.values()) for at in kept) / 3)
        assert found.static_seconds == pytest.approx(min(sum(at[plan] for at in kept) / 3 for plan in kept[0]))
        assert found.speedup >= 1
        assert [at[plan] for at, plan in zip(kept, found.plans, strict=True)] == [min(at.values()) for at in kept]
    usual = f"{USUAL} layout=padded"
    assert padded.usual_seconds == both.usual_seconds == pytest.approx(sum(at[usual] for at in times) / 3)
    assert both.planner <= min(padded.planner, ragged.planner)


def test_a_swing_that_does_not_fit_is_refused():
    with pytest.raises(ValueError) as caught:
        swing(BASE, A100, 1.0, levels=2)
    assert str(caught.value) == "no plan fits in memory=1 bytes at loads up to 4.38 on 16 ranks."


# --- python -m fmoe plan -----------------------------------------------------------------------------------------

SMALL = ["--experts", "8", "--world", "16", "--node", "8", "--tokens", "1024", "--model-dim", "512", "--hidden-dim",
         "1024", "--activation", "relu"]  # fmt: skip


def test_plan_says_what_to_run_and_why(capsys):
    assert main(["plan", *SMALL, "--imbalance", "2", "--rows", "2"]) == 0
    text = capsys.readouterr().out
    prices = dataclasses.replace(BASE, imbalance=2.0).prices(A100)
    plan, best = min(prices.items(), key=lambda item: item[1].seconds)
    assert f"\nRun {plan}\n  {1e3 * best.seconds:.4g} ms a layer" in text
    assert f'fmoe.ShardingSpec(fmoe.make_mesh(8, world=16, node=8), plan="{plan}")' in text
    assert "the fullest expert at 2 times the mean load." in text
    assert f"and {len(prices) - 2} more (--rows 0 for all)" in text
    others = {p: f for p, f in prices.items() if p.parallelism != plan.parallelism}
    other = min(others, key=lambda p: others[p].seconds)
    more = others[other].seconds / best.seconds
    said = f"{100 * (more - 1):.3g} % longer" if more < 2 else f"{more:.3g} times as long"
    assert f"\n  {other.parallelism}: {said}" in text


def test_plan_takes_memory_into_account(capsys):
    prices = BASE.prices(A100)
    fastest = min(prices, key=lambda plan: prices[plan].seconds)
    less = min(found.memory for found in prices.values())
    assert prices[fastest].memory > less
    assert main(["plan", *SMALL, "--memory", str(less), "--rows", "0"]) == 0
    text = capsys.readouterr().out
    assert f"Run {fastest}\n" not in text
    assert f"{sum(f.memory > less for f in prices.values())} of {len(prices)} plans take more memory" in text


def test_what_would_fit_is_told_and_fits(capsys):
    prices = BASE.prices(A100)
    plan = min(prices, key=lambda plan: (prices[plan].memory, str(plan)))
    least = prices[plan].memory
    limit = 0.9 * least
    assert main(["plan", *SMALL, "--memory", str(limit)]) == 2
    text = capsys.readouterr().err
    tokens = int(text.split("--tokens ")[1].split(",")[0])
    assert text == (
        f"python -m fmoe plan: no plan fits in memory={limit:.4g} bytes: the smallest, {plan}, takes {least:.4g}. "
        f"It would fit with --tokens {tokens}, or give it {math.ceil(least)} bytes.\n"
    )
    fits = [min(f.memory for f in dataclasses.replace(BASE, tokens=t).prices(A100).values()) for t in (tokens, 1024)]
    assert fits[0] <= limit < fits[1]
    assert main(["plan", *SMALL, "--memory", str(limit), "--tokens", str(tokens)]) == 0
    assert main(["plan", *SMALL, "--memory", str(math.ceil(least))]) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--profile", "a100"],
            "profile 'a100': choose one of a100_ndm, h100_dgx, h200_hgx, b200_hgx, gb200_nvl72, cpu_gloo, or a .json "
            "file of a calibration.",
        ),
        (["--profile", "nowhere.json"], "profile nowhere.json: there is no such file."),
        (["--world", "20", "--node", "8"], "Mesh: node=8, but the ranks per node must divide the 20 ranks."),
        (["--node", "0"], "node=0, but it must be a whole number of at least 1."),
        (["--tokens", "0"], "tokens=0, but it must be a whole number of at least 1."),
        (["--top-k", "9"], "MoEConfig: k=9 > num_experts=8: choose k from 1 to 8."),
        (
            ["--imbalance", "5"],
            "imbalance=5, but the fullest expert holds from 1 to E/K=4 times the mean: each token chooses 2 of 8 "
            "experts, one expert at most once.",
        ),
        (["--world", "2000000", "--node", "8"], "world=2000000, but at most 1048576 ranks are priced."),
        (
            ["--hidden-dim", "99999999999999999999"],
            "experts=8, tokens=4096, model_dim=1024 and hidden_dim=99999999999999999999 make tensors of more than "
            "1e+15 elements: choose smaller ones.",
        ),
        (["--memory", "nan"], "memory=nan, but it must be a number of bytes above 0."),
    ],
)
def test_bad_input_of_plan(options, message, capsys):
    assert main(["plan", *options]) == 2
    held = capsys.readouterr()
    assert (held.out, held.err) == ("", f"python -m fmoe plan: {message}\n")


def test_a_calibrated_profile_is_read(tmp_path, capsys):
    path = tmp_path / "mine.json"
    path.write_text(dataclasses.replace(A100, name="mine").as_json())
    assert main(["plan", *SMALL, "--profile", str(path)]) == 0
    assert "(mine)" in capsys.readouterr().out
    path.write_text("{}")
    assert main(["plan", *SMALL, "--profile", str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"python -m fmoe plan: profile {path}: not a profile")


# --- python -m fmoe sweep ----------------------------------------------------------------------------------------

FEW = ["--worlds", "8", "16", "--loads", "1", "2", "--capacities", "1", "--sizes", "512x256x512", "256x256x2048"]


def test_sweep_writes_json_tables_and_pictures(tmp_path, capsys):
    swung = ["--swing", "--swing-worlds", "16", "--swing-sizes", "512x256x512", "--swing-levels", "2"]
    assert main(["sweep", "--out", str(tmp_path / "new"), *FEW, *swung]) == 0
    text = capsys.readouterr().out
    found = json.loads((tmp_path / "new" / "sweep.json").read_text())
    assert (found["format"], found["version"]) == ("fmoe-sweep", 1)
    assert found["profile"]["name"] == "a100_ndm"
    assert len(found["points"]) == 2 * 2 * 3
    for one in found["points"]:
        assert one["seconds"] == min(one["plans"].values()) == one["plans"][one["chosen"]]
        assert 0 <= one["exposed_share"] <= 1
        alone = point(Workload(**one["workload"]), A100, LIMIT)
        assert (alone.chosen, alone.best) == (one["chosen"], one["seconds"])
    assert [s["layouts"] for s in found["swings"]] == ["padded", "ragged", "both"]
    assert all(s["speedup"] >= 1 and s["levels"] == [1.0, 4.38] for s in found["swings"])
    first = found["statics"]["load"][0]
    assert first["everywhere"]
    assert f"best single plan for all points: {first['plan']}" in text
    held = " ".join(text.split())
    for line in found["assumptions"]:
        assert " ".join(line.split()) in held
    pytest.importorskip("matplotlib")
    names = {path.name for path in (tmp_path / "new").glob("*.png")}
    assert names == {"plans.png", "speedup.png", "time.png", "exchange.png", "swing.png"}
    assert all((tmp_path / "new" / name).read_bytes().startswith(b"\x89PNG") for name in names)


def test_points_that_do_not_fit_are_shown_as_such(tmp_path, capsys):
    assert main(["sweep", "--out", str(tmp_path), *FEW, "--memory", "6e6"]) == 0
    assert "does not fit" in capsys.readouterr().out
    points = json.loads((tmp_path / "sweep.json").read_text())["points"]
    assert {None} < {p["chosen"] for p in points}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sizes", "4096x2048"], "sizes='4096x2048', but a size is TxMxH, such as 4096x2048x2048."),
        (["--worlds", "8", "12"], "Mesh: node=8, but the ranks per node must divide the 12 ranks."),
        (
            ["--loads", "1", "9"],
            "imbalance=9, but the fullest expert holds from 1 to E/K=8 times the mean: each token chooses 2 of 16 "
            "experts, one expert at most once.",
        ),
        (["--capacities", "0"], "capacities=0, but a factor must be a number above 0."),
        (["--loads", "--capacities"], "there is nothing to price: give --loads or --capacities."),
        (["--swing", "--swing-levels", "1"], "swing-levels=1, but there must be at least 2."),
    ],
)
def test_bad_input_of_sweep(options, message, tmp_path, capsys):
    assert main(["sweep", "--out", str(tmp_path / "out"), *options]) == 2
    held = capsys.readouterr()
    assert (held.out, held.err) == ("", f"python -m fmoe sweep: {message}\n")
    assert not (tmp_path / "out").exists()

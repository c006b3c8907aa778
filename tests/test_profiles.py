"""Profiles: files, what a bad one is told, fits, and what `calibrate` measures in one process and in two."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from ranks import launch

import fmoe
from fmoe.__main__ import main
from fmoe.calibrate import Effort, calibrate, report
from fmoe.sharding.fit import fit, received
from fmoe.sharding.presets import PRESETS
from fmoe.sharding.profile import COLLECTIVES, DTYPES, LEVELS, Profile, interpolate

SMALL = Effort(dims=(32, 128), sizes=(2**10, 2**14, 2**18), moved=2**22, budget=0.0, longest=1.0)


def saved(path, profile):
    path.write_text(profile.as_json())
    return path


# --- files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_comes_back_from_its_file(name, tmp_path):
    preset = PRESETS[name]
    found = Profile.load(saved(tmp_path / "profile.json", preset))
    assert found == preset
    assert hash(found) == hash(preset)
    assert found.as_json() == preset.as_json()
    assert preset.sources


def test_lookups():
    curve = ((1.0, 0.1), (100.0, 0.4))
    assert [interpolate(curve, x) for x in (0.5, 10.0, 1e9)] == [0.1, 0.2, 0.4]
    p = PRESETS["a100_ndm"]
    assert p.collective("all_to_all", 1e6, 1, "inside") == 0
    small, large = p.links["between"]["all_to_all"]
    assert p.collective("all_to_all", 100, 8, "between", 8) == small.alpha + 7 * small.peer + 100 / small.bandwidth
    assert math.isclose(p.collective("all_gather", 1e9, 256, "between", 32), large.alpha + 1e9 / (0.74 * 23e9))
    assert p.matmul(0, 4, "f32") == 0


def changed(held, where, value):
    """The JSON of a profile with one number replaced, or removed for None."""
    place = held
    for key in where[:-1]:
        place = place[key]
    if value is None:
        del place[where[-1]]
    else:
        place[where[-1]] = value
    return held


SWAP = ("links", "inside", "all_to_all")
BAD = {
    "a missing dtype": (("peak", "f32"), None, "peak['f32']=None, but it must be a number from 1e+06 to 1e+18."),
    "a negative peak": (("peak", "bf16"), -1.0, "peak['bf16']=-1.0, but it must be a number from 1e+06 to 1e+18."),
    "an absurd peak": (("peak", "f64"), 1e19, "peak['f64']=1e+19, but it must be a number from 1e+06 to 1e+18."),
    "a word": (("peak", "f16"), "fast", "peak['f16']='fast', but it must be a number from 1e+06 to 1e+18."),
    "a bool": (("launch",), True, "launch=True, but it must be a number from 0 to 1."),
    "a launch of minutes": (("launch",), 60, "launch=60, but it must be a number from 0 to 1."),
    "nan": (("memory_bandwidth",), math.nan, "memory_bandwidth=nan, but it must be a number from 1e+06 to 1e+15."),
    "all is shared": (("shared",), 1.0, "shared=1.0, but it must be a number from 0 to 0.9."),
    "memory of no bytes": (("memory",), 0, "memory=0, but it must be a number from 1e+06 to 1e+15."),
    "efficiency above 1": (
        ("efficiency", 1, 1), 3.0, "efficiency at 10000000.0 flops=3.0, but it must be a number from 1e-06 to 1.5."
    ),
    "efficiency that descends": (
        ("efficiency", 1, 0), 1e3, "efficiency at 100000, 1000, 1e+09: these must be ascending."
    ),
    "no efficiency": (("efficiency",), [], "efficiency and congestion need at least one point each."),
    "congestion": (("congestion", 0, 1), 0, "congestion at 1 nodes=0, but it must be a number from 0.001 to 1."),
    "a missing collective": (SWAP, None, "links['inside']['all_to_all'] is missing."),
    "alpha": ((*SWAP, 0, "alpha"), -1e-6,
        "links['inside']['all_to_all'].alpha=-1e-06, but it must be a number from 0 to 10."),
    "bandwidth": ((*SWAP, 0, "bandwidth"), 0,
        "links['inside']['all_to_all'].bandwidth=0, but it must be a number from 1000 to 1e+14."),
    "peer": ((*SWAP, 0, "peer"), 2, "links['inside']['all_to_all'].peer=2, but it must be a number from 0 to 1."),
    "segments that descend": (SWAP, [{"most": m, "alpha": 0.0, "bandwidth": 1e9} for m in (9, 8, None)],
        "links['inside']['all_to_all'].most 9, 8, inf: these must be ascending."),
    "a last bound": ((*SWAP, 0, "most"), 4096.0,
        "links['inside']['all_to_all'].most=4096.0 is that of the last segment, so it must be null."),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_number_is_refused_by_name(name, tmp_path):
    where, value, message = BAD[name]
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(changed(json.loads(PRESETS["cpu_gloo"].as_json()), where, value)))
    with pytest.raises(ValueError) as error:
        Profile.load(path)
    assert str(error.value) == f"Profile 'cpu_gloo': {message}"


def test_all_bad_numbers_are_told_at_once(tmp_path):
    held = changed(json.loads(PRESETS["cpu_gloo"].as_json()), ("launch",), -1)
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(changed(held, ("shared",), 2)))
    with pytest.raises(ValueError) as error:
        Profile.load(path)
    assert str(error.value) == (
        "Profile 'cpu_gloo': 2 things do not fit.\n"
        "  launch=-1, but it must be a number from 0 to 1.\n"
        "  shared=2, but it must be a number from 0 to 0.9."
    )


WRONG = {
    "a list": ("[1, 2]", "list indices must be integers or slices, not str"),
    "no json": ("peak: fast", "Expecting value: line 1 column 1 (char 0)"),
    "something else": ('{"loss": 3.2}', "'links'"),
    "a level of text": ('{"links": {"inside": "fast"}}', "'str' object has no attribute 'items'"),
    "a segment without bound": ('{"links": {"inside": {"all_to_all": [{"alpha": 1}]}}}', "'most'"),
    "a point of three": ('{"links": {}, "efficiency": [[1, 2, 3]]}', "too many values to unpack (expected 2)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_file_of_something_else(name, tmp_path):
    text, why = WRONG[name]
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        Profile.load(path)
    assert str(error.value) == f"profile {path}: not a profile, or one with parts missing ({why})."


def test_a_file_without_a_number_and_no_file(tmp_path):
    path = tmp_path / "profile.json"
    with pytest.raises(ValueError) as error:
        Profile.load(path)
    assert str(error.value) == f"profile {path}: there is no such file."
    path.write_text(json.dumps(changed(json.loads(PRESETS["cpu_gloo"].as_json()), ("launch",), None)))
    with pytest.raises(ValueError, match=r"not a profile, or one with parts missing \(.*'launch'\)\.$"):
        Profile.load(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not a profile, or one with parts missing"):
        Profile.load(path)


# --- fits -------------------------------------------------------------------------------------------------------


def test_a_fit_finds_what_the_points_were_made_of():
    sizes = [4.0**n for n in range(5, 13)]
    (line,) = fit([(s, 1e-4 + s / 2e9) for s in sizes]).segments
    assert (line.most, round(line.alpha, 9), round(line.bandwidth)) == (math.inf, 1e-4, 2e9)
    two = fit([(s, 1e-5 + s / 1e8 if s < 2e5 else 1e-3 + s / 1e9) for s in sizes])
    assert [round(s.alpha, 9) for s in two.segments] == [1e-5, 1e-3]
    assert [round(s.bandwidth) for s in two.segments] == [1e8, 1e9]
    assert 6.5e4 < two.segments[0].most < 2.7e5
    assert two.r2 > 0.9999
    noisy = fit([(s, (1e-4 + s / 2e9) * (1.1 if i % 2 else 0.9)) for i, s in enumerate(sizes)])
    assert len(noisy.segments) == 1
    assert 0.8 < noisy.r2 < 1
    assert 0.05 < max(map(abs, noisy.errors)) < 0.2
    with pytest.raises(ValueError, match=r"^fit: 1 points were given, but a line needs at least 2.$"):
        fit([(1.0, 1.0)])


def test_a_fit_is_a_legal_segment_whatever_was_measured():
    for times in ([3e-4, 2e-4, 1e-4], [1e-6, 1e-4, 1e-2], [1e-3, 1e-3, 1e-3]):
        for segment in fit([(float(10**i), t) for i, t in enumerate(times, 2)]).segments:
            assert segment.alpha >= 0
            assert 1e3 <= segment.bandwidth <= 1.01e14


def test_received_is_what_prices_count():
    assert [received(name, 800.0, 8, 1) for name in COLLECTIVES] == [700.0, 700.0, 700.0, 1400.0]
    assert [received(name, 800.0, 8, 2) for name in COLLECTIVES] == [400.0, 100.0, 100.0, 200.0]


# --- calibration ------------------------------------------------------------------------------------------------


def check_measured(profile):
    assert set(profile.peak) == set(DTYPES)
    shares = [share for _, share in profile.efficiency]
    assert shares == sorted(shares)
    assert 0 < shares[-1] <= 1
    assert [size for size, _ in profile.efficiency] == [2.0 * d**3 for d in SMALL.dims]
    for name in ("launch", "memory_bandwidth", "efficiency", *(f"peak.{d}" for d in DTYPES)):
        assert profile.sources[name].startswith("measured"), name
    assert report(profile).row_count == 16


def layer_and_plan(profile, x):
    """A layer that the planner places with the profile; its predicted seconds."""
    config = fmoe.MoEConfig(2, 16, 32, router=fmoe.TopK(1))
    step = fmoe.auto(lambda p, x: fmoe.moe(p, x, config), fmoe.ShardingSpec(fmoe.make_mesh(2)), profile=profile)
    step(fmoe.init(config, seed=0), x)
    state = step._state
    assert state.model.profile is profile
    return state.model.ranked(fmoe.sharding.planner.Bucket())[0][1].seconds


def test_calibrate_in_one_process(tmp_path):
    profile = calibrate(device="cpu", effort=SMALL, name="here")
    check_measured(profile)
    assert profile.links == PRESETS["cpu_gloo"].links
    assert profile.sources["links.inside"] == "preset cpu_gloo: one process has no links"
    loaded = Profile.load(saved(tmp_path / "profile.json", profile))
    assert loaded == profile
    x = torch.randn(32, 16)
    slow = Profile.load(saved(tmp_path / "slow.json", dataclasses.replace(loaded, launch=0.5)))
    assert layer_and_plan(slow, x) > 1 > layer_and_plan(loaded, x)


def test_the_command_measures_and_writes(tmp_path, capsys, monkeypatch):
    path = tmp_path / "profile.json"
    monkeypatch.setattr(Effort, "of", classmethod(lambda cls, device, quick: SMALL))
    assert main(["calibrate", "--quick", "--device", "cpu", "--out", str(path)]) == 0
    check_measured(Profile.load(path))
    assert "memory_bandwidth" in capsys.readouterr().out
    assert main(["calibrate", "--device", "cpu", "--node", "3", "--out", str(path)]) == 2
    message = "python -m fmoe calibrate: Mesh: node=3, but the ranks per node must divide the 1 ranks.\n"
    assert capsys.readouterr().err == message


def on_ranks(rank):
    torch.manual_seed(rank)
    inside, between = (calibrate(device="cpu", effort=SMALL, node=node) for node in (2, 1))
    seconds = layer_and_plan(inside, torch.randn(8, 16))
    return inside, between, seconds


def test_calibrate_on_two_ranks(tmp_path):
    (inside, between, seconds), other = launch(on_ranks, 2)
    assert other == (inside, between, seconds)
    for profile, level, copy in ((inside, *LEVELS), (between, *LEVELS[::-1])):
        check_measured(profile)
        assert Profile.load(saved(tmp_path / "profile.json", profile)) == profile
        assert profile.links[level] == profile.links[copy]
        assert profile.sources[f"links.{copy}"] == f"copied from {level}: the ranks here have no other links"
        for name in COLLECTIVES:
            assert "3 sizes; r2 " in profile.sources[f"links.{level}.{name}"]
            assert "residuals median" in profile.sources[f"links.{level}.{name}"]

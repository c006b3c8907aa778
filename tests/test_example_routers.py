"""The example of all routers: every row trains, the table and the picture are made."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import routers

import fmoe


def test_every_row(tmp_path, capsys):
    results = routers.main(["--steps", "3", "--out", str(tmp_path)])
    assert set(results) == set(routers.RECIPES)
    tried = {type(recipe.router) for recipe in routers.RECIPES.values()}
    every = {item for item in vars(fmoe).values() if isinstance(item, type) and issubclass(item, fmoe.Router)}
    assert tried == every - {fmoe.Router}
    assert all(0 < result.bits < 12 for result in results.values())
    assert (tmp_path / "routers.png").stat().st_size > 10_000
    shown = capsys.readouterr().out
    assert "looks at later bytes" in shown
    assert "SoftMoE *" in shown


def test_training_helps():
    results = routers.main(["--steps", "25", "--only", "Sigmoid"])
    assert results["Sigmoid"].bits < 6


def test_bars():
    assert routers.bars(torch.tensor([0, 1, 2, 4])) == " ▃▅█"


def test_bad_options(capsys):
    with pytest.raises(SystemExit):
        routers.main(["--steps", "0"])
    assert "--steps must be at least 1" in capsys.readouterr().err

"""A link and a rank that change their speed while training goes on, between hosts with limited links."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fmoe.sharding import planner

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import replan
from cluster_net import why_not

WITHIN = planner.REPEATS * (1 + planner.TRIALS)


@pytest.mark.skipif(bool(why_not()), reason=f"hosts are network namespaces: {why_not()}")
def test_the_plan_follows_the_links_and_the_slowest_rank():
    report = replan.measure(steps=WITHIN + 6)
    kinds = {phase: row["plan"].split()[0] for phase, row in report.items()}
    assert kinds == {"fast link": "dp", "slow link": "ep", "fast again": "dp", "slow rank": "ep"}
    assert all(row["settled"] <= WITHIN for row in report.values()), report

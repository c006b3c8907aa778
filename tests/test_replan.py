"""A link and a rank that change their speed while training goes on, between hosts with limited links."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import pytest

from fmoe.sharding import planner

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import replan
from cluster_net import why_not

LACKING = why_not()
WITHIN = planner.CHANGED_STEPS + planner.REPEATS * planner.TRIALS


@pytest.mark.skipif(bool(LACKING), reason=f"hosts are network namespaces: {LACKING}")
def test_the_plan_follows_the_links_and_the_slowest_rank():
    """Gathering the weights takes four times as long on the slow link, and several times as long beside a slow rank."""
    report = replan.measure(steps=WITHIN + 6)
    for phase in ("slow link", "slow rank"):
        kinds = [plan.split()[0] for plan, _ in report[phase]["steps"][WITHIN:]]
        assert statistics.mode(kinds) == "ep", report

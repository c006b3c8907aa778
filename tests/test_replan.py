"""A link and a rank that change their speed while training goes on, between hosts with limited links.

Steps are timed, so that it needs a machine to itself: `make test-links` runs it, `make test` does not. What the
planner does with such times is tested in test_planner.py.
"""

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


@pytest.mark.links
@pytest.mark.skipif(bool(LACKING), reason=f"hosts are network namespaces: {LACKING}")
def test_the_plan_follows_the_links_and_the_slowest_rank():
    """Gathering the weights takes four times as long on the slow link, and several times as long beside a slow rank."""
    report = replan.measure(steps=WITHIN + 6)
    for phase in ("slow link", "slow rank"):
        kinds = [plan.split()[0] for plan, _ in report[phase]["steps"][WITHIN:]]
        assert statistics.mode(kinds) == "ep", report

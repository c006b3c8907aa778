"""Checks on ``spec=`` that all functions share."""

from __future__ import annotations

from typing import Any

from ..sharding.spec import ShardingSpec


def spec_problems(spec: Any) -> list[str]:
    """What is wrong with a ``spec=`` argument."""
    if spec is None or isinstance(spec, ShardingSpec):
        return []
    return [f"spec={spec!r}, but it must be an fmoe.ShardingSpec, or None for one device."]

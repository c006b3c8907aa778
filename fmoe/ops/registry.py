"""All operations by name: one `FuncOp` record each, defined once."""

from __future__ import annotations

from typing import Any

from .differentiable import FuncOp

OPS: dict[str, FuncOp] = {}


def define(schema: str, **rules: Any) -> FuncOp:
    """Defines an operation and records it (arguments as for `FuncOp`)."""
    op = FuncOp(schema, **rules)
    OPS[op.name] = op
    return op

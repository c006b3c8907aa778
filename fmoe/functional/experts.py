"""Applies every expert to its rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .._autocast import autocast_dtype
from .._errors import refuse
from .._typing import ExpertFn, dtype_text, type_text
from ..ops.activations import ACTIVATIONS
from ..ops.differentiable import host_numbers
from ..trace import Recorder, recorder
from ..values import ExpertParams, cast_leaves
from .specs import spec_problems
from .tokens import Tokens, apply_experts


@dataclasses.dataclass(frozen=True)
class ExpertFunction:
    """An expert function that says which dim of each of its parameters is the hidden one.

    Under a plan with r > 1 each of r ranks applies the function to a slice of the parameters along that
    dim, and the results are added up: ``fn(whole, x)`` must be the sum over slices of ``fn(slice, x)``.

    Args:
        fn: ``fn(params_of_one_expert, rows [n,M]) -> [n,M]``.
        hidden: a tree like params_of_one_expert with the hidden dim of each leaf (of one expert's leaf,
            so without the dim of experts).

    Example:
        >>> fn = ExpertFunction(lambda p, x: (x @ p["a"]).relu() @ p["b"], hidden={"a": 1, "b": 0})
        >>> fn({"a": torch.ones(2, 3), "b": torch.ones(3, 2)}, torch.ones(1, 2))
        tensor([[6., 6.]])
    """

    fn: ExpertFn
    hidden: Any

    def __call__(self, params: Any, rows: Tensor) -> Tensor:
        """Applies the function."""
        return self.fn(params, rows)

    def __hash__(self) -> int:
        return hash(self.fn)


def expert_apply(
    expert_params: Any,
    tokens: Tokens,
    *,
    activation: str = "swiglu",
    fn: ExpertFn | None = None,
    spec: Any = None,
) -> Tokens:
    """Applies every expert to its rows: ``w_out @ act(w_in @ row + b_in) + b_out``, or `fn`.

    Under autocast the built-in experts compute in the autocast dtype, as `torch.nn.Linear` does.

    Args:
        expert_params: an `ExpertParams`; with `fn`, any pytree of stacked leaves ``[E,...]``.
        tokens: from `dispatch`.
        activation: ``"relu"``, ``"gelu"`` (exact), ``"silu"``, ``"swiglu"``, ``"geglu"``, or ``"swiglu_oss"``,
            gpt-oss's ``(clamp(up, -7, 7) + 1) * g * sigmoid(1.702 * g)`` with ``g = min(gate, 7)``.
        fn: one expert as a pure function ``fn(params_of_one_expert, rows [n,M]) -> [n,M]``, each row by
            itself. In the ragged layout it is called once per expert with that expert's rows, which
            needs their numbers; in the padded layout it runs under vmap over the experts.
        spec: a sharding spec; None for one device.

    Returns:
        `Tokens`, for `combine`.

    Raises:
        ValueError: if the parameters do not fit the tokens or each other.

    Example:
        >>> import fmoe, torch
        >>> x = torch.tensor([[1.0], [2.0]])
        >>> routing = fmoe.functional.gate(fmoe.RouterParams(torch.tensor([[-1.0, 1.0]])), x, fmoe.TopK(1))
        >>> tokens = fmoe.functional.dispatch(x, routing)
        >>> scale = torch.tensor([10.0, 100.0])
        >>> expert_apply(scale, tokens, fn=lambda p, rows: p * rows).data.flatten()
        tensor([100., 200.])

    References:
        Shazeer, "GLU variants improve Transformer" (arXiv 2002.05202) for swiglu and geglu.
    """
    refuse("expert_apply", spec_problems(spec))
    writer = recorder()
    if writer is not None:
        return _record(writer, expert_params, tokens, activation, fn, spec)
    if spec is not None:
        if tokens.spec is None or tokens.experts is not None:
            refuse("expert_apply", ["spec= was given: give the same spec to dispatch, and apply experts once."])
        return dataclasses.replace(tokens, experts=expert_params, activation=activation, fn=fn)
    if fn is not None:
        return _apply_function(expert_params, tokens, fn)
    dtype = autocast_dtype(tokens.held)
    if dtype is not None and isinstance(expert_params, ExpertParams):
        expert_params = cast_leaves(expert_params, dtype)
    _check(expert_params, tokens, activation, dtype or tokens.held.dtype)
    held = tokens.held if dtype is None else tokens.held.to(dtype)
    if tokens.x is None or tokens.experts is not None:  # rows that exist already go through at once
        rows = apply_experts(tokens.ragged_rows().to(held.dtype), expert_params, activation, tokens.groups)
        return tokens.with_rows(rows)
    return dataclasses.replace(tokens, x=held, experts=expert_params, activation=activation)


def _record(writer: Recorder, params: Any, tokens: Tokens, activation: str, fn: ExpertFn | None, spec: Any) -> Tokens:
    if fn is None:
        dtype = tokens.held.dtype
        if autocast_dtype(tokens.held) is not None and isinstance(params, ExpertParams):
            dtype = params.w_in.dtype  # all are cast when it runs
        _check(params, tokens, activation, dtype)
    leaves, treespec = pytree.tree_flatten(params)
    _check_leaves(leaves, tokens.num_experts)
    shared = (("activation", None if fn else activation), ("fn", fn), ("tree", treespec), ("spec", spec))
    (rows,) = writer.record("expert_apply", [tokens.held, *leaves], shared, ["tokens"])
    writer.hide(rows)
    return dataclasses.replace(tokens, rows=rows)


def _check_leaves(leaves: list[Any], num_experts: int) -> None:
    wrong = [leaf for leaf in leaves if not isinstance(leaf, Tensor) or leaf.dim() < 1 or leaf.shape[0] != num_experts]
    if wrong or not leaves:
        shown = ", ".join(type_text(leaf) if isinstance(leaf, Tensor) else repr(leaf) for leaf in wrong) or "no leaf"
        refuse(
            "expert_apply",
            [f"expert_params has {shown}: every leaf of a function's parameters is a tensor stacked over "
             f"num_experts={num_experts} in dim 0."],
        )  # fmt: skip


def _apply_function(params: Any, tokens: Tokens, fn: ExpertFn) -> Tokens:
    leaves, treespec = pytree.tree_flatten(params)
    _check_leaves(leaves, tokens.num_experts)
    if tokens.layout == "padded":
        data = tokens.data
        live = torch.arange(data.shape[1], device=data.device) < tokens.group_sizes.unsqueeze(1)
        live = live.unsqueeze(-1)  # [E,C,1]
        # an inert slot holds a real row meanwhile: fn need not be finite at 0, and 0 * NaN would reach its parameters
        out = torch.func.vmap(fn)(params, torch.where(live, data, tokens.any_row()))
        check_output(out, data)
        return dataclasses.replace(tokens, x=None, experts=None, rows=torch.where(live, out, 0))
    with host_numbers("the number of rows of each expert", 'use layout="padded" and a capacity.'):
        sizes = tokens.group_sizes.tolist()
    rows = tokens.ragged_rows()
    parts = rows.split([*sizes, rows.shape[0] - sum(sizes)])
    each = zip(*(leaf.unbind(0) for leaf in leaves), strict=True)  # unbind: indexing would copy every gradient E times
    made = []
    for one, part in zip(each, parts, strict=False):  # the last part belongs to no expert
        made.append(fn(pytree.tree_unflatten(list(one), treespec), part))
        check_output(made[-1], part)
    out = torch.cat(made)
    rest = out.new_zeros(rows.shape[0] - out.shape[0], out.shape[1])
    return tokens.with_rows(torch.cat([out, rest]))


def check_output(out: Any, rows: Tensor) -> None:
    """Refuses what is not one row for each row."""
    if not isinstance(out, Tensor) or out.shape[:-1] != rows.shape[:-1]:
        found = type_text(out) if isinstance(out, Tensor) else repr(type(out))
        refuse("expert_apply", [f"fn made {found} of rows {type_text(rows)}: it must return one row for each row."])


def _check(params: Any, tokens: Tokens, activation: str, dtype: torch.dtype) -> None:
    if activation not in ACTIVATIONS:
        names = ", ".join(map(repr, ACTIVATIONS))
        refuse("expert_apply", [f"activation={activation!r}: choose one of {names}, or give your own fn."])
    if not isinstance(params, ExpertParams):
        refuse("expert_apply", [f"expert_params is a {type(params).__name__}: without fn it must be an ExpertParams."])
    experts, dim, gated = tokens.num_experts, tokens.dim, ACTIVATIONS[activation].gated
    hidden = params.w_out.shape[1] if params.w_out.dim() == 3 else params.w_in.shape[-1]
    want = {
        "w_in": [experts, dim, 2, hidden] if gated else [experts, dim, hidden],
        "w_out": [experts, hidden, params.w_out.shape[-1]],
        "b_in": [experts, 2, hidden] if gated else [experts, hidden],
        "b_out": [experts, params.w_out.shape[-1]],
    }
    problems = []
    for name, shape in want.items():
        leaf = getattr(params, name)
        if leaf is None:
            continue
        if list(leaf.shape) != shape:
            problems.append(
                f"{name} is {type_text(leaf)}, but for E={experts}, M={dim} and activation {activation!r} it must be "
                f"{shape} ({_LETTERS[name][gated]})."
            )
        if leaf.dtype != dtype:
            problems.append(
                f"{name} is {dtype_text(leaf.dtype)}, but the tokens are {dtype_text(dtype)}: cast one of them, "
                "for example with params.to(x.dtype)."
            )
    refuse("expert_apply", problems)


_LETTERS = {
    "w_in": ("[E,M,H]", "[E,M,2,H]"),
    "w_out": ("[E,H,M]", "[E,H,M]"),
    "b_in": ("[E,H]", "[E,2,H]"),
    "b_out": ("[E,M]", "[E,M]"),
}

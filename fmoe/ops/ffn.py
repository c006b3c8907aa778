"""The expert layer as one operation: gather, up, activation, down, weighted sum.

    ffn(x, w, ...)[t] = sum over k with index[t,k] >= 0 of  w[t,k] * expert(x[t])

`order`, `index` and `groups` are those of `row_index`: ``order[r]`` is the choice ``t*K + k`` of row r,
``index[t,k]`` its inverse, and ``groups [G,3]`` the rows and the matrices of each expert. Only the
pre-activation z is kept for backward; rows are gathered on load and weights applied on the fly, so no
``[N,M]`` tensor is made. `composition` is the same function made of expand, gmm and combine: it
defines the op, and its derivatives are those of every higher order.

    ffn           forward                      fused kernel
    ffn_backward  its transpose in all inputs  fused kernel
    higher        vjp of the transpose written in `_backward_composition`
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .activations import Activation, form_of
from .differentiable import Saved, batch_first, without_saved_tensor_hooks
from .grouped import empty_in_order, fold_groups, gmm, gmm_dw, gmm_t, is_transposed
from .kernels.cpu_ffn import ffn_backward_cpu, ffn_cpu
from .kernels.cuda_ffn import ffn_backward_cuda, ffn_cuda
from .rearrange import combine, expand, fold_index, rowdot
from .registry import define


def _row_ones(order: Tensor, like: Tensor) -> Tensor:
    return torch.ones(order.shape[0], 1, dtype=like.dtype, device=like.device)


def gather_rows(x: Tensor, index: Tensor, rows: int) -> Tensor:
    """``x [T,D]`` as the rows ``[R,D]`` its choices stand in; rows of no choice are 0."""
    return expand(x, index, torch.ones(index.shape, dtype=x.dtype, device=x.device), rows)


def up(rows: Tensor, w_in: Tensor, b_in: Tensor | None, groups: Tensor) -> Tensor:
    """``[N,M] -> [N,D]``: the pre-activation of each row's expert."""
    z = gmm(rows, w_in, groups)
    return z if b_in is None else z + gmm(_row_ones(rows, rows), b_in.unsqueeze(1), groups)


def _composition(
    x: Tensor,
    w: Tensor,
    w_in: Tensor,
    b_in: Tensor | None,
    w_out: Tensor,
    b_out: Tensor | None,
    index: Tensor,
    order: Tensor,
    groups: Tensor,
    activation: str,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    z = up(gather_rows(x, index, order.shape[0]), w_in, b_in, groups)
    y = up(form_of(activation)(z), w_out, b_out, groups)
    return combine(y, index, w), z if keep else z[:0]


def _backward_composition(
    grad: Tensor,
    x: Tensor,
    w: Tensor,
    w_in: Tensor,
    b_in: Tensor | None,
    w_out: Tensor,
    b_out: Tensor | None,
    z: Tensor,
    index: Tensor,
    order: Tensor,
    groups: Tensor,
    written: Tensor,
    experts: int,
    activation: str,
    needs: list[bool],
) -> tuple[Tensor, ...]:
    """The transpose of `_composition`, from x and the weights alone, so that z needs no derivative."""
    rows, act = order.shape[0], form_of(activation)
    out_groups = torch.cat([groups[:, :2], written.unsqueeze(1)], dim=1)
    ones = _row_ones(order, x)
    xs = gather_rows(x, index, rows)
    z = up(xs, w_in, b_in, groups)
    h, dact = _activation_and_transpose(act, z)
    gs = gather_rows(grad, index, rows)  # [N,M], without the weights
    gh = gmm_t(gs, w_out, groups)
    score = (gh * h).sum(1, keepdim=True)
    if b_out is not None:
        score = score + (gs * gmm(ones, b_out.unsqueeze(1), groups)).sum(1, keepdim=True)
    dw = rowdot(torch.ones(x.shape[0], 1, dtype=x.dtype, device=x.device), score, index).to(w.dtype)
    weight = expand(torch.ones(x.shape[0], 1, dtype=x.dtype, device=x.device), index, w, rows)  # [N,1]
    dz = dact(gh * weight)
    made = (
        lambda: combine(gmm_t(dz, w_in, groups), index, torch.ones_like(w)),
        lambda: dw,
        lambda: gmm_dw(xs, dz, out_groups, experts),
        lambda: gmm_dw(ones, dz, out_groups, experts).squeeze(1),
        lambda: gmm_dw(h * weight, gs, out_groups, experts),
        lambda: gmm_dw(weight, gs, out_groups, experts).squeeze(1),
    )
    return tuple(make() if need else x.new_zeros(0) for make, need in zip(made, needs, strict=True))


def _activation_and_transpose(act: Activation, z: Tensor) -> tuple[Tensor, Any]:
    """The activation of z, and the map from a gradient of h to one of z, in torch ops of any order."""
    if not act.gated:
        return act.function(z), lambda grad: act.slope(z, grad)
    gate, value = act.halves(z)
    opened, curve = act.function(gate), act.up
    if curve is None:
        return opened * value, lambda grad: act.joined(act.slope(gate, grad * value), grad * opened)
    raised = curve.function(value)
    return opened * raised, lambda grad: act.joined(act.slope(gate, grad * raised), curve.slope(value, grad * opened))


def _ffn_backward_rule(saved: Saved, grad: Tensor, _: Any) -> tuple[Any, ...]:
    x, _, w_in, b_in, _, _, index, order, groups, activation, keep = saved.args
    (z,) = saved.outputs
    if not keep:
        z = up(gather_rows(x, index, order.shape[0]), w_in, b_in, groups)
    needs = list(saved.needs[:6])
    routing = (index, order, groups, groups[:, 2])
    made = ffn_backward(grad, *saved.args[:6], z, *routing, w_in.shape[0], activation, needs)
    return (*(part if need else None for part, need in zip(made, needs, strict=True)), None, None, None, None, None)


def _second_backward_rule(saved: Saved, *grads: Tensor | None) -> tuple[Any, ...]:
    """The transpose of the transpose, by torch.func over its composition."""
    args = saved.args
    places = [i for i in range(7) if args[i] is not None]  # grad, x, w and the parameters

    def transpose(*inputs: Tensor) -> tuple[Tensor, ...]:
        full = list(args)
        for i, item in zip(places, inputs, strict=True):
            full[i] = item
        return _backward_composition(*full)

    with without_saved_tensor_hooks():
        outputs, pull = torch.func.vjp(transpose, *(args[i] for i in places))  # type: ignore[misc]
    cotangents = [torch.zeros_like(out) if g is None else g for out, g in zip(outputs, grads, strict=True)]
    result: list[Any] = [None] * len(args)
    for i, g in zip(places, pull(tuple(cotangents)), strict=True):
        result[i] = g
    return tuple(result)


def _ffn_fake(x, w, w_in, b_in, w_out, b_out, index, order, groups, activation, keep):  # type: ignore[no-untyped-def]
    rows = order.shape[0] if keep else 0
    return x.new_empty(x.shape[0], w_out.shape[2]), x.new_empty(rows, w_in.shape[2])


def _ffn_backward_reference(*args: Any) -> tuple[Tensor, ...]:
    """`_backward_composition`, with gradients of parameters in the parameters' order in memory."""
    dx, dw, *grads = _backward_composition(*args)
    for i, (parameter, grad) in enumerate(zip(args[3:7], grads, strict=True)):
        if grad.dim() == 3 and is_transposed(parameter):
            grads[i] = empty_in_order(parameter, grad.shape[0]).copy_(grad)
    return dx, dw, *grads


def _ffn_backward_fake(grad, x, w, w_in, b_in, w_out, b_out, z, index, order, groups, written, experts, act, needs):  # type: ignore[no-untyped-def]
    made = [lambda: x.new_empty(x.shape), lambda: w.new_empty(w.shape)]
    made += [lambda p=p: empty_in_order(p, experts) for p in (w_in, b_in, w_out, b_out)]
    return tuple(make() if need else x.new_empty(0) for make, need in zip(made, needs, strict=True))


def _fold_routing(batch: int, dims: Any, parts: Any, shared: bool, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """index, order and groups of B entries as those of one buffer; -1 in `order` stays."""
    index, order, groups = (batch_first(part, dim, batch) for part, dim in zip(parts, dims, strict=True))
    rows = order.shape[1]
    choice = torch.arange(batch, device=order.device).mul(index.shape[1] * index.shape[2]).unsqueeze(1)
    order = torch.where(order >= 0, order + choice, order).flatten()
    return fold_index(index, rows), order, fold_groups(groups, rows, 0 if shared else experts)


def _fold_parameters(batch: int, dims: Any, parameters: Any) -> tuple[list[Tensor | None], bool]:
    """Stacked parameters ``[B*E,...]``, or as they are if none has a batch; and whether they are shared."""
    if all(dim is None for dim in dims):
        return list(parameters), True
    folded = [
        None if p is None else batch_first(p, d, batch).flatten(0, 1) for p, d in zip(parameters, dims, strict=True)
    ]
    return folded, False


def _ffn_vmap(batch: int, dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    x, w = (batch_first(arg, dim, batch) for arg, dim in zip(args[:2], dims[:2], strict=True))
    experts = args[2].shape[0] if dims[2] is None else args[2].shape[0 if dims[2] else 1]
    parameters, shared = _fold_parameters(batch, dims[2:6], args[2:6])
    routing = _fold_routing(batch, dims[6:9], args[6:9], shared, experts)
    y, z = ffn(x.flatten(0, 1), w.flatten(0, 1), *parameters, *routing, *args[9:])
    return (y.unflatten(0, (batch, x.shape[1])), z.unflatten(0, (batch, args[7].shape[-1] if args[10] else 0))), (0, 0)


def _ffn_backward_vmap(batch: int, dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    grad, x, w = (batch_first(arg, dim, batch) for arg, dim in zip(args[:3], dims[:3], strict=True))
    z, written = batch_first(args[7], dims[7], batch), batch_first(args[11], dims[11], batch)
    experts, activation, needs = args[12:]
    count = args[3].shape[0] if dims[3] is None else args[3].shape[0 if dims[3] else 1]
    parameters, shared = _fold_parameters(batch, dims[3:7], args[3:7])
    routing = _fold_routing(batch, dims[8:11], args[8:11], shared, count)
    step = torch.arange(batch, device=written.device).mul(experts).unsqueeze(1)
    out = ffn_backward(
        grad.flatten(0, 1), x.flatten(0, 1), w.flatten(0, 1), *parameters, z.flatten(0, 1),
        *routing, (written + step).flatten(), batch * experts, activation, needs,
    )  # fmt: skip
    sizes = x.shape[1], x.shape[1], *[experts] * 4
    parts = zip(out, sizes, needs, strict=True)
    return tuple(part.unflatten(0, (batch, size if need else 0)) for part, size, need in parts), (0,) * 6


ffn = define(
    "ffn(Tensor x, Tensor w, Tensor w_in, Tensor? b_in, Tensor w_out, Tensor? b_out, Tensor index, Tensor order, "
    "Tensor groups, str activation, bool keep) -> (Tensor, Tensor)",
    reference=_composition,
    cpu=ffn_cpu,
    cuda=ffn_cuda,
    fake=_ffn_fake,
    backward=_ffn_backward_rule,
    composition=_composition,
    saves=(1,),
    vmap=_ffn_vmap,
)
ffn_backward = define(
    "ffn_backward(Tensor grad, Tensor x, Tensor w, Tensor w_in, Tensor? b_in, Tensor w_out, Tensor? b_out, Tensor z, "
    "Tensor index, Tensor order, Tensor groups, Tensor written, SymInt experts, str activation, bool[] needs) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=_ffn_backward_reference,
    cpu=ffn_backward_cpu,
    cuda=ffn_backward_cuda,
    fake=_ffn_backward_fake,
    backward=_second_backward_rule,
    composition=_backward_composition,
    vmap=_ffn_backward_vmap,
)

"""Exchanges between the ranks of a process group, through torch.distributed, as operations of torch.func.

torch's own functional collectives raise under grad, give zero tangents under jvp and uninitialised
memory under vmap, silently. Here the transpose of each collective is another one, forward mode runs
the collective on the tangent, and vmap moves its batch dim behind dim 0 and exchanges once. With
ranks 0 and 1 holding x0 and x1 (dim 0 is what is exchanged):

    op               result on rank i                           transpose
    all_to_all       piece i of x0, piece i of x1               all_to_all, sizes swapped
    all_gather       x0, x1                                     reduce_scatter
    reduce_scatter   piece i of x0 + x1                         all_gather
    all_reduce       x0 + x1                                    all_reduce
    broadcast        x of the root                              sum on the root, 0 elsewhere

Derivatives are those of the SUM over ranks of what each rank computes. Each exchange also comes in
halves, `start` and `done`, and what runs between them overlaps with it. The future between them is a
buffer of the rows of the larger side, so that done's transpose, the start of the reverse exchange, has
a legal shape; autograd then runs the halves in the order that overlaps in backward too.

NOTE [streams]. On NCCL torch already does what the halves need, so no stream, event or `record_stream` is
added here. An exchange begun with ``async_op=True`` runs on its group's own stream behind an event of the
current one; its work object holds inputs and outputs until it is waited for, so the allocator gives their
memory to nobody meanwhile; and its wait puts an event before what comes next on the current stream, while the
host goes on (`syncStream`, `stashed_for_allocator_safety_` and `synchronizeStream` of torch's
ProcessGroupNCCL.cpp). Between the halves the work object is in torch's registry, under the future's
storage, from where `wait_tensor` takes it. A whole exchange, without ``async_op``, runs on the current stream.
All of this can be captured in a CUDA graph. Sizes of ragged messages are the one thing the host must know.

Sizes are checked on each rank before data moves. `where` names the layer and the exchange in errors.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._errors import CollectiveError
from .._typing import type_text
from .differentiable import FuncOp, Saved
from .registry import OPS, define


def _resolve(group: str) -> Any:
    return importlib.import_module("torch.distributed.distributed_c10d")._resolve_process_group(group)


def _exchange(where: str, what: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except RuntimeError as error:
        raise _failed(where, what, error) from error


def _failed(where: str, what: str, error: Exception) -> CollectiveError:
    return CollectiveError(
        f"{where}: {what} failed on rank {dist.get_rank()}. Every rank must call, in the same order, with the same "
        f"plan and dtypes (its number of tokens may be 0). torch.distributed says: {str(error).strip().splitlines()[0]}"
    )


def _check_splits(where: str, x: Tensor, sends: Sequence[int], receives: Sequence[int], ranks: int) -> None:
    wrong = []
    if len(sends) != ranks or len(receives) != ranks:
        wrong.append(f"sizes for {len(sends)} and {len(receives)} ranks were given, but the group has {ranks}")
    if min([*sends, *receives], default=0) < 0:
        wrong.append("sizes must be at least 0")
    if sum(sends) != x.shape[0]:
        wrong.append(f"sizes to send add up to {sum(sends)}, but x is {type_text(x)}")
    if wrong:
        raise CollectiveError(f"{where}: all_to_all on rank {dist.get_rank()}: {'; '.join(wrong)}.")


def _check_divisible(where: str, what: str, x: Tensor, ranks: int) -> None:
    if x.dim() < 1 or x.shape[0] % ranks:
        raise CollectiveError(
            f"{where}: {what} on rank {dist.get_rank()}: dim 0 of {type_text(x)} must be a multiple of {ranks}."
        )


# newer names of torch 2.13; the old ones warn there
_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# --- kernels: out is a tensor to fill, and `wait` whether to wait for it -------------------------------------


def _all_to_all(out: Tensor, x: Tensor, receives: Sequence[int], sends: Sequence[int], group: str, wait: bool) -> None:
    dist.all_to_all_single(out, x.contiguous(), list(receives), list(sends), group=_resolve(group), async_op=not wait)


def _all_gather(out: Tensor, x: Tensor, group: str, wait: bool) -> None:
    _gather_single(out, x.contiguous(), group=_resolve(group), async_op=not wait)


def _reduce_scatter(out: Tensor, x: Tensor, group: str, wait: bool) -> None:
    _scatter_single(out, x.contiguous(), group=_resolve(group), async_op=not wait)


def _begin(call: Callable[[], Any]) -> None:
    """Starts an exchange whose work object waits beside the tensor it fills."""
    functional = importlib.import_module("torch.distributed._functional_collectives")
    with functional.allow_inflight_collective_as_graph_input_ctx():
        call()


def _end(future: Tensor, where: str, what: str) -> Tensor:
    return _exchange(where, what, lambda: torch.ops._c10d_functional.wait_tensor(future))


def _all_to_all_kernel(x: Tensor, receives: list[int], sends: list[int], group: str, where: str) -> Tensor:
    _check_splits(where, x, sends, receives, _resolve(group).size())
    out = x.new_empty(sum(receives), *x.shape[1:])
    _exchange(where, "all_to_all", lambda: _all_to_all(out, x, receives, sends, group, True))
    return out


def _start_all_to_all_kernel(x: Tensor, receives: list[int], sends: list[int], group: str, where: str) -> Tensor:
    _check_splits(where, x, sends, receives, _resolve(group).size())
    rows = sum(receives)
    future = x.new_empty(max(rows, x.shape[0]), *x.shape[1:])
    future[rows:] = 0
    work = lambda: _all_to_all(future[:rows], x, receives, sends, group, False)  # noqa: E731
    _exchange(where, "start of all_to_all", lambda: _begin(work))
    return future


def _done_all_to_all_kernel(future: Tensor, receives: list[int], sends: list[int], group: str, where: str) -> Tensor:
    return _end(future, where, "all_to_all")[: sum(receives)].clone()


def _all_gather_kernel(x: Tensor, ranks: int, group: str, where: str) -> Tensor:
    out = x.new_empty(x.shape[0] * ranks, *x.shape[1:])
    _exchange(where, "all_gather", lambda: _all_gather(out, x, group, True))
    return out


def _start_all_gather_kernel(x: Tensor, ranks: int, group: str, where: str) -> Tensor:
    out = x.new_empty(x.shape[0] * ranks, *x.shape[1:])
    _exchange(where, "start of all_gather", lambda: _begin(lambda: _all_gather(out, x, group, False)))
    return out


def _done_all_gather_kernel(future: Tensor, ranks: int, group: str, where: str) -> Tensor:
    return _end(future, where, "all_gather").clone()


def _reduce_scatter_kernel(x: Tensor, ranks: int, group: str, where: str) -> Tensor:
    _check_divisible(where, "reduce_scatter", x, ranks)
    out = x.new_empty(x.shape[0] // ranks, *x.shape[1:])
    _exchange(where, "reduce_scatter", lambda: _reduce_scatter(out, x, group, True))
    return out


def _start_reduce_scatter_kernel(x: Tensor, ranks: int, group: str, where: str) -> Tensor:
    _check_divisible(where, "reduce_scatter", x, ranks)
    future = torch.zeros_like(x, memory_format=torch.contiguous_format)
    out = future[: x.shape[0] // ranks]
    _exchange(where, "start of reduce_scatter", lambda: _begin(lambda: _reduce_scatter(out, x, group, False)))
    return future


def _done_reduce_scatter_kernel(future: Tensor, ranks: int, group: str, where: str) -> Tensor:
    return _end(future, where, "reduce_scatter")[: future.shape[0] // ranks].clone()


def _all_reduce_kernel(x: Tensor, group: str, where: str) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    _exchange(where, "all_reduce", lambda: dist.all_reduce(out, group=_resolve(group)))
    return out


def _broadcast_kernel(x: Tensor, root: int, group: str, where: str) -> Tensor:
    out, resolved = x.clone(memory_format=torch.contiguous_format), _resolve(group)
    source = dist.get_global_rank(resolved, root)
    _exchange(where, "broadcast", lambda: dist.broadcast(out, src=source, group=resolved))
    return out


# --- derivatives and batches ---------------------------------------------------------------------------------


def _linear(name: str, transpose: str, swap: bool = False) -> dict[str, Callable[..., Any]]:
    """Rules of a linear exchange: its transpose is another one, with the first two sizes swapped if `swap`."""

    def backward(saved: Saved, grad: Tensor) -> tuple[Any, ...]:
        rest = list(saved.args[1:])
        if swap:
            rest[0], rest[1] = rest[1], rest[0]
        return (OPS[transpose](grad, *rest), *[None] * len(rest))

    def jvp(saved: Saved, tangent: Tensor, *_: Any) -> Tensor:
        return OPS[name](tangent, *saved.args[1:])

    def vmap(batch: int, dims: tuple[Any, ...], x: Tensor, *rest: Any) -> tuple[Tensor, int]:
        return OPS[name](x.movedim(dims[0], 1), *rest), 1

    return {"backward": backward, "jvp": jvp, "vmap": vmap}


def _elementwise_vmap(name: str) -> Callable[..., Any]:
    def vmap(batch: int, dims: tuple[Any, ...], x: Tensor, *rest: Any) -> tuple[Tensor, int]:
        return OPS[name](x.movedim(dims[0], 0), *rest), 0

    return vmap


def _broadcast_backward(saved: Saved, grad: Tensor) -> tuple[Any, ...]:
    _, root, group, where = saved.args
    total = all_reduce(grad, group, where)
    mine = torch.full((), _resolve(group).rank() == root, dtype=torch.bool, device=total.device)
    return torch.where(mine, total, 0), None, None, None  # a graph on every rank: all take part in its derivative


_SIZES = "SymInt[] receives, SymInt[] sends, str group, str where"
_GROUP = "SymInt ranks, str group, str where"


def _rows(rows: Callable[..., Any]) -> Callable[..., Tensor]:
    """Shape rule: `rows(rows of x, *sizes)` of the same other dims."""
    return lambda x, *rest: x.new_empty(rows(x.shape[0], *rest[:-2]), *x.shape[1:])


all_to_all = define(
    f"all_to_all(Tensor x, {_SIZES}) -> Tensor",
    reference=_all_to_all_kernel,
    fake=_rows(lambda n, receives, sends: sum(receives)),
    **_linear("all_to_all", "all_to_all", swap=True),
)
start_all_to_all = define(
    f"start_all_to_all(Tensor x, {_SIZES}) -> Tensor",
    reference=_start_all_to_all_kernel,
    fake=_rows(lambda n, receives, sends: max(sum(receives), n)),
    **_linear("start_all_to_all", "done_all_to_all", swap=True),
)
done_all_to_all = define(
    f"done_all_to_all(Tensor future, {_SIZES}) -> Tensor",
    reference=_done_all_to_all_kernel,
    fake=_rows(lambda n, receives, sends: sum(receives)),
    **_linear("done_all_to_all", "start_all_to_all", swap=True),
)
all_gather = define(
    f"all_gather(Tensor x, {_GROUP}) -> Tensor",
    reference=_all_gather_kernel,
    fake=_rows(lambda n, ranks: n * ranks),
    **_linear("all_gather", "reduce_scatter"),
)
start_all_gather = define(
    f"start_all_gather(Tensor x, {_GROUP}) -> Tensor",
    reference=_start_all_gather_kernel,
    fake=_rows(lambda n, ranks: n * ranks),
    **_linear("start_all_gather", "done_reduce_scatter"),
)
done_all_gather = define(
    f"done_all_gather(Tensor future, {_GROUP}) -> Tensor",
    reference=_done_all_gather_kernel,
    fake=_rows(lambda n, ranks: n),
    **_linear("done_all_gather", "start_reduce_scatter"),
)
reduce_scatter = define(
    f"reduce_scatter(Tensor x, {_GROUP}) -> Tensor",
    reference=_reduce_scatter_kernel,
    fake=_rows(lambda n, ranks: n // ranks),
    **_linear("reduce_scatter", "all_gather"),
)
start_reduce_scatter = define(
    f"start_reduce_scatter(Tensor x, {_GROUP}) -> Tensor",
    reference=_start_reduce_scatter_kernel,
    fake=_rows(lambda n, ranks: n),
    **_linear("start_reduce_scatter", "done_all_gather"),
)
done_reduce_scatter = define(
    f"done_reduce_scatter(Tensor future, {_GROUP}) -> Tensor",
    reference=_done_reduce_scatter_kernel,
    fake=_rows(lambda n, ranks: n // ranks),
    **_linear("done_reduce_scatter", "start_all_gather"),
)
all_reduce = define(
    "all_reduce(Tensor x, str group, str where) -> Tensor",
    reference=_all_reduce_kernel,
    fake=lambda x, group, where: x.new_empty(x.shape),
    **{**_linear("all_reduce", "all_reduce"), "vmap": _elementwise_vmap("all_reduce")},
)
broadcast: FuncOp = define(
    "broadcast(Tensor x, SymInt root, str group, str where) -> Tensor",
    reference=_broadcast_kernel,
    fake=lambda x, root, group, where: x.new_empty(x.shape),
    backward=_broadcast_backward,
    jvp=lambda saved, tangent, *_: broadcast(tangent, *saved.args[1:]),
    vmap=_elementwise_vmap("broadcast"),
)

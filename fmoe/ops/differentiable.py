"""`FuncOp`: an opaque kernel that every torch.func transform goes through.

This is the only file that defines operators or subclasses `torch.autograd.Function`, and the only
one that uses private names of torch (`PRIVATE_NAMES`).

Design. Neither public way of adding an operation survives torch.func: `torch.library.custom_op`
with `register_autograd` raises under grad and gives zero tangents under jvp, silently
(pytorch#168393, #170834); `torch.autograd.Function` with a jvp is refused by Dynamo and wrong under
jvp of jvp. A `FuncOp` does what a C++ operator of ATen does, one dispatch key at a time:

1. ``CPU`` and ``CUDA`` keys: the kernel. Plain tensors in, plain tensors out.
2. ``Autograd`` key: one autograd node for ONE level of differentiation, then on to the keys below.
   functorch's interpreters reach this key once per nested transform, so nesting costs nothing. The
   node is made by the single-level half of `torch.autograd.Function.apply`, which switches grad mode
   and forward mode off; both are restored around the redispatch, or the next level would record
   nothing and grad(grad) would be zero.
3. ``FuncTorchBatched`` key: the vmap rule, which folds the batch into the rows and calls the same op.
4. A fake kernel gives shapes to torch.compile and torch.export.

Derivatives of every order exist because they are written with FuncOps: an op's `backward` and `jvp`
call ops of the same family. A fused op gives a `composition` instead of a `jvp`: a function of the
same arguments made of simpler FuncOps. Forward mode then runs the composition itself.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .._autocast import without_autocast

#: Part of every op's name. Raise it when a derivative or shape rule changes: the disk cache of
#: AOTAutograd knows an op by its name alone and would go on using the old rule.
NAMESPACE = "fmoe_v1"
TORCH_CHECKED = ("2.11", "2.13")
PRIVATE_NAMES = (
    "torch._C._AutoDispatchBelowAutograd",
    "torch._C._after_autograd_keyset",
    "torch._C._is_fwd_grad_enabled",
    "torch.autograd.forward_ad._set_fwd_grad_enabled",
    "torch._functorch.utils.enable_single_level_autograd_function",
    "torch._functorch.autograd_function.custom_function_call_vmap_helper",
    "torch._functorch.pyfunctorch.retrieve_current_functorch_interpreter",
    "torch._VF._unpack_dual",
    "torch._C._autograd._top_saved_tensors_default_hooks",
    "torch._C._autograd._pop_saved_tensors_default_hooks",
    "torch._C._autograd._push_saved_tensors_default_hooks",
    "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack",
    "torch._C._functorch.is_functorch_wrapped_tensor",
    "torch._C._functorch.get_unwrapped",
)


def _private(name: str) -> Any:
    """One private name of torch, or an error that says which torch fmoe was checked on."""
    module, attribute = name.rsplit(".", 1)
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError):
        low, high = TORCH_CHECKED
        raise ImportError(
            f"fmoe was checked on torch {low} to {high}; torch {torch.__version__} has no {name}. "
            f"Install torch {high}, or a newer fmoe."
        ) from None


(
    _below_autograd,
    _after_autograd_keyset,
    _is_forward_mode,
    _set_forward_mode,
    _single_level,
    _vmap_helper,
    _current_interpreter,
    _unpack_dual,
    _top_hooks,
    _pop_hooks,
    _push_hooks,
    without_transforms,
    is_transformed,
    _unwrapped,
) = map(_private, PRIVATE_NAMES)

_library = torch.library.Library(NAMESPACE, "FRAGMENT")


class Saved:
    """What a derivative rule may read: the op's arguments and outputs, and which are differentiated.

    Attributes:
        args: the arguments as they were given.
        outputs: the outputs named by ``saves`` in the op, in that order.
        needs: for each argument, whether its gradient is wanted.
    """

    __slots__ = ("args", "needs", "outputs")

    def __init__(self, args: Sequence[Any], outputs: Sequence[Tensor], needs: Sequence[bool]):
        self.args, self.outputs, self.needs = tuple(args), tuple(outputs), tuple(needs)


class FuncOp:
    """One operation: its schema, shape rule, kernels, derivatives and vmap rule.

    Args:
        schema: as for `torch.library.define`, for example ``"gmm(Tensor x, Tensor w, Tensor bounds) -> Tensor"``.
        reference: the kernel that defines the op, in plain torch; runs on every device.
        fake: the shape rule, with the same arguments.
        vmap: ``vmap(batch_size, in_dims, *args) -> (outputs, out_dims)``.
        cpu: a faster kernel for the CPU.
        cuda: a kernel for GPUs; it returns NotImplemented where the reference is to run in its place.
        backward: ``backward(saved, *grads) -> grad of each argument``; grads may be None. Without it
            the outputs are not differentiable (an op on integers).
        jvp: ``jvp(saved, *tangents) -> tangent of each output``; tangents may be None.
        composition: instead of `jvp`: the same function made of simpler ops.
        saves: indices of outputs that the derivative rules read.
        dtensor: what the op does to a `DTensor`, with the same arguments; torch's own rules do not know it.
    """

    def __init__(
        self,
        schema: str,
        *,
        reference: Callable[..., Any],
        fake: Callable[..., Any],
        vmap: Callable[..., Any],
        cpu: Callable[..., Any] | None = None,
        cuda: Callable[..., Any] | None = None,
        backward: Callable[..., Any] | None = None,
        jvp: Callable[..., Any] | None = None,
        composition: Callable[..., Any] | None = None,
        saves: Sequence[int] = (),
        dtensor: Callable[..., Any] | None = None,
    ):
        self.schema, self.name = schema, schema.split("(")[0]
        self.reference, self.fake = reference, fake
        self.kernels = {"cpu": cpu, "cuda": cuda}
        self.backward, self.jvp, self.composition = backward, jvp, composition
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        self.op = getattr(getattr(torch.ops, NAMESPACE), self.name).default
        _library.impl(self.name, self._kernel_of("cpu"), "CPU")
        _library.impl(self.name, self._kernel_of("cuda"), "CUDA")
        torch.library.register_fake(f"{NAMESPACE}::{self.name}", fake, lib=_library)
        autograd = _autograd_kernel(self.op, backward, jvp, composition, saves) if backward else _below(self.op)
        _library.impl(self.name, autograd, "Autograd", with_keyset=True)
        _library.impl(self.name, _vmap_kernel(self.op, vmap), "FuncTorchBatched", with_keyset=True)
        self.dtensor = dtensor

    def _kernel_of(self, device: str) -> Callable[..., Any]:
        """What runs there, with autocast off: it computes in the dtypes it is given, as compiled kernels do."""

        def run(*args: Any) -> Any:
            with without_autocast(device):
                kernel = self.kernels[device]
                made = NotImplemented if kernel is None else kernel(*args)
                return self.reference(*args) if made is NotImplemented else made

        return run

    def know_dtensors_once(self, cls: type) -> None:
        """Makes the `dtensor` rule known to torch; `cls` is DTensor, which is not imported before it is needed."""
        if self.dtensor is None:
            return
        rule, self.dtensor = self.dtensor, None
        torch.library.register_torch_dispatch(
            f"{NAMESPACE}::{self.name}", cls, lambda mode, func, types, args=(), kwargs=None: rule(*args), lib=_library
        )

    def __call__(self, *args: Any) -> Any:
        """Runs the op; arguments by position, as in the schema."""
        return self.op(*args)

    def __repr__(self) -> str:
        return f"FuncOp({self.schema!r})"


def _below(op: Any) -> Callable[..., Any]:
    """Autograd kernel of an op on integers: no node, no tangent."""

    def kernel(keyset: Any, *args: Any) -> Any:
        with _below_autograd():
            return op.redispatch(keyset & _after_autograd_keyset, *args)

    return kernel


class _Call:
    """Where a call came from: the dispatch keys left to visit and the grad modes at the call."""

    __slots__ = ("forward_mode", "grad", "keyset")

    def __init__(self, keyset: Any):
        self.keyset, self.grad, self.forward_mode = keyset, torch.is_grad_enabled(), _is_forward_mode()


def _autograd_kernel(
    op: Any,
    backward: Callable[..., Any],
    jvp: Callable[..., Any] | None,
    composition: Callable[..., Any] | None,
    saves: Sequence[int],
) -> Callable[..., Any]:
    """The kernel of the Autograd key: one level of reverse and forward mode (see the module)."""

    def forward(call: _Call, *args: Any) -> Any:
        with torch.set_grad_enabled(call.grad), _set_forward_mode(call.forward_mode), _below_autograd():
            return op.redispatch(call.keyset & _after_autograd_keyset, *args)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.forward_mode = inputs[0].forward_mode
        ctx.set_materialize_grads(False)
        outputs = output if isinstance(output, tuple) else (output,)
        kept = [*inputs[1:], *(outputs[i] for i in saves)]
        tensors = [item for item in kept if isinstance(item, Tensor)]
        ctx.layout = [None if isinstance(item, Tensor) else (item,) for item in kept]  # (constant,) or a tensor
        ctx.save_for_backward(*tensors)
        if jvp:
            ctx.save_for_forward(*tensors)

    def saved(ctx: Any, tensors: Sequence[Tensor], needs: Sequence[bool]) -> Saved:
        rest: Iterator[Tensor] = iter(tensors)
        kept = [next(rest) if entry is None else entry[0] for entry in ctx.layout]
        count = len(kept) - len(saves)
        return Saved(kept[:count], kept[count:], needs)

    def run_backward(ctx: Any, *grads: Any) -> Any:
        if all(grad is None for grad in grads):
            return (None,) * (1 + len(ctx.layout) - len(saves))
        return (None, *backward(saved(ctx, ctx.saved_tensors, ctx.needs_input_grad[1:]), *grads))

    def run_jvp(ctx: Any, _call: Any, *tangents: Any) -> Any:
        with _set_forward_mode(ctx.forward_mode):
            primals = [_primal(tensor) for tensor in ctx.saved_tensors]
            return jvp(saved(ctx, primals, ()), *tangents)  # type: ignore[misc]

    rules: dict[str, Callable[..., Any]] = {
        "forward": forward,
        "setup_context": setup_context,
        "backward": run_backward,
    }
    if jvp:
        rules["jvp"] = run_jvp
    function = type(op.name(), (torch.autograd.Function,), {name: staticmethod(rule) for name, rule in rules.items()})
    apply = super(torch.autograd.Function, function).apply  # type: ignore[misc]  # this level only

    def kernel(keyset: Any, *args: Any) -> Any:
        if composition is not None and _is_forward_mode() and any(map(_has_tangent, args)):
            return composition(*args)
        with _single_level():
            return apply(_Call(keyset), *args)

    return kernel


def _primal(tensor: Tensor) -> Tensor:
    """The tensor without this level's tangent: what C++ formulas get."""
    return torch.ops.aten._fw_primal.default(tensor, 0) if tensor.is_floating_point() else tensor


def _has_tangent(arg: Any) -> bool:
    if not isinstance(arg, Tensor) or not arg.is_floating_point():
        return False
    # not forward_ad.unpack_dual: it reads a level that is not set while a compiled graph is traced
    return _unpack_dual(arg, level=0)[1] is not None


def _vmap_kernel(op: Any, rule: Callable[..., Any]) -> Callable[..., Any]:
    def with_batch_size(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        return rule(info.batch_size, in_dims, *args)

    def kernel(keyset: Any, *args: Any) -> Any:
        return _vmap_helper(_current_interpreter(), with_batch_size, op, *args)

    return kernel


def batch_first(tensor: Tensor, dim: int | None, batch: int) -> Tensor:
    """The tensor with its batch as dim 0, expanded if it has none: for vmap rules."""
    return tensor.unsqueeze(0).expand(batch, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def add(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """The sum of two optional terms."""
    if first is None or second is None:
        return second if first is None else first
    return first + second


def innermost(tensor: Tensor) -> Tensor:
    """The tensor inside the wrappers of torch.func's transforms."""
    while is_transformed(tensor):
        tensor = _unwrapped(tensor)
    return tensor


@contextmanager
def watched_functions(watch: Callable[..., Any]) -> Iterator[None]:
    """Has ``watch(apply, cls, args)`` run every call of a user's `torch.autograd.Function` meanwhile."""
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return watch(lambda *given: original.__get__(None, cls)(*given, **kwargs), cls, args)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]


def under_saved_tensor_hooks() -> bool:
    """Whether checkpointing or offloading is at work."""
    return _top_hooks(True) is not None


@contextmanager
def without_saved_tensor_hooks() -> Iterator[None]:
    """Lifts the hooks of checkpointing and offloading, under which torch.func refuses to run."""
    lifted = []
    while (hooks := _top_hooks(True)) is not None:
        lifted.append(hooks)
        _pop_hooks()
    try:
        yield
    finally:
        for hooks in reversed(lifted):
            _push_hooks(*hooks)


@contextmanager
def host_numbers(what: str, way_out: str) -> Iterator[None]:
    """Turns torch's error for reading a number inside a transform into one that names the way out.

    Raises:
        ValueError: `what` was read inside vmap, torch.compile or torch.export.
    """
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(f"{what} is needed as a number, and inside a transform it has none: {way_out}") from error

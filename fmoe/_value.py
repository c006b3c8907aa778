"""Frozen dataclasses that are pytrees, for `torch.utils._pytree` and, where it is installed, for optree alike.

The children are the fields that hold tensors or other values; every other field (widths, layouts,
names) is context. A field that is None is context too: torch's pytree counts None as a leaf, and
grad, vmap and jvp refuse a leaf that is not a tensor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, TypeVar, dataclass_transform

import torch
from torch.utils import _pytree as torch_pytree

from ._typing import type_text

try:  # fmoe itself walks trees with torch alone
    import optree
except ImportError:
    optree = None  # type: ignore[assignment]

T = TypeVar("T")


def static(**kwargs: Any) -> Any:
    """A field that is context: never a leaf, compared when two trees are zipped."""
    return dataclasses.field(metadata={"static": True}, **kwargs)


@dataclass_transform(frozen_default=True, field_specifiers=(static,))
def value(cls: type[T]) -> type[T]:
    """Makes a frozen dataclass of `cls` and registers it with both pytree registries.

    Two values are equal only if they are the same object: tensors have no single truth value.
    """
    cls = dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    children = tuple(f.name for f in fields if not f.metadata.get("static"))
    context = tuple(f.name for f in fields if f.metadata.get("static"))

    def flatten(obj: Any) -> tuple[list[Any], Any]:
        present = tuple(name for name in children if getattr(obj, name) is not None)
        static_values = tuple(getattr(obj, name) for name in context)
        return [getattr(obj, name) for name in present], (present, static_values)

    def unflatten(leaves: Iterable[Any], spec: Any) -> Any:
        present, static_values = spec
        arguments: dict[str, Any] = dict.fromkeys(children)
        arguments.update(zip(present, leaves, strict=True))
        arguments.update(zip(context, static_values, strict=True))
        return cls(**arguments)

    def flatten_with_keys(obj: Any) -> tuple[list[tuple[Any, Any]], Any]:
        leaves, spec = flatten(obj)
        return [(torch_pytree.GetAttrKey(name), leaf) for name, leaf in zip(spec[0], leaves, strict=True)], spec

    def flatten_for_optree(obj: Any) -> tuple[list[Any], Any, tuple[str, ...]]:
        leaves, spec = flatten(obj)
        return leaves, spec, spec[0]

    torch_pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        flatten_with_keys_fn=flatten_with_keys,
        serialized_type_name=f"fmoe.{cls.__name__}",
        to_dumpable_context=_to_json,
        from_dumpable_context=_from_json,
    )
    if optree is not None:
        optree.register_pytree_node(
            cls,  # type: ignore[arg-type]
            flatten_for_optree,
            lambda spec, leaves: unflatten(leaves, spec),
            path_entry_type=optree.GetAttrEntry,
            namespace=getattr(optree.registry, "__GLOBAL_NAMESPACE"),
        )
    cls.__repr__ = _repr  # type: ignore[method-assign]
    return cls


def _to_json(context: Any) -> Any:
    """A context as JSON, for torch.export.save: tuples as lists, dtypes by name."""
    if isinstance(context, tuple):
        return [_to_json(item) for item in context]
    return {"dtype": str(context).removeprefix("torch.")} if isinstance(context, torch.dtype) else context


def _from_json(context: Any) -> Any:
    if isinstance(context, list):
        return tuple(_from_json(item) for item in context)
    return getattr(torch, context["dtype"]) if isinstance(context, dict) else context


def _repr(self: Any) -> str:
    shown = []
    for f in dataclasses.fields(self):
        item = getattr(self, f.name)
        if item is not None:
            shown.append(f"{f.name}={_item_text(item)}")
    return f"{type(self).__name__}({', '.join(shown)})"


def _item_text(item: Any) -> str:
    if not isinstance(item, torch.Tensor):
        return repr(item)
    if item.dim() == 0 and item.device.type == "cpu":
        try:  # a number reads better than its type, but a transformed or fake tensor has none
            number = item.item()
            return f"{number:.6g}" if isinstance(number, float) else str(number)
        except Exception:
            pass
    return type_text(item)

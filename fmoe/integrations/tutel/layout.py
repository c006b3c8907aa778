"""How Tutel cuts a layer's experts into the parts of its ranks, and puts them together again.

With E experts over W ranks, a rank holds n = E/W whole experts, or one of the s = W/E parts of an expert:

    entry               whole      part, n experts   part, 1/s of an expert
    batched_fc1_w       [E,H,M]    [n,H,M]           [1,H/s,M]
    batched_fc2_w       [E,H,O]    [n,H,O]           [1,H/s,O]
    batched_fc1_bias    [E,H]      [n,H]             [1,H/s]
    batched_fc2_bias    [E,O]      [n,O]             [1,ceil(O/s)], the last ones with zeros at the end
    W_fc1, W_fc2, W_fc3 [E*M*H]    [n*M*H]           [ceil(M*H/s)], likewise
    of custom experts   [E,...]    [n,...]           not known

A whole is what a single process holds. Shapes are compared, and tensors cut and joined: none is reshaped to fit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..._typing import type_text

State = dict[str, Tensor]
COUNT = "_num_global_experts"
FFN = ("batched_fc1_w", "batched_fc2_w", "batched_fc1_bias", "batched_fc2_bias")
LLAMA = ("W_fc1", "W_fc2", "W_fc3")
_EXPERT = re.compile(rf"(|.*\.)experts\.({'|'.join(FFN + LLAMA)})$")
_GATE = re.compile(r"(|.*\.)gates\.[0-9]+\.")


@dataclass(frozen=True)
class Layer:
    """One MoE layer of a state.

    Attributes:
        prefix: of its keys: empty, or ends in a dot.
        experts: E.
        dim: M, where a gate tells.
    """

    prefix: str
    experts: int
    dim: int | None

    def names(self, keys: Sequence[str] | Mapping[str, Tensor]) -> list[str]:
        """The experts' entries among keys, without the prefix and ``experts.``."""
        start = f"{self.prefix}experts."
        names = [key.removeprefix(start) for key in keys if key.startswith(start)]
        if any(name in FFN + LLAMA for name in names):  # what is below belongs to an activation, and is not cut
            names = [name for name in names if "." not in name]
        return names

    def key(self, name: str) -> str:
        """The key of an expert's entry."""
        return f"{self.prefix}experts.{name}"


def prefixes_of(keys: Sequence[str] | Mapping[str, Tensor]) -> list[str]:
    """Prefixes of the MoE layers: those with a number of experts, with a built-in expert's entry, or with a gate."""
    found: dict[str, None] = {}
    for key in keys:
        expert, gate = _EXPERT.match(key), _GATE.match(key)
        if key == COUNT or key.endswith("." + COUNT):
            found[key.removesuffix(COUNT)] = None
        elif expert is not None:
            found[expert[1]] = None
        elif gate is not None and any(other.startswith(f"{gate[1]}experts.") for other in keys):
            found[gate[1]] = None
    return list(found)


def layers_of(state: State, num_experts: int | None) -> tuple[list[Layer], list[str]]:
    """The MoE layers of a state, and what is wrong with their numbers of experts."""
    layers, problems = [], []
    for prefix in prefixes_of(state):
        told = {}
        if prefix + COUNT in state:
            told[prefix + COUNT] = int(state[prefix + COUNT])
        dim = None
        for name, at, m in (("wg.weight", 0, 1), ("sim_matrix", 1, None)):
            gate = state.get(f"{prefix}gates.0.{name}")
            if gate is not None and gate.dim() == 2:
                told[f"{prefix}gates.0.{name}"] = gate.shape[at]
                dim = gate.shape[m] if m is not None else dim
        projector = state.get(f"{prefix}gates.0.cosine_projector.weight")
        dim = projector.shape[1] if projector is not None and projector.dim() == 2 else dim
        if num_experts is not None and not told:
            told["num_experts="] = num_experts
        if len(set(told.values())) > 1:
            problems.append("; ".join(f"{key} says {n} experts" for key, n in told.items()) + ".")
        elif not told:
            problems.append(f"nothing says how many experts {prefix or 'the layer'} has: give num_experts=.")
        else:
            layers.append(Layer(prefix, next(iter(told.values())), dim))
    return layers, problems


def divides(layer: Layer, world: int) -> list[str]:
    """Why a layer cannot be over so many ranks, if it cannot."""
    if layer.experts % world == 0 or world % layer.experts == 0:
        return []
    return [
        f"{layer.prefix or 'the layer'} has {layer.experts} experts, which {world} ranks cannot hold: one number must "
        "divide the other."
    ]


def shape_problems(layer: Layer, state: State) -> list[str]:
    """What is wrong with the whole entries of a layer's experts."""
    names, e, m = layer.names(state), layer.experts, layer.dim
    held = {name: state[layer.key(name)] for name in names}
    want: dict[str, list[int | None]] = {}
    if any(name in FFN for name in names):
        w1, w2 = held.get("batched_fc1_w"), held.get("batched_fc2_w")
        h = w1.shape[1] if w1 is not None and w1.dim() == 3 else None
        o = w2.shape[2] if w2 is not None and w2.dim() == 3 else None
        want = dict(zip(FFN, ([e, h, m], [e, h, o], [e, h], [e, o]), strict=True))
    elif any(name in LLAMA for name in names):
        sizes = [t.shape[0] for t in held.values() if t.dim() == 1]
        want = {name: [min(sizes, default=None)] for name in LLAMA}
    else:
        want = {name: [e, *t.shape[1:]] for name, t in held.items()}
    needed = [name for name in want if not name.endswith("bias")]
    problems = [f"{layer.key(name)} is missing." for name in needed if name not in held]
    for name, tensor in held.items():
        shape = want.get(name)
        if shape is None:
            problems.append(f"{layer.key(name)} is no entry of these experts, which have {', '.join(want)}.")
        elif tensor.dim() != len(shape) or any(
            n is not None and n != d for n, d in zip(shape, tensor.shape, strict=True)
        ):
            text = ", ".join("*" if n is None else str(n) for n in shape)
            problems.append(f"{layer.key(name)} is {type_text(tensor)}, but it must be [{text}].")
    if m is not None and any(name in LLAMA for name in names):
        problems += [
            f"{layer.key(name)} is {type_text(t)}, but it must be of E*M={e * m} times H numbers."
            for name, t in held.items()
            if name in LLAMA and t.dim() == 1 and t.shape[0] % (e * m)
        ]
    return problems


def width_of(layer: Layer, name: str, part: State, world: int, size: int | None) -> int | None:
    """How much of an expert's entry, which ranks share, is no filling: O of fc2's bias, M*H of llama's.

    Args:
        layer: whose it is.
        name: of the entry.
        part: the state of one rank.
        world: how many there are.
        size: M*H, where a model tells; None to find the one multiple of M that has such parts.

    Returns:
        The width; None where nothing is filled.

    Raises:
        ValueError: if no size has such parts, or several have.
    """
    if name == "batched_fc2_bias":
        fc2 = part.get(layer.key("batched_fc2_w"))
        return None if fc2 is None else int(fc2.shape[-1])
    if name not in LLAMA or world <= layer.experts:
        return None
    shards, tensor, step = world // layer.experts, part[layer.key(name)], layer.dim or 1
    held, here = tensor.numel() * shards, f"{layer.key(name)} of {world} ranks is {type_text(tensor)}"
    fits = [n for n in range(max(1, held - shards + 1), held + 1) if n % step == 0 and size in (None, n)]
    if not fits:
        want = f"M*H={size}" if size is not None else f"a multiple of M={step}"
        raise ValueError(f"{here}, but no {shards} such parts are those of {want} numbers.")
    if len(fits) > 1:
        raise ValueError(
            f"{here}: an expert has any of {fits[0]} to {fits[-1]} numbers, as the last of its {shards} parts may end "
            "in filling. checkpoint.load goes by the model; read needs files of fewer ranks."
        )
    return fits[0]


def joined(layer: Layer, name: str, parts: Sequence[Tensor], width: int | None) -> Tensor:
    """The whole of an entry, from the parts of all ranks.

    Args:
        layer: whose it is.
        name: of the entry.
        parts: by rank, of one shape.
        width: O for fc2's bias and M*H for llama's entries, whose last part may end in zeros; None if not known.

    Raises:
        ValueError: if the parts have another shape than so many ranks hold, or are of unknown experts.
    """
    world, flat = len(parts), name in LLAMA
    first, here = parts[0], f"{layer.key(name)} of {world} ranks is {type_text(parts[0])}"
    if layer.experts % world == 0:
        n = layer.experts // world
        if not flat and (first.dim() < 1 or first.shape[0] != n):
            raise ValueError(f"{here}, but each rank has {n} of {layer.experts} experts in dim 0.")
        return torch.cat(list(parts))
    s = world // layer.experts
    if name not in FFN + LLAMA:
        raise ValueError(f"{here}, but how {s} ranks share a custom expert is not known: give files of at most "
                         f"{layer.experts} ranks.")  # fmt: skip
    if flat:
        wholes = [torch.cat(list(parts[i : i + s])) for i in range(0, world, s)]
        return torch.cat([whole if width is None else whole[:width] for whole in wholes])
    cut = None if name != "batched_fc2_bias" or width is None else -(-width // s)
    if first.dim() < 2 or first.shape[0] != 1 or (cut is not None and first.shape[1] != cut):
        want = "1 expert in dim 0" + ("" if cut is None else f" and {cut} of {width} numbers in dim 1")
        raise ValueError(f"{here}, but {s} ranks share an expert, so each has {want}.")
    wholes = [torch.cat(list(parts[i : i + s]), dim=1) for i in range(0, world, s)]
    whole = torch.cat(wholes)
    return whole[:, :width] if cut is not None else whole


def part_of(layer: Layer, name: str, whole: Tensor, rank: int, world: int) -> Tensor:
    """A rank's part of a whole entry.

    Raises:
        ValueError: if it cannot be cut so.
    """
    if layer.experts % world == 0:
        n = whole.shape[0] // world
        return whole.narrow(0, rank * n, n).clone()
    s, here = world // layer.experts, f"{layer.key(name)} is {type_text(whole)}"
    expert, place = rank // s, rank % s
    if name not in FFN + LLAMA:
        raise ValueError(f"{here}, but how {s} ranks share a custom expert is not known: use at most "
                         f"{layer.experts} ranks.")  # fmt: skip
    if name in LLAMA:
        n = whole.shape[0] // layer.experts
        return _piece(whole.narrow(0, expert * n, n), 0, s, place)
    if name != "batched_fc2_bias" and whole.shape[1] % s:
        raise ValueError(f"{here}, but the {s} ranks that share an expert cannot split {whole.shape[1]} hidden units.")
    return _piece(whole.narrow(0, expert, 1), 1, s, place)


def _piece(whole: Tensor, dim: int, pieces: int, place: int) -> Tensor:
    size = -(-whole.shape[dim] // pieces)
    end = list(whole.shape)
    end[dim] = size * pieces - whole.shape[dim]
    return torch.cat([whole, whole.new_zeros(end)], dim).narrow(dim, place * size, size).clone()

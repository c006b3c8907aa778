"""Reads and writes Tutel's checkpoints, for any number of ranks.

Three kinds of files hold the same entries:

    all in one     one file with every expert (tutel.checkpoint.gather writes it)
    rank files     ``name.{rank}.pt``: each rank's part of the experts, and everything else in each file
    Swin-MoE's     ``name.pth.rank0``, ``name.pth.rank1``, ...: the parts alone; ``name.pth.master``: everything else

``_num_global_experts`` may be missing, as older versions have it. A *whole state* is what a single process
would hold; `read` makes it of any of these, and `write` any of these of it. Files are loaded with
``weights_only=True``: tensors in dicts and nothing else, so no pickled object is ever made. A shape that
does not fit is an error, never a reshape.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch import Tensor

from ..._errors import is_whole, refuse
from ..._typing import type_text
from ...values import ExpertParams, MoEParams, RouterParams
from .experts import LlamaFFNNetwork
from .files import files_of, load_file, named
from .layout import (
    COUNT,
    FFN,
    LLAMA,
    Layer,
    State,
    divides,
    joined,
    layers_of,
    part_of,
    prefixes_of,
    shape_problems,
    width_of,
)  # fmt: skip
from .moe import MOELayer

__all__ = ["load", "moe_params", "moe_state", "read", "write"]


def read(path: str | os.PathLike[str], *, ranks: int | None = None, num_experts: int | None = None) -> State:
    """The whole state that the files of a checkpoint hold.

    Args:
        path: an all-in-one file; a pattern with ``{rank}`` (and ``{size}``) for rank files; or the name
            before ``.rank0`` of Swin-MoE's.
        ranks: how many rank files there are; by default as many as are found.
        num_experts: E, for layers whose gates do not tell and that lack ``_num_global_experts``.

    Returns:
        Every entry by its key, all experts of a layer in one tensor, ``_num_global_experts`` of every layer.

    Raises:
        ValueError: if a file is missing, holds more than tensors, or keys or shapes do not fit.

    Example:
        >>> import os, tempfile
        >>> from fmoe.integrations.tutel import moe_layer
        >>> experts = {"type": "ffn", "num_experts_per_device": 2, "hidden_size_per_expert": 6}
        >>> layer = moe_layer({"type": "top"}, 4, experts)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     pattern = os.path.join(folder, "moe.{rank}.pt")
        ...     files = write(layer.state_dict(), pattern, ranks=4)
        ...     state = read(pattern)
        >>> [os.path.basename(file) for file in files]
        ['moe.0.pt', 'moe.1.pt', 'moe.2.pt', 'moe.3.pt']
        >>> all(torch.equal(state[key], entry) for key, entry in layer.state_dict().items())
        True
    """
    return _read(os.fspath(path), ranks, num_experts, {})


def _read(path: str, ranks: int | None, num_experts: int | None, sizes: Mapping[str, int]) -> State:
    """`read`; sizes are M*H of llama's experts by prefix, where a model tells."""
    files, master = files_of(path, ranks)
    states = [load_file(file) for file in files]
    if master is not None:
        rest = load_file(master)
        twice = sorted(set(rest) & set(states[0]))
        refuse("read", [f"{key} is both in {files[0]} and in {master}." for key in twice])
        states = [{**state, **rest} for state in states]
    problems = []
    for file, state in zip(files[1:], states[1:], strict=True):
        problems += [f"{file} lacks {key}, which {files[0]} has." for key in states[0] if key not in state]
        problems += [f"{file} has {key}, which {files[0]} lacks." for key in state if key not in states[0]]
        problems += [
            f"{key} is {type_text(state[key])} in {file}, but {type_text(entry)} in {files[0]}."
            for key, entry in states[0].items()
            if key in state and (state[key].shape, state[key].dtype) != (entry.shape, entry.dtype)
        ]
    refuse("read", problems)
    layers, problems = layers_of(states[0], num_experts)
    refuse("read", problems or [text for layer in layers for text in divides(layer, len(states))])
    whole = dict(states[0])
    for layer in layers:
        for name in layer.names(whole) if len(states) > 1 else ():
            parts = [state[layer.key(name)] for state in states]
            try:
                width = width_of(layer, name, states[0], len(states), sizes.get(layer.prefix))
                whole[layer.key(name)] = joined(layer, name, parts, width)
            except ValueError as error:
                problems.append(str(error))
        whole[layer.prefix + COUNT] = torch.tensor(layer.experts)
    refuse("read", problems)
    refuse("read", [text for layer in layers for text in shape_problems(layer, whole)])
    return whole


def write(state: State, path: str | os.PathLike[str], *, ranks: int | None = None) -> list[str]:
    """Writes a whole state as files that Tutel, or Swin-MoE, reads.

    Args:
        state: from `read`, or the ``state_dict()`` of a single process.
        path: one file (without `ranks`); a pattern with ``{rank}`` (and ``{size}``) for rank files; or any
            other name with `ranks` for Swin-MoE's ``.rank0``, ... and ``.master``.
        ranks: for how many ranks.

    Returns:
        The names of the files.

    Raises:
        ValueError: if the experts cannot be over so many ranks, or their shapes do not fit.

    Example:
        >>> write({"head.weight": torch.ones(2)}, "never.pt", ranks=0)
        Traceback (most recent call last):
        ...
        ValueError: write: ranks=0, but it must be a whole number of at least 1, or None for one file.
    """
    path = os.fspath(path)
    if ranks is not None and not is_whole(ranks, 1):
        refuse("write", [f"ranks={ranks!r}, but it must be a whole number of at least 1, or None for one file."])
    pattern = "{rank}" in path
    if ranks is None and pattern:
        refuse("write", [f"path={path!r} is a pattern for rank files: say for how many, with ranks=."])
    if ranks is None:
        torch.save(state, path)
        return [path]
    parts = [_part(state, rank, ranks) for rank in range(ranks)]
    if pattern:
        files = [named(path, rank, ranks) for rank in range(ranks)]
        for file, part in zip(files, parts, strict=True):
            os.makedirs(os.path.dirname(file) or ".", exist_ok=True)
            torch.save(part, file)
        return files
    experts = {key for layer in layers_of(state, None)[0] for key in map(layer.key, layer.names(state))}
    files = [f"{path}.rank{rank}" for rank in range(ranks)]
    for file, part in zip(files, parts, strict=True):
        torch.save({"model": {key: entry for key, entry in part.items() if key in experts}}, file)
    torch.save({"model": {key: entry for key, entry in state.items() if key not in experts}}, f"{path}.master")
    return [*files, f"{path}.master"]


def load(model: torch.nn.Module, source: str | os.PathLike[str] | State, *, ranks: int | None = None) -> None:
    """Loads a checkpoint into a model with Tutel layers: into each layer this rank's part, whoever wrote the files.

    Args:
        model: any module with `moe_layer` in it, or one itself.
        source: what `read` takes, or a whole state.
        ranks: how many rank files there are; by default as many as are found.

    Raises:
        ValueError: if a key is missing or not known to the model, or a shape does not fit.

    Example:
        >>> from fmoe.integrations.tutel import moe_layer
        >>> experts = {"type": "ffn", "num_experts_per_device": 2, "hidden_size_per_expert": 6}
        >>> one, other = (moe_layer({"type": "top"}, 4, experts) for _ in range(2))
        >>> load(other, one.state_dict())
        >>> torch.equal(one.experts.batched_fc1_w, other.experts.batched_fc1_w)
        True
    """
    modules = {
        f"{name}." if name else "": module for name, module in model.named_modules() if isinstance(module, MOELayer)
    }
    if isinstance(source, dict):
        state = source
    else:
        counts = {module.num_global_experts for module in modules.values()}
        sizes = {p: m.experts.size for p, m in modules.items() if isinstance(m.experts, LlamaFFNNetwork)}
        state = _read(os.fspath(source), ranks, counts.pop() if len(counts) == 1 else None, sizes)
    own, held = model.state_dict(), dict(state)
    for prefix, module in modules.items():
        count = int(held.setdefault(prefix + COUNT, own[prefix + COUNT]))
        if count != module.num_global_experts:
            refuse(
                "load",
                [f"the checkpoint has {count} experts in {prefix or 'the layer'}, but the model has "
                 f"{module.num_global_experts}."],
            )  # fmt: skip
        layer = Layer(prefix, count, module.model_dim)
        refuse("load", shape_problems(layer, held))
        held |= _cut("load", layer, held, module.ranks.rank, module.ranks.world)
    problems = [f"the checkpoint lacks {key}, which the model has." for key in own if key not in held]
    problems += [f"the checkpoint has {key}, which the model lacks: delete it." for key in held if key not in own]
    problems += [
        f"{key} is {type_text(entry)} in the checkpoint, but {type_text(own[key])} in the model."
        for key, entry in held.items()
        if key in own and entry.shape != own[key].shape
    ]
    refuse("load", problems)
    model.load_state_dict(held)


# --- fmoe's own parameters ----------------------------------------------------------------------------------------


def moe_params(state: State, prefix: str = "", *, gate: int = 0) -> MoEParams:
    """One layer of a whole state as fmoe's parameters, for `fmoe.moe`, `fmoe.distribute` and any plan.

    Args:
        state: from `read`.
        prefix: of the layer's keys, such as ``"layers.2.blocks.1.mlp._moe_layer"``.
        gate: which of the layer's gates.

    Returns:
        The parameters: views of the state's tensors where the layout allows. Their config has the layer's activation,
        which Tutel's default is ``"relu"``, of llama_ffn ``"swiglu"``, and ``TopK(k)`` or ``Cosine(k)``.

    Raises:
        ValueError: if the state lacks an entry, or the gate or the experts have no counterpart.

    Example:
        >>> from fmoe.integrations.tutel import moe_layer
        >>> experts = {"type": "ffn", "num_experts_per_device": 2, "hidden_size_per_expert": 6, "has_fc2_bias": False}
        >>> moe_params(moe_layer({"type": "top"}, 4, experts).state_dict()).experts
        ExpertParams(w_in=f32[2,4,6], w_out=f32[2,6,4], b_in=f32[2,6])
    """
    prefix = f"{prefix.removesuffix('.')}." if prefix else ""
    layers, problems = layers_of({k: v for k, v in state.items() if k.startswith(prefix)}, None)
    found = [layer for layer in layers if layer.prefix == prefix]
    if not found:
        names = ", ".join(repr(p.removesuffix(".")) for p in prefixes_of(state)) or "none"
        refuse("moe_params", problems or [f"prefix={prefix!r} is no MoE layer of the state, which has {names}."])
    layer = found[0]
    refuse("moe_params", shape_problems(layer, state))
    return MoEParams(_router(state, f"{prefix}gates.{gate}."), _experts(state, layer))


def _router(state: State, at: str) -> RouterParams:
    if f"{at}wg.weight" in state:
        return RouterParams(state[f"{at}wg.weight"].t())
    names = ("sim_matrix", "cosine_projector.weight", "cosine_projector.bias", "temperature")
    missing = [name for name in names if at + name not in state]
    if missing:
        refuse("moe_params", [f"{at}wg.weight is missing, and so is {at}{missing[0]}: no gate that fmoe has."])
    weight, projection, bias, scale = (state[at + name] for name in names)
    if bool(bias.count_nonzero()):
        refuse("moe_params", [f"{at}cosine_projector.bias is not 0, but fmoe.Cosine has no bias: use moe_layer."])
    return RouterParams(weight, projection=projection.t(), log_scale=scale.squeeze(0))


def _experts(state: State, layer: Layer) -> ExpertParams:
    held = {name: state[layer.key(name)] for name in layer.names(state)}
    if "batched_fc1_w" in held:
        w1, w2, b1, b2 = (held.get(name) for name in FFN)
        assert w1 is not None
        assert w2 is not None
        return ExpertParams(w1.transpose(1, 2), w2, b1, b2)
    if "W_fc1" not in held or layer.dim is None:
        refuse("moe_params", [f"{layer.prefix}experts are custom ones, or their gate does not tell M: use moe_layer."])
    e, m = layer.experts, layer.dim
    assert m is not None
    one, two, three = (held[name] for name in LLAMA)
    return ExpertParams(torch.stack([one.view(e, m, -1), two.view(e, m, -1)], 2), three.view(e, -1, m))


def moe_state(params: MoEParams, prefix: str = "") -> State:
    """The entries of one layer in Tutel's layout, from fmoe's parameters: the reverse of `moe_params`.

    Args:
        params: whole tensors: ``"ffn"`` of a plain activation, ``"llama_ffn"`` of a gated one without biases.
        prefix: of the layer's keys.

    Raises:
        ValueError: if Tutel has no such gate or experts.

    Example:
        >>> import fmoe
        >>> params = fmoe.init(fmoe.MoEConfig(2, 4, 6, router=fmoe.TopK(1), activation="relu"), seed=0)
        >>> {key: tuple(entry.shape) for key, entry in moe_state(params, "moe").items()}
        {'moe._num_global_experts': (), 'moe.gates.0.wg.weight': (2, 4), 'moe.experts.batched_fc1_w': (2, 6, 4), \
'moe.experts.batched_fc2_w': (2, 6, 4)}
    """
    prefix = f"{prefix.removesuffix('.')}." if prefix else ""
    experts, router = params.experts, params.router
    if not isinstance(experts, ExpertParams) or experts.sharded is not None:
        refuse(
            "moe_state", ["params.experts must be a whole fmoe.ExpertParams: gather what is on several ranks first."]
        )
    gated = experts.w_in.dim() == 4
    if gated and (experts.b_in is not None or experts.b_out is not None):
        refuse("moe_state", ["params.experts are gated and have biases, which Tutel's llama_ffn has not."])
    extra = [name for name in ("noise_weight", "scale") if getattr(router, name) is not None]
    if extra or (router.projection is None) != (router.log_scale is None):
        refuse("moe_state", [f"params.router={router!r} is of no gate that Tutel has: a linear one, or cosine_top."])
    state: dict[str, Tensor] = {COUNT: torch.tensor(experts.w_in.shape[0])}
    if router.projection is None or router.log_scale is None:
        state["gates.0.wg.weight"] = router.weight.t()
    else:
        state["gates.0.temperature"] = router.log_scale.view(1)
        state["gates.0.cosine_projector.weight"] = router.projection.t()
        state["gates.0.cosine_projector.bias"] = router.projection.new_zeros(router.projection.shape[1])
        state["gates.0.sim_matrix"] = router.weight
    if gated:
        one, two = experts.w_in.unbind(2)
        flat = {name: w.flatten() for name, w in zip(LLAMA, (one, two, experts.w_out), strict=True)}
    else:
        held = (experts.w_in.transpose(1, 2), experts.w_out, experts.b_in, experts.b_out)
        flat = {name: w for name, w in zip(FFN, held, strict=True) if w is not None}
    state |= {f"experts.{name}": w for name, w in flat.items()}
    return {prefix + key: entry.detach().contiguous() for key, entry in state.items()}


# --- parts ------------------------------------------------------------------------------------------------------------


def _part(state: State, rank: int, world: int) -> State:
    """What a rank's file holds."""
    layers, problems = layers_of(state, None)
    refuse("write", problems or [text for layer in layers for text in divides(layer, world)])
    refuse("write", [text for layer in layers for text in shape_problems(layer, state)])
    part = dict(state)
    for layer in layers:
        part |= _cut("write", layer, state, rank, world)
    return part


def _cut(call: str, layer: Layer, state: State, rank: int, world: int) -> State:
    """A rank's part of a layer's experts."""
    part, problems = {}, []
    for name in layer.names(state):
        try:
            part[layer.key(name)] = part_of(layer, name, state[layer.key(name)], rank, world)
        except ValueError as error:
            problems.append(str(error))
    refuse(call, problems)
    return part

"""The files of a checkpoint: how they are named, found and loaded."""

from __future__ import annotations

import glob
import os
import pickle
import re
from typing import Any

import torch
from torch import Tensor

from ..._errors import is_whole, refuse
from .layout import State


def named(pattern: str, rank: int | str, size: int | str) -> str:
    """The name of a rank's file."""
    return pattern.replace("{rank}", str(rank)).replace("{size}", str(size))


def files_of(path: str, ranks: int | None) -> tuple[list[str], str | None]:
    """The files by rank, and Swin-MoE's master.

    Raises:
        ValueError: if one is missing, or for how many ranks they are is not known.
    """
    if ranks is not None and not is_whole(ranks, 1):
        refuse("read", [f"ranks={ranks!r}, but it must be a whole number of at least 1, or None."])
    if "{rank}" not in path:
        single = next((file for file in (path, f"{path}.global") if os.path.isfile(file)), None)
        if single is not None:
            return [single], None
        if not os.path.isfile(f"{path}.rank0"):
            refuse("read", [f"there is no file {path}, and no {path}.rank0 of several ranks."])
        files = _by_rank(f"{path}.rank{{rank}}", ranks)
        master = f"{path}.master"
        return files, master if os.path.isfile(master) else None
    return _by_rank(path, ranks), None


def _by_rank(pattern: str, ranks: int | None) -> list[str]:
    if ranks is None:
        found = _found(pattern)
        sizes = {size for _, size in found}
        if len(sizes) > 1:
            refuse("read", [f"{pattern} is there for {', '.join(map(str, sorted(sizes)))} ranks: give ranks=."])
        ranks = sizes.pop() if sizes and "{size}" in pattern else 1 + max((rank for rank, _ in found), default=0)
    files = [named(pattern, rank, ranks) for rank in range(ranks)]
    missing = [file for file in files if not os.path.isfile(file)]
    refuse("read", [f"there is no file {file}." for file in missing])
    return files


def _found(pattern: str) -> list[tuple[int, int]]:
    """(rank, size) of every file of a pattern; size 0 where the pattern has none."""
    wanted = re.escape(pattern).replace(re.escape("{rank}"), "(?P<rank>[0-9]+)", 1)
    wanted = wanted.replace(re.escape("{size}"), "(?P<size>[0-9]+)", 1)
    wanted = wanted.replace(re.escape("{rank}"), "(?P=rank)").replace(re.escape("{size}"), "(?P=size)")
    found = []
    for file in glob.glob(named(glob.escape(pattern), "*", "*")):
        match = re.fullmatch(wanted, file)
        if match is not None:
            found.append((int(match["rank"]), int(match.groupdict().get("size") or 0)))
    return found


def load_file(file: str) -> State:
    """The tensors of a file, and nothing else.

    Raises:
        ValueError: if it holds more than tensors in a dict.
    """
    try:
        held: Any = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        what = re.search(r"(?:GLOBAL|global) (\S+)", str(error))
        raise ValueError(
            f"read: {file} holds more than tensors{f' ({what[1]})' if what else ''}, and no pickled object is made of "
            "a file. Save its state dict alone where it was written: torch.save(model.state_dict(), path)."
        ) from error
    if isinstance(held, dict) and isinstance(held.get("model"), dict):
        held = held["model"]
    wrong = [str(k) for k, v in held.items() if not isinstance(v, Tensor)] if isinstance(held, dict) else ["it"]
    refuse("read", [f"{file}: {key} is no tensor, but a checkpoint is a dict of tensors." for key in wrong])
    state: State = held
    return state

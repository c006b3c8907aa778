"""Checkpoints that do not know how many processes wrote them, written whole or not at all.

A checkpoint is a folder: what `torch.distributed.checkpoint` writes of `Training.state`, every tensor
under its name and in its whole shape, and run.json beside it. Each rank writes and reads its own part.
Its ``.metadata`` is a pickle, so go on only from checkpoints of your own.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from lm_model import Failed, Refused
from lm_training import Training
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException

FORMAT, VERSION = "fmoe-lm-checkpoint", 2


@dataclass(frozen=True)
class Saved:
    """What a checkpoint says of itself; its tensors stay on the disk.

    Args:
        path: the checkpoint's name.
        folder: where it is.
        options: those of the run, as text.
        text: SHA-256 of what it was trained on.
        step: steps done.
        validation: (step, bits per byte).
        tensors: dtype and shape of each, such as ``float32[8,4]``.
    """

    path: Path
    folder: Path
    options: dict[str, str]
    text: str
    step: int
    validation: list[tuple[int, float]]
    tensors: dict[str, str]


def save(run: Training, path: Path, options: dict[str, str], digest: str) -> None:
    """Writes a checkpoint in place of the one at `path`; every rank must call.

    Raises:
        Failed: if that is not possible; then the earlier one is still there.
    """
    ranks, temporary = run.runner.ranks, path.with_name(f".{path.name}.new")
    about = {"format": FORMAT, "version": VERSION, "options": options, "text": digest, "step": run.step}

    def begin() -> None:
        if ranks.first:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            about_run = json.dumps({**about, "validation": run.curves.validation})
            (temporary / "run.json").write_text(about_run + "\n")

    def finish() -> None:
        if ranks.first:
            put(temporary, path)

    try:
        ranks.together(begin)
        with warnings.catch_warnings(action="ignore"):  # that there is one process only, which is as it should be
            dcp.save(dict(run.state()), checkpoint_id=temporary, no_dist=not ranks.joined)
        ranks.together(finish)
    except CheckpointException as error:
        raise Failed(f"cannot write: {path}: {_cause(error)}") from None
    finally:
        if ranks.first:
            shutil.rmtree(temporary, ignore_errors=True)


def read(path: Path) -> Saved:
    """What the checkpoint at `path` says of itself.

    Raises:
        Refused: if there is none, or it is not a checkpoint of this program.
    """
    folder = path if path.exists() else _aside(path)
    if not folder.exists():
        raise Refused(f"--resume: there is no {path}; leave --resume out to begin")
    try:
        about = json.loads((folder / "run.json").read_text())
        found = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    except Exception as error:  # whatever unpickling may raise
        raise Refused(f"{path}: not a checkpoint, or one cut short ({type(error).__name__})") from None
    if not isinstance(about, dict) or (about.get("format"), about.get("version")) != (FORMAT, VERSION):
        raise Refused(f"{path}: not a checkpoint of this program, or of another version of it")
    try:
        validation = [(int(step), float(bits)) for step, bits in about["validation"]]
        tensors = {
            name: _type(held.properties.dtype, held.size) if hasattr(held, "size") else "no tensor"
            for name, held in found.items()
        }
        if about["step"] < 0:
            raise ValueError("less than no step")
        return Saved(path, folder, about["options"], about["text"], int(about["step"]), validation, tensors)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Refused(f"{path}: a damaged checkpoint ({type(error).__name__})") from None


def restore(run: Training, saved: Saved) -> None:
    """Goes back to the state that was saved; every rank must call.

    Raises:
        Refused: naming every tensor that differs from those of the model; then nothing is loaded.
    """
    state = run.state(saved.step)
    problems = mismatches(state, saved.tensors)
    if problems:
        of_curves = all(problem.startswith("curves.") for problem in problems)
        kind = "a damaged checkpoint" if of_curves else "a checkpoint of another model"
        raise Refused(f"{saved.path}: {kind}: {'; '.join(problems)}")
    try:
        with warnings.catch_warnings(action="ignore"):
            dcp.load(state, checkpoint_id=saved.folder, no_dist=not run.runner.ranks.joined)
    except CheckpointException as error:
        raise Refused(f"{saved.path}: not a checkpoint, or one cut short ({_cause(error)})") from None
    run.resume(state, saved.validation)


def mismatches(state: dict[str, Tensor], found: dict[str, str]) -> list[str]:
    """One sentence for each name that is missing, not known, or of another type."""
    problems = []
    for name in sorted(state.keys() | found.keys()):
        if name not in found:
            problems.append(f"{name} is missing")
        elif name not in state:
            problems.append(f"{name} is not of this model")
        elif found[name] != (expected := _type(state[name].dtype, state[name].shape)):
            problems.append(f"{name} is {found[name]}, not {expected}")
    return problems


def set_aside(path: Path) -> Path | None:
    """Keeps the checkpoint at `path` under another name, which it returns; None if there is none."""
    folder = path if path.exists() else _aside(path)
    if not folder.exists():
        return None
    kept = path.with_name(f"{path.name}.previous")
    put(folder, kept)
    return kept


def put(folder: Path, path: Path) -> None:
    """Moves a folder to `path`. At any moment, `read` finds what was there or what is there now."""
    aside = _aside(path)
    if path.exists():
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(path, aside)  # a folder cannot take the place of another in one move
    os.rename(folder, path)
    shutil.rmtree(aside, ignore_errors=True)


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.replaced")


def _type(dtype: Any, shape: Any) -> str:
    return f"{str(dtype).removeprefix('torch.')}[{','.join(map(str, shape))}]"


def _cause(error: CheckpointException) -> str:
    cause = next(iter(error.failures.values()))[0]
    return f"{type(cause).__name__}: {(str(cause).splitlines() or [''])[0]}"


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A name to write to; what is there at the end takes the place of `path` in one move."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)

"""What `train_lm` takes on its command line."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lm_model
import torch
from lm_model import LMConfig, Refused

import fmoe

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
CYCLE = "cycle"
TIMEOUT = 60.0


def whole(low: int, high: int = 10**9) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not low <= number <= high:
            raise argparse.ArgumentTypeError(f"{text} is not from {low} to {high}")
        return number

    return parse


def real(low: float, *, open_end: bool = False) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not math.isfinite(number) or number < low or (open_end and number == low):
            raise argparse.ArgumentTypeError(
                f"{text} is not a finite number {'above' if open_end else 'of at least'} {low:g}"
            )
        return number

    return parse


def capacity(text: str) -> float | str | None:
    if text.lower() == "none":
        return None
    return text if text == "as_needed" else real(0.0)(text)


def dtype_name(text: str) -> str:
    if text not in DTYPES:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(DTYPES)}")
    return text


def plan(text: str) -> str:
    if text in ("", CYCLE):
        return text
    try:
        fmoe.Plan.parse(text)
    except fmoe.PlanError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def option(default: Any, parse: Callable[[str], Any], text: str, *, fixed: bool = False) -> Any:
    """A field of `Options`; `fixed` if a run cannot go on with another value."""
    return dataclasses.field(default=default, metadata={"parse": parse, "help": text, "fixed": fixed})


@dataclass(frozen=True)
class Options:
    """Everything that shapes a run. `--resume` takes what the command line leaves out from the checkpoint."""

    steps: int = option(500, whole(1), "optimizer steps")
    batch: int = option(16, whole(1), "sequences in a step", fixed=True)
    length: int = option(128, whole(1), "bytes in a sequence", fixed=True)
    dim: int = option(128, whole(1), "width of the model", fixed=True)
    layers: int = option(2, whole(1), "blocks", fixed=True)
    heads: int = option(4, whole(1), "attention heads", fixed=True)
    experts: int = option(8, whole(1), "experts in a block", fixed=True)
    top_k: int = option(2, whole(1), "experts that each byte goes to", fixed=True)
    hidden: int = option(256, whole(1), "hidden size of an expert", fixed=True)
    capacity: float | str | None = option(
        None, capacity, "capacity factor, as_needed, or none to drop nothing", fixed=True
    )
    dtype: str = option("float32", dtype_name, f"to compute in: {', '.join(DTYPES)}", fixed=True)
    plan: str = option("", plan, f"how the experts run, such as 'dp' or 'ep r=1 pipeline=2', or {CYCLE}")
    lr: float = option(5e-3, real(0, open_end=True), "highest learning rate, after the warm-up")
    warmup: int = option(50, whole(0), "steps over which the rate rises, before it falls as a cosine to a tenth")
    seed: int = option(0, whole(0, 2**63 - 1), "of the parameters, the batches and the sample", fixed=True)
    data: str = option(lm_model.STDLIB, str, "file or folder of text; stdlib is Python's own source")
    max_bytes: int = option(8_000_000, whole(1), "read no more of it than this")
    eval_every: int = option(50, whole(1), "steps from one validation to the next")
    eval_batches: int = option(8, whole(1), "batches in each validation; the last one takes four times as many")
    checkpoint_every: int = option(100, whole(1), "steps from one checkpoint to the next")
    sample_bytes: int = option(400, whole(0), "bytes to write at the end")
    temperature: float = option(0.7, real(0), "of the sample; 0 for the likeliest byte")
    prompt: str = option("", str, "what the sample goes on from ('def ' for stdlib, a new line otherwise)")

    def as_text(self) -> dict[str, str]:
        """The options as they would stand on a command line."""
        return {name: str(value) for name, value in dataclasses.asdict(self).items()}

    def model(self, name: str) -> LMConfig:
        """The model of the run called `name`."""
        if self.top_k > self.experts:
            raise Refused(f"--top-k {self.top_k} is more than --experts {self.experts}")
        if self.dim % self.heads or self.dim // self.heads % 2:
            raise Refused(f"--dim {self.dim} over --heads {self.heads} must be an even whole number")
        dtype = DTYPES[self.dtype]
        moe = fmoe.MoEConfig(
            num_experts=self.experts,
            model_dim=self.dim,
            hidden_dim=self.hidden,
            router=fmoe.TopK(self.top_k),
            capacity=self.capacity,
            dtype=dtype,
        )
        dense = self.top_k * self.hidden if name == "dense" else None
        return LMConfig(self.dim, self.layers, self.heads, moe, dense, dtype)


class Parser(argparse.ArgumentParser):
    """A parser whose complaints take one line."""

    def error(self, message: str) -> Any:
        """Refuses the command line."""
        raise Refused(message)


def parse(argv: list[str] | None, about: str) -> tuple[dict[str, Any], argparse.Namespace]:
    """The options that were given, and what to do: out, resume, compare_dense, show_program, timeout."""
    description, _, rest = about.partition("\n")
    parser = Parser(description=description, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/lm"), help="folder for the results (default runs/lm)")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument("--compare-dense", action="store_true", help="train a dense model of the same cost as well")
    parser.add_argument("--show-program", action="store_true", help="print the program that one rank runs")
    parser.add_argument(
        "--timeout",
        type=real(0, open_end=True),
        default=TIMEOUT,
        metavar="X",
        help=f"seconds to wait for another rank (default {TIMEOUT:g})",
    )
    for f in dataclasses.fields(Options):
        default = "" if f.default == "" else f" (default {str(f.default).lower()})"
        parser.add_argument(
            "--" + f.name.replace("_", "-"),
            type=f.metadata["parse"],
            default=argparse.SUPPRESS,
            metavar="X",
            help=f.metadata["help"] + default,
        )
    given = vars(parser.parse_args(argv))
    names = ("out", "resume", "compare_dense", "show_program", "timeout")
    return given, argparse.Namespace(**{name: given.pop(name) for name in names})


def resumed(given: dict[str, Any], saved: dict[str, str], path: Path) -> Options:
    """The options of a checkpoint, with those given in their place where that is possible."""
    options = {}
    try:
        for f in dataclasses.fields(Options):
            options[f.name] = f.metadata["parse"](saved[f.name])
    except (AttributeError, KeyError, TypeError, argparse.ArgumentTypeError):
        raise Refused(f"{path}: a damaged checkpoint (its options)") from None
    for f in dataclasses.fields(Options):
        if f.metadata["fixed"] and given.get(f.name, options[f.name]) != options[f.name]:
            flag = "--" + f.name.replace("_", "-")
            raise Refused(
                f"{path} was made with {flag} {options[f.name]}, which {flag} {given[f.name]} cannot go on from"
            )
    return Options(**{**options, **given})

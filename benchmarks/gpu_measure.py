"""How `gpu.py` measures: a budget of time, clocks, ceilings, memory, poison, and the errors of a check.

On a GPU a run is between two events on its stream, and what the cache held before is overwritten first. On
a CPU, where the script is tested, it is between two readings of the host's clock.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

try:  # before anything of it is used, and the first of the script's files to be read
    import fmoe  # noqa: F401
except ImportError as missing:
    sys.exit(f"gpu.py: fmoe cannot be imported here: {missing}. It needs torch 2.11 or newer and numpy.")

Run = Callable[[], Any]


class Budget:
    """Seconds that may be spent; what no longer fits is skipped, with a line that says so."""

    def __init__(self, seconds: float):
        self.seconds, self.start, self.skipped = seconds, time.perf_counter(), list[str]()

    def spent(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.start

    def allows(self, what: str, seconds: float) -> bool:
        """Whether `seconds` are left; if not, it is said once that `what` is skipped."""
        if self.spent() + seconds <= self.seconds:
            return True
        line = f"skipped {what}: it may take {seconds:.0f} s, and {self.seconds - self.spent():.0f} s are left"
        if line not in self.skipped:
            self.skipped.append(line)
            print(line, flush=True)
        return False


def finish(device: torch.device) -> None:
    """Waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Flush:
    """Overwrites what the last-level cache holds, so that no run reads what another left there."""

    def __init__(self, device: torch.device):
        size = 0
        if device.type == "cuda":
            size = 4 * getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 2**26)
        self.held = torch.empty(size, dtype=torch.uint8, device=device)

    def __call__(self) -> None:
        """Writes all of it; on a GPU the host goes on, and launches the run meanwhile."""
        self.held.add_(1)


def once(run: Run, device: torch.device, flush: Run) -> float:
    """Seconds of one run on the device."""
    flush()
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def rounds(
    runs: Mapping[str, Run], device: torch.device, flush: Run, seconds: float, most: int = 50, least: int = 3
) -> dict[str, dict[str, Any]]:
    """Times every run once a round, in an order that changes, for some seconds; the median and quartiles of each.

    A run that fails is out, with its error.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    failed: dict[str, str] = {}

    def attempt(name: str) -> float | None:
        try:
            return once(runs[name], device, flush)
        except Exception as error:
            failed[name] = error_text(error)
            return None

    for _ in range(2):  # compiles, and fills the allocator's cache
        for name in runs:
            if name not in failed:
                attempt(name)
    start, done = time.perf_counter(), 0
    while done < most and (done < least or time.perf_counter() - start < seconds):
        names = [name for name in runs if name not in failed]
        shift = done % max(1, len(names))
        for name in names[shift:] + names[:shift]:
            taken = attempt(name)
            if taken is not None:
                times[name].append(taken)
        done += 1
    return {name: {"error": failed[name]} if name in failed else spread(found) for name, found in times.items()}


def spread(seconds: Sequence[float]) -> dict[str, Any]:
    """Median, least and quartiles, in milliseconds."""
    ms = sorted(1e3 * s for s in seconds)
    quartiles = statistics.quantiles(ms, n=4, method="inclusive") if len(ms) > 1 else ms * 3
    return {"ms": statistics.median(ms), "min": ms[0], "q1": quartiles[0], "q3": quartiles[2], "rounds": len(ms)}


def error_text(error: BaseException) -> str:
    """The type of an error and its first line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"


# --- ceilings and the card's state -------------------------------------------------------------------------------


def ceilings(device: torch.device, flush: Run, seconds: float, small: bool) -> dict[str, float]:
    """TFLOP/s of one large bf16 matmul on random data, and GB/s read and written by one large copy."""
    dim, size = (256, 2**20) if small else (8192, 2**32)
    a, b = (torch.randn(dim, dim, device=device).to(torch.bfloat16) for _ in range(2))
    product = torch.empty_like(a)
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    runs = {"matmul": lambda: torch.mm(a, b, out=product), "copy": lambda: target.copy_(source)}
    found = rounds(runs, device, flush, seconds)
    return {
        "matmul_tflops": 2 * dim**3 / found["matmul"]["ms"] / 1e9,
        "copy_gb_per_s": 2 * size / found["copy"]["ms"] / 1e6,
    }


_ASKED = "name,driver_version,power.draw,clocks.sm,clocks.mem,temperature.gpu"


def card_state() -> dict[str, str]:
    """What nvidia-smi says of power, clocks and temperature; nothing where there is none. It sets nothing."""
    command = ["nvidia-smi", f"--query-gpu={_ASKED}", "--format=csv,noheader"]
    try:
        line = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return {}
    return dict(zip(_ASKED.split(","), (part.strip() for part in line.split(",")), strict=False))


# --- memory ----------------------------------------------------------------------------------------------------------


def clear(device: torch.device) -> None:
    """Gives back what nobody holds."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def peak_bytes(run: Run, device: torch.device) -> int | None:
    """The most bytes held during a run, beyond those before it; None on a CPU."""
    if device.type != "cuda":
        return None
    finish(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    finish(device)
    return torch.cuda.max_memory_allocated(device) - before


def saved_bytes(forward: Callable[[], Tensor], known: Sequence[Tensor]) -> int:
    """Bytes that a forward keeps for backward beside `known` (x, parameters) and its result, each storage once."""
    skip = {tensor.untyped_storage().data_ptr() for tensor in known}
    held: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in skip:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        y = forward()
    held.pop(y.untyped_storage().data_ptr(), None)
    return sum(held.values())


@contextlib.contextmanager
def poisoned(device: torch.device, size: int = 2**31) -> Iterator[None]:
    """Fresh memory holds NaN meanwhile, so that an output nobody wrote is seen.

    On a GPU the allocator's blocks are filled and given back to it; on a CPU torch fills what it allocates.
    """
    if device.type == "cuda":
        for bytes_each in (2**8, 2**12, 2**16, 2**19, 2**20, 2**24, size // 4, size):
            held = [
                torch.full((bytes_each // 4,), torch.nan, device=device) for _ in range(32 if bytes_each < 2**20 else 2)
            ]
            del held
        yield
        return
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


# --- errors ----------------------------------------------------------------------------------------------------------


def error_of(found: Tensor, wanted: Tensor) -> float:
    """``|found - wanted| / |wanted|`` over all entries, in fp64; NaN stays NaN. Where wanted is 0, found must be."""
    a, b = found.detach().double(), wanted.detach().double()
    if a.shape != b.shape:
        return float("inf")
    scale = b.norm()
    return float((a - b).norm() / torch.where(scale > 0, scale, 1))


def row_error(found: Tensor, wanted: Tensor) -> float:
    """Relative error of a row, the median over rows: rounding may send a few tokens to other experts."""
    a, b = found.detach().float(), wanted.detach().float()
    return float(((a - b).norm(dim=-1) / b.norm(dim=-1).clamp(min=1e-30)).median())


def require(error: float, limit: float, what: str) -> None:
    """Fails unless ``error <= limit``; NaN fails."""
    if not error <= limit:
        raise AssertionError(f"{what}: error {error:.2e} is above {limit:.0e}")

"""Runs a function on W real processes over gloo, and brings back what each returns."""

from __future__ import annotations

import datetime
import faulthandler
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# ranks are forks of a process that has imported these, and has no threads yet
multiprocessing.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "fmoe"])


def launch(
    fn: Callable[..., Any],
    world: int,
    *args: Any,
    timeout: float = 60,
    ends: bool = True,
    survivors: Sequence[int] | None = None,
) -> list[Any]:
    """``fn(rank, *args)`` on `world` processes; the result of each, or the first one's error.

    `timeout` is the process group's, in seconds. `ends` is whether the ranks still agree at the end.
    With `survivors` the others may die, and only theirs are the results.
    """
    with tempfile.TemporaryDirectory() as folder:
        call = (fn, world, folder, timeout, ends and survivors is None, args)
        context = mp.start_processes(_run, args=call, nprocs=world, join=survivors is None, start_method="forkserver")
        for rank in survivors or ():
            context.processes[rank].join()
        results = [
            torch.load(os.path.join(folder, f"{rank}.pt"), weights_only=False)
            for rank in (range(world) if survivors is None else survivors)
        ]
    errors = [result["error"] for result in results if "error" in result]
    if errors:
        raise AssertionError("\n".join(errors))
    return [result["value"] for result in results]


def _run(
    rank: int, fn: Callable[..., Any], world: int, folder: str, timeout: float, ends: bool, args: tuple[Any, ...]
) -> None:
    faulthandler.enable()  # a rank that dies says where
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=timeout),
    )
    try:
        result = {"value": fn(rank, *args)}
    except Exception:
        result = {"error": f"rank {rank}:\n{traceback.format_exc()}"}
    torch.save(result, os.path.join(folder, f"{rank}.pt"))
    if ends and "error" not in result:
        dist.barrier()
    dist.destroy_process_group()

"""The processes that train one model together, and how it runs on them.

Every rank calls the same functions in the same order, also those that only rank 0 has work in. Each
takes its rows of every batch. Parameters and their gradients are DTensors in one home layout, so that
a plan may change at every step.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import lm_model
import optree
import torch
import torch.distributed as dist
from lm_model import Failed, LMConfig, Params, Refused
from lm_options import CYCLE
from torch import Tensor
from torch.distributed.tensor import DTensor

import fmoe

T = TypeVar("T")
LOST = ("gloo", "Connection closed", "Connection reset", "Broken pipe", "Timed out", "timed out")


@dataclass(frozen=True)
class Ranks:
    """The processes that train together: one, without a process group, unless torchrun started more.

    Args:
        world: how many there are.
        rank: which one this is.
        joined: whether there is a process group.
    """

    world: int = 1
    rank: int = 0
    joined: bool = False

    @property
    def first(self) -> bool:
        """Whether this is the rank that prints, draws and writes."""
        return self.rank == 0

    def together(self, work: Callable[[], T]) -> T:
        """Runs `work`, which exchanges nothing, on every rank; if it fails on one, they all raise its error."""
        result: Any = None
        error: Exception | None = None
        try:
            result = work()
        except (Refused, Failed) as caught:
            error = caught
        except OSError as caught:
            error = Failed(f"cannot write: {caught}")
        if self.world > 1:
            errors: list[Any] = [None] * self.world
            dist.all_gather_object(errors, error)
            error = next((found for found in errors if found is not None), None)
        if error is not None:
            raise error
        return result

    def any(self, flag: bool) -> bool:
        """Whether `flag` is set on any rank."""
        if self.world == 1:
            return flag
        held = torch.tensor(flag, dtype=torch.int64)
        dist.all_reduce(held, op=dist.ReduceOp.MAX)
        return bool(held)

    def leave(self) -> None:
        """Waits until every rank is here, and ends the process group."""
        if self.joined and dist.is_initialized():
            with contextlib.suppress(RuntimeError):  # one that died meanwhile is not waited for
                dist.barrier()  # a rank that left early would break the connections of the others
            dist.destroy_process_group()


def join(timeout: float) -> Ranks:
    """Meets the processes that torchrun started; any exchange with them takes `timeout` seconds at most."""
    if "WORLD_SIZE" not in os.environ:
        return Ranks()
    try:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout))
    except (RuntimeError, ValueError) as error:
        raise Failed(f"cannot meet the other ranks: {str(error).splitlines()[0]}") from None
    return Ranks(dist.get_world_size(), dist.get_rank(), joined=True)


def of_a_lost_rank(error: BaseException) -> str:
    """The line in which torch.distributed says that another rank is gone or late; empty for other errors."""
    lost = isinstance(error, (RuntimeError, fmoe.SpecError)) and any(sign in str(error) for sign in LOST)
    return str(error).splitlines()[0].partition(" This is typically")[0] if lost else ""


class Runner:
    """How a model runs: as it is written, or under a spec on this rank's rows of each batch.

    Args:
        config: of the model.
        ranks: the processes.
        plan: a plan's text, `CYCLE`, or an empty string: then the planner chooses on several ranks.

    Raises:
        Refused: if the plan is not legal on so many ranks.
    """

    def __init__(self, config: LMConfig, ranks: Ranks, plan: str):
        self.config, self.ranks = config, ranks
        self.spec: fmoe.ShardingSpec | None = None
        self.plans: list[fmoe.Plan] = []
        self.model: Any = lm_model.forward
        if ranks.joined or plan:
            mesh = fmoe.make_mesh(config.moe.num_experts)
            if plan == CYCLE:
                self.plans = fmoe.legal_plans(mesh, pipelines=(1, 2))
            elif plan:
                self.plans = [fmoe.Plan.parse(plan)]
            try:
                self.spec = fmoe.ShardingSpec(mesh, **({"plan": self.plans[0]} if plan else {}))
            except fmoe.PlanError as error:
                raise Refused(f"--plan {plan}: {error}") from None
            self.model = fmoe.auto(lm_model.forward, self.spec)

    def begin(self, step: int) -> None:
        """Takes the plan of step 1, 2, ...: with `CYCLE` the next one, the same on every rank."""
        if len(self.plans) > 1:
            self.model.use(self.plans[(step - 1) % len(self.plans)])

    def end(self, counts: Tensor, seconds: float) -> None:
        """Tells the planner, if it chooses, what a step took and how its ``counts [layers,E]`` were spread."""
        if self.planned:
            self.model.update(list(counts.unbind()), seconds=seconds)

    def explanation(self) -> str:
        """Why the plans run that run; nothing where none were chosen."""
        return str(self.model.explain()) if self.planned else ""

    @property
    def planned(self) -> bool:
        """Whether the planner chooses."""
        return self.spec is not None and not self.plans and self.config.dense is None

    def program(self, params: Params, windows: Tensor) -> str:
        """The program of a step, under a plan that overlaps exchanges with compute if there is one to choose."""
        args = (params, self.rows(windows)[:, :-1], self.config)
        if self.spec is None:
            return fmoe.trace(lm_model.forward)(*args).as_text()
        if len(self.plans) > 1:
            self.model.use(next(plan for plan in self.plans if plan.pipeline > 1))
        return self.model.planned(*args).as_text()

    def distribute(self, params: Params) -> Params:
        """Parameters as they are held: plain tensors in one process, DTensors under torchrun."""
        return fmoe.distribute(params, self.spec) if self.ranks.joined and self.spec is not None else params

    def rows(self, windows: Tensor) -> Tensor:
        """This rank's rows of a batch; there may be none."""
        return windows.tensor_split(self.ranks.world)[self.ranks.rank]

    def share(self, mean: Tensor, rows: Tensor) -> Tensor:
        """This rank's share of the mean over the batch of what is `mean` over its rows."""
        return mean if self.spec is None else self.spec.mean(mean, tokens=rows.shape[0] * (rows.shape[1] - 1))

    def total(self, share: Tensor) -> Tensor:
        """The sum of all shares."""
        return share if self.spec is None else self.spec.total(share)

    def mean_nats(self, params: Params, windows: Tensor) -> Tensor:
        """Nats per byte of a batch ``windows [B,L+1]``."""
        rows = self.rows(windows)
        return self.total(self.share(lm_model.cross_entropy(params, rows, self.config, model=self.model)[0], rows))

    def gradient(self, params: Params, windows: Tensor) -> tuple[Params, tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Gradients of the objective of a batch, and of the batch: objective, nats per byte, counts and dropped."""
        rows = self.rows(windows)

        def shared(params: Params) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
            objective, (nats, *load) = lm_model.objective(params, rows, self.config, model=self.model)
            return self.share(objective, rows), (self.share(nats, rows), *load)

        grads, (objective, (nats, counts, dropped)) = torch.func.grad_and_value(shared, has_aux=True)(params)
        objective, nats = self.total(torch.stack([objective, nats]))
        return grads, (objective, nats, counts, dropped)


def gathered(params: Params) -> Params:
    """The parameters as whole plain tensors; every rank must call."""
    return optree.tree_map(lambda leaf: leaf.full_tensor() if isinstance(leaf, DTensor) else leaf, params)

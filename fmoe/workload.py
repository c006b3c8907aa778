"""One MoE layer on a cluster that need not be there: its sizes, every plan for it, and what each takes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from ._errors import PlanError, is_whole
from .functional.config import MoEConfig
from .functional.moe import moe
from .functional.routers import TopK
from .ops.activations import ACTIVATIONS
from .sharding.cost import Load, Price, price
from .sharding.distribute import make_mesh
from .sharding.mesh import Mesh
from .sharding.plan import Plan, legal_plans
from .sharding.presets import PRESETS
from .sharding.profile import Profile
from .sharding.spec import ShardingSpec
from .stages import Planned, Traced, trace
from .values import ExpertParams, MoEParams, RouterParams

LAYER = "moe.0"
#: Above these there is no cluster, and numbers no longer fit into 64 bits.
MOST_RANKS, MOST_ELEMENTS = 2**20, 10**15
DTYPES = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Workload:
    """Sizes of one MoE layer and of the cluster it runs on.

    Attributes:
        experts: E.
        world: W.
        node: ranks per node.
        tokens: T of each rank.
        model_dim: M.
        hidden_dim: H.
        top_k: K.
        capacity: the factor; None to drop nothing.
        imbalance: choices of the fullest expert over those of the mean one. Padded buffers do not feel it.
        dtype: of everything.
        activation: of the experts.

    Example:
        >>> small = Workload(experts=4, world=8, node=4, tokens=64, model_dim=32, hidden_dim=64)
        >>> min(small.prices(PRESETS["a100_ndm"]).items(), key=lambda item: item[1].seconds)[0].parallelism
        'dp'
    """

    experts: int
    world: int
    node: int
    tokens: int
    model_dim: int
    hidden_dim: int
    top_k: int = 2
    capacity: float | None = None
    imbalance: float = 1.0
    dtype: str = "bfloat16"
    activation: str = "swiglu"

    def __post_init__(self) -> None:
        _ = self.mesh, self.config  # which check the sizes
        if self.world > MOST_RANKS:
            raise ValueError(f"world={self.world}, but at most {MOST_RANKS} ranks are priced.")
        for name in ("tokens", "node"):
            if not is_whole(getattr(self, name), 1):
                raise ValueError(f"{name}={getattr(self, name)!r}, but it must be a whole number of at least 1.")
        elements = max(2 * self.experts * self.hidden_dim, self.experts * self.tokens, self.tokens) * self.model_dim
        if elements > MOST_ELEMENTS:
            raise ValueError(
                f"experts={self.experts}, tokens={self.tokens}, model_dim={self.model_dim} and hidden_dim="
                f"{self.hidden_dim} make tensors of more than {MOST_ELEMENTS:.0e} elements: choose smaller ones."
            )
        most = self.experts / self.top_k
        if not 1 <= self.imbalance <= most:
            raise ValueError(
                f"imbalance={self.imbalance:g}, but the fullest expert holds from 1 to E/K={most:g} times the mean: "
                f"each token chooses {self.top_k} of {self.experts} experts, one expert at most once."
            )

    @property
    def mesh(self) -> Mesh:
        """The ranks."""
        return make_mesh(self.experts, world=self.world, node=self.node)

    @property
    def config(self) -> MoEConfig:
        """The layer."""
        return MoEConfig(
            num_experts=self.experts,
            model_dim=self.model_dim,
            hidden_dim=self.hidden_dim,
            router=TopK(self.top_k),
            activation=self.activation,
            capacity=self.capacity,
        )

    @property
    def counts(self) -> tuple[float, ...]:
        """Choices of each expert over the mean: one expert at the imbalance, the others alike."""
        if self.experts == 1:
            return (1.0,)
        rest = (self.experts - self.imbalance) / (self.experts - 1)
        return (self.imbalance, *[rest] * (self.experts - 1))

    @cached_property
    def traced(self) -> Traced:
        """The layer, captured on shapes alone."""
        config = self.config

        def layer(params: MoEParams, x: torch.Tensor) -> Any:
            return moe(params, x, config)

        return trace(layer)(*without_data(config, self.tokens, getattr(torch, self.dtype)))

    def planned(self, plan: Plan) -> Planned:
        """The layer under a plan."""
        return self.traced.plan(ShardingSpec(self.mesh, plan=plan, max_tokens=self.tokens))

    @cached_property
    def programs(self) -> Mapping[Plan, Planned]:
        """The layer under every legal plan, in both layouts if there is a capacity.

        Without one a padded buffer holds E/K times the rows, and is left out.
        """
        layout = "ragged" if self.capacity is None else None
        return {plan: self.planned(plan) for plan in legal_plans(self.mesh, layout=layout)}

    @property
    def excess(self) -> float:
        """Kept rows of the fullest part of the experts over the mean of all rows, dropped ones too."""
        most = math.inf if self.capacity is None else self.capacity
        kept = tuple(min(count, most) for count in self.counts)
        return Load(kept, sum(self.counts)).fullest(self.mesh.expert)

    def priced(self, planned: Planned, profile: Profile) -> Price:
        """What a program takes under the load of this workload."""
        ragged = planned.plans[LAYER].layout == "ragged"
        loads = {LAYER: Load.spread(self.excess)} if ragged else {}
        return price(planned.program, planned.axes, profile, loads=loads, tokens=self.tokens)

    def prices(self, profile: Profile, like: Workload | None = None) -> dict[Plan, Price]:
        """What every legal plan takes on a machine.

        Args:
            profile: the machine.
            like: a workload that differs in its load alone, whose programs are taken.
        """
        return {plan: self.priced(planned, profile) for plan, planned in (like or self).programs.items()}

    def why_none_fits(self, prices: Mapping[Plan, Price], limit: float, profile: Profile) -> str:
        """What to change where no plan fits in memory: the least memory and the most tokens that would do."""
        plan, least = min(prices.items(), key=lambda item: (item[1].memory, str(item[0])))
        problem = f"no plan fits in memory={limit:.4g} bytes: the smallest, {plan}, takes {least.memory:.4g}. "
        small = sorted(prices, key=lambda plan: prices[plan].memory)[:4]
        fits, over = 0, self.tokens
        while over - fits > 1:
            middle = (fits + over) // 2
            fewer = replace(self, tokens=middle)
            if min(fewer.priced(fewer.planned(plan), profile).memory for plan in small) <= limit:
                fits = middle
            else:
                over = middle
        change = f"give it {math.ceil(least.memory)} bytes"
        if fits:
            return f"{problem}It would fit with --tokens {fits}, or {change}."
        return f"{problem}Fewer tokens are not enough, as its parameters do not fit: {change}, or use more ranks."


def duplicates(num_experts: int, top_k: int, groups: int) -> float:
    """Share of a token's copies that go to a group of experts that gets another one, if every choice is as likely.

    Of the ``R`` groups a token reaches ``R (1 - C(E - E/R, K) / C(E, K))``; an exchange that sends one copy to
    each moves that share less. It is what HierMoE (arXiv 2508.09591) measured of its groups, and of 4 nodes what
    X-MoE did.

    Args:
        num_experts: E.
        top_k: K, different experts.
        groups: R, each of E / R experts.

    Returns:
        A number from 0 to 1.

    Example:
        >>> round(duplicates(256, 8, 4), 3), duplicates(8, 1, 2)
        (0.548, 0.0)
    """
    elsewhere = math.comb(num_experts - num_experts // groups, top_k) / math.comb(num_experts, top_k)
    return 1 - groups * (1 - elsewhere) / top_k


def best(prices: Mapping[Plan, Price], limit: float | None) -> Plan:
    """The fastest plan that fits in memory; of equal ones the first by name.

    Raises:
        PlanError: if none fits.
    """
    fits = [plan for plan, found in prices.items() if limit is None or found.memory <= limit]
    if not fits:
        raise PlanError("no plan fits in memory.")
    return min(fits, key=lambda plan: (prices[plan].seconds, str(plan)))


def without_data(config: MoEConfig, tokens: int, dtype: torch.dtype) -> tuple[MoEParams, torch.Tensor]:
    """Parameters and tokens that have shapes alone."""
    experts, dim, hidden = config.num_experts, config.model_dim, config.hidden_dim
    halves = (2,) if ACTIVATIONS[config.activation].gated else ()
    shapes = (dim, experts), (experts, dim, *halves, hidden), (experts, hidden, dim), (tokens, dim)
    router, w_in, w_out, x = (torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
    return MoEParams(RouterParams(router), ExpertParams(w_in, w_out)), x


def profile_of(text: str) -> Profile:
    """A machine, by the name of a preset or the path of a calibrated one.

    Raises:
        ValueError: if it is neither.
    """
    if text in PRESETS:
        return PRESETS[text]
    if not text.endswith(".json"):
        raise ValueError(f"profile {text!r}: choose one of {', '.join(PRESETS)}, or a .json file of a calibration.")
    return Profile.load(text)

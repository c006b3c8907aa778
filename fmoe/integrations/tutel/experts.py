"""Tutel's experts: modules with its parameters, and how each call applies them.

One rank of W holds n experts, or one of s parts of an expert that s ranks share:

    ffn         batched_fc1_w [n,H/s,M]   batched_fc2_w [n,H/s,O]   batched_fc1_bias [n,H/s]
                batched_fc2_bias [n,ceil(O/s)]
    llama_ffn   W_fc1, W_fc2 [n*M*H/s]   W_fc3 [n*H*O/s], flat

What fmoe computes with is made of these without copying where their layout allows: ``w_in [n,M,H/s]`` is a
transposed view. What is cut otherwise than fmoe's home layout (fc2's bias, and llama_ffn's flat parts) is
gathered over the s ranks first; the gradient of that is a reduce_scatter, so each part's is complete.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor

from ..._errors import refuse
from ..._typing import type_text
from ...auto import Auto
from ...functional.combine import combine
from ...functional.dispatch import dispatch
from ...functional.experts import ExpertFunction, expert_apply
from ...ops import rearrange
from ...sharding.plan import as_plan
from ...sharding.spec import ShardingSpec
from ...values import ExpertParams, Routing
from .gates import Routed
from .ranks import Ranks

_PLAIN: dict[Any, str] = {nnf.relu: "relu", torch.relu: "relu", nnf.gelu: "gelu", nnf.silu: "silu"}
_GATED: dict[Any, str] = {nnf.silu: "swiglu", nnf.gelu: "geglu"}


def _name_of(fn: Any, names: dict[Any, str]) -> str | None:
    """By identity: a callable object of the user's may have no hash, or an equality of its own."""
    return next((name for known, name in names.items() if known is fn), None)


class Experts(torch.nn.Module):
    """What `FusedExpertsNetwork` and `LlamaFFNNetwork` share.

    Attributes:
        activation: the name of the activation, or None for a function that fmoe has no name for.
    """

    ranks: Ranks
    hidden_size_per_expert: int
    output_dim: int
    activation: str | None
    activation_fn: Callable[[Tensor], Tensor]
    gated: bool

    def params(self) -> ExpertParams:
        """This rank's part of the experts, in fmoe's layout; every rank that shares them must ask."""
        raise NotImplementedError

    def activate(self, x: Tensor) -> Tensor:
        """The activation."""
        return self.activation_fn(x)

    def function(self, params: ExpertParams) -> ExpertFunction | None:
        """One expert as a function, where the activation has no name."""
        if self.activation is not None:
            return None

        def one(p: ExpertParams, rows: Tensor) -> Tensor:
            z = rows[:, : p.w_in.shape[0]] @ p.w_in.flatten(1)
            if p.b_in is not None:
                z = z + p.b_in
            if self.gated:
                gate, up = z.chunk(2, dim=-1)
                hidden = self.activate(gate) * up
            else:
                hidden = self.activate(z)
            y = hidden @ p.w_out
            y = y if p.b_out is None else y + p.b_out.sum(0)
            return nnf.pad(y, (0, rows.shape[1] - y.shape[1]))

        bias = (None if b is None else 0 for b in (params.b_in, params.b_out))
        dims: Any = (2 if self.gated else 1, 0, *bias)
        return ExpertFunction(one, hidden=ExpertParams(*dims))


class FusedExpertsNetwork(Experts):
    """Experts of two linear layers: Tutel's type ``"ffn"``, with its parameters and its initialisation."""

    batched_fc1_bias: Tensor | None
    batched_fc2_bias: Tensor | None

    def __init__(
        self,
        model_dim: int,
        num_experts_per_device: int,
        ranks: Ranks,
        hidden_size_per_expert: int,
        output_dim: int | None = None,
        activation_fn: Callable[[Tensor], Tensor] | None = None,
        activation_fn_with_self: Callable[[Tensor, Any], Tensor] | None = None,
        has_fc1_bias: bool = True,
        has_fc2_bias: bool = True,
    ) -> None:
        super().__init__()
        shards = ranks.mesh.shard
        if hidden_size_per_expert % shards:
            refuse(
                "moe_layer",
                [f"hidden_size_per_expert={hidden_size_per_expert} is split over the {shards} ranks that share an "
                 f"expert: choose a multiple of {shards}."],
            )  # fmt: skip
        self.ranks, self.model_dim, self.hidden_size_per_expert = ranks, model_dim, hidden_size_per_expert
        self.hidden_size, self.output_dim = hidden_size_per_expert // shards, output_dim or model_dim
        n, h = num_experts_per_device, self.hidden_size
        self.batched_fc1_w = torch.nn.Parameter(torch.empty(n, h, model_dim))
        self.batched_fc2_w = torch.nn.Parameter(torch.empty(n, h, self.output_dim))
        self.register_parameter("batched_fc1_bias", torch.nn.Parameter(torch.empty(n, h)) if has_fc1_bias else None)
        cut = -(-self.output_dim // shards)
        self.register_parameter("batched_fc2_bias", torch.nn.Parameter(torch.empty(n, cut)) if has_fc2_bias else None)
        self.activation_fn, self.activation_fn_with_self = activation_fn or nnf.relu, activation_fn_with_self
        self.activation = None if activation_fn_with_self is not None else _name_of(self.activation_fn, _PLAIN)
        self.gated = False
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Expert by expert what two `torch.nn.Linear` start from; fc2 is kept transposed."""
        b1, b2 = self.batched_fc1_bias, self.batched_fc2_bias
        for i in range(self.batched_fc1_w.shape[0]):
            fc1 = torch.nn.Linear(self.model_dim, self.hidden_size, bias=b1 is not None)
            fc2 = torch.nn.Linear(self.hidden_size, self.output_dim, bias=b2 is not None)
            self.batched_fc1_w[i] = fc1.weight
            self.batched_fc2_w[i] = fc2.weight.t()
            if b1 is not None:
                b1[i] = fc1.bias
            if b2 is not None:
                b2[i] = fc2.bias[: b2.shape[1]]

    def activate(self, x: Tensor) -> Tensor:
        """See `Experts`."""
        return self.activation_fn(x) if self.activation_fn_with_self is None else self.activation_fn_with_self(x, self)

    def params(self) -> ExpertParams:
        """See `Experts`."""
        b_out = self.batched_fc2_bias
        if b_out is not None:
            b_out = self.ranks.whole(b_out).reshape(b_out.shape[0], -1)[:, : self.output_dim]
            if self.activation is None:  # as many shares as there are slices of an expert, which are added up
                shards = self.ranks.mesh.shard
                b_out = (b_out / shards).unsqueeze(1).expand(-1, shards, -1)
        return ExpertParams(self.batched_fc1_w.transpose(1, 2), self.batched_fc2_w, self.batched_fc1_bias, b_out)

    def extra_repr(self) -> str:
        """Sizes of this rank's part."""
        n, h, m = self.batched_fc1_w.shape
        b1, b2 = (b is not None for b in (self.batched_fc1_bias, self.batched_fc2_bias))
        return (
            f"model_dim={m}, hidden_size={h}, output_dim={self.output_dim}, num_experts_per_device={n}, "
            f"has_fc1_bias={b1}, has_fc2_bias={b2}"
        )


class LlamaFFNNetwork(Experts):
    """Gated experts, ``(act(x W1) * (x W2)) W3``: Tutel's type ``"llama_ffn"``, with its flat parameters."""

    W_fc1: Tensor
    W_fc2: Tensor
    W_fc3: Tensor

    def __init__(
        self,
        model_dim: int,
        num_experts_per_device: int,
        ranks: Ranks,
        hidden_size_per_expert: int,
        activation_fn: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.ranks, self.output_dim, self.hidden_size_per_expert = ranks, model_dim, hidden_size_per_expert
        self.whole = (num_experts_per_device, model_dim, hidden_size_per_expert)
        self.size = model_dim * hidden_size_per_expert
        part = -(-num_experts_per_device * model_dim * hidden_size_per_expert // ranks.mesh.shard)
        for name in ("W_fc1", "W_fc2", "W_fc3"):
            self.register_parameter(name, torch.nn.Parameter(torch.empty(part)))
        self.activation_fn = activation_fn or nnf.silu
        self.activation, self.gated = _name_of(self.activation_fn, _GATED), True
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Normal numbers of standard deviation 0.01."""
        for part in (self.W_fc1, self.W_fc2, self.W_fc3):
            part.normal_(0, 0.01)

    def params(self) -> ExpertParams:
        """See `Experts`."""
        n, m, h = self.whole
        fc1, fc2, fc3 = (self.ranks.whole(part)[: n * m * h] for part in (self.W_fc1, self.W_fc2, self.W_fc3))
        w_in = torch.stack([fc1.view(n, m, h), fc2.view(n, m, h)], dim=2)
        return ExpertParams(self.ranks.slice(w_in, 3), self.ranks.slice(fc3.view(n, h, m), 1))

    def extra_repr(self) -> str:
        """Sizes."""
        n, m, h = self.whole
        return f"model_dim={m}, hidden_size={h}, num_experts_per_device={n}"


BUILT_IN = {"ffn": FusedExpertsNetwork, "llama_ffn": LlamaFFNNetwork}


class Runner:
    """Applies built-in experts to routed tokens: on one rank by fmoe's functions, on several under one of its plans."""

    def __init__(self, experts: Experts, num_experts: int) -> None:
        self.experts, self.sizes = experts, (num_experts, experts.hidden_size_per_expert)
        self._fn: ExpertFunction | None = None
        self._auto: Auto | None = None

    def __call__(self, x: Tensor, routed: Routed, plan: str | None) -> Tensor:
        """``[T,M] -> [T,O]``; without a plan the planner chooses one."""
        experts = self.experts
        dim, out = x.shape[1], experts.output_dim
        params = experts.params()
        if self._fn is None:
            self._fn = experts.function(params)
        if self._fn is not None and out > dim:  # under a plan a function keeps the width of its rows
            x = nnf.pad(x, (0, out - dim))
        if experts.ranks.world == 1:
            y = self._layer(params, x, *routed)
        else:
            y = self._planned(plan)(dataclasses.replace(params, sharded=self.sizes), x, *routed)
        return y[:, :out]

    def _planned(self, plan: str | None) -> Auto:
        if self._auto is None:
            self._auto = Auto(self._layer, ShardingSpec(self.experts.ranks.mesh, plan=plan))
        elif self._auto.spec.plan != (None if plan is None else as_plan(plan)):
            self._auto.use(plan)
        return self._auto

    def _layer(
        self, params: ExpertParams, x: Tensor, experts: Tensor, weights: Tensor, slots: Tensor, capacity: int | None
    ) -> Tensor:
        """What is captured as a program."""
        routing = Routing(
            experts, weights, slots, experts, num_experts=self.sizes[0], shape=(x.shape[0],), capacity=capacity
        )
        activation = self.experts.activation or "relu"
        tokens = expert_apply(params, dispatch(x, routing), activation=activation, fn=self._fn)
        return combine(tokens, routing)


def apply_custom(layer: Any, x: Tensor, routed: Routed, shape: Sequence[int]) -> Tensor:
    """Applies a module of the user's to ``[n,C,*shape]``: n experts of this rank, C slots from all ranks.

    Slots that hold no token are 0. With degree 0 there is no exchange and n is E; with degree r every row
    visits r of the ranks that share its expert, and what they make is added up, as Tutel does.
    """
    ranks, num_experts = layer.ranks, layer.num_global_experts
    width = routed.capacity
    if width is None:
        width = int(routed.slots.max()) + 1 if routed.slots.numel() else 0
    r = layer.adaptive_degree
    exchange = ranks.world > 1 and r > 0
    cut = ranks.mesh.shard // r if exchange else 1
    if exchange:
        width = ranks.most(width)
    width = -(-width // cut) * cut
    index = torch.where(routed.slots >= 0, routed.experts * width + routed.slots, -1)
    buf = rearrange.expand(x, index, torch.ones_like(index, dtype=x.dtype), num_experts * width)
    if not exchange:
        out = _checked(layer.experts, buf.view(num_experts, width, *shape), layer)
        flat = out.flatten(2).flatten(0, 1)
    else:
        mesh = ranks.mesh
        each, c, dim = num_experts // mesh.expert, width // cut, x.shape[1]
        pieces = buf.view(mesh.expert, 1, each, cut, c, dim).movedim(3, 2)
        send = pieces.expand(-1, r, -1, -1, -1, -1).reshape(ranks.world, each, c, dim)
        recv = ranks.exchanged(send).transpose(0, 1).reshape(each, ranks.world * c, *shape)
        out = _checked(layer.experts, recv, layer)
        back = ranks.exchanged(out.flatten(2).unflatten(1, (ranks.world, c)).transpose(0, 1))
        home = back.unflatten(0, (mesh.expert, r, cut)).sum(1).movedim(1, 2)
        flat = home.reshape(num_experts * width, back.shape[-1])
    y = rearrange.combine(flat, index, routed.weights)
    return y.reshape(x.shape[0], *out.shape[2:])


def _checked(module: Any, rows: Tensor, layer: Any) -> Tensor:
    out = module(rows, layer)
    if not isinstance(out, Tensor) or out.dim() < 3 or out.shape[:2] != rows.shape[:2]:
        found = type_text(out) if isinstance(out, Tensor) else f"a {type(out).__name__}"
        refuse(
            "moe_layer", [f"the custom experts made {found} of {type_text(rows)}: keep the first two dims of three."]
        )
    made: Tensor = out
    return made

"""Tutel's gates: modules from tokens ``[T,M]`` to logits ``[T,E]``, and what is made of the logits.

    logits      gate(x)
    noisy       logits + gate_noise * normal / E              while training
    scores      softmax(noisy)
    choices     the k largest, in queues by first choice, second choice, ...; ties to the lowest expert id
    weights     scores of the choices, over their sum if normalize_gate and k > 1
    capacity    k * int(factor * ceil(T / E)) rows of each expert and rank are kept

Everything is in fp32, or wider where the input or the weight is.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as nnf
from torch import Tensor

from ..._autocast import without_autocast
from ..._errors import refuse
from ..._typing import accumulation_dtype
from ...functional.losses import gshard_loss
from ...ops.routing import assign_slots, top_k


class LinearTopKGate(torch.nn.Module):
    """``logits = x @ wg.weight.T``: Tutel's gate of type ``"top"``."""

    def __init__(self, model_dim: int, num_global_experts: int, k: int = 1, fp32_gate: bool = False) -> None:
        super().__init__()
        dtype = torch.float32 if fp32_gate else None
        self.wg = torch.nn.Linear(model_dim, num_global_experts, bias=False, dtype=dtype)
        self.top_k, self.fp32_gate = min(num_global_experts, int(k)), bool(fp32_gate)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[T,E]``."""
        return _linear(x, self.wg)


class CosineTopKGate(torch.nn.Module):
    """Cosines of the projected token and the experts' directions, over a learned temperature: ``"cosine_top"``.

    The temperature is kept as log(1/t), and is never below 0.01.
    """

    def __init__(
        self,
        model_dim: int,
        num_global_experts: int,
        k: int = 1,
        fp32_gate: bool = False,
        proj_dim: int = 256,
        init_t: float = 0.5,
    ) -> None:
        super().__init__()
        self.top_k, self.fp32_gate = min(num_global_experts, int(k)), bool(fp32_gate)
        self.temperature = torch.nn.Parameter(torch.log(torch.full([1], 1.0 / init_t)))
        self.cosine_projector = torch.nn.Linear(model_dim, proj_dim)
        # drawn twice: the numbers are Tutel's for the same seed
        self.sim_matrix = torch.nn.Parameter(torch.randn(proj_dim, num_global_experts))
        torch.nn.init.normal_(self.sim_matrix, 0, 0.01)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[T,E]``."""
        token = nnf.normalize(_linear(x, self.cosine_projector), dim=1)
        with without_autocast(x.device.type):
            cosines = token @ nnf.normalize(self.sim_matrix.to(token.dtype), dim=0)
        scale = self.temperature.to(token.dtype).clamp(max=math.log(100.0)).exp()
        return cosines * scale


GATES = {"top": LinearTopKGate, "cosine_top": CosineTopKGate}


def _linear(x: Tensor, layer: torch.nn.Linear) -> Tensor:
    dtype = accumulation_dtype(x.dtype, layer.weight.dtype)
    bias = None if layer.bias is None else layer.bias.to(dtype)
    with without_autocast(x.device.type):
        return nnf.linear(x.to(dtype), layer.weight.to(dtype), bias)


class Routed(NamedTuple):
    """What a gate decides.

    Attributes:
        experts: ``[T,K]`` int64.
        weights: ``[T,K]``.
        slots: ``[T,K]`` int64, place among the rows its expert keeps, -1 where dropped.
        capacity: the most rows that an expert keeps; None for any number.
    """

    experts: Tensor
    weights: Tensor
    slots: Tensor
    capacity: int | None

    def repeated(self) -> Routed:
        """One token ``[T*K,1]`` for each choice, with weight 1."""
        flat = self.weights.reshape(-1, 1)
        return Routed(self.experts.reshape(-1, 1), torch.ones_like(flat), self.slots.reshape(-1, 1), self.capacity)


def with_noise(logits: Tensor, gate_noise: float, training: bool) -> tuple[Tensor, Tensor]:
    """The logits, and the same with noise; both fp32 or wider. Drawn from torch's generator as Tutel does."""
    dtype = accumulation_dtype(logits.dtype)
    wide = logits.to(dtype)
    if not training or gate_noise <= 0:
        return wide, wide
    return wide, wide + gate_noise * torch.randn_like(logits).to(dtype) / logits.shape[1]


def capacity_of(factor: float, k: int, samples: int, num_experts: int) -> int | None:
    """The most rows of one rank that an expert keeps; None for all of them.

    Example:
        >>> capacity_of(1.3, 2, 512, 4), capacity_of(-1.0, 2, 510, 4), capacity_of(0.0, 2, 512, 4)
        (332, 256, None)
    """
    return k * int(abs(factor) * -(-samples // num_experts)) if factor else None


def route(
    noisy: Tensor, k: int, *, capacity: int | None, batch_prioritized_routing: bool, normalize_gate: bool
) -> Routed:
    """Choices, weights and places in the queues, from logits ``[T,E]``."""
    tokens, num_experts = noisy.shape
    scores = noisy.softmax(dim=1)
    experts = top_k(noisy.detach(), k)
    weights = scores.gather(1, experts)
    if normalize_gate and k > 1:
        weights = weights / weights.sum(1, keepdim=True).clamp(min=torch.finfo(weights.dtype).eps)
    limit = tokens if capacity is None else min(tokens, capacity)
    order, queue = None, experts
    if batch_prioritized_routing:
        best = scores.detach().gather(1, experts[:, :1]).squeeze(1)
        order = best.argsort(descending=True, stable=True).unsqueeze(1).expand(-1, k)
        queue = experts.gather(0, order)
    slots, _ = assign_slots(queue.unsqueeze(0), torch.tensor([[limit]], device=noisy.device), [tokens], num_experts)
    slots = slots.squeeze(0)
    if order is not None:
        slots = torch.zeros_like(slots).scatter(0, order, slots)
    return Routed(experts, weights, slots, None if capacity is None else limit)


def auxiliary_loss(
    logits: Tensor, noisy: Tensor, experts: Tensor, *, is_gshard_loss: bool, gate_noise: float
) -> Tensor:
    """Tutel's ``l_aux`` of one rank's tokens, a scalar.

    With c the share of tokens whose first choice is e and m the mean of ``softmax(noisy)``, the first is
    ``E * sum_e c_e * m_e``. The second is half the sum of the squared coefficients of variation (with the
    unbiased variance) of two sums over tokens,

        importance_e = softmax(logits)_e        load_e = Phi((softmax(logits)_e - noisy_[k]) / (gate_noise / E))

    where noisy_[k] is the logit of the last choice.
    """
    if is_gshard_loss:
        return gshard_loss(noisy.softmax(dim=1), experts)
    if not gate_noise > 0:
        refuse(
            "moe_layer",
            [f"is_gshard_loss=False needs gate_noise above 0, which its load is measured by, but the gate has "
             f"gate_noise={gate_noise!r}: set it in gate_type."],
        )  # fmt: skip
    probs = logits.softmax(dim=1)
    threshold = noisy.gather(1, experts[:, -1:])
    load = torch.special.ndtr((probs - threshold) / (gate_noise / logits.shape[1]))
    return (_variation(probs.sum(0)) + _variation(load.sum(0))) / 2


def _variation(mass: Tensor) -> Tensor:
    if mass.shape[0] == 1:  # one expert is always in balance; the unbiased variance of one number is none
        return mass.sum() * 0
    return mass.var() / (mass.mean().square() + 1e-10)


def top_k_of(gate: Any, top_k: int | None, num_experts: int) -> int:
    """The number of choices per token of a call."""
    k = getattr(gate, "top_k", None) if top_k is None else top_k
    if not isinstance(k, int) or isinstance(k, bool) or k < 1:
        where = "the gate has no top_k" if k is None else f"top_k={k!r}"
        refuse("moe_layer", [f"{where}, but it must be a whole number of at least 1: set top_k, or give it per call."])
    assert isinstance(k, int)
    return min(k, num_experts)

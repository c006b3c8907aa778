"""Softmax top-k: the plain router, and the ones that differ from it in where the logits come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..._errors import refuse
from ...ops.routing import top_k
from ...values import RouterParams
from ..losses import balance_of, load_chance
from .base import (
    Given,
    Router,
    Scope,
    Scores,
    adds_up,
    chosen,
    flag,
    k_misfits,
    k_problems,
    linear,
    option,
    pick,
    positive,
    shares,
)  # fmt: skip

Order = Literal["softmax_topk", "topk_softmax"]


@dataclass(frozen=True)
class TopK(Router):
    """Softmax top-k routing.

    With logits ``z = x @ weight`` (``+ logit_bias``) and S the K largest of them (ties to the lowest expert id), the
    weight of expert e in S is

        softmax_topk, normalize=False    softmax(z)_e                          Switch, GShard
        softmax_topk, normalize=True     softmax(z)_e / sum_{j in S} softmax(z)_j
        topk_softmax                     softmax over S of z                   Mixtral, gpt-oss

    The last two are the same function. A single normalized expert always has weight 1, so its router
    would get no gradient from the output: with ``k=1``, `normalize` is False unless you say otherwise.

    Args:
        k: experts per token, from 1 to E. A router is an argument of every call, so k may change
            from call to call.
        order: ``"softmax_topk"`` or ``"topk_softmax"``.
        normalize: whether the weights of a token add up to 1; by default True if k > 1.
        noise_std: scale of the noise given to `gate`, over E; also the width of `load_loss`. With
            noise drawn from N(0, 1) and ``noise_std=1`` this is V-MoE's noise of 1/E.
        scope: tokens over which the balance, importance and load losses are taken: ``"global"``, all
            tokens of the call on all ranks; ``"group"``, each group by itself, then the mean over groups
            weighted by their tokens (with one group for each sequence: the sequence-wise loss); or
            ``"local"``, the tokens of each rank by themselves, then likewise the mean over ranks.
        logit_bias: whether ``RouterParams.logit_bias`` is added to the logits: a parameter, which weighs
            too, unlike the selection bias of `Sigmoid`.

    Raises:
        ValueError: if a value is out of range.

    Example:
        >>> TopK(2)
        TopK(k=2, order='softmax_topk', normalize=None, noise_std=1.0, scope='global', logit_bias=False)

    References:
        Switch Transformer (arXiv 2101.03961, section 2.1); GShard (arXiv 2006.16668, section 2.2);
        Mixtral (arXiv 2401.04088, section 2.1); V-MoE (arXiv 2106.05974, section 2); gpt-oss (arXiv
        2508.10925) for the bias.
    """

    k: int
    order: Order = "softmax_topk"
    normalize: bool | None = None
    noise_std: float = 1.0
    scope: Scope = "global"
    logit_bias: bool = False

    takes: ClassVar[tuple[str, ...]] = ("noise",)

    def __post_init__(self) -> None:
        problems = k_problems(self.k) + option("order", self.order, Order) + flag("logit_bias", self.logit_bias)
        if self.order == "topk_softmax" and self.normalize is False:
            problems.append('normalize=False, but order="topk_softmax" adds up to 1: choose order="softmax_topk".')
        if self.normalize not in (True, False, None):
            problems.append(f"normalize={self.normalize!r}: choose True, False or None.")
        problems += positive("noise_std", self.noise_std) + option("scope", self.scope, Scope)
        refuse(type(self).__name__, problems)
        object.__setattr__(self, "k", int(self.k))

    @property
    def normalized(self) -> bool:
        """Whether the weights of a token add up to 1."""
        return self.order == "topk_softmax" or adds_up(self.normalize, self.k)

    def choices(self, num_experts: int) -> int:
        """K."""
        return self.k

    def misfits(self, num_experts: int) -> list[str]:
        """That there are k experts."""
        return k_misfits(self.k, num_experts)

    def parameters(self, model_dim: int, num_experts: int) -> dict[str, tuple[int, ...]]:
        """The weight, and the bias if there is one."""
        shapes: dict[str, tuple[int, ...]] = {"weight": (model_dim, num_experts)}
        return shapes | {"logit_bias": (num_experts,)} if self.logit_bias else shapes

    def initial(self) -> dict[str, float]:
        """No expert ahead of the others at first."""
        return {"logit_bias": 0.0} if self.logit_bias else {}

    def scores(self, params: RouterParams, given: Given) -> Scores:
        """The logits with noise, and their softmax."""
        logits = linear(given.x, params.weight)
        if self.logit_bias:
            assert params.logit_bias is not None
            logits = logits + params.logit_bias.to(logits.dtype)
        noisy = logits
        if given.noise is not None:
            noisy = logits + given.noise.to(logits.dtype) * (self.noise_std / logits.shape[1])
        probs = noisy.softmax(dim=-1)
        return Scores(logits, noisy, probs, probs)

    def weigh(self, scores: Scores, experts: Tensor) -> Tensor:
        """The softmax of the chosen."""
        if self.order == "topk_softmax":
            least = torch.finfo(scores.ranking.dtype).min
            return torch.where(experts >= 0, pick(scores.ranking, experts), least).softmax(dim=-1)
        weights = pick(scores.gates, experts)
        return shares(weights, experts) if self.normalized else weights

    def chance(self, scores: Scores, experts: Tensor) -> Tensor:
        """V-MoE's chance to be chosen under fresh noise."""
        return load_chance(scores.logits, pick(scores.ranking, experts[:, -1:]), noise_std=self.noise_std)


@dataclass(frozen=True)
class NoisyTopK(Router):
    """Top-k of noisy logits, with a learned scale of the noise for each token and expert.

    With ``z = x @ weight``, ``s = softplus(x @ noise_weight) + epsilon`` and standard normal ``n``, the K
    largest of ``h = z + n * s`` are chosen, and weighed by their softmax. The chance of expert e to be
    chosen under fresh noise, of which ``aux.load`` is made, is

        Phi((z_e - threshold_e) / s_e)

    where threshold_e is the K-th largest h among the other experts (infinitely low if there are fewer).
    Without `noise`, ``h = z``.

    Args:
        k: experts per token, from 1 to E.
        epsilon: least scale of the noise.
        scope: as in `TopK`.

    Raises:
        ValueError: if a value is out of range.

    Example:
        >>> import fmoe
        >>> params = fmoe.RouterParams(torch.tensor([[2.0, 1.0, 0.0]]), noise_weight=torch.zeros(1, 3))
        >>> routing = fmoe.functional.gate(params, torch.ones(1, 1), NoisyTopK(2), noise=torch.tensor([[0.0, 0, 4]]))
        >>> routing.experts
        tensor([[2, 0]])

    References:
        Shazeer et al. (arXiv 1701.06538, section 2.1 and appendix A).
    """

    k: int
    epsilon: float = 1e-2
    scope: Scope = "global"

    takes: ClassVar[tuple[str, ...]] = ("noise",)

    def __post_init__(self) -> None:
        refuse("NoisyTopK", k_problems(self.k) + positive("epsilon", self.epsilon) + option("scope", self.scope, Scope))

    def choices(self, num_experts: int) -> int:
        """K."""
        return self.k

    def misfits(self, num_experts: int) -> list[str]:
        """That there are k experts."""
        return k_misfits(self.k, num_experts)

    def parameters(self, model_dim: int, num_experts: int) -> dict[str, tuple[int, ...]]:
        """Weights of the logits and of the noise."""
        return {"weight": (model_dim, num_experts), "noise_weight": (model_dim, num_experts)}

    def initial(self) -> dict[str, float]:
        """The same noise for all experts at first."""
        return {"noise_weight": 0.0}

    def scores(self, params: RouterParams, given: Given) -> Scores:
        """The logits with noise of a learned scale."""
        assert params.noise_weight is not None
        logits = linear(given.x, params.weight)
        width = torch.nn.functional.softplus(linear(given.x, params.noise_weight), 1.0, 40.0) + self.epsilon
        noisy = logits if given.noise is None else logits + given.noise.to(logits.dtype) * width
        probs = noisy.softmax(dim=-1)
        return Scores(logits, noisy, probs, probs, width)

    def weigh(self, scores: Scores, experts: Tensor) -> Tensor:
        """Softmax over the chosen."""
        return shares(pick(scores.gates, experts), experts)

    def chance(self, scores: Scores, experts: Tensor) -> Tensor:
        """Each expert's chance to be chosen under fresh noise."""
        assert scores.width is not None
        noisy, num_experts = scores.ranking, scores.ranking.shape[1]
        if self.k == num_experts:
            return torch.ones_like(noisy)
        best = pick(noisy, top_k(noisy.detach(), self.k + 1))
        inside = noisy.detach() >= best[:, -2:-1].detach()  # without e, the next one is the K-th
        threshold = torch.where(inside, best[:, -1:], best[:, -2:-1])
        return torch.special.ndtr((scores.logits - threshold) / scores.width)


@dataclass(frozen=True)
class GShard(Router):
    """Top-2 with a random second expert.

    With g1 and g2 the two largest of ``softmax(x @ weight)``, divided by their sum, the first expert
    has weight g1, and the second one weight g2 if it is kept: with probability ``min(1, 2 * g2)`` where
    `noise` is given (``Phi(noise[t,e2])`` is then uniform), always where it is not. ``aux.balance`` is
    GShard's own, ``E * sum_e c_e * m_e`` with c the share of tokens whose first choice is e and m the
    mean softmax.

    Args:
        scope: as in `TopK`.

    Raises:
        ValueError: if the scope is not known.

    Example:
        >>> import fmoe
        >>> params, x = fmoe.RouterParams(torch.tensor([[2.0, 1.0, 0.0]])), torch.ones(2, 1)
        >>> fmoe.functional.gate(params, x, GShard(), noise=torch.tensor([[0.0, -1, 0], [0, 1, 0]])).experts
        tensor([[ 0,  1],
                [ 0, -1]])

    References:
        GShard (arXiv 2006.16668, algorithm 1; its loss has another constant).
    """

    scope: Scope = "global"

    takes: ClassVar[tuple[str, ...]] = ("noise",)
    fills: ClassVar[bool] = False
    sums: ClassVar[int] = 3

    def __post_init__(self) -> None:
        refuse("GShard", option("scope", self.scope, Scope))

    def choices(self, num_experts: int) -> int:
        """Two."""
        return 2

    def misfits(self, num_experts: int) -> list[str]:
        """That there are two experts."""
        return k_misfits(2, num_experts)

    def scores(self, params: RouterParams, given: Given) -> Scores:
        """The logits and their softmax."""
        logits = linear(given.x, params.weight)
        probs = logits.softmax(dim=-1)
        return Scores(logits, logits, probs, probs)

    def select(self, scores: Scores, given: Given) -> Tensor:
        """The two best, the second one at random."""
        experts = top_k(scores.ranking.detach(), 2)
        if given.noise is None:
            return experts
        uniform = torch.special.ndtr(pick(given.noise, experts[:, 1:]))
        second = shares(pick(scores.gates.detach(), experts))[:, 1:]
        return torch.cat([experts[:, :1], torch.where(uniform < 2 * second, experts[:, 1:], -1)], dim=1)

    def weigh(self, scores: Scores, experts: Tensor) -> Tensor:
        """Divided by the sum of the best two, whether or not the second one is kept."""
        first = experts[:, :1].clamp(min=0)
        other = top_k(scores.ranking.detach().scatter(1, first, -torch.inf), 1)
        return shares(
            pick(scores.gates, torch.cat([first, torch.where(experts[:, 1:] >= 0, experts[:, 1:], other)], 1))
        )

    def firsts(self, experts: Tensor, num_experts: int) -> tuple[Tensor, ...]:
        """First choices."""
        return (chosen(experts[:, :1], num_experts),)

    def balance(self, mean: Tensor, counts: Tensor, tokens: Tensor, *firsts: Tensor) -> Tensor:
        """Of the first choices."""
        return balance_of(mean, firsts[0])

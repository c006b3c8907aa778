"""What every router is: frozen data, and pure functions from scores to choices and weights.

A router works in three steps, each a method that reads nothing but its arguments:

    scores   [T,M] -> `Scores`, all of them [T,E]
    select   which experts each token goes to, [T,K] ids, -1 for none; no gradient
    weigh    the weights of given experts, [T,K]; this step alone is done again to replay a routing

K is static, `Router.choices`; how many of the K columns hold an expert may depend on the data.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ..._autocast import without_autocast
from ..._errors import is_whole
from ..._typing import accumulation_dtype
from ...ops.routing import top_k
from ...ops.wide import wide_linear
from ...values import RouterParams
from ..losses import balance_of

Scope = Literal["global", "group", "local"]


class Given(NamedTuple):
    """What a router reads besides its parameters.

    Attributes:
        x: ``[T,M]``, 0 where masked.
        sizes: of the groups of tokens; they add up to T.
        noise: ``[T,E]`` standard normal, 0 where masked, or None.
        keep: ``[T]`` bool, False where masked, or None.
        token_ids: ``[T]`` int64, or None.
        bias: ``[E]``, or None.
    """

    x: Tensor
    sizes: list[int]
    noise: Tensor | None = None
    keep: Tensor | None = None
    token_ids: Tensor | None = None
    bias: Tensor | None = None


class Scores(NamedTuple):
    """``[T,E]`` each.

    Attributes:
        logits: without noise; of which the z loss is made.
        ranking: the largest are chosen; read without gradient.
        gates: of which weights are made.
        probs: of which the balance, importance and entropy losses are made.
        width: scale of the noise on each logit, if the router has noise.
    """

    logits: Tensor
    ranking: Tensor
    gates: Tensor
    probs: Tensor
    width: Tensor | None = None


class Router:
    """The base of all routers.

    Attributes:
        takes: arguments of `gate` that it may be given: ``noise``, ``token_ids``, ``bias``.
        needs: those of them that it cannot do without.
        whole_batch: whether choices of a token depend on the other tokens of its group. Under a spec
            each rank's tokens are groups of their own, so such a router sees one rank's tokens.
        causal: whether choices of a token are independent of later tokens, as a language model needs.
        variable: whether the number of choices depends on the token; a capacity is then a share of the
            choices there are, not of K per token.
        fills: whether all K columns hold an expert.
        takes_capacity: whether choices may be dropped.
        routes: whether it makes choices at all, so that `gate` takes it.
    """

    takes: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[tuple[str, ...]] = ()
    whole_batch: ClassVar[bool] = False
    causal: ClassVar[bool] = True
    variable: ClassVar[bool] = False
    fills: ClassVar[bool] = True
    takes_capacity: ClassVar[bool] = True
    routes: ClassVar[bool] = True
    sums: ClassVar[int] = 2  # tensors [E] that the losses over all tokens need
    scope: Scope = "global"

    @property
    def splits(self) -> bool:
        """Whether a batch may be split before the gate without changing any token's choices."""
        return not self.whole_batch

    def choices(self, num_experts: int) -> int:
        """K: the static number of choices per token, some of which may be of no expert."""
        raise NotImplementedError

    def slots(self, sizes: list[int], num_experts: int) -> int | None:
        """Rows of one expert that always suffice without a capacity, if fewer than there are tokens."""
        return None

    def rows(self, tokens: int, num_experts: int) -> int:
        """Rows that always suffice for a group of tokens without a capacity: T*K, if not fewer."""
        slots = self.slots([tokens], num_experts)
        return tokens * self.choices(num_experts) if slots is None else slots * num_experts

    def parameters(self, model_dim: int, num_experts: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the leaves of `RouterParams` that it reads."""
        return {"weight": (model_dim, num_experts)}

    def initial(self) -> dict[str, float]:
        """Leaves that start from one number."""
        return {}

    def misfits(self, num_experts: int) -> list[str]:
        """What is wrong with it for this many experts."""
        return []

    def scores(self, params: RouterParams, given: Given) -> Scores:
        """Scores of every token and expert."""
        raise NotImplementedError

    def select(self, scores: Scores, given: Given) -> Tensor:
        """``[T,K]`` ids, best first, ties to the lowest; -1 for no expert."""
        return top_k(scores.ranking.detach(), self.choices(scores.ranking.shape[1]))

    def weigh(self, scores: Scores, experts: Tensor) -> Tensor:
        """``[T,K]`` weights of these experts; anything where there is none."""
        return pick(scores.gates, experts)

    def mass(self, scores: Scores, experts: Tensor) -> Tensor:
        """``[T,E]`` of which the balance, importance and entropy losses are made."""
        return scores.probs

    def odds(self, mass: Tensor) -> Tensor:
        """``[T,E]``, rows that add up to 1, of which the entropy is taken."""
        return mass

    def chance(self, scores: Scores, experts: Tensor) -> Tensor:
        """``[T,E]`` of which the load loss is made: here the choices themselves, which have no gradient."""
        return chosen(experts, scores.logits.shape[1]).to(scores.logits.dtype)

    def firsts(self, experts: Tensor, num_experts: int) -> tuple[Tensor, ...]:
        """``[T,E]`` tensors besides `mass` and `chance` whose sums over tokens `balance` needs."""
        return ()

    def balance(self, mean: Tensor, counts: Tensor, tokens: Tensor, *firsts: Tensor) -> Tensor:
        """The balance loss, of the mean `mass` ``[E]``, the choices per expert and the number of tokens."""
        return balance_of(mean, counts)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight`` in fp32 or wider."""
    dtype = accumulation_dtype(x.dtype, weight.dtype)
    if x.dtype != dtype and x.dim() == weight.dim() == 2:
        return wide_linear(x, weight)
    with without_autocast(x.device.type):
        return x.to(dtype) @ weight.to(dtype)


def unit(x: Tensor, dim: int) -> Tensor:
    """Divided by the norm; the largest entry first, so that no square overflows or vanishes."""
    tiny = torch.finfo(x.dtype).tiny
    x = x / x.detach().abs().amax(dim, keepdim=True).clamp(min=tiny)
    return x * x.square().sum(dim, keepdim=True).clamp(min=tiny).rsqrt()


def pick(table: Tensor, experts: Tensor) -> Tensor:
    """``[T,E], [T,K] -> [T,K]``: the entries of the experts; of expert 0 where there is none."""
    return table.gather(1, experts.clamp(min=0))


def chosen(experts: Tensor, num_experts: int) -> Tensor:
    """``[T,K] -> [T,E]`` int64: how often each token chose each expert."""
    ids = torch.where(experts >= 0, experts, num_experts)
    zeros = torch.zeros_like(ids[:, :1]).expand(-1, num_experts + 1)
    return zeros.scatter_add(1, ids, torch.ones_like(ids))[:, :num_experts]


def shares(weights: Tensor, experts: Tensor | None = None) -> Tensor:
    """Rows divided by their sums, over the choices that are of an expert; 0 where the sum is 0."""
    if experts is not None:
        weights = torch.where(experts >= 0, weights, 0)
    return weights / weights.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)


# --- checks that routers share -------------------------------------------------------------------------------


def whole(name: str, number: Any, least: int = 1) -> list[str]:
    """That `number` is whole and at least `least`."""
    return [] if is_whole(number, least) else [f"{name}={number!r}, but it must be a whole number of at least {least}."]


def k_problems(k: Any) -> list[str]:
    """That k is a number of choices."""
    return [] if is_whole(k, 1) else [f"k={k!r}, but k must be a whole number of at least 1."]


def k_misfits(k: int, num_experts: int, name: str = "k") -> list[str]:
    """That there are k experts."""
    if k <= num_experts:
        return []
    return [f"{name}={k} > num_experts={num_experts}: choose {name} from 1 to {num_experts}."]


def option(name: str, value: Any, allowed: Any) -> list[str]:
    """That `value` is one of a Literal's."""
    names = get_args(allowed)
    return [] if value in names else [f"{name}={value!r}: choose one of {', '.join(map(repr, names))}."]


def is_number(value: Any) -> bool:
    """Whether `value` is a finite real number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def positive(name: str, value: Any) -> list[str]:
    """That `value` is a finite number above 0."""
    good = is_number(value) and value > 0
    return [] if good else [f"{name}={value!r}, but it must be a finite number above 0."]


def flag(name: str, value: Any) -> list[str]:
    """That `value` is True or False."""
    return [] if value in (True, False) else [f"{name}={value!r}: choose True or False."]


def adds_up(normalize: bool | None, k: int) -> bool:
    """Whether weights add up to 1: unless said otherwise, if k > 1, as one such weight has no gradient."""
    return k > 1 if normalize is None else normalize

"""What the expert layer launches on a GPU and the bytes that each launch moves, from sizes alone.

A launch reads and writes each of its tensors once; a gathered tensor counts its own rows, not the copies.
The least that this plan can launch is one kernel for the tile map, one for each product, and one for each
sum over a token's choices, forward 4 and backward 7: the activation, its transpose, both gathers and the
weights are inside products. Tokens of one choice need no sum, only zeros where it was dropped. Biases add
three launches backward.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...cost import Work
from .launch import cdiv

_INDEX, _WEIGHT = 8, 4  # bytes of a place and of a routing weight


@dataclass(frozen=True)
class Step:
    """One launch: the kernel and the bytes it moves."""

    kernel: str
    moved: int


@dataclass(frozen=True)
class Sizes:
    """Sizes of an expert layer; `pre_dim` is that of the pre-activation, 2H if gated.

    Example:
        >>> sizes = Sizes(32768, 8, 2048, 768, 2 * 768, 128, 2)  # Qwen3-30B
        >>> forward, backward = total(forward_steps(sizes)), total(backward_steps(sizes))
        >>> forward.launches, round(forward.moved / 1e9, 2), backward.launches, round(backward.moved / 1e9, 2)
        (4, 5.24, 7, 9.15)
    """

    tokens: int
    choices: int
    model_dim: int
    hidden: int
    pre_dim: int
    experts: int
    itemsize: int
    biases: bool = False

    @property
    def rows(self) -> int:
        """N."""
        return self.tokens * self.choices

    def per_row(self, width: int) -> int:
        """Bytes of ``[N,width]``."""
        return self.rows * width * self.itemsize

    def per_token(self, width: int) -> int:
        """Bytes of ``[T,width]``."""
        return self.tokens * width * self.itemsize

    def matrices(self, width: int) -> int:
        """Bytes of ``[E,width]``."""
        return self.experts * width * self.itemsize

    @property
    def w_in(self) -> int:
        """Bytes of w_in."""
        return self.matrices(self.model_dim * self.pre_dim)

    @property
    def w_out(self) -> int:
        """Bytes of w_out."""
        return self.matrices(self.hidden * self.model_dim)


def forward_steps(s: Sizes) -> tuple[Step, ...]:
    """Launches of `ffn`, in order."""
    return (
        Step("gemm.tile_map", 24 * s.experts),
        Step(
            "gemm.rows_gemm",
            s.per_token(s.model_dim) + _INDEX * s.rows + s.w_in + s.per_row(s.pre_dim) + s.per_row(s.hidden),
        ),
        *_to_tokens(s, s.per_row(s.hidden) + s.w_out, _WEIGHT * s.rows),
    )


def _to_tokens(s: Sizes, read: int, weights: int) -> list[Step]:
    """A product of rows, from what it reads, and the weighted sum over each token's choices."""
    if s.choices == 1:
        product = Step("gemm.rows_gemm", read + _INDEX * s.rows + weights + s.per_token(s.model_dim))
        return [product, Step("rows.zero_dropped", _INDEX * s.tokens)]
    rows = s.per_row(s.model_dim)
    summed = Step("rows.combine_rows", rows + _INDEX * s.rows + weights + s.per_token(s.model_dim))
    return [Step("gemm.rows_gemm", read + rows), summed]


def backward_steps(s: Sizes) -> tuple[Step, ...]:
    """Launches of `ffn_backward` for the gradients of everything, in order."""
    dots = 4 * s.rows * (cdiv(s.hidden, 128) + s.biases)
    gathered = s.per_token(s.model_dim) + _INDEX * s.rows
    steps = [
        Step("gemm.tile_map", 24 * s.experts),
        Step(
            "backward.down_back",
            gathered + s.w_out + 2 * s.per_row(s.pre_dim) + s.per_row(s.hidden) + _WEIGHT * s.rows + dots,
        ),
    ]
    if s.biases:
        steps.append(Step("backward.bias_dots", gathered + s.matrices(s.model_dim) + 4 * s.rows))
    steps += [
        *_to_tokens(s, s.per_row(s.pre_dim) + s.w_in, 0),
        Step("rows.score_sums", dots + (_INDEX + _WEIGHT) * s.rows),
        Step("backward.weight_gemm", gathered + s.per_row(s.pre_dim) + s.w_in),
    ]
    if s.biases:
        steps.append(Step("backward.bias_sum", s.per_row(s.pre_dim) + s.matrices(s.pre_dim)))
    steps.append(Step("backward.weight_gemm", s.per_row(s.hidden) + gathered + s.w_out))
    if s.biases:
        steps.append(Step("backward.bias_sum", gathered + _WEIGHT * s.rows + s.matrices(s.model_dim)))
    return tuple(steps)


def total(steps: tuple[Step, ...]) -> Work:
    """Launches and bytes of all steps."""
    return Work(len(steps), sum(step.moved for step in steps))

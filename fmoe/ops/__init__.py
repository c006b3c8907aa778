"""Operations: one record each, with kernels, derivatives and vmap rules (see `differentiable`)."""

from . import collectives as collectives
from .grouped import grouped_matmul as grouped_matmul
from .registry import OPS as OPS

__all__ = ["OPS", "grouped_matmul"]

"""The layer as pure functions: gate, dispatch, expert_apply, combine, and the four in a row, moe."""

from .combine import combine as combine
from .dispatch import dispatch as dispatch
from .experts import expert_apply as expert_apply
from .gate import gate as gate
from .losses import balance_loss as balance_loss
from .losses import choice_counts as choice_counts
from .losses import dead_experts as dead_experts
from .losses import gshard_loss as gshard_loss
from .losses import importance_loss as importance_loss
from .losses import load_loss as load_loss
from .losses import max_violation as max_violation
from .losses import router_entropy as router_entropy
from .losses import sequence_loss as sequence_loss
from .losses import squared_variation as squared_variation
from .losses import z_loss as z_loss
from .moe import moe as moe
from .routers import bias_update as bias_update
from .routers import l1_update as l1_update
from .soft import soft_moe as soft_moe

__all__ = [
    "balance_loss",
    "bias_update",
    "choice_counts",
    "combine",
    "dead_experts",
    "dispatch",
    "expert_apply",
    "gate",
    "gshard_loss",
    "importance_loss",
    "l1_update",
    "load_loss",
    "max_violation",
    "moe",
    "router_entropy",
    "sequence_loss",
    "soft_moe",
    "squared_variation",
    "z_loss",
]

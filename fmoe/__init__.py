"""fmoe: Mixture-of-Experts layers for PyTorch as pure functions.

config = fmoe.MoEConfig(num_experts=8, model_dim=512, hidden_dim=1024, router=fmoe.TopK(2))
params = fmoe.init(config, seed=0)
y, aux = fmoe.moe(params, x, config)
"""

from . import functional as functional
from ._errors import CollectiveError as CollectiveError
from ._errors import PlanError as PlanError
from ._errors import ProgramError as ProgramError
from ._errors import SpecError as SpecError
from ._errors import TraceError as TraceError
from .auto import Auto as Auto
from .auto import auto as auto
from .functional.capacity import Capacity as Capacity
from .functional.config import MoEConfig as MoEConfig
from .functional.experts import ExpertFunction as ExpertFunction
from .functional.init import init as init
from .functional.moe import moe as moe
from .functional.routers import Base as Base
from .functional.routers import Cosine as Cosine
from .functional.routers import ExpertChoice as ExpertChoice
from .functional.routers import GShard as GShard
from .functional.routers import Hash as Hash
from .functional.routers import NoisyTopK as NoisyTopK
from .functional.routers import Prototypes as Prototypes
from .functional.routers import ReLU as ReLU
from .functional.routers import Router as Router
from .functional.routers import Sigmoid as Sigmoid
from .functional.routers import Sinkhorn as Sinkhorn
from .functional.routers import SoftMoE as SoftMoE
from .functional.routers import SqrtSoftplus as SqrtSoftplus
from .functional.routers import TopK as TopK
from .functional.routers import TopP as TopP
from .functional.tokens import Tokens as Tokens
from .module import MoE as MoE
from .ops.grouped import grouped_matmul as grouped_matmul
from .ops.kernels.choice import checked as checked
from .sharding.distribute import clip_grad_norm_ as clip_grad_norm_
from .sharding.distribute import distribute as distribute
from .sharding.distribute import local as local
from .sharding.distribute import make_mesh as make_mesh
from .sharding.mesh import Mesh as Mesh
from .sharding.plan import Plan as Plan
from .sharding.plan import legal_plans as legal_plans
from .sharding.spec import ShardingSpec as ShardingSpec
from .stages import Compiled as Compiled
from .stages import Planned as Planned
from .stages import Traced as Traced
from .stages import simulate as simulate
from .stages import trace as trace
from .values import Aux as Aux
from .values import ExpertParams as ExpertParams
from .values import MoEParams as MoEParams
from .values import RouterParams as RouterParams
from .values import Routing as Routing

__version__ = "0.1.0"

__all__ = [
    "Auto",
    "Aux",
    "Base",
    "Capacity",
    "CollectiveError",
    "Compiled",
    "Cosine",
    "ExpertChoice",
    "ExpertFunction",
    "ExpertParams",
    "GShard",
    "Hash",
    "Mesh",
    "MoE",
    "MoEConfig",
    "MoEParams",
    "NoisyTopK",
    "Plan",
    "PlanError",
    "Planned",
    "ProgramError",
    "Prototypes",
    "ReLU",
    "Router",
    "RouterParams",
    "Routing",
    "ShardingSpec",
    "Sigmoid",
    "Sinkhorn",
    "SoftMoE",
    "SpecError",
    "SqrtSoftplus",
    "Tokens",
    "TopK",
    "TopP",
    "TraceError",
    "Traced",
    "auto",
    "checked",
    "clip_grad_norm_",
    "distribute",
    "functional",
    "grouped_matmul",
    "init",
    "legal_plans",
    "local",
    "make_mesh",
    "moe",
    "simulate",
    "trace",
]

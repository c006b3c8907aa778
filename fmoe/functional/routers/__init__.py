"""Routers as frozen data: how `gate` chooses experts for every token, and how it weighs them."""

from .affinity import Sigmoid as Sigmoid
from .affinity import SqrtSoftplus as SqrtSoftplus
from .affinity import bias_update as bias_update
from .balanced import Base as Base
from .balanced import ExpertChoice as ExpertChoice
from .balanced import Sinkhorn as Sinkhorn
from .base import Router as Router
from .directions import Cosine as Cosine
from .directions import Prototypes as Prototypes
from .hashed import Hash as Hash
from .soft import SoftMoE as SoftMoE
from .topk import GShard as GShard
from .topk import NoisyTopK as NoisyTopK
from .topk import TopK as TopK
from .variable import ReLU as ReLU
from .variable import TopP as TopP
from .variable import l1_update as l1_update

"""Tutel's layer on fmoe."""

from . import checkpoint as checkpoint
from . import moe as moe
from .moe import MOELayer as MOELayer
from .moe import moe_layer as moe_layer

"""Tutel's layer and checkpoints on fmoe: code written for Tutel runs by changing one import.

    from fmoe.integrations.tutel import moe as tutel_moe        # was: from tutel import moe as tutel_moe
    layer = tutel_moe.moe_layer(gate_type={"type": "top", "k": 2}, model_dim=512, experts={...})

Names, defaults, parameters, initialisation, ``l_aux`` and capacities are those of Tutel 0.3, so that a run with
the same seeds has the same losses. Training loops stay as they are: each rank holds its own part of the experts as
plain parameters, whose gradients are of the sum over ranks; those of the gates are of this rank's loss, and
yours to average. `checkpoint` reads and writes Tutel's and Swin-MoE's files for any number of ranks.

Where the two differ:

=================================== ============================================ ====================================
what                                Tutel 0.3                                    here
=================================== ============================================ ====================================
capacity                            rounded up to a multiple of the overlap and  ``k * int(f * ceil(T / E))`` under
                                    sharing degrees: the plan decides what is    every plan
                                    dropped
``capacity_factor=0`` in a call     ignored                                      drops nothing
``top_k=0`` in a call               ignored                                      refused
priority, and factor 0 or less      capacity from one token's place: drops rows  from the fullest expert: 0 drops
                                                                                 nothing
no tokens                           ZeroDivisionError                            an empty output; ``l_aux`` is 0
other numbers of tokens on ranks    aborts or hangs                              any, 0 among them; a capacity is of
                                                                                 the rank's own tokens
float64                             at float32 accuracy                          float64
gate in half precision              logits and softmax in that dtype             float32 or wider; ``fp32_gate`` only
                                                                                 sets the dtype of the weight
second derivatives                  silently wrong                               right
equal scores                        any expert                                   the lowest id
a NaN token under a capacity        changes other rows                           stays in its own; takes a slot as any
wrong shape in a checkpoint         reshaped if the numbers are as many          refused
missing entry in a checkpoint       filled with zeros                            refused by name
dicts of arguments                  emptied                                      left as they are
``llama_ffn`` with r of 0, above 1  weights of the sharing ranks alone; results  as with r = 1
                                    r times as large
overlap degree                      up to 32, on GPUs                            the next of 1, 2, 4, 8 below
``use_2dh``                         needs LOCAL_SIZE, and all ranks              used where torchrun tells of several
                                                                                 nodes; changes no result
``parallel_type="auto"``            r = 1                                        the plan with the least predicted
                                                                                 time for even loads
``megablocks_size``                 block-sparse inference on one GPU            not needed: rows are not padded
random activations (dropout)        drawn for padded slots                       drawn for the rows there are
custom gates and experts            as here                                      as here; experts of several ranks
                                                                                 gather their own parts
environment variables               CAP_FACTOR, BATCH_PRIO, SKIP_MOE,            none is read
                                    SKIP_EXPERT
marks on experts' parameters        ``_tutel_expert``                            also ``skip_allreduce`` where ranks
                                                                                 share the experts
=================================== ============================================ ====================================

The load loss of ``is_gshard_loss=False`` is kept as Tutel defines it, which holds a softmax against a noisy logit;
V-MoE's, which compares logits, is ``aux.load`` of `fmoe.moe`. Tutel's low-level operations, ``system`` and ``net``
have no counterpart here.
"""

from . import checkpoint as checkpoint
from . import moe as moe
from .moe import MOELayer as MOELayer
from .moe import moe_layer as moe_layer

__all__ = ["MOELayer", "checkpoint", "moe", "moe_layer"]

"""Profiles of known machines, from published figures; calibrate before you trust the last 20 percent."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from .profile import COLLECTIVES, Profile, Segment

_A100_CURVE = ((2.1e9, 0.38), (1.7e10, 0.71), (1.4e11, 0.73), (1.1e12, 0.81))
_GUIDE = "Azure AI benchmarking guide (public): GEMM, memory and all_reduce of ND A100 v4, H100 v5, H200 v5, GB200 v6"
_ALPHA = "between fits to that guide's all_reduce and NCCL's tuning constants (src/graph/tuning.cc); to be calibrated"
_SHEETS = "vendors' data sheets (dense, not sparse, figures)"


def _link(alpha: float, gather: float, swap: float, peer: float) -> dict[str, tuple[Segment, ...]]:
    """Segments of a level, from microseconds and GB/s of gathers and exchanges.

    NCCL moves small messages by protocols of a third of the start-up time and half of the bandwidth, up to the
    size from which the other one is faster.
    """
    made: dict[str, tuple[Segment, ...]] = {}
    for name in COLLECTIVES:
        speed = (swap if name == "all_to_all" else gather) * 1e9
        each = peer * 1e-6 if name == "all_to_all" else 0.0
        made[name] = (
            Segment(2 / 3 * alpha * 1e-6 * speed, alpha / 3 * 1e-6, speed / 2, each),
            Segment(math.inf, alpha * 1e-6, speed, each),
        )
    return made


def _preset(
    name: str,
    bf16: float,
    f32: float,
    memory: float,
    bandwidth: float,
    inside: tuple[float, float, float, float],
    between: tuple[float, float, float, float],
    *,
    top: float,
    congestion: tuple[tuple[int, float], ...] = ((1, 1.0),),
    **sources: str,
) -> Profile:
    """TFLOP/s, GB and GB/s; `top` is the share of the peak that a large bf16 matmul reaches."""
    curve = tuple((size, round(share * top / 0.81, 4)) for size, share in _A100_CURVE)
    known = {"peak": _SHEETS, "memory": _SHEETS, "efficiency": _GUIDE, "memory_bandwidth": _GUIDE, "alpha": _ALPHA}
    return Profile(
        name,
        peak={"f64": f32 * 1e12 / 8, "f32": f32 * 1e12, "bf16": bf16 * 1e12, "f16": bf16 * 1e12},
        efficiency=curve,
        memory_bandwidth=bandwidth * 1e9,
        memory=memory * 1e9,
        launch=5e-6,
        links={"inside": _link(*inside), "between": _link(*between)},
        congestion=congestion,
        shared=0.15,
        sources={**known, **sources},
    )


_NCCL = "nccl-tests #130, #212 and Tutel (arXiv 2206.03382, appendix A)"
PRESETS: dict[str, Profile] = {
    p.name: p
    for p in (
        # f32 is TF32: 0.455 of 156 TFLOP/s, fitted to the 16-GPU row of Tutel's table 2, over the curve's 0.81;
        # the congestion of 0.74 at 32 nodes is fitted to its 256-GPU row
        _preset(
            "a100_ndm", 312, 156 * 0.455 / 0.81, 80, 1700, (30, 230, 195, 1.0), (50, 23, 23, 1.0), top=0.81,
            congestion=((8, 1.0), (32, 0.74)),
            links=_NCCL, tf32="fitted to Tutel, table 2, 16 GPUs", congestion_note="fitted to the same, 256 GPUs",
        ),
        _preset(
            "h100_dgx", 989, 400, 80, 2970, (25, 370, 350, 0.8), (40, 48, 48, 0.8), top=0.72,
            links=f"{_NCCL}; nccl-tests #267",
        ),
        _preset(
            "h200_hgx", 989, 400, 141, 4180, (25, 370, 350, 0.8), (40, 48, 48, 0.8), top=0.70, links=_NCCL,
        ),
        _preset(
            "b200_hgx", 2250, 900, 192, 7000, (20, 650, 640, 0.8), (40, 48, 48, 0.8), top=0.62,
            links="NVLink 5 at the efficiency of gb200_nvl72",
        ),
        _preset(
            "gb200_nvl72", 2250, 900, 186, 7000, (15, 650, 640, 0.5), (40, 47, 47, 0.8), top=0.62,
            links="GB300 all_to_all of 4, 8, 64 and 128 GPUs (public NCCL logs)",
        ),
        Profile(
            "cpu_gloo",
            peak={"f64": 4e10, "f32": 1e11, "bf16": 1e11, "f16": 1e11},
            efficiency=((1e5, 0.05), (1e7, 0.5), (1e9, 0.9)),
            memory_bandwidth=1e10,
            launch=2e-5,
            links={
                level: {name: (Segment(math.inf, alpha, speed, 5e-5),) for name in COLLECTIVES}
                for level, alpha, speed in (("inside", 3e-4, 1.5e9), ("between", 5e-4, 1e9))
            },
            shared=0.3,
            sources={"all": "round numbers for a few cores and gloo over TCP; calibrate"},
        ),
    )
}  # fmt: skip


def default_profile(devices: Iterable[str]) -> Profile:
    """The preset for the device types of a function's arguments: the GPU's own, or that of a CPU."""
    if "cuda" not in devices:
        return PRESETS["cpu_gloo"]
    name = torch.cuda.get_device_name()
    known = {"A100": "a100_ndm", "H100": "h100_dgx", "H200": "h200_hgx", "GB200": "gb200_nvl72", "B200": "b200_hgx"}
    return PRESETS[next((preset for part, preset in known.items() if part in name), "h100_dgx")]

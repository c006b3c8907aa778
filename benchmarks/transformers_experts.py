"""Times transformers' experts on fmoe beside its own backends: ``python benchmarks/transformers_experts.py``.

What is measured
    The forward of an experts module of transformers, with given routing: "eager" (a loop over experts), "grouped_mm"
    (its fastest on a CPU), and "fmoe". ``batched_mm`` copies the weights of every choice, and is left out.

    train    forward and backward, gradients of tokens, weights and parameters, at M and F
    decode   forward without gradients, at few tokens: D is 16, one is 1; small is one token of a small layer

How
    In rounds: each backend once per round, in an order that changes, with fresh routing (so that no backend finds the
    weights of its experts in a cache that another filled). ``ratio`` is the median over rounds of fmoe's time over
    that of the fastest other in the same round: below 1, fmoe is faster. With ``--clock cpu`` the process's own time
    is taken, which a busy machine disturbs less; use one thread then (``OMP_NUM_THREADS=1``).

Examples:
    python benchmarks/transformers_experts.py
    OMP_NUM_THREADS=1 python benchmarks/transformers_experts.py --clock cpu --rounds 7 --modes decode
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from typing import Any

import torch

import fmoe.integrations.transformers  # noqa: F401  makes "fmoe" known

#: Tokens, M, H, E, K.
TRAIN = {"M": (4096, 512, 1024, 16, 2), "F": (4096, 512, 256, 64, 8)}
DECODE = {"D": (16, 1024, 1024, 64, 8), "one": (1, 1024, 1024, 64, 8), "small": (1, 64, 64, 8, 2)}
BACKENDS = ("eager", "grouped_mm", "fmoe")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def module_of(family: str, dim: int, hidden: int, experts: int, dtype: torch.dtype) -> Any:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts
    from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralExperts

    config, cls = {"mixtral": (MixtralConfig, MixtralExperts), "gpt_oss": (GptOssConfig, GptOssExperts)}[family]
    module = cls(config(hidden_size=dim, intermediate_size=hidden, num_local_experts=experts))
    with torch.no_grad():
        for leaf in module.parameters():
            leaf.normal_(0, 0.03)
    return module.to(dtype)


def timed(module: Any, backend: str, x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor, train: bool, clock) -> float:
    module.config._experts_implementation = backend
    for leaf in module.parameters():
        leaf.grad = None
    x, w = x.clone().requires_grad_(train), w.clone().requires_grad_(train)
    with torch.set_grad_enabled(train):
        start = clock()
        y = module(x, ids, w)
        if train:
            y.backward(x.detach())
        return clock() - start


def cell(family: str, shape: tuple[int, ...], dtype: torch.dtype, train: bool, rounds: int, clock) -> dict[str, float]:
    """Milliseconds of each backend, medians over rounds, and fmoe's ratio."""
    tokens, dim, hidden, experts, k = shape
    module, x = module_of(family, dim, hidden, experts, dtype), torch.randn(tokens, dim).to(dtype)
    taken: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    for turn in range(rounds + 1):
        for backend in random.sample(BACKENDS, len(BACKENDS)):
            w, ids = torch.randn(tokens, experts).softmax(1).topk(k)
            seconds = timed(module, backend, x, ids, w.to(dtype), train, clock)
            if turn:  # the first round warms up
                taken[backend].append(seconds)
    ratios = [
        ours / min(others) for ours, *others in zip(taken["fmoe"], taken["eager"], taken["grouped_mm"], strict=True)
    ]
    return {name: 1e3 * statistics.median(s) for name, s in taken.items()} | {"ratio": statistics.median(ratios)}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=("train", "decode"), default=["train", "decode"])
    parser.add_argument("--families", nargs="+", choices=("mixtral", "gpt_oss"), default=["mixtral", "gpt_oss"])
    parser.add_argument("--dtypes", nargs="+", choices=tuple(DTYPES), default=list(DTYPES))
    parser.add_argument("--configs", nargs="+", choices=(*TRAIN, *DECODE), default=[*TRAIN, *DECODE])
    parser.add_argument("--rounds", type=int, default=5, help="of a training cell; decoding has four times as many")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--out", help="a JSON file")
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: give at least 1.")
    clock = time.perf_counter if args.clock == "wall" else time.process_time
    rows: list[dict[str, Any]] = []
    print(f"{'experts':8} {'mode':6} {'config':6} dtype {'eager':>9} {'grouped_mm':>10} {'fmoe':>9}  fmoe / best other")
    for family in args.families:
        for mode in args.modes:
            for name, shape in (TRAIN if mode == "train" else DECODE).items():
                if name not in args.configs:
                    continue
                for dtype in args.dtypes:
                    rounds = args.rounds if mode == "train" else 4 * args.rounds
                    found = cell(family, shape, DTYPES[dtype], mode == "train", rounds, clock)
                    rows.append({"experts": family, "mode": mode, "config": name, "dtype": dtype, **found})
                    print(
                        f"{family:8} {mode:6} {name:6} {dtype:5} {found['eager']:9.2f} {found['grouped_mm']:10.2f} "
                        f"{found['fmoe']:9.2f}  {found['ratio']:.2f}",
                        flush=True,
                    )
    if args.out:
        with open(args.out, "w") as file:
            json.dump({"torch": torch.__version__, "threads": torch.get_num_threads(), "rows": rows}, file, indent=1)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

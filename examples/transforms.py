"""What torch.func does to a mixture of experts, on real images: four questions, each a few lines.

    python examples/transforms.py                # about half a minute on two cores
    python examples/transforms.py --out runs/transforms

trains five small classifiers of the handwritten digits that scikit-learn ships, all at once, and prints

    ensemble      vmap over parameters: the five are one tree of stacked leaves; accuracy of each, of all
                  together, and the time of a step beside that of five separate ones
    per sample    vmap of grad: the norm of the gradient of every image's own loss in every expert; which
                  classes move which experts, and which images move the most
    curvature     jvp of grad: Hessian-vector products in the router, and by power iteration the direction in
                  which the loss bends the most, with the loss along it
    sensitivity   jvp: how the balance loss moves when an expert's logits grow, or a pixel gets darker, for
                  all experts and all pixels at once (vmap of jvp)

and draws each in ``--out`` (ensemble.png, per_sample.png, curvature.png, sensitivity.png; needs matplotlib).
Choices of experts are constant almost everywhere, so derivatives are those at fixed choices.

Exit codes: 0; 2 for input that cannot be used, with one line on stderr.
"""

from __future__ import annotations

import os

# before torch is imported: its threads otherwise spin while they wait, and slow down a machine that others use too
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import torch
from einops import rearrange
from lm_model import Refused
from lm_options import Parser, whole
from rich.console import Console
from swin_data import digits
from torch import Tensor
from torch.func import grad, jvp, vmap
from torch.nn import functional as nn
from transforms_report import Digits, Found, draw, show

import fmoe

DIM, EXPERTS, BATCH = 32, 8, 64
CONFIG = fmoe.MoEConfig(num_experts=EXPERTS, model_dim=DIM, hidden_dim=32, router=fmoe.TopK(2))
Params = dict[str, Any]


# --- a small model -----------------------------------------------------------------------------------------


def init(seed: int) -> Params:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float) -> Tensor:
        return torch.randn(shape, generator=generator) * std

    return {
        "embed": normal(4, DIM, std=1.0),
        "place": normal(16, DIM, std=0.5),
        "mix": normal(16, 16, std=0.25),
        "moe": fmoe.init(CONFIG, seed=seed),
        "head": normal(DIM, 10, std=DIM**-0.5),
    }


def logits(params: Params, images: Tensor) -> tuple[Tensor, fmoe.Aux]:
    """``[B,10]`` of ``images [B,8,8]``: 16 patches of 2 x 2, mixed, through the experts, and their mean."""
    x = rearrange(images, "b (h p) (w q) -> b (h w) (p q)", p=2, q=2) @ params["embed"] + params["place"]
    x = x + params["mix"] @ x
    y, aux = fmoe.moe(params["moe"], nn.layer_norm(x, (DIM,)), CONFIG)
    return nn.layer_norm(x + y, (DIM,)).mean(1) @ params["head"], aux


def nats(params: Params, images: Tensor, labels: Tensor) -> Tensor:
    return nn.cross_entropy(logits(params, images)[0], labels)


def objective(params: Params, images: Tensor, labels: Tensor) -> Tensor:
    found, aux = logits(params, images)
    return nn.cross_entropy(found, labels) + 0.01 * aux.balance


def stacked(trees: list[Params]) -> Params:
    """Trees of one kind as one tree, with their number as dim 0 of every leaf."""
    return optree.tree_map(lambda *leaves: torch.stack(leaves), *trees)


def member(tree: Params, index: int) -> Params:
    """One of the trees that were `stacked`."""
    return optree.tree_map(lambda leaf: leaf[index], tree)


# --- the four questions ------------------------------------------------------------------------------------


def ensemble_gradient(params: Params, images: Tensor, labels: Tensor) -> Params:
    """Gradients of all members, each on a batch of its own: ``images [members,B,8,8]``."""
    return vmap(grad(objective))(params, images, labels)


def ensemble_logits(params: Params, images: Tensor) -> Tensor:
    """``[members,B,10]``, all members on the same images."""
    return vmap(lambda p, x: logits(p, x)[0], (0, None))(params, images)


def expert_norms(params: Params, images: Tensor, labels: Tensor) -> Tensor:
    """``[N,E]``: the norm of the gradient of each image's own loss in the parameters of each expert."""

    def own(experts: fmoe.ExpertParams, image: Tensor, label: Tensor) -> Tensor:
        moe = fmoe.MoEParams(params["moe"].router, experts)
        return nats({**params, "moe": moe}, image[None], label[None])

    grads = vmap(grad(own), (None, 0, 0), chunk_size=128)(params["moe"].experts, images, labels)
    return sum(leaf.square().flatten(2).sum(2) for leaf in optree.tree_leaves(grads)).sqrt()


def in_router(params: Params, images: Tensor, labels: Tensor) -> Callable[[Tensor], Tensor]:
    """The loss as a function of the router's weight ``[M,E]`` alone."""

    def loss(weight: Tensor) -> Tensor:
        return nats({**params, "moe": fmoe.MoEParams(fmoe.RouterParams(weight), params["moe"].experts)}, images, labels)

    return loss


def hessian_vector(loss: Callable[[Tensor], Tensor], at: Tensor, direction: Tensor) -> Tensor:
    """The Hessian times a direction: forward mode over reverse mode, without the Hessian."""
    return jvp(grad(loss), (at,), (direction,))[1]


def top_curvature(
    loss: Callable[[Tensor], Tensor], at: Tensor, *, iterations: int
) -> tuple[Tensor, list[float], float]:
    """The eigenvector of the Hessian's eigenvalue that is largest in size, by power iteration.

    Returns:
        The direction, of norm 1; the estimate of the eigenvalue after each iteration; and the residual
        ``|H v - value v| / |value|`` of the last one.
    """
    v = torch.randn(at.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(at)
    v, values, residual = v / v.norm(), [], float("nan")
    for _ in range(iterations):
        product = hessian_vector(loss, at, v)
        values.append(float((v * product).sum()))
        residual = float((product - values[-1] * v).norm()) / max(abs(values[-1]), 1e-12)
        v = product / product.norm().clamp(min=1e-30)
    return v, values, residual


def balance_by_expert(params: Params, images: Tensor) -> Tensor:
    """``[E]``: how fast the balance loss grows when the logits of one expert are scaled up."""

    def balance(weight: Tensor) -> Tensor:
        moe = fmoe.MoEParams(fmoe.RouterParams(weight), params["moe"].experts)
        return logits({**params, "moe": moe}, images)[1].balance

    weight = params["moe"].router.weight
    tangents = torch.diag_embed(weight).transpose(0, 1)  # [E,M,E]: column e alone
    return vmap(lambda tangent: jvp(balance, (weight,), (tangent,))[1])(tangents)


def balance_by_pixel(params: Params, images: Tensor) -> Tensor:
    """``[8,8]``: how fast the balance loss grows when one pixel of all images gets darker."""
    tangents = torch.eye(64, dtype=images.dtype).view(64, 1, 8, 8).expand(64, *images.shape)
    found = vmap(lambda tangent: jvp(lambda x: logits(params, x)[1].balance, (images,), (tangent,))[1])(tangents)
    return found.view(8, 8)


# --- the program -------------------------------------------------------------------------------------------


def read() -> Digits:
    images, labels = digits()
    images = (images - images.mean()) / images.std()
    test, train = torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).split([449, 1348])
    return Digits(images[train], labels[train], images[test], labels[test])


def train(data: Digits, *, members: int, steps: int) -> Params:
    """Members side by side: one gradient, one optimizer, stacked leaves."""
    params = stacked([init(seed) for seed in range(members)])
    leaves = optree.tree_leaves(params)
    optimizer = torch.optim.AdamW(leaves, weight_decay=0.01)
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        rows = torch.randint(len(data.train), (members, BATCH), generator=generator)
        grads = ensemble_gradient(params, data.train[rows], data.train_labels[rows])
        for leaf, gradient in zip(leaves, optree.tree_leaves(grads), strict=True):
            leaf.grad = gradient
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(1.0, (step + 1) / 10) * (1 - step / steps)
        optimizer.step()
    return params


def milliseconds(call: Callable[[], Any], rounds: int = 7) -> float:
    times = []
    for _ in range(rounds + 1):  # the first one warms up
        start = time.perf_counter()
        call()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times[1:])


def answers(params: Params, data: Digits) -> Found:
    """Asks everything: the ensemble all members, the rest the first one."""
    members = params["head"].shape[0]
    rows = torch.arange(members * BATCH).view(members, BATCH) % len(data.train)
    images, labels = data.train[rows], data.train_labels[rows]
    singles = [member(params, index) for index in range(members)]
    once = milliseconds(lambda: ensemble_gradient(params, images, labels))
    apart = milliseconds(lambda: [grad(objective)(p, x, y) for p, x, y in zip(singles, images, labels, strict=True)])
    one = singles[0]
    loss, at = in_router(one, data.train[:512], data.train_labels[:512]), one["moe"].router.weight
    direction, values, residual = top_curvature(loss, at, iterations=30)
    base, slope = float(loss(at)), float((grad(loss)(at) * direction).sum())
    steps = torch.linspace(-2, 2, 81).tolist()
    along = [[t, float(loss(at + t * direction)), base + slope * t + values[-1] * t * t / 2] for t in steps]
    aux = logits(one, data.test)[1]
    return Found(
        data=data,
        guesses=ensemble_logits(params, data.test).softmax(-1),
        milliseconds=(once, apart),
        norms=expert_norms(one, data.test, data.test_labels),
        direction=direction,
        values=values,
        residual=residual,
        along=torch.tensor(along),
        balance=float(aux.balance),
        counts=aux.counts,
        by_expert=balance_by_expert(one, data.test),
        by_pixel=balance_by_pixel(one, data.test),
    )


def program(todo: argparse.Namespace) -> None:
    data = read()
    try:
        todo.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refused(f"--out {todo.out}: {error.strerror}") from None
    console = Console()
    with console.status(f"training {todo.members} models at once"):
        everyone = train(data, members=todo.members, steps=todo.steps)
    with console.status("asking"):
        found = answers(everyone, data)
    show(found, console)
    if draw(found, todo.out):
        console.print(f"pictures are in {todo.out}", highlight=False)
    else:
        console.print("no pictures: matplotlib is not installed")


def main(argv: list[str] | None = None) -> int:
    """Runs the program; whatever goes wrong takes one line on stderr."""
    about, _, rest = (__doc__ or "").partition("\n")
    parser = Parser(description=about, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=whole(1), default=150, metavar="X", help="of training (150)")
    parser.add_argument("--members", type=whole(1, 64), default=5, metavar="X", help="of the ensemble (5)")
    parser.add_argument("--out", type=Path, default=Path("runs/transforms"), help="folder for the pictures")
    try:
        program(parser.parse_args(argv))
    except Refused as error:
        print("transforms: " + " ".join(str(error).split()), file=sys.stderr, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

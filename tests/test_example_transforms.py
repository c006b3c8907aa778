"""examples/transforms.py: every answer against loops, differences and the whole Hessian."""

from __future__ import annotations

import sys
from pathlib import Path

import optree
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

pytest.importorskip("sklearn")

import transforms

import fmoe


@pytest.fixture(scope="module")
def asked():
    """Parameters in float64, and 12 digits."""
    data = transforms.read()
    params = optree.tree_map(torch.Tensor.double, transforms.init(3))
    return params, data.train[:12].double(), data.train_labels[:12]


def test_every_sample_by_itself(asked):
    params, images, labels = asked
    found = transforms.expert_norms(params, images, labels)
    assert found.shape == (12, 8)
    experts = params["moe"].experts
    for i in range(12):
        leaves = [leaf.clone().requires_grad_() for leaf in (experts.w_in, experts.w_out)]
        moe = fmoe.MoEParams(params["moe"].router, fmoe.ExpertParams(*leaves))
        transforms.nats({**params, "moe": moe}, images[i : i + 1], labels[i : i + 1]).backward()
        for e in range(8):
            both = torch.cat([leaf.grad[e].flatten() for leaf in leaves])
            torch.testing.assert_close(found[i, e], both.norm())
    assert (found == 0).any()  # an expert that no patch of an image goes to
    assert (found > 0).any(1).all()


def test_an_ensemble_is_its_members(asked):
    _, images, labels = asked
    members = [optree.tree_map(torch.Tensor.double, transforms.init(seed)) for seed in range(3)]
    stacked = transforms.stacked(members)
    batches = torch.stack([images, images.flip(0), images.roll(1, 0)])
    answers = torch.stack([labels, labels.flip(0), labels.roll(1, 0)])
    guesses = transforms.ensemble_logits(stacked, images)
    grads = transforms.ensemble_gradient(stacked, batches, answers)
    for i, params in enumerate(members):
        torch.testing.assert_close(guesses[i], transforms.logits(params, images)[0])
        alone = torch.func.grad(transforms.objective)(params, batches[i], answers[i])
        pairs = zip(optree.tree_leaves(transforms.member(grads, i)), optree.tree_leaves(alone), strict=True)
        for ours, theirs in pairs:
            torch.testing.assert_close(ours, theirs)


def test_curvature(asked):
    params, images, labels = asked
    loss, at = transforms.in_router(params, images, labels), params["moe"].router.weight
    v = torch.randn_like(at)
    slope = torch.func.grad(loss)
    difference = (slope(at + 1e-6 * v) - slope(at - 1e-6 * v)) / 2e-6
    torch.testing.assert_close(transforms.hessian_vector(loss, at, v), difference, rtol=1e-5, atol=1e-7)

    whole = torch.func.hessian(loss)(at).reshape(at.numel(), at.numel())
    eigenvalues, vectors = torch.linalg.eigh(whole)
    top = int(eigenvalues.abs().argmax())
    direction, values, residual = transforms.top_curvature(loss, at, iterations=150)
    assert values[-1] == pytest.approx(float(eigenvalues[top]), rel=1e-4)
    assert residual < 1e-2
    assert abs(float((direction.flatten() * vectors[:, top]).sum())) == pytest.approx(1, abs=1e-3)


def test_the_top_curvature_may_be_negative():
    at = torch.ones(2, dtype=torch.float64)
    direction, values, residual = transforms.top_curvature(lambda w: w[1] ** 2 - 3 * w[0] ** 2, at, iterations=40)
    assert values[-1] == pytest.approx(-6)
    assert residual < 1e-9
    torch.testing.assert_close(direction.abs(), torch.tensor([1.0, 0], dtype=torch.float64))


def test_sensitivity(asked):
    params, images, _ = asked
    router = params["moe"].router

    def balance(weight, images):
        moe = fmoe.MoEParams(fmoe.RouterParams(weight), params["moe"].experts)
        return transforms.logits({**params, "moe": moe}, images)[1].balance

    by_expert = transforms.balance_by_expert(params, images)
    for expert in range(8):
        step = torch.zeros_like(router.weight)
        step[:, expert] = 1e-6 * router.weight[:, expert]
        difference = (balance(router.weight + step, images) - balance(router.weight - step, images)) / 2e-6
        torch.testing.assert_close(by_expert[expert], difference, rtol=1e-5, atol=1e-8)
    by_pixel = transforms.balance_by_pixel(params, images)
    backward = torch.func.grad(balance, argnums=1)(router.weight, images).sum(0)
    torch.testing.assert_close(by_pixel, backward)
    assert float(by_pixel.abs().max()) > 1e-4


def test_a_run(tmp_path, capsys):
    assert transforms.main(["--steps", "2", "--members", "2", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    for title in ("ensemble", "per sample", "curvature", "sensitivity"):
        assert title in shown
        assert (tmp_path / f"{title.replace(' ', '_')}.png").stat().st_size > 10_000


def test_training_helps():
    data = transforms.read()
    params = transforms.train(data, members=2, steps=40)
    right = transforms.ensemble_logits(params, data.test).argmax(2) == data.test_labels
    assert float(right.double().mean(1).min()) > 0.5


def test_what_is_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for argv in (["--members", "0"], ["--steps", "none"], ["--out", str(tmp_path / "file" / "x")]):
        assert transforms.main(argv) == 2
        error = capsys.readouterr().err
        assert error.startswith("transforms: ")
        assert argv[0] in error
        assert error.count("\n") == 1

"""The transform table: every cell, and that a cell can fail."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.func import grad, jacfwd, jvp, vmap

import fmoe
from fmoe.__main__ import main
from fmoe.ops import differentiable
from fmoe.ops.ffn import ffn_backward
from fmoe.ops.rearrange import combine
from fmoe.transforms.routers import router_subjects
from fmoe.transforms.subjects import subjects
from fmoe.transforms.table import ROWS, run_cell

SUBJECTS = subjects()
COMPILER = [row for row in ROWS if row.startswith(("compile", "export"))]
TORCH_211 = torch.__version__.startswith("2.11")


@pytest.mark.parametrize("subject", SUBJECTS)
def test_eager_rows(subject):
    cells = {row: run_cell(row, SUBJECTS[subject]) for row in ROWS if row not in COMPILER}
    assert {row: cell for row, cell in cells.items() if cell.outcome != "pass"} == {}


@pytest.mark.parametrize("row", COMPILER)
@pytest.mark.parametrize("subject", SUBJECTS)
def test_compiled_rows(subject, row):
    cell = run_cell(row, SUBJECTS[subject])
    if cell.outcome == "torch":
        pytest.xfail(f"torch {torch.__version__} fails with plain torch operations too: {cell.detail}")
    if cell.outcome == "fail" and TORCH_211 and row in ("compile(jacfwd)", "compile(hessian)"):
        pytest.xfail(f"torch 2.11 raises a data-dependent error here: {cell.detail}")
    assert cell.outcome == "pass", cell.detail


def test_every_operation_is_in_the_table():
    missing = {"groups_from_sizes"}  # inside grouped_matmul
    # these need several ranks: tests/test_collectives.py and tests/test_dtensors.py
    missing |= {name for name, op in fmoe.ops.OPS.items() if "str where" in op.schema or "str layout" in op.schema}
    tried = {name.split()[0] for name in {**SUBJECTS, **router_subjects()}}
    assert set(fmoe.ops.OPS) - missing <= tried


def test_a_wrong_value_fails_the_cell():
    subject = SUBJECTS["gmm"]
    wrong = dataclasses.replace(subject, function=lambda x, w: subject.function(x, w) * (1 + 1e-6))
    cell = run_cell("grad", wrong)
    assert cell.outcome == "fail"
    assert cell.detail.startswith("wrong by")


def test_what_torch_cannot_do_is_told_apart():
    """A transform that plain torch refuses too is torch's limit, not ours."""

    def broken(x, w):
        torch._dynamo.graph_break()
        return x @ w[0]

    def unmappable(x, w):
        return x * x.sum().item()

    graph = dataclasses.replace(SUBJECTS["gmm"], function=broken, reference=broken)
    assert run_cell("compile", graph).outcome == "torch"
    number = dataclasses.replace(SUBJECTS["gmm"], function=unmappable, reference=unmappable)
    assert run_cell("vmap data", number).outcome == "torch"


def test_gradcheck_with_forward_mode_and_batches():
    subject = SUBJECTS["moe ragged"]
    leaves = [a.clone().requires_grad_() for a in subject.args]
    assert torch.autograd.gradcheck(
        subject.function, leaves, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True
    )
    assert torch.autograd.gradgradcheck(lambda *a: subject.function(*a)[0], leaves)


@pytest.mark.parametrize("name", ["gmm", "gmm_t", "gmm_dw", "combine", "expand", "rowdot", "ffn geglu"])
def test_opcheck(name):
    """torch's own check of a custom operator: schema, fake kernel, autograd registration, AOT dispatch."""
    subject, calls = SUBJECTS[name], []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == differentiable.NAMESPACE:
                calls.append((func, args))
            return func(*args, **(kwargs or {}))

    with Spy():
        subject.function(*subject.args)
    func, args = calls[-1]
    args = [a.clone().requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
    assert set(torch.library.opcheck(func, tuple(args)).values()) == {"SUCCESS"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SUBJECTS)
def test_fake_matches_real(name, dtype):
    """The shape rules give the shapes and dtypes of the kernels, in every dtype."""
    subject = SUBJECTS[name]
    args = [a.to(dtype) for a in subject.args]
    real = subject.function(*args)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = subject.function(*[mode.from_tensor(a) for a in args])
    for a, b in zip(torch.utils._pytree.tree_leaves(real), torch.utils._pytree.tree_leaves(fake), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)


def test_nested_batches_of_shared_weights():
    """A batch inside grad inside another batch: groups share matrices that no batch owns."""
    subject = SUBJECTS["ffn swiglu"]
    x = subject.batched[0]

    def gradients(fn, scale):
        def loss(*p):
            return vmap(lambda one: fn(one, *p).sin().sum())(x * scale).sum()

        return grad(loss, (0, 1, 3))(*subject.args[1:])

    scales = torch.tensor([0.5, 2.0], dtype=torch.float64)
    found = vmap(lambda s: gradients(subject.function, s))(scales)
    expected = vmap(lambda s: gradients(subject.reference, s))(scales)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_third_order():
    subject = SUBJECTS["ffn geglu"]

    def third(fn):
        f = lambda x: fn(x, *subject.args[1:]).sin().sum()  # noqa: E731
        g = lambda x: grad(f)(x).square().sum()  # noqa: E731
        return grad(lambda x: grad(g)(x).square().sum())(subject.args[0])

    torch.testing.assert_close(third(subject.function), third(subject.reference), rtol=1e-10, atol=1e-10)


def test_forward_mode_is_not_silently_zero():
    subject = SUBJECTS["ffn_backward"]
    _, tangent = jvp(
        lambda x: subject.function(subject.args[0], x, *subject.args[2:])[2], subject.args[1:2], subject.tangents[1:2]
    )
    assert tangent.abs().max() > 1e-3
    assert jacfwd(lambda w: combine(subject.args[1], torch.zeros(1, 1, dtype=torch.int64), w))(
        torch.ones(1, 1).double()
    ).any()
    assert ffn_backward.composition is not None


def test_a_missing_private_name_says_which_torch_was_checked():
    with pytest.raises(ImportError) as caught:
        differentiable._private("torch._C._no_such_name")
    assert str(caught.value) == (
        f"fmoe was checked on torch 2.11 to 2.13; torch {torch.__version__} has no torch._C._no_such_name. "
        "Install torch 2.13, or a newer fmoe."
    )


def test_the_command_prints_the_table(capsys):
    assert main(["transforms", "--rows", "grad", "jvp", "--subjects", "gmm", "--backend", "aot_eager"]) == 0
    printed = capsys.readouterr().out
    assert "gmm" in printed
    assert "2 ok, 0 where plain torch fails too (torch), 0 failed" in printed


def test_the_command_refuses_unknown_names(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["transforms", "--rows", "grade"])
    assert stopped.value.code == 2
    assert "no row 'grade': choose from eager, grad" in capsys.readouterr().err

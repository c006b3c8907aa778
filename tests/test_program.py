"""Programs: what is well typed, what can be captured, and what is printed."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn import functional as nn

import fmoe
from fmoe import functional as F
from fmoe.__main__ import main
from fmoe.program import Equation, Program, Size, Type, Var
from fmoe.trace import recorder

CONFIG = fmoe.MoEConfig(num_experts=2, model_dim=3, hidden_dim=4)
PARAMS = fmoe.init(CONFIG, seed=0, dtype=torch.float64)
X = torch.ones(5, 3, dtype=torch.float64)


def layer(params, x):
    return fmoe.moe(params, x, CONFIG)


# --- types ------------------------------------------------------------------------------------------------


def test_types_print():
    tokens = Size(6, "T")
    assert str(Type(torch.bfloat16, (tokens, 8))) == "bf16[T,8]"
    assert str(Type(torch.float32, (4, 8), ("mp",))) == "f32[4,8]{P:mp}"
    assert str(Type(torch.int64, (2, 3), kind="host")) == "host i64[2,3]"
    assert str(Type(torch.float32, (4,), kind="future")) == "future"
    assert tokens + 1 == 7


def small(*equations, outputs=("s",)):
    return Program("p", (Var("s", Type(torch.float32, (4, 2, 3, 5))),), equations, outputs)


def swap(result, operand, kind=None, **params):
    kind = kind or Type(torch.float32, (4, 2, 3, 5))
    return Equation(
        (Var(result, kind),), "all_to_all", (operand,), tuple({"axis": "world", "ranks": 4, **params}.items())
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: small(swap("a", "s"), swap("a", "s")), "p: a is assigned twice."),
        (lambda: small(swap("a", "t")), "p: a = all_to_all: t is used before it is assigned."),
        (lambda: small(outputs=("z",)), "p: the outputs z are never assigned."),
        (
            lambda: small(Equation((), "no_such", ("s",))),
            "p:  = no_such: there is no operation of that name.",
        ),
        (
            lambda: small(swap("a", "s", Type(torch.float32, (4, 2, 3, 6)))),
            "p: a = all_to_all: the types f32[4,2,3,6] are declared, but it makes f32[4,2,3,5].",
        ),
        (
            lambda: small(swap("a", "s", ranks=3)),
            "p: a = all_to_all: dim 0 of f32[4,2,3,5] does not divide over the 3 ranks of world",
        ),
    ],
)
def test_a_program_is_checked_when_it_is_made(make, message):
    with pytest.raises(fmoe.ProgramError) as caught:
        make()
    assert str(caught.value) == message


def test_a_pending_sum_may_not_be_used_as_a_value():
    """A missing sum over mp is an error and not a wrong result."""
    index, weights = Var("index", Type(torch.int64, (6, 1))), Var("w", Type(torch.float32, (6, 1)))
    rows = Var("rows", Type(torch.float32, (4, 3, 5), ("mp",)))
    decode = Equation(
        (Var("y", Type(torch.float32, (6, 5))),),
        "decode",
        ("rows", "index", "w"),
        (("shape", (6,)), ("dtype", torch.float32)),
    )
    with pytest.raises(fmoe.ProgramError) as caught:
        Program("p", (rows, index, weights), (decode,), ("y",))
    assert str(caught.value) == "p: y = decode: an operand is still a pending sum over mp: add it up first."


# --- capture ------------------------------------------------------------------------------------------------


def blocks(params, x):
    """Two layers with torch in between, containers and branches of the user's own."""
    kept = {"x": x}
    for p in params["layers"]:
        h = nn.layer_norm(kept["x"], x.shape[-1:])
        routing = F.gate(p.router, h, CONFIG.router)
        tokens = F.expert_apply(p.experts, F.dispatch(h, routing))
        kept["x"] = kept["x"] + F.combine(tokens, routing)
        if x.shape[0] > 3:
            with torch.no_grad():
                mean = kept["x"].mean(0)
            kept["x"] = kept["x"] - mean
    return kept["x"], [routing.aux.balance, None, "text"]


def two():
    return {"layers": [PARAMS, fmoe.init(CONFIG, seed=1, dtype=torch.float64)], "unused": 3}


def test_a_function_with_two_layers_is_captured():
    traced = fmoe.trace(blocks)(two(), X)
    assert [item.name for item in traced.layers] == ["moe.0", "moe.1"]
    text = traced.as_text()
    assert text.count("= gate[") == text.count("= combine ") == 2
    assert "layer_norm:f64[T,3] = torch.layer_norm[_, (3), eps=1e-05] x" in text
    assert "mean:f64[3] = torch.mean[_, 0 no_grad] add" in text
    spec = fmoe.ShardingSpec(fmoe.make_mesh(2, world=1), plan="dp")
    want = blocks(two(), X)
    found = fmoe.simulate(traced.plan(spec), two(), [X])[0]
    torch.testing.assert_close(found[0], want[0], rtol=1e-12, atol=1e-12)
    assert found[1][1:] == [None, "text"]

    def gradient(fn):
        return torch.utils._pytree.tree_leaves(
            torch.func.grad(lambda p: fn({"layers": p, "unused": 3})[0].square().sum())(two()["layers"])
        )

    simulated = gradient(lambda p: fmoe.simulate(traced.plan(spec), p, [X])[0])
    for a, b in zip(simulated, gradient(lambda p: blocks(p, X)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_autocast_is_kept_per_equation():
    def fn(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = x @ x.t()
        return h.float() + 1

    x = torch.randn(4, 3)
    traced = fmoe.trace(fn)(x)
    assert "= torch.matmul[autocast=bf16]" in traced.as_text()
    spec = fmoe.ShardingSpec(fmoe.make_mesh(1, world=1))
    assert torch.equal(fmoe.auto(fn, spec)(x), fn(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fmoe.auto(lambda x: x @ x.t(), spec)(x).dtype == torch.bfloat16


def test_capture_inside_transforms():
    spec = fmoe.ShardingSpec(fmoe.make_mesh(2, world=1))
    step = fmoe.auto(layer, spec)  # captured for the first time inside grad inside vmap
    xs = torch.randn(3, 5, 3, dtype=torch.float64)
    found = torch.func.vmap(torch.func.grad(lambda x: step(PARAMS, x)[0].sin().sum()))(xs)
    want = torch.func.vmap(torch.func.grad(lambda x: layer(PARAMS, x)[0].sin().sum()))(xs)
    torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)
    assert recorder() is None


def test_closed_over_tensors_are_constants():
    scale = torch.full((3,), 2.0, dtype=torch.float64)
    traced = fmoe.trace(lambda x: x * scale)(X)
    assert "const:f64[3]" in traced.as_text()
    spec = fmoe.ShardingSpec(fmoe.make_mesh(1, world=1))
    assert torch.equal(fmoe.auto(lambda x: x * scale, spec)(X), 2 * X)


def branch(x):
    return x if x.sum() > 0 else -x


def in_place(x):
    y = x * 1
    y += 1
    return y


def by_item(x):
    return x * x.sum().item()


def setitem(x):
    y = x * 1
    y[0] = 0
    return y


def random(x):
    return x + torch.rand_like(x)


def dropped(x):
    return nn.dropout(x, 0.5)


def inner_vmap(x):
    return torch.func.vmap(lambda r: r.sin())(x)


def checkpointed(x):
    return torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False)


def inside_tokens(x):
    routing = F.gate(PARAMS.router, x, CONFIG.router)
    return F.dispatch(x, routing).rows * 2


def returned_tokens(x):
    return F.dispatch(x, F.gate(PARAMS.router, x, CONFIG.router))


OUTSIDE = torch.ones(3, dtype=torch.float64, requires_grad=True)


def closed_over_parameter(x):
    return x * OUTSIDE


def mean_inside(x):
    return fmoe.ShardingSpec(fmoe.make_mesh(1, world=1)).mean(x.mean(), tokens=5)


REFUSED = {
    branch: "__bool__ reads the value of a tensor, which a program has not. Use torch.where, or pass the number as "
    "an argument.",
    by_item: "item reads the value of a tensor, which a program has not. Use torch.where, or pass the number as an "
    "argument.",
    in_place: "add_ changes a tensor in place. Use its out-of-place form.",
    setitem: "__setitem__ changes a tensor in place. Use its out-of-place form.",
    random: "rand_like is random. Draw the numbers outside and pass them as an argument.",
    dropped: "dropout is random. Draw the numbers outside and pass them as an argument.",
    inner_vmap: "sin gets a tensor of a torch.func transform. Apply transforms around the captured function, not "
    "inside it, and pass what it uses as arguments.",
    checkpointed: "sin runs inside torch.utils.checkpoint. Checkpoint around the captured function.",
    inside_tokens: "mul touches the inside of Tokens, which depends on the plan. Give Tokens to expert_apply and "
    "combine only; change x before dispatch, or y after combine.",
    returned_tokens: "the function returns Tokens, whose inside depends on the plan. Give Tokens to expert_apply and "
    "combine only; change x before dispatch, or y after combine.",
    closed_over_parameter: "mul uses a tensor from outside the function (f64[3]) that is being differentiated or "
    "batched. Pass it as an argument.",
    mean_inside: "spec.mean is called inside a captured function: take the mean of what it returns.",
}


@pytest.mark.parametrize("fn", REFUSED, ids=lambda fn: fn.__name__)
def test_what_a_program_cannot_hold_is_refused_with_its_line(fn):
    with pytest.raises(fmoe.TraceError) as caught:
        fmoe.trace(fn)(X)
    line, _, rest = str(caught.value).partition(": ")
    if fn in (returned_tokens, mean_inside):
        assert str(caught.value) == REFUSED[fn]
        return
    code = fn.__code__
    path, number = line.rsplit(":", 1)
    assert path == code.co_filename
    assert code.co_firstlineno <= int(number) <= code.co_firstlineno + 4
    assert rest == REFUSED[fn]
    assert recorder() is None


def test_dropout_that_is_off_is_not_random():
    assert fmoe.trace(lambda x: nn.dropout(x, 0.5, training=False))(X).as_text() == "lambda (x:f64[5,3]) {\n} -> (x)"


def test_experts_parameters_may_be_cast_but_not_reduced():
    def cast(params, x):
        experts = dataclasses.replace(
            params.experts, w_in=params.experts.w_in.float(), w_out=params.experts.w_out.float() * 2
        )
        routing = F.gate(params.router, x, CONFIG.router)
        return F.combine(F.expert_apply(experts, F.dispatch(x.float(), routing)), routing)

    def penalty(params, x):
        return layer(params, x)[0] + params.experts.w_in.norm()

    spec = fmoe.ShardingSpec(fmoe.make_mesh(2, world=4), plan="ep r=2")
    planned = fmoe.trace(cast)(PARAMS, X).plan(spec)
    for y in fmoe.simulate(planned, PARAMS, [X] * 4):
        torch.testing.assert_close(y, cast(PARAMS, X), rtol=1e-5, atol=1e-6)
    with pytest.raises(fmoe.PlanError) as caught:
        fmoe.trace(penalty)(PARAMS, X).plan(spec)
    assert str(caught.value) == (
        "torch.norm is called on params.experts.w_in, of which each rank holds a part. Between the arguments and "
        "expert_apply only elementwise calls are possible there (to, mul, ...): do the rest outside."
    )


def test_a_layer_is_dispatch_apply_combine_once_each():
    def twice(params, x):
        routing = F.gate(params.router, x, CONFIG.router)
        tokens = F.dispatch(x, routing)
        for _ in range(2):
            tokens = F.expert_apply(params.experts, tokens)
        return F.combine(tokens, routing)

    with pytest.raises(fmoe.PlanError) as caught:
        fmoe.trace(twice)(PARAMS, X)
    assert str(caught.value) == (
        "moe.0: what expert_apply makes must go to one combine, but it goes to expert_apply. Under a plan a layer is "
        "dispatch, expert_apply, combine, once each."
    )


def test_compiled_says_what_it_was_planned_for():
    spec = fmoe.ShardingSpec(fmoe.make_mesh(2, world=1))
    compiled = fmoe.trace(layer)(PARAMS, X).plan(spec).compile()
    assert torch.equal(compiled(PARAMS, X)[0], layer(PARAMS, X)[0])
    with pytest.raises(ValueError) as caught:
        compiled(PARAMS, X.float()[:4])
    assert str(caught.value) == (
        "layer: the arguments are not those it was planned for; plan it again for these.\n"
        "  planned for f64[5,3], called with f32[4,3]"
    )
    assert "-> cpu.ffn" in compiled.as_text()
    assert compiled.in_types == fmoe.trace(layer)(PARAMS, X).in_types
    assert str(compiled.out_types[0]) == "f64[T,3]"


def test_a_mesh_of_another_size_is_refused():
    planned = fmoe.trace(layer)(PARAMS, X).plan(fmoe.ShardingSpec(fmoe.make_mesh(2, world=4)))
    with pytest.raises(fmoe.SpecError) as caught:
        planned.compile()
    assert str(caught.value) == (
        "the mesh has 4 ranks, but torch.distributed has 1: make the mesh with fmoe.make_mesh(num_experts) under "
        "torchrun, or use fmoe.simulate to run it in one process."
    )


def test_text_is_the_same_every_time():
    spec = fmoe.ShardingSpec(fmoe.make_mesh(2, world=4, node=2), plan="ep r=2 pipeline=2 a2a=2dh")
    texts = {fmoe.trace(layer)(PARAMS, X).plan(spec).as_text() for _ in range(3)}
    assert len(texts) == 1
    longer = fmoe.trace(layer)(PARAMS, torch.ones(7, 3, dtype=torch.float64))
    assert longer.as_text() == fmoe.trace(layer)(PARAMS, X).as_text()  # T is a letter


# --- the command line ---------------------------------------------------------------------------------------


def test_the_command_shows_a_program(capsys):
    arguments = "--experts 4 --world 16 --node 8 --tokens 6144 --model-dim 2048 --hidden-dim 5632 --activation gelu"
    plan = ["--plan", "ep r=2 pipeline=2 a2a=2dh layout=padded", "--capacity", "1.0"]
    assert main(["show", *arguments.split(), *plan]) == 0
    shown = capsys.readouterr().out
    assert "mesh      ep=4 mp=2 dp=2" in shown
    assert "recv.0:bf16[16,1,768,2048] = done f.0" in shown
    # by hand: rows of one device 16*1536, 2 matmuls of 2048 x 2816; half of 11 MiB of weights; a2a of 16*768*2048*2 B
    assert f"expert matmul  {2 * 16 * 1536 * 2 * 2048 * 2816 / 1e9:.4g} GFLOP" in shown
    assert "all_gather dp  11 MiB in 2 calls, inside the node" in shown
    assert "all_to_all gpu  168 MiB in 4 calls, inside the node" in shown
    assert "all_to_all node  96 MiB in 4 calls, between nodes" in shown
    assert main(["show", *arguments.split(), "--logical"]) == 0
    assert capsys.readouterr().out.startswith("layer (\n    params.router.weight:bf16[2048,4]\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--experts", "4", "--world", "16", "--plan", "ep r=3"],
            "r=3 is not available. 16 ranks hold the experts in 4",
        ),
        (["--plan", "sp"], "Plan.parse('sp'): it must begin with one of dp, ep."),
        (["--node", "3"], "Mesh: node=3, but the ranks per node must divide the 8 ranks."),
        (["--experts", "0"], "MoEConfig: num_experts=0, but it must be a whole number of at least 1."),
    ],
)
def test_the_command_refuses_what_is_not_legal(arguments, message, capsys):
    assert main(["show", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"python -m fmoe show: {message}")
    assert captured.err.count("\n") == 1


def test_arguments_by_keyword():
    def scaled(params, x, *, by, shift=0.0):
        return layer(params, x)[0] * by + shift

    by = torch.tensor(2.0, dtype=torch.float64)
    step = fmoe.auto(scaled, fmoe.ShardingSpec(fmoe.make_mesh(2, world=1)))
    assert torch.equal(step(PARAMS, X, by=by), scaled(PARAMS, X, by=by))
    assert torch.equal(step(PARAMS, x=X, by=by, shift=1.0), scaled(PARAMS, X, by=by, shift=1.0))
    assert "by:f64[]" in step.planned(PARAMS, X, by=by).as_text()
    with pytest.raises(TypeError, match=r"an argument holds a bytearray: give tensors, numbers, strings or None\."):
        step(PARAMS, X, by=bytearray(1))

"""Found by breaking it: what programs and plans once got wrong, silently or not."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from oracle import assert_close
from ranks import launch
from torch.nn import functional as nn
from torch.utils import _pytree as pytree

import fmoe
from fmoe import functional as F

M = 8
ONE = fmoe.ShardingSpec(fmoe.make_mesh(1, world=1), plan="dp")
X = torch.randn(5, M, generator=torch.Generator().manual_seed(0))


def layer_of(experts=4, hidden=6, **changes):
    config = fmoe.MoEConfig(experts, M, hidden, **{"router": fmoe.TopK(2), **changes})
    return config, fmoe.init(config, seed=0, dtype=torch.float64), lambda p, x: fmoe.moe(p, x, config)


def tokens_of(*sizes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(t, M, dtype=torch.float64, generator=generator) for t in sizes]


# --- capture ----------------------------------------


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: torch.nn.ReLU(inplace=True)(x * 1) * 2,
        lambda x: nn.silu(x * 1, True),
        lambda x: nn.hardtanh(x * 1, -1.0, 1.0, True),
    ],
)
def test_in_place_by_argument_is_refused(fn):
    with pytest.raises(fmoe.TraceError, match="changes a tensor in place"):
        fmoe.trace(fn)(X)


class StraightThrough(torch.autograd.Function):
    """Rounds, with the gradient of the identity."""

    @staticmethod
    def forward(x):
        return x.round()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_functions_of_the_users_own_keep_their_backward():
    step = fmoe.auto(lambda x: StraightThrough.apply(x * 2), ONE)
    assert torch.equal(step(X), (X * 2).round())
    assert torch.equal(torch.func.grad(lambda x: step(x).sum())(X), torch.full_like(X, 2.0))
    assert "= torch.StraightThrough mul" in step.planned(X).as_text()
    with pytest.raises(fmoe.TraceError, match="register_hook acts on gradients"):
        fmoe.trace(lambda x: (x * 2).register_hook(print))(X)


@pytest.mark.parametrize("fn", [lambda x: x * torch.Tensor([2.0]), lambda x: x * torch.from_numpy(np.ones(M))])
def test_tensors_that_no_call_made_are_refused(fn):
    with pytest.raises(fmoe.TraceError, match="was made in a way that cannot be recorded"):
        fmoe.trace(fn)(X)


def test_shapes_unpacking_and_strides_are_fine():
    def fn(x):
        a, b = x.t().contiguous().view(-1, 2, x.shape[0] * M // 4).unbind(1)[0:2]
        first, *_ = x
        return a.sum() + b.sum() + first / len(x)

    strided = torch.randn(M, 4).t()
    assert torch.allclose(fmoe.auto(fn, ONE)(strided), fn(strided))
    flat = lambda x: x.contiguous().view(-1)  # noqa: E731
    assert torch.equal(fmoe.auto(flat, ONE)(strided), flat(strided))


@pytest.mark.parametrize(
    ("fn", "random"),
    [
        (lambda x: nn.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5), True),
        (lambda x: nn.scaled_dot_product_attention(x[None], x[None], x[None]), False),
        (lambda x: torch.dropout(x, 0.5, False), False),
        (lambda x: torch.native_dropout(x, 0.5, True)[0], True),
    ],
)
def test_what_is_random(fn, random):
    if random:
        with pytest.raises(fmoe.TraceError, match="is random"):
            fmoe.trace(fn)(X)
    else:
        fmoe.trace(fn)(X)


# --- which program runs ----------------------------------------


def test_arguments_in_another_order_are_another_call():
    a, b = torch.ones(2), torch.full((2,), 3.0)

    def fn(a, b):
        return a - 2 * b

    compiled = fmoe.trace(fn)(a=a, b=b).plan(ONE).compile()
    assert torch.equal(compiled(a=a, b=b), fn(a, b))
    with pytest.raises(ValueError, match="the arguments are another tree than those it was planned for"):
        compiled(b=b, a=a)
    step = fmoe.auto(fn, ONE)
    assert torch.equal(step(a=a, b=b), step(b=b, a=a))


def test_constants_tell_calls_apart():
    step = fmoe.auto(lambda x, by: x * by, ONE)
    assert [step(torch.ones(1, dtype=torch.int64), by).dtype for by in (1, 1.0, True)] == [
        torch.int64,
        torch.float32,
        torch.int64,
    ]
    flagged = fmoe.auto(lambda x, flag=True: x * (2 if flag else 3), ONE)
    flagged(X, flag=True), flagged(X, flag=False)
    compiled = torch.compile(lambda x: flagged(x, flag=False), fullgraph=True, backend="eager")
    assert torch.equal(compiled(X), 3 * X)


def test_simulated_ranks_run_their_own_programs():
    table = {4: torch.tensor(4.0), 3: torch.tensor(3.0)}
    spec = fmoe.ShardingSpec(fmoe.make_mesh(2, world=2), plan="dp")
    params, xs = {}, [torch.ones(4, M), torch.ones(3, M)]
    planned = fmoe.trace(lambda p, x: x * table[x.shape[0]])(params, xs[0]).plan(spec)
    assert [float(y[0, 0]) for y in fmoe.simulate(planned, params, xs)] == [4.0, 3.0]
    other = fmoe.trace(lambda p, x: x * 2 - x.sin() if len(x) % 2 else x.sin() - x * 2)(params, xs[0]).plan(spec)
    with pytest.raises(ValueError, match="the function is another program for another number of tokens"):
        fmoe.simulate(other, params, xs)
    parts = fmoe.local(layer_of()[1], fmoe.ShardingSpec(fmoe.make_mesh(4)))
    with pytest.raises(ValueError, match="give the whole ones"):
        fmoe.simulate(other, parts, xs)


# --- experts of the user's own ----------------------------------------


def own(fn, experts, hidden=None):
    generator = torch.Generator().manual_seed(1)
    weights = {
        "a": torch.randn(experts, M, 4, dtype=torch.float64, generator=generator),
        "b": torch.randn(experts, 4, M, dtype=torch.float64, generator=generator),
    }
    router = fmoe.RouterParams(torch.randn(M, experts, dtype=torch.float64, generator=generator))
    fn = fmoe.ExpertFunction(fn, hidden) if hidden is not None else fn
    config = fmoe.MoEConfig(experts, M, 4, fn=fn)
    return config, fmoe.MoEParams(router, weights)


def product(p, rows):
    return (rows @ p["a"]).relu() @ p["b"]


@pytest.mark.parametrize("hidden", [{"a": -1, "b": -2}, {"b": 0, "a": 1}])
def test_hidden_dims_by_name_and_from_the_end(hidden):
    config, params = own(product, 2, hidden)
    xs = tokens_of(5, 3, 2, 4)
    spec = fmoe.ShardingSpec(fmoe.Mesh(2, 2), plan="ep r=2")
    planned = fmoe.trace(lambda p, x: fmoe.moe(p, x, config)[0])(params, xs[0]).plan(spec)
    for x, y in zip(xs, fmoe.simulate(planned, params, xs), strict=True):
        assert_close(y, fmoe.moe(params, x, config)[0])


@pytest.mark.parametrize("hidden", [{"a": 1}, 1, {"a": 2, "b": 0}, {"a": "1", "b": 0}])
def test_hidden_dims_that_do_not_fit(hidden):
    config, params = own(product, 2, hidden)
    spec = fmoe.ShardingSpec(fmoe.Mesh(2, 2), plan="ep r=2")
    with pytest.raises(
        fmoe.PlanError, match=r"must be a tree like the parameters of one expert, with a dim of each leaf"
    ):
        fmoe.trace(lambda p, x: fmoe.moe(p, x, config)[0])(params, tokens_of(5)[0]).plan(spec)


@pytest.mark.parametrize("plan", ["dp layout=ragged", "ep r=1 layout=ragged", "ep r=1 layout=padded"])
def test_a_function_sees_whole_hidden_dims(plan):
    """H=3 over two ranks: zeros at the end of a part are not among what it gets."""
    config = fmoe.MoEConfig(2, M, 3, fn=lambda p, x: torch.softmax(x @ p.w_in, -1) @ p.w_out)
    experts = layer_of(2, 3, activation="relu")[1].experts
    params = fmoe.MoEParams(layer_of(2)[1].router, experts)
    xs = tokens_of(5, 3, 2, 4)
    planned = fmoe.trace(lambda p, x: fmoe.moe(p, x, config)[0])(params, xs[0]).plan(
        fmoe.ShardingSpec(fmoe.make_mesh(2, world=4), plan=plan)
    )
    for x, y in zip(xs, fmoe.simulate(planned, params, xs), strict=True):
        assert_close(y, fmoe.moe(params, x, config)[0])


@pytest.mark.parametrize("plan", ["ep layout=ragged", "ep layout=padded"])
@pytest.mark.parametrize(
    ("fn", "message"),
    [(lambda p, x: x[:1], "it must return one row for each row"), (lambda p, x: x[:, :5], "must keep them")],
)
def test_what_a_function_makes_is_checked_under_a_plan(plan, fn, message):
    config, params = own(fn, 2)
    (x,) = tokens_of(5)
    planned = fmoe.trace(lambda p, x: fmoe.moe(p, x, config)[0])(params, x).plan(
        fmoe.ShardingSpec(fmoe.make_mesh(2, world=2), plan=plan)
    )
    with pytest.raises((ValueError, RuntimeError), match=message):
        fmoe.simulate(planned, params, [x, x])


# --- routings made by hand ----------------------------------------


def by_hand(experts, slots, capacity=None, num_experts=3):
    chosen = torch.tensor(experts)
    counts = torch.bincount(chosen.flatten(), minlength=num_experts)
    weights = torch.full(chosen.shape, 0.5, dtype=torch.float64)
    return fmoe.Routing(
        chosen, weights, torch.tensor(slots), counts, num_experts=num_experts, shape=(len(experts),), capacity=capacity
    )


@pytest.mark.parametrize("plan", ["dp layout=padded", "ep layout=ragged", "ep layout=padded"])
def test_routings_made_by_hand(plan):
    _, params, _ = layer_of(3)
    spec = fmoe.ShardingSpec(fmoe.make_mesh(3, world=2), plan=plan)
    (x,) = tokens_of(2)

    def run(routing):
        def fn(p, x):
            given = dataclasses.replace(routing)
            return F.combine(F.expert_apply(p.experts, F.dispatch(x, given)), given)

        planned = fmoe.trace(fn)(params, x).plan(spec)
        return fmoe.simulate(planned, params, [x, x]), fn(params, x), planned

    found, want, planned = run(by_hand([[0, 0], [0, 0]], [[0, 1], [2, 3]]))  # a token may choose an expert twice
    assert_close(found[0], want)
    assert planned.cost().flops > 0
    for experts, slots, capacity in (
        ([[3, 0], [0, 1]], [[0, 0], [1, 0]], None),  # no such expert
        ([[0, 1], [0, 1]], [[0, 0], [2, 1]], None),  # a gap
        ([[0, 1], [0, 1]], [[0, 0], [0, 1]], None),  # a slot twice
        ([[0, 1], [0, 1]], [[0, 0], [1, 1]], 1),  # more than the capacity
    ):
        with pytest.raises(ValueError, match="dispatch: routing"):
            run(by_hand(experts, slots, capacity))


# --- parameters ----------------------------------------


def test_clipping_takes_what_torch_takes():
    def fresh():
        p = torch.nn.Parameter(torch.zeros(2))
        p.grad = torch.tensor([3.0, 4.0])
        return p

    def module():
        made = torch.nn.Linear(1, 1, bias=False)
        made.weight.grad = torch.full((1, 1), 5.0)
        return made

    kinds = [{"a": fresh()}.values(), {fresh()}, iter([fresh()]), torch.nn.ParameterList([fresh()]), {"a": fresh()}]
    for parameters in (*kinds, module(), module().parameters(), fresh()):
        assert fmoe.clip_grad_norm_(parameters, 1.0).item() == pytest.approx(5.0)
    with pytest.raises(ValueError, match="parameters holds a str: give tensors"):
        fmoe.clip_grad_norm_(["w"], 1.0)


@pytest.mark.parametrize("fn", [lambda w: w / w, lambda w: torch.div(torch.tensor(1.0, dtype=torch.float64), w)])
def test_parts_may_be_divided_but_not_divide(fn):
    config, params, _ = layer_of()

    def layer(p, x):
        return fmoe.moe(
            dataclasses.replace(p, experts=dataclasses.replace(p.experts, w_in=fn(p.experts.w_in))), x, config
        )

    spec = fmoe.ShardingSpec(fmoe.make_mesh(4, world=8), plan="dp")
    with pytest.raises(fmoe.PlanError, match="only elementwise calls"):
        fmoe.trace(layer)(params, tokens_of(5)[0]).plan(spec)


def test_parts_are_not_returned():
    _, params, layer = layer_of()
    spec = fmoe.ShardingSpec(fmoe.make_mesh(4, world=8), plan="dp")
    with pytest.raises(fmoe.PlanError, match="of which each rank holds a part: leave experts' parameters out"):
        fmoe.trace(lambda p, x: (layer(p, x), p.experts.w_out * 1))(params, tokens_of(5)[0]).plan(spec)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: fmoe.Plan("ep", pipeline=2.0), fmoe.PlanError, "pipeline=2.0: choose one of 1, 2, 4, 8"),
        (lambda: ONE.replace(plan={0: "dp"}), fmoe.PlanError, "a mapping must name layers, such as 'moe.0'"),
        (lambda: ONE.replace(plan={}), fmoe.PlanError, "a mapping must name layers, such as 'moe.0'"),
        (lambda: ONE.mean(0.5, tokens=0), fmoe.SpecError, "mean: loss=0.5, but it must be a tensor."),
    ],
)
def test_small_mistakes(make, error, message):
    with pytest.raises(error, match=message):
        make()


# --- between ranks ----------------------------------------


def told(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def disagreements(rank):
    """Calls that differ in what decides exchanges or numbers; every rank is told, and goes on."""
    config, params, layer = layer_of(capacity=1.0)
    spec = fmoe.ShardingSpec(fmoe.make_mesh(4), plan="ep layout=padded")
    (x,) = tokens_of(4)
    group = config.replace(router=fmoe.TopK(2, scope="group"))
    silu = config.replace(activation="geglu")
    many = lambda n: lambda p, x: [layer(p, x * i)[0] for i in range(1, n + 1)]  # noqa: E731
    y_only, both = fmoe.auto(lambda p, x: layer(p, x)[0], spec), fmoe.auto(layer, spec)
    pairs = [
        (lambda: both(params, x), lambda: y_only(params, x)),
        (lambda: fmoe.moe(params, x, config, spec=spec), lambda: fmoe.moe(params, x, group, spec=spec)),
        (lambda: fmoe.moe(params, x, config, spec=spec), lambda: fmoe.moe(params, x, silu, spec=spec)),
        (lambda: fmoe.auto(many(14), spec)(params, x), lambda: fmoe.auto(many(15), spec)(params, x)),
    ]
    errors = [told(pair[rank]) for pair in pairs]
    narrow = fmoe.ShardingSpec(fmoe.make_mesh(4), plan="ep layout=padded", max_tokens=16)
    for _ in range(3):  # groups of other kinds on the ranks are legal
        y, _ = fmoe.moe(params, x, config, groups=[4] if rank else np.int64(2), spec=narrow)
    assert_close(y, fmoe.moe(params, x, config, groups=[4] if rank else 2)[0])
    deep = fmoe.auto(many(17), spec)(params, x)
    assert_close(deep[16], layer(params, 17 * x)[0])
    trained = fmoe.distribute(pytree.tree_map(torch.nn.Parameter, params), spec)
    fmoe.moe(trained, x, config, spec=spec)[0].sum().backward()
    assert all(leaf.requires_grad and leaf.grad is not None for leaf in pytree.tree_leaves(trained.experts))
    split = fmoe.ShardingSpec(fmoe.Mesh(1, 2), plan="ep r=2")
    part = fmoe.local(params, split)
    assert_close(fmoe.moe(part, x, config, spec=split)[0], layer(params, x)[0])
    return errors, told(lambda: fmoe.local(part, spec))


def test_ranks_that_differ_are_told():
    for errors, foreign in launch(disagreements, 2, timeout=30):
        for error in errors:
            assert error.startswith("SpecError: ")
            assert ": the ranks disagree. Rank " in error
        assert "is a part of f64[4,8,2,6] on another mesh: make it by fmoe.local with this spec." in foreign


# --- verification ----------------------------------------


def test_pending_sums_do_not_leave_a_program():
    from fmoe.program import Equation, Program, Type, Var

    pending = Var("p", Type(torch.float32, (4, 2, 3, 5), ("mp",)))
    whole = Var("w", Type(torch.float32, (4, 2, 3, 5)))
    fan_in = (("ep", 2), ("copies", 2), ("cut", 1))
    scatter = (("axis", "mp"), ("ranks", 3), ("dim", 2))
    home, less = Type(torch.float32, (4, 3, 5)), Type(torch.float32, (4, 2, 1, 5))
    sine = Equation((Var("s", whole.type),), "torch.sin", ("p",), (("function", torch.sin), ("call", ((), {}))))
    wrong = [
        (lambda: Program("f", (pending,), (), ("p",)), "the output p:f32[4,2,3,5]{P:mp} is not a whole tensor"),
        (lambda: Program("f", (pending,), (sine,), ("s",)), "p:f32[4,2,3,5]{P:mp} is not a whole tensor"),
        (
            lambda: Program("f", (whole,), (Equation((Var("h", home),), "fan_in", ("w",), fan_in),), ("h",)),
            "f32[4,2,3,5] is not a pending sum over the 2 copies of each row",
        ),
        (
            lambda: Program("f", (whole,), (Equation((Var("h", less),), "reduce_scatter", ("w",), scatter),), ("h",)),
            "f32[4,2,3,5] is not a pending sum over mp",
        ),
    ]
    for make, message in wrong:
        with pytest.raises(fmoe.ProgramError) as caught:
            make()
        assert message in str(caught.value)


def test_biases_are_not_matmuls():
    config, params, layer = layer_of(bias=True, router=fmoe.TopK(1))
    traced = fmoe.trace(lambda p, x: layer(p, x)[0])(params, tokens_of(6)[0])
    assert traced.cost().flops == 2 * 6 * (M * 2 * 6 + 6 * M)
    assert config.bias

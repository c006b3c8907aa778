"""Plans: which are legal, the text of each kind, and that what the text says computes the layer.

The text of every kind of plan stands in ``golden/``; the same program is run by `simulate`, so text
that is right but does not compute is caught, and so is the reverse. ``FMOE_ACCEPT=1`` rewrites them.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from oracle import assert_close
from torch.utils import _pytree as pytree

import fmoe
from fmoe import functional as F
from fmoe.program import Program
from fmoe.sharding.exchange import exchange_tokens
from fmoe.sharding.lower import axes_of
from fmoe.sharding.pipeline import hierarchical, pipeline
from fmoe.sharding.rewrites import gather_weights, localize, overlap_gathers, sum_losses

GOLDEN = Path(__file__).parent / "golden"
M, H, T = 8, 16, 6


def layer_of(experts, **changes):
    config = fmoe.MoEConfig(experts, M, H, **{"router": fmoe.TopK(min(2, experts)), **changes})
    return config, fmoe.init(config, seed=0, dtype=torch.float64), lambda params, x: fmoe.moe(params, x, config)


def tokens_of(*sizes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(t, M, dtype=torch.float64, generator=generator) for t in sizes]


# --- text ---------------------------------------------------------------------------------------------------

#: name -> (experts, ranks, ranks per node, plan)
KINDS = {
    "dp": (4, 8, 4, "dp"),
    "ep_r1": (4, 8, 4, "ep r=1 layout=padded"),
    "ep_r1_pipeline_2dh": (4, 8, 4, "ep r=1 pipeline=2 a2a=2dh layout=padded"),
    "ep_r2_copies": (4, 16, 8, "ep r=2 layout=padded"),
    "ep_r2_copies_pipeline_2dh": (4, 16, 8, "ep r=2 pipeline=2 a2a=2dh layout=padded"),
    "ep_r2_gather": (4, 16, 8, "ep r=2 mp=gather layout=padded"),
    "ep_r2_gather_pipeline_2dh": (4, 16, 8, "ep r=2 mp=gather pipeline=2 a2a=2dh layout=padded"),
    "ep_rmax": (4, 16, 8, "ep r=4 layout=padded"),
    "ep_rmax_pipeline_2dh": (4, 16, 8, "ep r=4 pipeline=4 a2a=2dh layout=padded"),
    "ep_many_experts": (8, 4, 2, "ep layout=padded"),
    "ep_many_experts_pipeline_2dh": (8, 4, 2, "ep pipeline=2 a2a=2dh layout=padded"),
    "ep_ragged_pipeline": (4, 8, 4, "ep r=2 pipeline=2 layout=ragged"),
}


def check_golden(name, text):
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("FMOE_ACCEPT"):
        path.write_text(text + "\n")
    assert text + "\n" == path.read_text(), text


@pytest.mark.parametrize("name", KINDS)
def test_text_and_what_it_computes(name):
    experts, world, node, plan = KINDS[name]
    _, params, layer = layer_of(experts, capacity=1.0 if "ragged" not in name else None)
    x = tokens_of(T)[0]
    spec = fmoe.ShardingSpec(fmoe.make_mesh(experts, world=world, node=node), plan=plan, max_tokens=T)
    planned = fmoe.trace(layer)(params, x).plan(spec)
    check_golden(name, planned.as_text())
    xs = tokens_of(*[T - r % 3 for r in range(world)])
    compare(planned, params, xs, layer_of(experts, capacity=1.0 if "ragged" not in name else None)[0])


def compare(planned, params, xs, config, **extra):
    """The program on all ranks against one process with a group for each rank."""
    found = fmoe.simulate(planned, params, xs)
    want, aux = fmoe.moe(params, torch.cat(xs), config, groups=[len(x) for x in xs], **extra)
    for rank, ((y, got), expected) in enumerate(zip(found, want.split([len(x) for x in xs]), strict=True)):
        assert_close(y, expected, what=f"y of rank {rank}")
        for name in ("balance", "z", "importance", "load", "entropy"):
            assert_close(getattr(got, name), getattr(aux, name), what=f"{name} of rank {rank}")
        assert torch.equal(got.counts, aux.counts)
        assert got.dropped == aux.dropped


def two_layers(params, x):
    for p in params:
        config = fmoe.MoEConfig(p.router.weight.shape[1], M, H)
        y, _ = fmoe.moe(p, torch.nn.functional.layer_norm(x, (M,)), config)
        x = x + y
    return x


def test_two_layers_with_plans_of_their_own():
    params = [layer_of(4)[1], layer_of(8)[1]]
    mesh = fmoe.make_mesh([4, 8], world=8, node=4)
    spec = fmoe.ShardingSpec(mesh, plan={"moe.0": "ep r=2", "moe.1": "dp"})
    xs = tokens_of(*[T] * 8)
    planned = fmoe.trace(two_layers)(params, xs[0]).plan(spec)
    check_golden("two_layers", planned.as_text())
    for x, y in zip(xs, fmoe.simulate(planned, params, xs), strict=True):
        assert_close(y, two_layers(params, x))
    assert planned.cost().flops > 0
    with pytest.raises(fmoe.PlanError, match=r"plan= names moe.2, but the layers are moe.0, moe.1."):
        fmoe.trace(two_layers)(params, xs[0]).plan(spec.replace(plan={"moe.0": "dp", "moe.1": "dp", "moe.2": "dp"}))
    with pytest.raises(fmoe.PlanError, match=r"there is no plan for moe.1: plan= names moe.0."):
        fmoe.trace(two_layers)(params, xs[0]).plan(spec.replace(plan={"moe.0": "dp"}))


def test_two_layers_in_chunks():
    params = [layer_of(4)[1], layer_of(8)[1]]
    xs = tokens_of(*[T] * 8)
    for plan in ("ep r=1 pipeline=2 a2a=2dh layout=padded", "ep r=2 pipeline=4"):
        spec = fmoe.ShardingSpec(fmoe.make_mesh([4, 8], world=8, node=4), plan=plan)
        planned = fmoe.trace(two_layers)(params, xs[0]).plan(spec)
        for x, y in zip(xs, fmoe.simulate(planned, params, xs), strict=True):
            assert_close(y, two_layers(params, x))


# --- values ------------------------------------------------------------------------------------------------------

WORLDS = [(1, 1), (2, 1), (2, 2), (3, 3), (4, 2), (6, 2), (6, 3), (8, 4), (12, 4)]


@st.composite
def cases(draw):
    world, node = draw(st.sampled_from(WORLDS))
    experts = draw(st.integers(1, 9))
    mesh = fmoe.make_mesh(experts, world=world, node=node)
    layout = draw(st.sampled_from(["ragged", "padded"]))
    plan = draw(st.sampled_from(fmoe.legal_plans(mesh, layout=layout)))
    return {
        "mesh": mesh,
        "plan": plan,
        "experts": experts,
        "sizes": draw(st.lists(st.integers(0, 7), min_size=world, max_size=world)),
        "k": draw(st.integers(1, min(3, experts))),
        "capacity": draw(st.sampled_from([None, 0.5, 1.0, 1.25, "as_needed"])),
        "bias": draw(st.booleans()),
        "activation": draw(st.sampled_from(["relu", "swiglu"])),
        "hidden": draw(st.sampled_from([3, 8])),
        "masked": draw(st.booleans()),
        "skew": draw(st.booleans()),
        "seed": draw(st.integers(0, 99)),
    }


@hypothesis.given(cases())
@hypothesis.settings(max_examples=120, deadline=None, derandomize=True)
def test_every_plan_computes_the_layer(case):
    """Outputs, losses and all gradients of the sum over ranks, with drops, empty experts and ranks without tokens."""
    config = fmoe.MoEConfig(
        case["experts"], M, case["hidden"], router=fmoe.TopK(case["k"]), capacity=case["capacity"],
        bias=case["bias"], activation=case["activation"],
    )  # fmt: skip
    params = fmoe.init(config, seed=case["seed"], dtype=torch.float64)
    if case["bias"]:
        params = pytree.tree_map(lambda p: p + 0.1, params)
    if case["skew"]:  # everything to few experts
        router = params.router.weight.clone()
        router[:, : max(1, case["experts"] // 2)] += 0.5
        params = dataclasses.replace(params, router=fmoe.RouterParams(router))
    xs = tokens_of(*case["sizes"], seed=case["seed"])
    masks = [torch.arange(len(x)) % 3 != 1 for x in xs] if case["masked"] else None
    spec = fmoe.ShardingSpec(case["mesh"], plan=case["plan"])

    def layer(params, held):
        return fmoe.moe(params, held["x"], config, mask=held.get("mask"))

    held = [{"x": x} if masks is None else {"x": x, "mask": m} for x, m in zip(xs, masks or xs, strict=True)]
    planned = fmoe.trace(layer)(params, held[0]).plan(spec)

    def loss(y, aux):
        return y.sin().sum() + 0.3 * aux.balance + 0.1 * aux.z + 0.1 * aux.importance

    world = case["mesh"].world

    def simulated(params, xs):
        outs = fmoe.simulate(planned, params, [{**h, "x": x} for h, x in zip(held, xs, strict=True)])
        return sum(loss(*out) for out in outs), outs

    def direct(params, xs):
        mask = None if masks is None else torch.cat(masks)
        y, aux = fmoe.moe(params, torch.cat(xs), config, groups=case["sizes"], mask=mask)
        return y.sin().sum() + world * (0.3 * aux.balance + 0.1 * aux.z + 0.1 * aux.importance), (y, aux)

    grads, outs = torch.func.grad(simulated, (0, 1), has_aux=True)(params, xs)
    wanted, (y, aux) = torch.func.grad(direct, (0, 1), has_aux=True)(params, xs)
    assert_close(torch.cat([out[0] for out in outs]), y, what="y")
    for out in outs:
        assert torch.equal(out[1].counts, aux.counts)
        assert out[1].dropped == aux.dropped
        assert_close(out[1].balance, aux.balance, what="balance")
    for a, b in zip(pytree.tree_leaves(grads), pytree.tree_leaves(wanted), strict=True):
        assert_close(a, b, what="gradient")


@pytest.mark.parametrize("plan", ["dp", "ep r=1", "ep r=2", "ep r=1 layout=padded", "ep r=2 pipeline=2 layout=padded"])
def test_a_function_of_the_users_own(plan):
    """Legal under dp and r=1; with r > 1 if it says which dims are hidden. NaN at 0 stays out of its gradients."""

    def fn(p, rows):
        scaled = rows / rows.norm(dim=-1, keepdim=True)  # NaN for a row of zeros
        return (scaled @ p["a"]).relu() @ p["b"]

    expert = fmoe.ExpertFunction(fn, hidden={"a": 1, "b": 0})
    generator = torch.Generator().manual_seed(0)
    experts = {
        name: torch.randn(shape, dtype=torch.float64, generator=generator)
        for name, shape in (("a", (3, M, 4)), ("b", (3, 4, M)))
    }
    params = fmoe.MoEParams(fmoe.RouterParams(torch.randn(M, 3, dtype=torch.float64, generator=generator)), experts)

    def layer(config):
        return lambda params, x: fmoe.moe(params, x, config)[0]

    config = fmoe.MoEConfig(3, M, 4, fn=expert, capacity=1.0, router=fmoe.TopK(2))
    xs = tokens_of(5, 4, 0, 3, 5, 1)
    mesh = fmoe.make_mesh(3, world=6)
    planned = fmoe.trace(layer(config))(params, xs[0]).plan(fmoe.ShardingSpec(mesh, plan=plan))

    def total(p):
        return sum(y.sin().sum() for y in fmoe.simulate(planned, p, xs))

    def direct(p):
        return fmoe.moe(p, torch.cat(xs), config, groups=[len(x) for x in xs])[0].sin().sum()

    grads, value = torch.func.grad_and_value(total)(params)
    wanted, expected = torch.func.grad_and_value(direct)(params)
    assert_close(value, expected)
    for a, b in zip(pytree.tree_leaves(grads), pytree.tree_leaves(wanted), strict=True):
        assert_close(a, b)
    if "r=2" in plan:
        bare = layer(config.replace(fn=fn))
        with pytest.raises(fmoe.PlanError) as caught:
            fmoe.trace(bare)(params, xs[0]).plan(fmoe.ShardingSpec(mesh, plan=plan))
        assert str(caught.value) == (
            "moe.0: r > 1 splits the hidden dim of the experts, and fn does not say which dim that is: wrap it as "
            "fmoe.ExpertFunction(fn, hidden=...), or choose r=1 or dp."
        )


def test_whole_experts_that_are_not_parameters():
    """Stacked inside the function, so that every rank has all of them: each takes its slice."""
    config, params, _ = layer_of(4)

    def layer(held, x):
        experts = fmoe.ExpertParams(torch.stack(held["w_in"]), torch.stack(held["w_out"]))
        routing = F.gate(fmoe.RouterParams(held["router"]), x, config.router)
        return F.combine(F.expert_apply(experts, F.dispatch(x, routing)), routing)

    held = {
        "router": params.router.weight,
        "w_in": list(params.experts.w_in.unbind()),
        "w_out": list(params.experts.w_out.unbind()),
    }
    xs = tokens_of(*[T] * 8)
    for plan in ("dp", "ep r=1", "ep r=2 layout=padded"):
        spec = fmoe.ShardingSpec(fmoe.make_mesh(4, world=8), plan=plan)
        planned = fmoe.trace(layer)(held, xs[0]).plan(spec)
        for x, y in zip(xs, fmoe.simulate(planned, held, xs), strict=True):
            assert_close(y, layer(held, x))


# --- passes -------------------------------------------------------------------------------------------------


class Passes:
    """The passes one by one on one layer, and what the program of each step computes."""

    def __init__(self, plan, world=8, node=4, experts=4, capacity=1.0):
        self.config, self.params, layer = layer_of(experts, capacity=capacity)
        self.plan = fmoe.Plan.parse(plan)
        self.mesh = fmoe.make_mesh(experts, world=world, node=node)
        self.xs = tokens_of(*[T] * world)
        self.traced = fmoe.trace(layer)(self.params, self.xs[0])
        self.axes = axes_of(self.plan, self.mesh)
        self.local, self.parts = localize(self.traced.program, self.traced.captured.roles, self.mesh)

    def exchanged(self):
        (layer,) = self.traced.layers
        program = sum_losses(self.local, self.mesh.world)
        return exchange_tokens(program, "moe.0", self.axes, self.plan, self.parts, layer.slots(T))

    def run(self, program):
        spec = fmoe.ShardingSpec(self.mesh, plan=self.plan)
        planned = self.traced.plan(spec)
        return fmoe.simulate(dataclasses.replace(planned, program=program), self.params, self.xs)

    def check(self, program):
        want, aux = fmoe.moe(self.params, torch.cat(self.xs), self.config, groups=self.mesh.world)
        found = self.run(program)
        assert_close(torch.cat([y for y, _ in found]), want)
        assert_close(found[0][1].balance, aux.balance)
        return found


def ops(program: Program) -> list[str]:
    return [eq.op for eq in program.equations]


def test_localize():
    p = Passes("ep r=1")
    assert [str(v.type) for v in p.local.inputs] == ["f64[8,4]", "f64[1,8,2,8]", "f64[1,8,8]", "f64[T,8]"]
    assert {part.role for part in p.parts.values()} == {"w_in", "w_out"}
    assert ops(p.local) == ops(p.traced.program)


def test_sum_losses():
    p = Passes("ep r=1")
    program = sum_losses(p.local, 8)
    assert ops(program) == ["route", "all_reduce", "aux_loss", "dispatch", "expert_apply", "combine"]
    assert ops(sum_losses(p.local, 1))[:2] == ["route", "aux_loss"]


def test_gather_weights():
    p = Passes("dp layout=padded")
    program = gather_weights(sum_losses(p.local, 8), "moe.0", p.axes, p.plan, p.parts, 3)
    assert ops(program)[3:] == ["dispatch", "all_gather", "all_gather", "expert_apply", "combine"]
    p.check(program)


def test_exchange_tokens():
    p = Passes("ep r=1 layout=padded")
    program = p.exchanged()
    assert ops(program)[3:] == [
        "encode", "fan_out", "all_to_all", "all_gather", "all_gather", "expert_ffn", "all_to_all", "fan_in", "decode",
    ]  # fmt: skip
    p.check(program)


@pytest.mark.parametrize("plan", ["ep r=1 layout=ragged", "ep r=2 layout=padded", "ep r=2 mp=gather layout=padded"])
def test_pipeline_moves_the_same_numbers(plan):
    p = Passes(plan, capacity=1.0)
    whole = Passes(f"{plan} pipeline=2")
    before = whole.exchanged()
    after = pipeline(before, "moe.0", 2)
    assert ops(after).count("start") == ops(after).count("done") == 4
    assert ops(after).count("expert_ffn") == 2
    first = [i for i, op in enumerate(ops(after)) if op == "start"]
    assert first[1] == first[0] + 1  # both are on their way before the first is waited for
    for (a, _), (b, _) in zip(p.check(before), p.check(after), strict=True):
        assert torch.equal(a, b)
    assert pipeline(before, "moe.0", 1) is before


def test_hierarchical_moves_the_same_numbers():
    p = Passes("ep r=2 layout=padded")
    before = p.exchanged()
    after = hierarchical(before, "moe.0", p.axes)
    assert [sub.name for sub in after.lets] == ["a2a_2dh"]
    assert ops(after).count("call") == 2
    assert "all_to_all" not in ops(after)
    for (a, _), (b, _) in zip(p.check(before), p.check(after), strict=True):
        assert torch.equal(a, b)


def test_overlap_gathers_starts_first_and_ends_before_use():
    p = Passes("ep r=1 layout=padded")
    before = p.exchanged()
    after = overlap_gathers(before)
    assert ops(after)[:2] == ["start", "start"]
    at = ops(after).index("expert_ffn")
    assert ops(after)[at - 2 : at] == ["done", "done"]
    for (a, _), (b, _) in zip(p.check(before), p.check(after), strict=True):
        assert torch.equal(a, b)


def test_losses_that_nobody_returns_are_not_summed():
    _, params, layer = layer_of(4)
    spec = fmoe.ShardingSpec(fmoe.make_mesh(4, world=8))
    only_y = fmoe.trace(lambda params, x: layer(params, x)[0])(params, tokens_of(T)[0]).plan(spec)
    assert not {"all_reduce", "aux_loss"} & set(ops(only_y.program))
    both = fmoe.trace(layer)(params, tokens_of(T)[0]).plan(spec)
    assert ops(both.program).count("all_reduce") == 1


def test_a_wrong_rewrite_is_caught():
    """Weights gathered over mp instead of dp: the types fit, and the values do not."""
    p = Passes("ep r=2 layout=padded", world=16, node=8)
    right = p.exchanged()
    p.check(right)
    wrong = dataclasses.replace(
        right,
        equations=tuple(
            dataclasses.replace(eq, params=tuple((k, "mp" if k == "axis" else v) for k, v in eq.params))
            if eq.op == "all_gather"
            else eq
            for eq in right.equations
        ),
    )
    with pytest.raises(AssertionError, match="not close"):
        p.check(wrong)


# --- legality --------------------------------------------------------------------------------------------------------


def test_plans_parse_their_own_text():
    for world, node in WORLDS:
        for experts in (1, 3, 4, 8):
            for plan in fmoe.legal_plans(fmoe.make_mesh(experts, world=world, node=node)):
                assert fmoe.Plan.parse(str(plan)) == plan
                assert hash(fmoe.Plan.parse(str(plan))) == hash(plan)


def test_legal_plans_are_those_of_the_mesh():
    mesh = fmoe.make_mesh(4, world=16, node=8)
    plans = fmoe.legal_plans(mesh)
    assert {p.r for p in plans} == {1, 2, 4}
    assert sum(p.parallelism == "dp" for p in plans) == 2
    # ragged: r in 1, 2, 4 with 4 pipelines; padded: (1 + 2 + 2) ways of mp, two all_to_alls, 4 pipelines
    assert len(plans) == 2 + 3 * 4 + 5 * 2 * 4
    assert {p.r for p in fmoe.legal_plans(fmoe.make_mesh(8, world=4))} == {1}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: fmoe.ShardingSpec(fmoe.make_mesh(4, world=16), plan="ep r=3"),
            "r=3 is not available. 16 ranks hold the experts in 4 parts, so 4 ranks share one part, and r divides 4: "
            "choose 1 or 2 or 4, or dp.",
        ),
        (
            lambda: fmoe.ShardingSpec(fmoe.make_mesh(8, world=4), plan="ep r=2"),
            "r=2 is not available. 4 ranks hold the experts in 4 parts, so each part is on one rank, and r divides 1: "
            "choose 1, or dp.",
        ),
        (
            lambda: fmoe.ShardingSpec(fmoe.make_mesh(8, world=4), plan="ep a2a=2dh"),
            "a2a=2dh is not available. It needs more than 1 rank on each of several nodes, but 4 ranks stand on 1 node "
            "of 4: choose a2a=linear.",
        ),
        (
            lambda: fmoe.Plan("xp", pipeline=3, layout="square"),
            "Plan: 3 things do not fit.\n  parallelism='xp': choose one of 'dp', 'ep'.\n  pipeline=3: choose one of "
            "1, 2, 4, 8.\n  layout='square': choose one of None, 'ragged', 'padded'.",
        ),
        (
            lambda: fmoe.Plan("ep", r=2, mp="gather", layout="ragged"),
            "Plan: mp='gather' needs layout='padded': its messages are of one size.",
        ),
        (
            lambda: fmoe.Plan("dp", pipeline=2),
            "Plan: Plan(parallelism='dp', r=1, mp='copies', pipeline=2, a2a='linear', layout=None): dp exchanges no "
            "tokens, so it has no r, mp, pipeline or a2a.",
        ),
        (
            lambda: fmoe.Plan.parse("ep r=two s=1"),
            "Plan.parse('ep r=two s=1'): 2 things do not fit.\n  'r=two': r must be a whole number.\n  's=1' must be "
            "one of a2a=, layout=, mp=, pipeline=, r=, each once.",
        ),
    ],
)
def test_illegal_plans(make, message):
    with pytest.raises(fmoe.PlanError) as caught:
        make()
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: fmoe.make_mesh(0, world=0),
            "make_mesh: 2 things do not fit.\n  num_experts=0, but it must be a whole number of at least 1, or a list "
            "of them.\n  world=0, but it must be a whole number of at least 1.",
        ),
        (
            lambda: fmoe.make_mesh(4, world=8, node=3),
            "Mesh: node=3, but the ranks per node must divide the 8 ranks.",
        ),
        (
            lambda: fmoe.ShardingSpec("mesh", max_tokens=0, memory=-1),  # type: ignore[arg-type]
            "ShardingSpec: 3 things do not fit.\n  mesh='mesh', but it must be a mesh, as fmoe.make_mesh makes.\n  "
            "max_tokens=0, but it must be a whole number of at least 1, or None.\n  memory=-1, but it must be whole "
            "bytes of at least 1, or None.",
        ),
        (
            lambda: fmoe.trace(layer_of(4)[2])(layer_of(4)[1], tokens_of(5)[0]).plan(
                fmoe.ShardingSpec(fmoe.make_mesh(4, world=2), max_tokens=4)
            ),
            "moe.0: 5 tokens on a rank are more than max_tokens=4 of the spec: raise it.",
        ),
    ],
)
def test_specs_that_do_not_fit(make, message):
    with pytest.raises(fmoe.SpecError) as caught:
        make()
    assert str(caught.value) == message


def test_simulate_needs_every_rank():
    _, params, layer = layer_of(4)
    (x,) = tokens_of(T)
    planned = fmoe.trace(layer)(params, x).plan(fmoe.ShardingSpec(fmoe.make_mesh(4, world=2)))
    with pytest.raises(ValueError, match=r"simulate: 1 xs were given, but the mesh has 2 ranks: give one for each."):
        fmoe.simulate(planned, params, [x])


def test_capacity_does_not_depend_on_the_plan():
    """A plan may widen a buffer; it may not move the capacity: the same choices are dropped under every plan."""
    config, params, layer = layer_of(4, capacity=0.5)
    xs = tokens_of(*[T] * 8)
    dropped = set()
    for plan in fmoe.legal_plans(fmoe.make_mesh(4, world=8, node=4)):
        spec = fmoe.ShardingSpec(fmoe.make_mesh(4, world=8, node=4), plan=plan)
        outs = fmoe.simulate(fmoe.trace(layer)(params, xs[0]).plan(spec), params, xs)
        dropped.add(int(outs[0][1].dropped))
    assert dropped == {int(fmoe.moe(params, torch.cat(xs), config, groups=8)[1].dropped)}
    assert dropped.pop() > 0

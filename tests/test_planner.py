"""The planner: finds the best of its model, learns from what steps took, does not flap, is the same on every rank."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch
from ranks import launch
from torch.utils import _pytree as pytree

import fmoe
from fmoe.sharding import planner
from fmoe.sharding.cost import Load, price
from fmoe.sharding.lower import lower
from fmoe.sharding.presets import PRESETS
from fmoe.workload import without_data


def model_of(
    experts=8,
    world=16,
    node=8,
    tokens=512,
    dim=256,
    hidden=1024,
    k=2,
    capacity=None,
    profile="a100_ndm",
    layers=1,
    **spec,
):
    config = fmoe.MoEConfig(experts, dim, hidden, router=fmoe.TopK(k), capacity=capacity)
    params, x = without_data(config, tokens, torch.bfloat16)

    def fn(params, x):
        for p in params:
            x = x + fmoe.moe(p, x, config)[0]
        return x

    traced = fmoe.trace(fn)([params] * layers, x)
    spec = fmoe.ShardingSpec(fmoe.make_mesh(experts, world=world, node=node), max_tokens=tokens, **spec)
    widths = {layer.name: layer.slots(tokens) for layer in traced.layers}
    return planner.init(traced, spec, PRESETS[profile], widths, tokens)


def even(experts=8):
    return {"moe.0": [10.0] * experts}


def skewed(ratio, experts=8):
    """A load whose fullest expert has `ratio` times the mean."""
    rest = (experts - ratio) / (experts - 1)
    return {"moe.0": [100 * ratio, *[100 * rest] * (experts - 1)]}


def plan_of(assignment):
    return str(assignment[0][1])


def test_the_exhaustive_best_of_the_model_is_found():
    """An independent loop over every legal plan, lowered and priced by itself."""
    draw = random.Random(0)
    for _ in range(60):
        world = draw.choice([1, 2, 4, 8, 16, 64])
        case = {
            "experts": draw.choice([1, 2, 3, 4, 8, 16]),
            "world": world,
            "node": draw.choice([n for n in (1, 2, 8) if world % n == 0]),
            "tokens": draw.choice([16, 512, 8192]),
            "hidden": draw.choice([64, 1024, 8192]),
            "capacity": draw.choice([None, 1.0, 2.0]),
            "profile": draw.choice(list(PRESETS)),
        }
        case["k"] = min(draw.choice([1, 2]), case["experts"])
        state = model_of(**case)
        load = skewed(draw.choice([1.0, 2.0, 4.0]), case["experts"]) if case["experts"] > 4 else even(case["experts"])
        bucket = planner.Bucket.of(load, state.model)
        found = state.model.ranked(bucket)[0]
        traced, mesh = state.model.traced, state.model.spec.mesh
        limit = PRESETS[case["profile"]].memory or math.inf
        ratio = planner.STEP ** dict(bucket.levels).get("moe.0", 0)
        best = math.inf
        for plan in fmoe.legal_plans(mesh):
            widths = {"moe.0": traced.layers[0].slots(case["tokens"])}
            args = (traced.program, traced.layers, traced.captured.roles, mesh, {"moe.0": plan}, widths)
            made = price(
                *lower(*args), PRESETS[case["profile"]], loads={"moe.0": Load.spread(ratio)}, tokens=case["tokens"]
            )
            if made.memory <= limit:
                best = min(best, made.seconds)
        assert found[1].seconds == pytest.approx(best, rel=1e-12)


def test_choices_follow_measurements():
    """Three trials of two steps each; then the fastest measured one runs, whatever was predicted."""
    state = model_of()
    load, tried = even(), []
    ranked = [plan_of(a) for a, _ in state.model.ranked(planner.Bucket())]
    slow = {ranked[0]: 0.030, ranked[1]: 0.010, ranked[2]: 0.020}
    for _ in range(12):
        chosen = planner.choose(state, load)
        tried.append(plan_of(chosen))
        state = planner.observe(state, chosen, load, slow[plan_of(chosen)])
    assert len(set(tried)) <= planner.TRIALS
    assert tried[-6:] == [ranked[1]] * 6
    rows = planner.explain(state, load)
    assert next(row for row in rows if row.plans == ranked[1]).why == "runs"
    assert next(row for row in rows if row.plans == ranked[0]).measured == 0.030
    assert rows[-1].why.startswith("predicted ")


def test_a_gain_below_the_margin_does_not_switch():
    state = model_of()
    ranked = [a for a, _ in state.model.ranked(planner.Bucket())][:3]
    times = {a: 0.100 - 0.003 * i for i, a in enumerate(ranked)}  # 3 % apart
    chosen = planner.choose(state, even())
    for _ in range(6):
        chosen = planner.choose(state, even())
        state = planner.observe(state, chosen, even(), times[chosen])
    last = planner.choose(state, even())
    for _ in range(10):
        state = planner.observe(state, last, even(), times[last])
        assert planner.choose(state, state.load) == last


def crossover(state):
    """Two loads between which the best plan of the model changes."""
    levels = [skewed(r) for r in (1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]
    best = [state.model.ranked(planner.Bucket.of(load, state.model))[0][0] for load in levels]
    at = next((i for i in range(len(best) - 1) if best[i] != best[i + 1]), None)
    return None if at is None else (levels[at], levels[at + 1])


def test_a_load_that_swings_across_a_crossover_does_not_make_it_flap():
    for tokens in (256, 512, 1024, 2048, 4096, 8192):
        state = model_of(tokens=tokens, hidden=4096)
        pair = crossover(state)
        if pair:
            break
    assert pair is not None
    switches, before = 0, state.chosen
    for step in range(200):
        load = pair[step % 2]
        seconds = state.model.price(state.chosen, planner.Bucket.of(load, state.model)).seconds
        state = planner.observe(state, state.chosen, load, seconds)
        state = dataclasses.replace(state, chosen=planner.choose(state, state.load))
        switches += state.chosen != before and step > 40  # after the trials
        before = state.chosen
    assert switches == 0


def run_for(state, steps, seconds):
    """`steps` steps under one load; what ran in each, and the state."""
    ran = []
    for _ in range(steps):
        ran.append(state.chosen)
        state = planner.observe(state, state.chosen, even(), seconds[state.chosen])
        state = dataclasses.replace(state, chosen=planner.choose(state, state.load))
    return ran, state


def test_a_changed_machine_is_answered_within_ten_steps():
    """What runs becomes 20 times slower, then as fast as before: each time the best of the three runs in time."""
    state = model_of()
    first, second, third = [a for a, _ in state.model.ranked(planner.Bucket())][:3]
    before = {first: 0.010, second: 0.012, third: 0.015}
    within = planner.CHANGED_STEPS + planner.REPEATS * planner.TRIALS
    assert within == 10
    _, state = run_for(state, 20, before)
    assert state.chosen == first
    ran, state = run_for(state, 20, {**before, first: 0.2})
    assert set(ran[within:]) == {second}
    ran, state = run_for(state, 20, {first: 0.001, second: 0.0012, third: 0.0015})
    assert set(ran[within:]) == {first}


def test_what_was_measured_long_ago_is_measured_again():
    """A plan that became faster while another ran is found when what is known of it is stale."""
    state = model_of()
    first, second, third = [a for a, _ in state.model.ranked(planner.Bucket())][:3]
    _, state = run_for(state, 20, {first: 0.010, second: 0.012, third: 0.015})
    ran, state = run_for(state, planner.STALE + 10, {first: 0.010, second: 0.012, third: 0.001})
    assert state.chosen == third
    assert ran[: planner.STALE // 2] == [first] * (planner.STALE // 2)


def test_slow_steps_now_and_then_are_not_a_changed_machine():
    """Three slow steps in a row, as of checkpoints and validation, forget nothing and change nothing."""
    state = model_of()
    ranked = [a for a, _ in state.model.ranked(planner.Bucket())][:3]
    _, state = run_for(state, 20, dict(zip(ranked, (0.010, 0.012, 0.015), strict=True)))
    known = set(state.measured)
    ran, state = run_for(state, planner.CHANGED_STEPS - 1, dict.fromkeys(ranked, 0.05))
    more, state = run_for(state, 100, dict(zip(ranked, (0.010, 0.012, 0.015), strict=True)))
    assert set(state.measured) == known
    assert set(ran + more) == {ranked[0]}


def test_steps_of_many_sizes_are_not_a_changed_machine():
    """Batches from one to three times a size, and noise of 20 %: few steps go to trials, and the best plan runs."""
    for sizes in ([1.0, 1.5, 2.0, 3.0], [1.0]):
        draw, state = random.Random(0), model_of()
        ranked = [a for a, _ in state.model.ranked(planner.Bucket())][:3]
        taken = dict(zip(ranked, (1.0, 1.3, 1.6), strict=True))
        spent = least = 0.0
        for _ in range(1000):
            size = draw.choice(sizes) * draw.lognormvariate(0, 0.2)
            spent, least = spent + size * taken[state.chosen], least + size
            state = planner.observe(state, state.chosen, even(), size * taken[state.chosen])
            state = dataclasses.replace(state, chosen=planner.choose(state, state.load))
        assert spent < 1.06 * least


def test_a_slow_step_of_a_trial_does_not_decide():
    state = model_of()
    ranked = [a for a, _ in state.model.ranked(planner.Bucket())][:3]
    seconds = dict(zip(ranked, (0.010, 0.012, 0.015), strict=True))
    _, state = run_for(state, 1, {**seconds, ranked[0]: 0.040})
    ran, state = run_for(state, 50, seconds)
    assert set(ran[planner.TRIALS * planner.REPEATS :]) == {ranked[0]}


def test_the_fastest_of_the_trials_runs_however_small_its_lead():
    state = model_of()
    ranked = [a for a, _ in state.model.ranked(planner.Bucket())][:3]
    ran, _ = run_for(state, 30, dict(zip(ranked, (0.0100, 0.0102, 0.01045), strict=True)))
    assert set(ran[planner.TRIALS * planner.REPEATS :]) == {ranked[0]}


def test_steps_under_another_load_are_set_down_under_the_mean_one():
    """A load that swings from step to step: what a plan took is scaled by what is predicted of both loads."""
    state = model_of()
    plan = next(a for a, _ in state.model.ranked(planner.Bucket()) if "ep r=1" in plan_of(a))
    level = planner.Bucket.of(skewed(4.0), state.model)
    slower = state.model.price(plan, level).seconds / state.model.price(plan, planner.Bucket()).seconds
    assert slower > 1.2
    state = planner.observe(state, plan, even(), 0.1)
    state = planner.observe(state, plan, skewed(4.0), 0.1 * slower)
    assert state.took(0, plan) == pytest.approx([0.1, 0.1])


def test_many_layers_under_wandering_loads():
    """Six layers whose loads wander: few steps are trials, and what is kept has a bound."""
    draw, state, switches, before = random.Random(0), model_of(layers=6, tokens=64), 0, None
    ratios = dict.fromkeys(state.model.names, 1.5)
    for step in range(150):
        ratios = {n: min(4.0, max(1.0, r * draw.choice([0.9, 1.0, 1.1]))) for n, r in ratios.items()}
        load = {name: skewed(ratio)["moe.0"] for name, ratio in ratios.items()}
        seconds = state.model.price(state.chosen, planner.Bucket()).seconds
        state = planner.observe(state, state.chosen, load, seconds)
        state = dataclasses.replace(state, chosen=planner.choose(state, state.load))
        switches += state.chosen != before and step > 20
        before = state.chosen
    assert switches < 30
    assert len(state.model._prices) <= 32


def test_a_load_under_which_nothing_fits_keeps_the_plans():
    least = min(p.memory for _, p in model_of().model.ranked(planner.Bucket()))
    state = model_of(memory=math.ceil(1.02 * least))
    assert not state.model.ranked(planner.Bucket.of(skewed(4.0), state.model))
    assert planner.choose(state, skewed(4.0)) == state.chosen
    rows = planner.explain(state, skewed(4.0))
    assert [row.why == "runs" or row.why.startswith("takes ") for row in rows] == [True] * len(rows)


def test_what_the_ranks_agree_on_is_what_counts():
    """The highest price and memory of any rank: another rank is slow under what is the best plan here."""
    alone = model_of()
    first, second = (a for a, _ in alone.model.ranked(planner.Bucket())[:2])
    order = list(alone.model.uniform)

    def agree(numbers):
        if len(numbers) < 4 * len(order):
            return list(numbers)
        rows = [list(numbers[i : i + 4]) for i in range(0, len(numbers), 4)]
        rows[order.index(first)][0] += 10**9
        return [n for row in rows for n in row]

    m = alone.model
    state = planner.init(m.traced, m.spec, m.profile, m.widths, m.tokens, agree)
    assert state.chosen == second
    assert state.model.price(first, planner.Bucket()).forward > 1


def test_rows_that_a_capacity_drops_are_no_load():
    """Expert 0 of 8 is chosen 7 times in 10; a capacity of 1.25 keeps 1.25 eighths of all choices for it."""
    counts = {"moe.0": [70.0, *[30 / 7] * 7]}
    dropping, keeping = model_of(world=8, capacity=1.25), model_of(world=8)
    assert planner.Bucket.of(counts, dropping.model) == planner.Bucket((("moe.0", 1),))  # 1.25, in powers of 1.25
    assert dict(planner.Bucket.of(counts, keeping.model).levels)["moe.0"] == round(math.log(5.6) / math.log(1.25))
    pairs = model_of(world=2, node=2, capacity=1.25)
    assert planner.Bucket.of(counts, pairs.model) == planner.Bucket((("moe.0", -3),))  # 0.57 of a half of all
    even_price, price_now = (
        pairs.model.price(pairs.model.uniform[2], bucket).seconds
        for bucket in (planner.Bucket(), planner.Bucket((("moe.0", -3),)))
    )
    assert price_now < even_price


def test_what_the_user_fixed_is_never_overridden():
    state = model_of(plan="ep r=2")
    for _ in range(10):
        assert plan_of(planner.choose(state, even())) == "ep r=2 mp=copies pipeline=1 a2a=linear layout=ragged"
        state = planner.observe(state, state.chosen, even(), 1.0)
    assert "fixed by the user" in [row.why for row in planner.explain(state, even())]


def test_memory_is_a_hard_filter():
    free = model_of(tokens=64, hidden=8192)
    priced = free.model.ranked(planner.Bucket())
    least = min(p.memory for _, p in priced)
    tight = model_of(tokens=64, hidden=8192, memory=math.ceil(least * 1.01))
    assert all(p.memory <= least * 1.01 for _, p in tight.model.ranked(planner.Bucket()))
    assert any(row.why.startswith("takes ") for row in planner.explain(tight, None))
    with pytest.raises(fmoe.PlanError) as caught:
        model_of(tokens=64, hidden=8192, memory=1000)
    assert str(caught.value).startswith("no plan fits in memory=1000 bytes: the smallest, ")
    assert f"takes {least:.4g}. Raise memory= to that, give a rank fewer tokens, or use more ranks." in str(
        caught.value
    )


@pytest.mark.parametrize("wrong", [[1.0] * 7, [math.nan] * 8, [-1.0] * 8, [math.inf] * 8])
def test_a_load_that_does_not_fit_is_refused_and_the_plan_stays(wrong):
    state = model_of()
    for call in (planner.choose, planner.explain, lambda s, load: planner.observe(s, s.chosen, load, 1.0)):
        with pytest.raises(ValueError, match=r"load of moe.0: .* must be 8 finite numbers of at least 0"):
            call(state, {"moe.0": wrong})
    assert planner.choose(state, even()) == state.chosen


def test_layers_may_get_plans_of_their_own():
    state = model_of(layers=2)
    (assignment, _), *_ = state.model.ranked(planner.Bucket())
    assert [name for name, _ in assignment] == ["moe.0", "moe.1"]


def test_state_is_a_value():
    """The same state and numbers give the same choices, in any order of calls."""
    a, b = model_of(), model_of()
    for _ in range(8):
        chosen = planner.choose(a, even())
        assert chosen == planner.choose(b, even()) == planner.choose(a, even())
        a, b = (planner.observe(s, chosen, even(), 0.01) for s in (a, b))
    assert a.measured == b.measured


# --- auto --------------------------------------------------------------------------------------------------------


def planned_training(rank):
    """The same plans on both ranks at every step; calls never change them; gradients stay those of one process."""
    config = fmoe.MoEConfig(4, 16, 32)
    params = fmoe.init(config, seed=0, dtype=torch.float64)
    spec = fmoe.ShardingSpec(fmoe.make_mesh(4))
    step = fmoe.auto(lambda p, x: fmoe.moe(p, x, config), spec)
    held = fmoe.distribute(params, spec)
    x = torch.randn(12, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mine = x.split([9, 3])[rank]
    with pytest.raises(ValueError, match="update: the function has not been called yet"):
        step.update(None)
    want = torch.func.grad(lambda p: fmoe.moe(p, x, config)[0].square().sum())(params)
    log = []

    def loss(p):
        y, aux = step(p, mine)
        return y.square().sum(), aux

    for _ in range(10):
        grads, aux = torch.func.grad(lambda p: (lambda o: (o[0].square().sum(), o[1]))(step(p, mine)), has_aux=True)(
            held
        )
        for a, b in zip(pytree.tree_leaves(grads), pytree.tree_leaves(want), strict=True):
            torch.testing.assert_close(a.full_tensor(), b, rtol=1e-10, atol=1e-10)
        running = step.planned(held, mine).plans
        step(held, mine)
        assert step.planned(held, mine).plans == running
        step.update({"anything": [aux]})
        log.append(str(running["moe.0"]))
    with pytest.raises(ValueError, match=r"update: 2 Aux were given, but the layers are moe.0: give one for each."):
        step.update([aux, aux])
    assert "runs" in step.explain()
    step.use("dp")
    step(held, mine)
    assert step.planned(held, mine).plans["moe.0"].parallelism == "dp"
    return log


def test_auto_plans_alike_on_every_rank():
    a, b = launch(planned_training, 2)
    assert a == b
    assert len(set(a)) > 1  # it tried more than one


def shared_planning(rank):
    """What differs between the ranks reaches no choice, and what is wrong on one is refused on both."""
    config = fmoe.MoEConfig(4, 64, 48)
    spec = fmoe.ShardingSpec(fmoe.make_mesh(4), memory=520_000)
    params = fmoe.local(fmoe.init(config, seed=0), spec)

    def attends(p, x):  # of other sizes on other ranks, and its buffers count
        return fmoe.moe(p, x + torch.softmax(x @ x.mT, -1) @ x, config)

    step, log = fmoe.auto(attends, spec), []
    x = torch.randn([4, 1][rank], 16, 64)
    for _ in range(9):
        _, aux = step(params, x)
        log.append(str(step.planned(params, x).plans["moe.0"]))
        step.update(aux)
    log.append(step.explain())

    counts = [[120, 8, 0, 0], [32, 32, 32, 32]][rank]  # of this rank alone, as of a routing made by hand
    step.update(torch.tensor(counts))
    log.append(str(step._state.means))

    before = step._state
    nan = torch.tensor([math.nan, 1, 1, 1])
    wrong = [([nan, aux][rank], None), ([aux, aux][rank], [math.nan, 0.1][rank]), ([[aux, aux], aux][rank], None)]
    for given, seconds in wrong:
        with pytest.raises(ValueError, match="update: ") as caught:
            step.update(given, seconds=seconds)
        said = str(caught.value)
        assert said.startswith("update: another rank was given") == (rank == 1), said
        assert step._state is before
    step.update(aux)

    grows = fmoe.auto(lambda p, x: fmoe.moe(p, x, config), fmoe.ShardingSpec(spec.mesh))
    grows.update(grows(params, torch.randn(4, 64))[1])
    grows.update(grows(params, torch.randn([400, 7][rank], 64))[1])
    log.append(grows._state.model.tokens)
    return log


def test_ranks_plan_alike_whatever_differs_between_them():
    a, b = launch(shared_planning, 2)
    assert a == b
    assert a[-1] == 400


def test_a_fixed_plan_needs_no_updates():
    config = fmoe.MoEConfig(2, 8, 8)
    params, x = fmoe.init(config, seed=0), torch.randn(4, 8)
    step = fmoe.auto(lambda p, x: fmoe.moe(p, x, config), fmoe.ShardingSpec(fmoe.make_mesh(2), plan="dp"))
    step.update(step(params, x)[1])
    assert step.explain().startswith("the plan is fixed by the user: dp")


def test_updates_without_a_call_teach_nothing():
    config = fmoe.MoEConfig(2, 8, 8)
    params, x = fmoe.init(config, seed=0), torch.randn(4, 8)
    step = fmoe.auto(lambda p, x: fmoe.moe(p, x, config), fmoe.ShardingSpec(fmoe.make_mesh(2)))
    for _ in range(3):
        aux = step(params, x)[1]
        step.update(aux)
    known = step._state.measured
    step.update(aux)
    assert step._state.measured == known

"""What breaks for users of other systems across ranks, each with the right value; the public report beside it."""

from __future__ import annotations

import dataclasses
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from oracle import assert_close
from ranks import launch
from torch.utils import _pytree as pytree

import fmoe

M, H = 8, 6


def setup(experts, plan="ep", world=None, **changes):
    config = fmoe.MoEConfig(experts, M, H, **{"router": fmoe.TopK(1), **changes})
    params = fmoe.init(config, seed=0, dtype=torch.float64)
    spec = fmoe.ShardingSpec(fmoe.make_mesh(experts, world=world), plan=plan)
    return config, params, spec, fmoe.auto(lambda p, x: fmoe.moe(p, x, config), spec)


def towards(params, expert, tokens):
    """Tokens that the router sends to one expert."""
    direction = torch.linalg.pinv(params.router.weight)[expert]
    return direction.expand(tokens, M) * (1 + torch.arange(tokens, dtype=torch.float64)).unsqueeze(1) * 3


def rand(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


ALL = ("dp", "ep", "ep pipeline=2", "ep layout=padded", "ep pipeline=2 layout=padded")


# --- B: capacity and dropping --------------------


def capacity_is_local(rank):
    """fastmoe#141: rank 0 all to e0, rank 1 all to e1, T=4, cf=1: C=2 per rank and expert keeps 4 in all."""
    for plan in ALL:
        config, params, _, step = setup(2, plan, capacity=1.0)
        _, aux = step(params, towards(params, rank, 4))
        assert (aux.counts.tolist(), int(aux.dropped)) == ([4, 4], 4)
        # the other rule, one group over all ranks, keeps 8: it is what one process with groups=1 does
        both = torch.cat([towards(params, r, 4) for r in range(2)])
        assert int(fmoe.moe(params, both, config)[1].dropped) == 0
    return True


def tokens_differ(rank):
    """Tutel#173, #182, DeepSpeed#6809: T=(8,6) must neither hang nor give garbage."""
    xs = [rand(8, M), rand(6, M, seed=1)]
    for plan in ALL:
        config, params, _, step = setup(2, plan, capacity=1.0)
        y, _ = step(params, xs[rank])
        assert_close(y, fmoe.moe(params, xs[rank], config)[0])
    return True


def wrong_reshapes_cannot_fit(rank):
    """DeepSpeed#8195: capacity and model dim of sizes that no wrong slice can mistake for each other."""
    for plan in ("ep r=2 layout=padded", "ep r=2 mp=gather layout=padded", "ep r=2"):
        config = fmoe.MoEConfig(2, 7, 5, router=fmoe.TopK(1), capacity=2.0)
        params = fmoe.init(config, seed=0, dtype=torch.float64)
        spec = fmoe.ShardingSpec(fmoe.Mesh(1, 2), plan=plan)
        x = rand(4, 7, seed=rank)
        y, _ = fmoe.moe(params, x, config, spec=spec)
        assert_close(y, fmoe.moe(params, x, config)[0])
    return True


def dropless_moves_every_row(rank):
    """Megatron-LM#1756: counts over ranks add up to W*T*k, and no row is lost."""
    for plan in ALL:
        config, params, _, step = setup(4, plan, router=fmoe.TopK(2))
        x = rand(8, M, seed=rank)
        y, aux = step(params, x)
        assert int(aux.counts.sum()) == 2 * 8 * 2
        assert_close(y, fmoe.moe(params, x, config)[0])
    return True


def fewer_tokens_than_ranks(rank):
    """torchtitan#3193, #3622: T=5 and T=1 with the hidden dim over two ranks."""
    for plan in ("ep r=2", "ep r=2 layout=padded", "ep r=2 mp=gather pipeline=2 layout=padded", "ep r=1"):
        for tokens in (5, 1):
            config = fmoe.MoEConfig(2, M, H, router=fmoe.TopK(2))
            params = fmoe.init(config, seed=0, dtype=torch.float64)
            x = rand(tokens, M, seed=rank)
            y, _ = fmoe.moe(params, x, config, spec=fmoe.ShardingSpec(fmoe.Mesh(1, 2), plan=plan))
            assert_close(y, fmoe.moe(params, x, config)[0])
    return True


# --- C: empty and odd shapes --------------------


def a_rank_gets_nothing(rank):
    """Megatron-LM PR#3626, TransformerEngine#3019: all tokens to e0 and e1, both on rank 0; gradients whole and 0."""
    for plan in ALL:
        _, params, spec, step = setup(4, plan)
        params = dataclasses.replace(params, router=fmoe.RouterParams(torch.eye(M, 4, dtype=torch.float64)))
        x = torch.zeros(4, M, dtype=torch.float64)
        x[:, rank] = torch.arange(1, 5)
        held = fmoe.distribute(params, spec)
        grads = torch.func.grad(lambda p, x=x, step=step: step(p, x)[0].sum())(held)
        whole = grads.experts.w_in.full_tensor()
        assert whole.shape == params.experts.w_in.shape
        assert torch.equal(whole[2:], torch.zeros_like(whole[2:]))
        assert whole[:2].abs().sum() > 0
    return True


def no_tokens_at_all(rank):
    """sglang#38780, #22455, DeepEP#374: T=0 on one rank, then on both: losses 0, graph and zero gradients."""
    for plan in ALL:
        _, params, spec, step = setup(4, plan, router=fmoe.TopK(2))
        held = fmoe.distribute(params, spec)
        for sizes in ((0, 3), (0, 0)):
            x = rand(sizes[rank], M)

            def share(p, x, step=step, spec=spec):
                y, aux = step(p, x)
                return spec.mean(y.sum() + aux.balance + aux.z, tokens=len(x)), (y, aux)

            (grads, dx), (y, aux) = torch.func.grad(share, (0, 1), has_aux=True)(held, x)
            assert y.shape == dx.shape == (sizes[rank], M)
            assert int(aux.counts.sum()) == sum(sizes) * 2
            if not any(sizes):
                assert all(float(getattr(aux, n)) == 0 for n in ("balance", "z", "importance", "load", "entropy"))
            for g in pytree.tree_leaves(grads):
                assert g.full_tensor().isfinite().all()
                assert any(sizes) or not g.full_tensor().any()
    return True


def rows_past_the_end_are_zero(rank):
    """torchtitan#1237, pytorch#193633: three steps with dirty memory in between; nothing uninitialised is read."""
    _, params, spec, _ = setup(4, "ep", router=fmoe.TopK(2), capacity=0.5)
    results = []
    for plan in ("dp", "ep", "ep layout=padded"):
        _, _, _, step = setup(4, plan, router=fmoe.TopK(2), capacity=0.5)
        held = fmoe.local(params, spec)
        for _ in range(3):
            dirty = [torch.full((50, M), float("nan"), dtype=torch.float64) for _ in range(20)]
            del dirty
            x = rand(6, M, seed=rank)
            grads = torch.func.grad(lambda p, x=x, step=step: step(p, x)[0].sin().sum())(held)
            held = pytree.tree_map(lambda p, g: p - 0.1 * g, held, grads)
        results.append(pytree.tree_leaves(held)[1])
    for other in results[1:]:
        assert_close(other, results[0])
    return True


def any_experts_on_any_ranks(rank):
    """torchtitan#4258, DeepSpeed#4562, #7535: (E,W) = (3,2) and (8,2) just work."""
    for experts in (1, 3, 8):
        for plan in ALL:
            config, params, _, step = setup(experts, plan)
            x = rand(5, M, seed=rank)
            assert_close(step(params, x)[0], fmoe.moe(params, x, config)[0])
    return True


# --- D, E, L: groups, gradients, placement --------------------


def no_collective_over_bools_or_uneven_gathers(rank):
    """pytorch#156627, #88245: gloo refuses both; with a mask, a capacity and uneven T nothing asks for them."""
    for plan in ALL:
        config, params, spec, _ = setup(3, plan, router=fmoe.TopK(2), capacity=1.0)
        x = rand(5 - rank, M, seed=rank)
        mask = torch.arange(len(x)) != 1
        y, _ = fmoe.moe(params, x, config, spec=spec, mask=mask)
        assert_close(y, fmoe.moe(params, x, config, mask=mask)[0])
        assert not y[1].any()
    return True


def losses_are_global(rank):
    """megablocks#85, Megatron-LM#1498, torchtitan#4772: rank r all to e_r: balance is 1 globally, 2 in each group."""
    for scope, want in (("global", 1.0), ("group", 2.0)):
        config, params, spec, _ = setup(2, "ep", router=fmoe.TopK(1, scope=scope))
        params = dataclasses.replace(params, router=fmoe.RouterParams(50 * torch.eye(M, 2, dtype=torch.float64)))
        x = torch.zeros(4, M, dtype=torch.float64)
        x[:, rank] = 1
        assert fmoe.moe(params, x, config, spec=spec)[1].balance.item() == pytest.approx(want)
    return True


def training_equals_one_rank(rank):
    """Tutel#293, fastmoe#116, #83: 2 ranks x 8 tokens equal 1 rank x 16, dropless, over 5 steps of SGD; every plan."""
    for plan in ALL:
        config, params, spec, step = setup(4, plan, router=fmoe.TopK(2))

        def train(params, gradient):
            for i in range(5):
                params = pytree.tree_map(lambda p, g: p - 0.5 * g, params, gradient(params, rand(16, M, seed=i)))
            return params

        def whole(p, x, config=config):
            return torch.func.grad(lambda p: fmoe.moe(p, x, config)[0].square().mean())(p)

        def shares(p, x, step=step, spec=spec):
            mine = x.chunk(2)[rank]
            return torch.func.grad(lambda p: spec.mean(step(p, mine)[0].square().mean(), tokens=8))(p)

        found, want = train(fmoe.distribute(params, spec), shares), train(params, whole)
        for a, b in zip(pytree.tree_leaves(found), pytree.tree_leaves(want), strict=True):
            assert_close(a.full_tensor(), b, what=plan)
    return True


def reductions_are_not_forgotten(rank):
    """NeMo-Automodel#1260, torchtitan#1805: losses (r+1)*sum give 3 on both ranks, not 1 and 2."""
    _, _, spec, _ = setup(2)
    held = fmoe.distribute({"w": torch.ones(3, dtype=torch.float64)}, spec)
    grads = torch.func.grad(lambda p: (rank + 1) * fmoe.local(p, spec)["w"].sum())(held)
    assert grads["w"].full_tensor().tolist() == [3.0] * 3
    assert grads["w"].to_local().tolist() == [3.0] * 3
    return True


def recomputation_does_not_count_twice(rank):
    """Megatron-LM#1330, megablocks#113: statistics are values, the same with checkpointing as without."""
    from torch.utils.checkpoint import checkpoint

    _, params, _, step = setup(4, "ep pipeline=2 layout=padded")
    x = rand(5, M, seed=rank).requires_grad_()
    plain, again = step(params, x), checkpoint(step, params, x, use_reentrant=False)
    assert torch.equal(plain[1].counts, again[1].counts)
    grads = [torch.autograd.grad(y.sum() + aux.z, x)[0] for y, aux in (plain, again)]
    assert torch.equal(*grads)
    return True


def plans_do_not_depend_on_local_numbers(rank):
    """T=(4,400): the plan is the spec's on every rank; only `use` changes it."""
    _, params, _, step = setup(4, "ep")
    x = rand((4, 400)[rank], M)
    texts = [step.planned(params, x).as_text()]
    step.use("dp")
    texts.append(step.planned(params, x).as_text())
    gathered = [None, None]
    dist.all_gather_object(gathered, texts)
    assert gathered[0] == gathered[1]
    return True


TWO = [
    capacity_is_local,
    tokens_differ,
    wrong_reshapes_cannot_fit,
    dropless_moves_every_row,
    fewer_tokens_than_ranks,
    a_rank_gets_nothing,
    no_tokens_at_all,
    rows_past_the_end_are_zero,
    any_experts_on_any_ranks,
    no_collective_over_bools_or_uneven_gathers,
    losses_are_global,
    training_equals_one_rank,
    reductions_are_not_forgotten,
    recomputation_does_not_count_twice,
    plans_do_not_depend_on_local_numbers,
]


def all_of(rank, numbers):
    done = []
    for number in numbers:
        assert TWO[number](rank)
        done.append(TWO[number].__name__)
    return done


def test_cases_on_two_ranks():
    (names, _) = launch(all_of, 2, list(range(len(TWO))))
    assert names == [case.__name__ for case in TWO]


def four_ranks(rank):
    """E < W: (E,W) = (2,4); and two groups of ranks that never wait for each other (fastmoe#106)."""
    for plan in ("dp", "ep r=1", "ep r=2", "ep r=2 mp=gather layout=padded"):
        config, params, _, step = setup(2, plan)
        x = rand(3 + rank, M, seed=rank)
        assert_close(step(params, x)[0], fmoe.moe(params, x, config)[0])
    return True


def test_cases_on_four_ranks():
    assert all(launch(four_ranks, 4))


# --- what must not hang, and never give a wrong number --------------------


def error_of(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def calls_that_differ(rank):
    """The errors of calls that the ranks do not make alike; all ranks get each, so they can go on."""
    config, params, spec, step = setup(4, "ep layout=padded")
    x = rand(4, M)
    step(params, x)
    other = fmoe.auto(lambda p, x: (fmoe.moe(p, x, config), fmoe.moe(p, 2 * x, config)), spec)
    errors = [
        error_of(lambda: step(params.to(torch.float32), x.float()) if rank else step(params, x)),
        error_of(lambda: fmoe.moe(params, x, config.replace(router=fmoe.TopK(1 + rank)), spec=spec)),
        error_of(lambda: other(params, x) if rank else step(params, x)),
    ]
    illegal = error_of(lambda: step.use("ep r=3"))
    if rank:
        step.use("dp")
    errors.append(error_of(lambda: step(params, x)))
    step.use("dp")
    step(params, x)  # and goes on
    return errors, illegal


def absent(rank):
    """One rank does not call."""
    _, params, _, step = setup(4, "ep layout=padded")
    x = rand(4, M)
    step(params, x)
    if rank == 1:
        time.sleep(8)
        return "slept"
    return error_of(lambda: step(params, x))


def test_a_rank_that_does_not_call_is_noticed():
    found, slept = launch(absent, 2, timeout=4, ends=False)
    assert slept == "slept"
    assert found.startswith(
        "CollectiveError: lambda (moe.0): rank 0 waited for the others, to agree on sizes (all_reduce over world)."
    )


def test_ranks_that_call_otherwise_are_told():
    for errors, illegal in launch(calls_that_differ, 2, timeout=20):
        for error in errors:
            assert error.startswith("SpecError: ")
            assert ": the ranks disagree. Rank " in error
            assert error.endswith("dtypes, dims, plan or function; only the number of tokens may differ.")
        assert illegal == (
            "PlanError: r=3 is not available. 2 ranks hold the experts in 2 parts, so each part is on one rank, and r "
            "divides 1: choose 1, or dp."
        )


def late(rank, max_tokens):
    """A rank that leaves while an exchange of tokens is expected: the error names the layer and the exchange."""
    config = fmoe.MoEConfig(4, M, H, router=fmoe.TopK(1), capacity=1.0)
    params = fmoe.init(config, seed=0, dtype=torch.float64)
    spec = fmoe.ShardingSpec(fmoe.make_mesh(4), plan="ep layout=padded", max_tokens=max_tokens)
    step = fmoe.auto(lambda p, x: fmoe.moe(p, x, config)[0], spec)
    x = rand(4, M)
    y, pull = torch.func.vjp(lambda x: step(params, x), x)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.perf_counter()
    with pytest.raises(fmoe.CollectiveError) as caught:
        pull(torch.ones_like(y))
    assert time.perf_counter() - started < 30
    return str(caught.value)


def test_a_rank_that_dies_in_backward():
    (message,) = launch(late, 2, 4, timeout=10, survivors=[0])
    assert message.startswith("moe.0: back = all_to_all over world: all_to_all failed on rank 0. Every rank must call")

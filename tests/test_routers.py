"""Every router against its equation restated in numpy, token by token; its gradients; every plan; transforms."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from oracle import assert_close
from ranks import launch
from torch.utils import _pytree as pytree

import fmoe
from fmoe import functional as F
from fmoe.transforms.routers import router_subjects
from fmoe.transforms.table import ROWS, run_cell

M, E = 5, 4
rng = np.random.default_rng


# --- the equations, in numpy -----------------------------------------------------------------------------------


def softmax(z):
    e = np.exp(z - z.max())
    return e / e.sum()


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def phi(z):
    return 0.5 * (1 + math.erf(z / math.sqrt(2)))


def best(scores, k):
    return sorted(range(len(scores)), key=lambda e: (-scores[e], e))[:k]


def share(values):
    return np.array(values) / sum(values)


def top_k(z, given, p):
    for t in range(len(z)):
        ids = best(z[t], 2)
        yield ids, softmax(z[t][ids])


def biased(z, given, p):
    yield from top_k(z + p["logit_bias"], given, p)


def noisy(z, given, p):
    for t in range(len(z)):
        s = np.log1p(np.exp(p["x"][t] @ p["noise_weight"])) + 0.01
        h = z[t] + given["noise"][t] * s
        ids = best(h, 2)
        yield ids, softmax(h[ids])


def gshard(z, given, p):
    for t in range(len(z)):
        a, b = best(z[t], 2)
        g = share([softmax(z[t])[a], softmax(z[t])[b]])
        keep = phi(given["noise"][t][b]) < min(1, 2 * g[1])
        yield ([a, b] if keep else [a]), (g if keep else g[:1])


def cosine(z, given, p):
    for t in range(len(z)):
        q = p["x"][t] @ p["projection"]
        tau = max(0.01, math.exp(-p["log_scale"]))
        c = np.array([q @ w / max(np.linalg.norm(q) * np.linalg.norm(w), 1e-300) for w in p["weight"].T]) / tau
        ids = best(c, 2)
        yield ids, softmax(c[ids])


def affinity(of):
    def restate(z, given, p):
        for t in range(len(z)):
            s = of(z[t])
            ranked = s + given["bias"]
            halves = [sum(sorted(ranked[:2])), sum(sorted(ranked[2:]))]
            inside = best(halves, 1)[0]
            allowed = [2 * inside, 2 * inside + 1]
            ids = sorted(allowed, key=lambda e: (-ranked[e], e))
            yield ids, 2.5 * share(s[ids])

    return restate


def top_p(z, given, p):
    for t in range(len(z)):
        probs = softmax(z[t])
        ids, total = [], 0.0
        for e in best(z[t], 3):
            if total >= 0.7:
                break
            ids.append(e)
            total += probs[e]
        yield ids, probs[ids]


def relu(z, given, p):
    for t in range(len(z)):
        ids = [e for e in best(z[t], 3) if z[t][e] > 0]
        yield ids, z[t][ids]


def hashed(z, given, p):
    for t in range(len(z)):
        h = (int(given["token_ids"][t]) + 3 * 40503) % 2**31
        for _ in range(2):
            h = ((h ^ h // 2**16) * 73244475) % 2**31
        h ^= h // 2**16
        yield [h % E, (h + 1) % E], [0.5, 0.5]


def expert_choice(z, given, p):
    probs = np.array([softmax(row) for row in z]).reshape(-1, E)
    n = min(len(z), math.ceil(1.5 * len(z) / E))
    taken = [sorted(range(len(z)), key=lambda t: (-probs[t][e], t))[:n] for e in range(E)]
    for t in range(len(z)):
        ids = [e for e in range(E) if t in taken[e]]
        yield ids, probs[t][ids]


def sinkhorn(z, given, p):
    u, v = np.zeros((len(z), 1)), np.zeros(E)
    for _ in range(16):
        u = -np.log(np.exp(z + v).sum(1, keepdims=True))
        v = math.log(max(len(z), 1) / E) - np.log(np.exp(z + u).sum(0)) if len(z) else v
    for t in range(len(z)):
        ids = best(z[t] + v, 1)
        yield ids, sigmoid(z[t][ids])


def prototypes(z, given, p):
    for t in range(len(z)):
        a, b = best(z[t][:2], 1)[0], 2 + best(z[t][2:], 1)[0]
        yield [a, b], [softmax(z[t][:2])[a], softmax(z[t][2:])[b - 2]]


GROUPED = {"expert_groups": 2, "top_groups": 1, "route_scale": 2.5}
ROUTERS = {
    "TopK": (fmoe.TopK(2), top_k),
    "TopK with a bias": (fmoe.TopK(2, order="topk_softmax", logit_bias=True), biased),
    "NoisyTopK": (fmoe.NoisyTopK(2), noisy),
    "GShard": (fmoe.GShard(), gshard),
    "Cosine": (fmoe.Cosine(2, dim=3), cosine),
    "Sigmoid": (fmoe.Sigmoid(2, **GROUPED), affinity(sigmoid)),
    "SqrtSoftplus": (fmoe.SqrtSoftplus(2, **GROUPED), affinity(lambda z: np.sqrt(np.log1p(np.exp(z))))),
    "TopP": (fmoe.TopP(0.7, max_k=3), top_p),
    "ReLU": (fmoe.ReLU(2, max_k=3), relu),
    "Hash": (fmoe.Hash(2, seed=3), hashed),
    "ExpertChoice": (fmoe.ExpertChoice(1.5), expert_choice),
    "Base": (fmoe.Base(), None),
    "Sinkhorn": (fmoe.Sinkhorn(), sinkhorn),
    "Prototypes": (fmoe.Prototypes(2), prototypes),
}
SMOOTH = [name for name in ROUTERS if name != "Hash"]
INPUTS = {
    "random": lambda: rng(0).normal(size=(11, M)),
    "tied": lambda: np.zeros((6, M)),
    "one-sided": lambda: np.abs(rng(1).normal(size=(1, M))) * np.linspace(1, 4, 9)[:, None],
    "one token": lambda: rng(2).normal(size=(1, M)),
    "no token": lambda: np.zeros((0, M)),
}


def tensor(array):
    return torch.from_numpy(np.ascontiguousarray(array))


def parameters(router, seed=0):
    config = fmoe.MoEConfig(E, M, 6, router=router, activation="relu")
    params = fmoe.init(config, seed=seed, dtype=torch.float64)
    if params.router.noise_weight is not None:
        params = dataclasses.replace(
            params, router=dataclasses.replace(params.router, noise_weight=params.router.weight.flip(1) / 2)
        )
    if params.router.logit_bias is not None:
        bias = tensor(np.array([0.3, -0.4, 0.0, 0.7]))
        params = dataclasses.replace(params, router=dataclasses.replace(params.router, logit_bias=bias))
    return config, params


def arguments(router, tokens, seed=3):
    made = {
        "noise": tensor(rng(seed).normal(size=(tokens, E))),
        "token_ids": tensor(rng(seed).integers(0, 1000, size=tokens)),
        "bias": tensor(np.array([0.1, -0.2, 0.0, 0.15])),
    }
    return {name: made[name] for name in router.takes if name != "noise" or not isinstance(router, fmoe.TopK)}


def listed(routing):
    """Ids and weights of each token, without the empty columns."""
    ids, weights = routing.experts.numpy(), routing.weights.detach().numpy()
    return [(list(i[i >= 0]), w[i >= 0]) for i, w in zip(ids, weights, strict=True)]


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("name", ROUTERS)
def test_the_equation(name, kind):
    router, restate = ROUTERS[name]
    x = INPUTS[kind]()
    _, params = parameters(router)
    given = arguments(router, len(x))
    routing = F.gate(params.router, tensor(x), router, **given)
    assert routing.experts.shape == routing.weights.shape == (len(x), router.choices(E))
    assert bool((routing.weights[routing.experts < 0] == 0).all())
    leaves = {f.name: getattr(params.router, f.name) for f in dataclasses.fields(params.router)}
    held = {n: leaf.numpy() for n, leaf in leaves.items() if leaf is not None}
    z = x @ held["weight"] if len(held["weight"]) == M else None
    if name == "Base":
        wanted = balanced(z, routing)
    else:
        wanted = list(restate(z if z is not None else x, {n: v.numpy() for n, v in given.items()}, {**held, "x": x}))
    for t, ((ids, weights), (right, numbers)) in enumerate(zip(listed(routing), wanted, strict=True)):
        assert ids == list(right), t
        np.testing.assert_allclose(weights, numbers, rtol=1e-12, atol=1e-14)
    counts = np.bincount([e for ids, _ in wanted for e in ids], minlength=E)
    assert routing.counts.tolist() == counts.tolist()
    assert all(bool(leaf.isfinite().all()) for leaf in pytree.tree_leaves(routing.aux))


def balanced(z, routing):
    """Loads differ by at most one, and no other such assignment has a larger sum."""
    ids = routing.experts.flatten().tolist()
    loads = np.bincount(ids, minlength=E)
    assert loads.max() - loads.min() <= 1
    if len(ids) <= 9:
        low, extra = divmod(len(ids), E)
        ways = set()
        for more in itertools.combinations(range(E), extra):
            ways.add(tuple(e for e in range(E) for _ in range(low + (e in more))))
        most = max((best_sum(z, way) for way in ways), default=0.0)
        assert sum(z[t][e] for t, e in enumerate(ids)) == pytest.approx(most, abs=1e-12)
    return [([e], [sigmoid(z[t][e])]) for t, e in enumerate(ids)]


def best_sum(z, places):
    """The best assignment of tokens to these places, by dynamic programming over sets of places."""
    table = {0: 0.0}
    for t in range(len(z)):
        new = {}
        for used, value in table.items():
            for i, e in enumerate(places):
                if not used >> i & 1:
                    key = used | 1 << i
                    new[key] = max(new.get(key, -math.inf), value + z[t][e])
        table = new
    return table[(1 << len(places)) - 1]


def test_assignment_is_optimal_on_many_inputs():
    """Ties, whole numbers, groups, masks and single experts."""
    for seed in range(40):
        generator = rng(seed)
        tokens, experts = int(generator.integers(0, 8)), int(generator.integers(1, 5))
        scores = generator.integers(-3, 4, size=(tokens, experts)) * (1.0 if seed % 2 else generator.random())
        keep = torch.ones(1, tokens, dtype=torch.bool)
        ids = fmoe.ops.OPS["balanced_assignment"](tensor(scores)[None], keep, [tokens])[0].tolist()
        low, extra = divmod(tokens, experts)
        loads = np.bincount(ids, minlength=experts)
        assert loads.min(initial=low) >= low
        assert (loads > low).sum() == extra
        ways = [
            [e for e in range(experts) for _ in range(low + (e in more))]
            for more in itertools.combinations(range(experts), extra)
        ]
        most = max(best_sum(scores, way) for way in ways)
        assert sum(scores[t][e] for t, e in enumerate(ids)) == pytest.approx(most, abs=1e-9)


def smooth_outputs(name, x, *leaves):
    router = ROUTERS[name][0]
    names = list(router.parameters(M, E))
    routing = F.gate(fmoe.RouterParams(**dict(zip(names, leaves, strict=True))), x, router, **arguments(router, len(x)))
    aux = routing.aux
    return routing.weights, aux.balance, aux.z, aux.importance, aux.load + 0 * routing.weights.sum(), aux.entropy


@pytest.mark.parametrize("name", SMOOTH)
def test_gradients_by_finite_differences(name):
    router = ROUTERS[name][0]
    _, params = parameters(router)
    leaves = [getattr(params.router, n).clone().requires_grad_() for n in router.parameters(M, E)]
    x = tensor(INPUTS["random"]()).requires_grad_()
    assert torch.autograd.gradcheck(lambda *a: smooth_outputs(name, *a), (x, *leaves))


@pytest.mark.parametrize("name", ROUTERS)
def test_the_layer_is_the_weighted_sum_of_experts(name):
    """Ragged, padded, vmap with per-sample routing: ``y[t] = sum_k w[t,k] * expert_{e[t,k]}(x[t])``."""
    router, _ = ROUTERS[name]
    config, params = parameters(router)
    x = tensor(INPUTS["random"]())
    given = arguments(router, len(x))
    routing = F.gate(params.router, x, router, **given)
    each = torch.einsum(
        "teh,ehm->tem", torch.einsum("tm,emh->teh", x, params.experts.w_in).relu(), params.experts.w_out
    )
    chosen = torch.nn.functional.one_hot(routing.experts.clamp(min=0), E).double() * routing.weights.unsqueeze(2)
    wanted = torch.einsum("tke,tem->tm", chosen, each)
    for layout in ("ragged", "padded"):
        y, aux = fmoe.moe(params, x, config.replace(layout=layout), **given)
        assert_close(y, wanted)
        assert int(aux.dropped) == 0
    xs = torch.stack([x, -x, x.flip(0)])
    samples = torch.func.vmap(lambda x: fmoe.moe(params, x, config, **given)[0])(xs)
    assert_close(samples, torch.stack([fmoe.moe(params, s, config, **given)[0] for s in xs]))


@pytest.mark.parametrize("name", ROUTERS)
def test_masked_tokens_count_for_nothing(name):
    """Choices, losses and counts are those of the other tokens alone, even where a masked token holds NaN."""
    router, _ = ROUTERS[name]
    _, params = parameters(router)
    x = tensor(INPUTS["random"]())
    mask = torch.arange(len(x)) % 3 != 1
    x[~mask] = torch.nan
    given = arguments(router, len(x))
    found = F.gate(params.router, x, router, mask=mask, **given)
    rest = {n: v[mask] if n != "bias" else v for n, v in given.items()}
    wanted = F.gate(params.router, x[mask], router, **rest)
    assert torch.equal(found.experts[mask], wanted.experts)
    assert_close(found.weights[mask], wanted.weights)
    assert bool((found.experts[~mask] == -1).all())
    for a, b in zip(pytree.tree_leaves(found.aux), pytree.tree_leaves(wanted.aux), strict=True):
        assert_close(a, b)
    grads = torch.func.grad(lambda x: F.gate(params.router, x, router, mask=mask, **given).weights.sum())(x)
    assert bool((grads[~mask] == 0).all())
    none = F.gate(params.router, x, router, mask=torch.zeros_like(mask), **given)
    assert none.counts.tolist() == [0] * E
    assert all(bool(leaf.isfinite().all()) for leaf in pytree.tree_leaves(none.aux))


def test_the_temperature_has_a_floor():
    """However large the learned scale, cosines are divided by at least 0.01, and the scale then gets no gradient."""
    router = ROUTERS["Cosine"][0]
    _, params = parameters(router)
    x = tensor(INPUTS["random"]())

    def weights(scale):
        return F.gate(dataclasses.replace(params.router, log_scale=scale), x, router).weights

    floor, beyond = (torch.tensor(s, dtype=torch.float64) for s in (math.log(100), 30.0))
    assert_close(weights(beyond), weights(floor))
    assert not torch.equal(weights(floor - 1), weights(floor))
    assert float(torch.func.grad(lambda s: weights(s).square().sum())(beyond)) == 0


@pytest.mark.parametrize("name", ROUTERS)
def test_hard_logits(name):
    """All equal, all NaN, all -inf and huge: ids stay ids, and values are finite where the equation is."""
    router, _ = ROUTERS[name]
    given = {n: v.float() if v.is_floating_point() else v for n, v in arguments(router, 3).items()}
    leaves = {n: torch.zeros(s) for n, s in router.parameters(1, E).items()}
    if "projection" in leaves:
        leaves["projection"] += 1
    for row in ([0.0] * E, [1e30, -1e30, 1e30, 0.0], [math.nan] * E, [-math.inf] * E):
        weight = torch.tensor([row]).expand(leaves["weight"].shape).contiguous()
        routing = F.gate(fmoe.RouterParams(**{**leaves, "weight": weight}), torch.ones(3, 1), router, **given)
        assert int(routing.experts.min()) >= -1
        assert int(routing.experts.max()) < E
        if all(map(math.isfinite, row)):
            assert bool(routing.weights.isfinite().all())
    if name not in ("Hash", "ExpertChoice", "Base", "Sinkhorn", "Prototypes", "Sigmoid", "SqrtSoftplus", "NoisyTopK"):
        tied = F.gate(
            fmoe.RouterParams(**{**leaves, "weight": leaves["weight"] + 1}), torch.ones(3, 1), router, **given
        )
        assert tied.experts[0, 0] == 0


# --- soft slots --------------------------------------------------------------------------------------------------


def soft_restated(x, weight, scale, w_in, w_out):
    """One sequence ``[L,M]``, in loops."""
    slots = weight.shape[1] * weight.shape[2]
    phi = weight.reshape(M, slots)
    logits = np.zeros((len(x), slots))
    for t in range(len(x)):
        for s in range(slots):
            norms = max(np.linalg.norm(x[t]), 1e-150) * np.linalg.norm(phi[:, s])
            logits[t, s] = scale * (x[t] @ phi[:, s]) / norms
    made = []
    for s in range(slots):
        mixed = softmax(logits[:, s]) @ x
        e = s // weight.shape[2]
        made.append(np.maximum(mixed @ w_in[e], 0) @ w_out[e])
    return np.array([softmax(logits[t]) @ np.array(made) for t in range(len(x))])


def soft_layer(slots=2):
    config, params = parameters(fmoe.SoftMoE(slots))
    held = dataclasses.replace(params.router, scale=torch.tensor(1.7, dtype=torch.float64))
    return config, dataclasses.replace(params, router=held)


def test_soft_slots():
    """Random, equal, single and long sequences; a batch is sequence by sequence; masked tokens count for nothing."""
    config, params = soft_layer()
    held = [params.router.weight, params.router.scale, params.experts.w_in, params.experts.w_out]
    numbers = [leaf.numpy() for leaf in held]
    for kind in ("random", "tied", "one-sided", "one token"):
        x = INPUTS[kind]()
        y, aux = fmoe.moe(params, tensor(x), config)
        assert_close(y, tensor(soft_restated(x, *numbers)))
        assert aux.counts.tolist() == [2] * E
    xs = tensor(rng(4).normal(size=(2, 3, 7, M)))
    y, aux = fmoe.moe(params, xs, config)
    assert aux.counts.tolist() == [12] * E
    assert_close(y[1, 2], tensor(soft_restated(xs[1, 2].numpy(), *numbers)))
    assert_close(torch.func.vmap(lambda x: fmoe.moe(params, x, config)[0])(xs), y)
    mask = torch.ones(2, 3, 7, dtype=torch.bool)
    mask[1, 2, 4:] = False
    y, aux = fmoe.moe(params, torch.where(mask[..., None], xs, torch.nan), config, mask=mask)
    assert_close(y[1, 2, :4], tensor(soft_restated(xs[1, 2, :4].numpy(), *numbers)))
    assert bool((y[1, 2, 4:] == 0).all())
    assert fmoe.moe(params, xs[:, :, :0], config)[0].shape == (2, 3, 0, M)
    leaves = [leaf.clone().requires_grad_() for leaf in (xs[0, 0], *held)]

    def layer(x, weight, scale, w_in, w_out):
        layer = fmoe.MoEParams(fmoe.RouterParams(weight, scale=scale), fmoe.ExpertParams(w_in, w_out))
        return fmoe.moe(layer, x, config)[0]

    assert torch.autograd.gradcheck(layer, leaves)


@pytest.mark.parametrize("plan", ["dp", "ep r=1", "ep r=2 layout=padded"])
def test_soft_slots_under_every_plan(plan):
    """Each rank mixes its own tokens, whatever their number."""
    config, params = soft_layer()
    xs = [tensor(rng(r).normal(size=(n, M))) for r, n in enumerate((3, 1, 5, 4, 2, 7, 3, 6))]
    spec = fmoe.ShardingSpec(fmoe.make_mesh(E, world=8), plan=plan)
    planned = fmoe.trace(lambda p, x: fmoe.moe(p, x, config))(params, xs[0]).plan(spec)
    outs = fmoe.simulate(planned, params, xs)
    for (y, _), x in zip(outs, xs, strict=True):
        assert_close(y, fmoe.moe(params, x, config)[0])
    grads = torch.func.grad(lambda p: sum(y.sin().sum() for y, _ in fmoe.simulate(planned, p, xs)))(params)
    wanted = torch.func.grad(lambda p: sum(fmoe.moe(p, x, config)[0].sin().sum() for x in xs))(params)
    for a, b in zip(pytree.tree_leaves(grads), pytree.tree_leaves(wanted), strict=True):
        assert_close(a, b)


# --- transforms --------------------------------------------------------------------------------------------------

SUBJECTS = router_subjects()
COMPILED = [row for row in ROWS if row.startswith(("compile", "export"))]


@pytest.mark.parametrize("subject", SUBJECTS)
def test_every_transform(subject):
    rows = [row for row in ROWS if row not in COMPILED] + ["compile(vmap(grad))"]
    cells = {row: run_cell(row, SUBJECTS[subject], "eager") for row in rows}
    assert {row: cell for row, cell in cells.items() if cell.outcome != "pass"} == {}


# --- programs and plans ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["dp", "ep r=1", "ep r=2 layout=padded"])
@pytest.mark.parametrize("name", ROUTERS)
def test_every_plan(name, plan):
    """Outputs, losses and gradients on 8 ranks, one of them without tokens, are those of one process with groups."""
    router, _ = ROUTERS[name]
    config, params = parameters(router)
    sizes = [3, 0, 5, 1, 4, 2, 3, 6]
    ends = np.cumsum(sizes)
    given = arguments(router, sum(sizes))
    x = tensor(rng(5).normal(size=(sum(sizes), M)))
    spec = fmoe.ShardingSpec(fmoe.make_mesh(E, world=8), plan=plan)

    def layer(params, held):
        return fmoe.moe(params, held["x"], config, **{n: v for n, v in held.items() if n != "x"})

    def part(rank, x):
        rows = slice(ends[rank] - sizes[rank], ends[rank])
        return {"x": x[rows], **{n: v if n == "bias" else v[rows] for n, v in given.items()}}

    planned = fmoe.trace(layer)(params, part(0, x)).plan(spec)

    def loss(y, aux):
        return y.sin().sum() + 0.3 * aux.balance + 0.1 * aux.z + 0.1 * aux.importance + 0.1 * aux.load

    def simulated(params, x):
        outs = fmoe.simulate(planned, params, [part(rank, x) for rank in range(8)])
        return sum(loss(*out) for out in outs), outs

    def direct(params, x):
        y, aux = fmoe.moe(params, x, config, groups=sizes, **given)
        return loss(y, aux) + 7 * (loss(y, aux) - y.sin().sum()), (y, aux)

    grads, outs = torch.func.grad(simulated, (0, 1), has_aux=True)(params, x)
    wanted, (y, aux) = torch.func.grad(direct, (0, 1), has_aux=True)(params, x)
    assert_close(torch.cat([out[0] for out in outs]), y)
    for out in outs:
        for a, b in zip(pytree.tree_leaves(out[1]), pytree.tree_leaves(aux), strict=True):
            assert_close(a, b)
    for a, b in zip(pytree.tree_leaves(grads), pytree.tree_leaves(wanted), strict=True):
        assert_close(a, b)


def ranks_agree(rank):
    """Global losses and bias updates of two ranks are one process's; a bias stays off the tape."""
    router = fmoe.Sigmoid(2)
    config, params = parameters(router)
    bias = torch.zeros(E)
    xs = [tensor(rng(r).normal(size=(6 - r, M))) for r in range(2)]
    step = fmoe.auto(lambda p, x, bias: fmoe.moe(p, x, config, bias=bias), fmoe.ShardingSpec(fmoe.make_mesh(E)))
    for _ in range(3):
        _, aux = step(params, xs[rank], bias)
        _, whole = fmoe.moe(params, torch.cat(xs), config, bias=bias)
        assert_close(aux.balance, whole.balance)
        assert torch.equal(aux.counts, whole.counts)
        assert torch.equal(F.bias_update(bias, aux.counts), F.bias_update(bias, whole.counts))
        bias = F.bias_update(bias, aux.counts, rate=0.05)
    routing = F.gate(params.router, xs[rank], router, bias=bias, spec=fmoe.ShardingSpec(fmoe.make_mesh(E)))
    alone = F.gate(params.router, xs[rank], router, bias=bias)
    assert torch.equal(routing.experts, alone.experts)
    # rank 0 all to one expert, rank 1 all to another: global 1, local 2
    for scope, value in (("global", 1.0), ("local", 2.0)):
        config = fmoe.MoEConfig(2, 2, 3, router=fmoe.TopK(1, scope=scope))
        held = fmoe.MoEParams(fmoe.RouterParams(60 * torch.eye(2).double()), fmoe.init(config, seed=0).experts)
        held = dataclasses.replace(held, experts=held.to(torch.float64).experts)
        x = torch.eye(2).double()[rank].expand(4, 2)
        _, aux = fmoe.moe(held, x, config, spec=fmoe.ShardingSpec(fmoe.make_mesh(2)))
        assert float(aux.balance) == pytest.approx(value)
    return bias.tolist()


def test_two_processes():
    first, second = launch(ranks_agree, 2)
    assert first == second
    assert any(first)


def test_assignment_of_nearly_equal_tokens():
    """Differences at the edge of precision make no cycle of moves, and the shares stay even."""
    for seed in range(6):
        generator = rng(seed)
        kinds = generator.normal(size=(5, 8))[generator.integers(0, 5, size=200)]
        scores = np.float32(kinds + 1e-7 * generator.normal(size=kinds.shape) * (seed % 2)).astype(np.float64)
        scores = scores * 10.0 ** (3 * seed - 6)
        keep = torch.ones(1, 200, dtype=torch.bool)
        ids = fmoe.ops.OPS["balanced_assignment"](tensor(scores)[None], keep, [200])[0].numpy()
        assert np.bincount(ids, minlength=8).tolist() == [25] * 8
        first, second = np.meshgrid(range(200), range(200), indexing="ij")  # no exchange of two tokens gains
        gain = scores[first, ids[second]] + scores[second, ids[first]] - scores[first, ids[first]]
        assert (gain - scores[second, ids[second]]).max() <= 1e-9 * np.abs(scores).max()

"""Every Triton kernel in Triton's interpreter on the CPU, equal to the reference, forward and backward.

`test_kernels.py` runs this file in a process of its own: TRITON_INTERPRET must be set before triton is
imported. There the operations take their GPU kernels on CPU tensors, in blocks of 16 so that small
tensors make several tiles; one test takes the real blocks.

The interpreter truncates when it rounds to bf16, so bf16 is compared at twice its tolerance.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import launches
import oracle
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.func import grad, jvp, vmap

import fmoe
from fmoe.functional.tokens import flat_experts
from fmoe.ops import OPS
from fmoe.ops.activations import ACTIVATIONS, INTERLEAVED, LIMIT, form_of
from fmoe.ops.ffn import ffn
from fmoe.ops.grouped import gmm
from fmoe.ops.kernels import choice, cuda_gemm, cuda_routing, cuda_rows, steps
from fmoe.ops.kernels.launch import interpreted, launch
from fmoe.ops.rearrange import combine

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
REAL = dict(choice.TABLE)
FORMS = [*ACTIVATIONS, *(name + INTERLEAVED for name, act in ACTIVATIONS.items() if act.gated)]
few = settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],  # to shrink a failure takes minutes here
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture(autouse=True)
def _kernels_on_the_cpu(monkeypatch):
    assert interpreted()
    monkeypatch.setattr(choice, "machine", lambda device: ("sm_90", ""))
    small(monkeypatch.setitem, 2)
    for name, size in (("SUB", 2), ("BLOCK", 32), ("BLOCK_E", 16)):
        monkeypatch.setattr(cuda_routing, name, size)
    for op in OPS.values():
        if op.kernels["cuda"] is not None:
            monkeypatch.setitem(op.kernels, "cpu", op.kernels["cuda"])
    torch.use_deterministic_algorithms(True)  # new memory holds NaN: whatever is not written shows
    assert torch.empty(2).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def small(setitem, sub: int) -> None:
    for key in REAL:
        setitem(choice.TABLE, key, (choice.Blocks(16, 16, 16, 4, 2, sub),) * 2)


def check(op: str, *args, dtype=torch.float32):
    """The kernel against the reference in float64; returns what the kernel made."""
    made = OPS[op].kernels["cuda"](*args)
    assert made is not NotImplemented, op
    wide = [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
    expected, like = OPS[op].reference(*wide), OPS[op].fake(*args)
    as_tuple = lambda out: out if isinstance(out, tuple) else (out,)  # noqa: E731
    for part, want, kind in zip(as_tuple(made), as_tuple(expected), as_tuple(like), strict=True):
        assert (part.shape, part.dtype) == (kind.shape, kind.dtype), op
        if part.dim() == 3 and min(part.shape) > 1:
            assert part.stride() == kind.stride(), op
        if not part.is_floating_point():
            assert torch.equal(part, want), op
            continue
        rtol, atol = oracle.TOLERANCE[dtype]
        scale = 2 * max(1.0, float(want.abs().max())) if want.numel() else 1.0
        torch.testing.assert_close(part.double(), want, rtol=2 * rtol, atol=atol * scale, msg=lambda m: f"{op}: {m}")
    return made


def strided(*shape, dtype=torch.float32):
    """A random tensor that is not contiguous."""
    return torch.randn(*shape[:-2], shape[-1], shape[-2] + 1).to(dtype).transpose(-1, -2)[..., 1:, :]


def routed(tokens, experts, k, dropped=0.2):
    """index, order and groups of random choices, the last expert empty, some choices dropped."""
    chosen = torch.rand(tokens, max(experts - 1, 1)).argsort(1)[:, : min(k, max(experts - 1, 1))]
    chosen = torch.where(torch.rand(chosen.shape) < dropped, -1, chosen)
    limit = torch.tensor([[max(1, tokens // 2)]])
    slots, _ = OPS["assign_slots"].reference(chosen.unsqueeze(0), limit, [tokens], experts)
    return OPS["row_index"].reference(chosen, slots[0], experts, tokens * k)


# --- routing -----------------------------------------------------------------------------------------------------


@few
@given(tokens=st.integers(1, 70), experts=st.integers(1, 40), k=st.integers(1, 5), levels=st.integers(2, 9))
def test_top_k(tokens, experts, k, levels):
    scores = torch.randint(-levels, levels, (tokens, experts)).float()  # many ties
    scores[torch.rand(scores.shape) < 0.05] = torch.tensor([math.nan, math.inf, -math.inf, -0.0])[tokens % 4]
    check("top_k", scores, min(k, experts))
    check("top_k", scores.t().contiguous().t(), min(k, experts))


@few
@given(
    size=st.integers(1, 40), groups=st.integers(1, 3), batch=st.integers(1, 2), experts=st.integers(1, 70),
    k=st.integers(1, 3), limit=st.integers(0, 9),
)  # fmt: skip
def test_places(size, groups, batch, experts, k, limit):
    chosen = torch.randint(-1, experts, (batch, groups * size, k))
    capacity = torch.randint(0, limit + 1, (batch, groups))
    slots, _ = check("assign_slots", chosen, capacity, [size] * groups, experts)
    check("row_index", chosen[0], slots[0], experts, groups * size * k)


def test_places_in_real_blocks(monkeypatch):
    for name, size in (("SUB", 8), ("BLOCK", 256), ("BLOCK_E", 32)):
        monkeypatch.setattr(cuda_routing, name, size)
    chosen = torch.randint(-1, 5, (1, 1100, 2))
    slots, _ = check("assign_slots", chosen, torch.tensor([[250]]), [1100], 5)
    check("row_index", chosen[0], slots[0], 5, 2200)


def test_wrong_ids_are_left_out_and_nothing_is_written_outside():
    chosen = torch.tensor([[0, 99], [-7, 1], [1, 2**40], [2, 1]])
    slots = torch.tensor([[0, 0], [3, 0], [1, 5], [0, 2**35]])
    index, order, groups = OPS["row_index"].kernels["cuda"](chosen, slots, 3, 8)
    # what fits: expert 0 slot 0, expert 1 slots 0 and 1; expert 1 has 3 rows, of which one is never placed
    assert index.tolist() == [[0, -1], [-1, 1], [2, -1], [4, -1]]
    assert groups.tolist() == [[0, 1, 0], [1, 4, 1], [4, 5, 2]]
    assert order[[0, 1, 2, 4]].tolist() == [0, 3, 4, 6]
    assert order[5:].tolist() == [-1, -1, -1]
    with fmoe.checked(), pytest.raises(ValueError, match="has ids from -7 to 1099511627776 with slots"):
        OPS["row_index"](chosen, slots, 3, 8)
    with fmoe.checked(), pytest.raises(ValueError, match="sizes must be at least 0"):
        fmoe.grouped_matmul(torch.ones(2, 2), torch.ones(1, 2, 2), torch.tensor([3]))
    guarded = torch.full((32,), 7)
    inside = guarded[8:24]
    launch(
        "routing.place_rows", (1,), chosen, slots, torch.tensor([1, 3, 2**33]), inside[:8], inside[8:], groups, 8, 3,
        SUB=1, BLOCK=16, BLOCK_E=4,
    )  # fmt: skip
    launch("rows.inverse", (1,), torch.tensor([-3, 99, 1]), inside[:8], 3, 8, BLOCK=16)
    assert (guarded[:8] == 7).all()
    assert (guarded[24:] == 7).all()
    y = OPS["combine"].kernels["cuda"](torch.ones(2, 3), torch.tensor([[-5, 2], [1, 9]]), torch.ones(2, 2))
    assert y.tolist() == [[0, 0, 0], [1, 1, 1]]
    w, x = torch.ones(2, 3, 4), torch.ones(5, 3)
    groups = torch.tensor([[-4, 1, 0], [1, 3, 7], [3, 99, 1]])
    assert gmm(x, w, groups).sum(1).tolist() == [12, 0, 0, 12, 12]


def test_group_sizes_are_cut_to_the_rows():
    made = fmoe.ops.grouped.groups_from_sizes(torch.tensor([2, -1, 9]), 5)
    assert made.tolist() == [[0, 2, 0], [2, 2, 1], [2, 5, 2]]


# --- moving rows -------------------------------------------------------------------------------------------------


@few
@given(
    tokens=st.integers(1, 20), k=st.sampled_from([1, 2, 5, 9]), width=st.sampled_from([1, 3, 64, 65, 130]),
    spare=st.integers(0, 5), dtype=st.sampled_from(DTYPES),
)  # fmt: skip
def test_rows(tokens, k, width, spare, dtype):
    rows = tokens * k + spare
    index = torch.randperm(rows)[: tokens * k].view(tokens, k)
    index = torch.where(torch.rand(index.shape) < 0.2, -1, index)
    weights = torch.where(index >= 0, torch.randn(tokens, k), math.nan)  # never read where there is no row
    x, y = strided(tokens, width, dtype=dtype), strided(rows, width, dtype=dtype)
    check("combine", y, index, weights, dtype=dtype)
    check("combine", y, index, torch.ones(1, 1).expand(tokens, k), dtype=dtype)
    check("expand", x, index, weights, rows, dtype=dtype)
    check("rowdot", x, y, index, dtype=dtype)


# --- grouped matmul ----------------------------------------------------------------------------------------------


@few
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=4), gap=st.integers(0, 20), inner=st.integers(1, 40),
    columns=st.integers(1, 40), shared=st.booleans(), dtype=st.sampled_from(DTYPES),
)  # fmt: skip
def test_gmm(sizes, gap, inner, columns, shared, dtype):
    """Groups with gaps between and around them, empty ones, and several of one matrix."""
    last, spans = gap, []
    for e, size in enumerate(sizes):
        spans.append([last, last + size, e // 2 if shared else e])
        last += size + gap
    groups, matrices = torch.tensor(spans), len(sizes)
    x, dy = strided(last, inner, dtype=dtype), strided(last, columns, dtype=dtype)
    w = torch.randn(matrices, inner, columns).to(dtype)
    check("gmm", x, w, groups, dtype=dtype)
    check("gmm", x, strided(matrices, inner, columns, dtype=dtype), groups, dtype=dtype)
    check("gmm_t", dy, w, groups, dtype=dtype)
    check("gmm_dw", x, dy, groups, matrices, dtype=dtype)


def test_the_library_path(monkeypatch):
    """torch's grouped matmul in place of the kernel: the same values, gaps 0."""
    monkeypatch.setattr(choice, "LIBRARY_ROWS", 8)
    groups = torch.tensor([[0, 11, 0], [11, 11, 1], [15, 40, 2]])
    x, w = torch.randn(44, 8).bfloat16(), torch.randn(3, 8, 16).bfloat16()
    index, order, places = routed(32, 2, 1, dropped=0.0)
    p = torch.randn(2, 8, 32).bfloat16(), torch.randn(2, 16, 8).bfloat16()
    tokens, weights = torch.randn(32, 8).bfloat16(), torch.rand(32, 1)
    with launches.recorded("sm_90", made=True) as seen:
        check("gmm", x, w, groups, dtype=torch.bfloat16)
        first = len(seen)
        check("gmm", x, strided(3, 8, 16, dtype=torch.bfloat16), groups, dtype=torch.bfloat16)
        second = len(seen)
        made = OPS["ffn"].kernels["cuda"](tokens, weights, p[0], None, p[1], None, index, order, places, "swiglu", True)
    names = [launch.where for launch in seen]
    assert names[:first] == ["gemm.tile_map", "gemm.zero_gaps"]
    assert names[first:second] == ["gemm.tile_map", "gemm.rows_gemm"]  # strides it does not take
    assert names[second:] == ["gemm.tile_map", "gemm.rows_gemm", "rows.combine_rows"]
    wide = tokens.double(), weights, p[0].double(), None, p[1].double(), None
    expected = OPS["ffn"].reference(*wide, index, order, places, "swiglu", True)
    for a, b in zip(made, expected, strict=True):
        oracle.assert_close(a, b, torch.bfloat16)


# --- the expert layer --------------------------------------------------------------------------------------------


def experts_of(e, m, h, activation, bias, dtype, transposed=False):
    """w_in, b_in, w_out, b_out; matrices may lie column by column, as linear layers of torch do."""
    d = 2 * h if form_of(activation).gated else h
    shapes = (e, m, d), (e, d) if bias else None, (e, h, m), (e, m) if bias else None
    made = [None if shape is None else (torch.randn(shape) * 0.5).to(dtype) for shape in shapes]
    return [p.mT.contiguous().mT if transposed and p is not None and p.dim() == 3 else p for p in made]


def both_passes(tokens, experts, k, m, h, activation, bias, dtype, transposed=False, scale=1):
    index, order, groups = routed(tokens, experts, k)
    parameters = experts_of(experts, m, h, activation, bias, dtype, transposed)
    x, weights = scale * strided(tokens, m, dtype=dtype), torch.rand(index.shape)
    routing = index, order, groups
    _, z = check("ffn", x, weights, *parameters, *routing, activation, True, dtype=dtype)
    assert check("ffn", x, weights, *parameters, *routing, activation, False, dtype=dtype)[1].shape[0] == 0
    needs = [True, True, True, bias, True, bias]
    written = groups[:, 2].flip(0).contiguous()  # any matrix may be written
    gradient = torch.randn(1, m).to(dtype).expand(tokens, m)
    args = (gradient, x, weights, *parameters, z, *routing, written, experts, activation)
    check("ffn_backward", *args, needs, dtype=dtype)
    return args, needs


@few
@given(
    tokens=st.integers(1, 24), experts=st.integers(1, 4), k=st.integers(1, 3), m=st.integers(1, 40),
    h=st.integers(1, 40), activation=st.sampled_from(FORMS),
    bias=st.booleans(), dtype=st.sampled_from(DTYPES), sub=st.sampled_from([1, 2, 4]), transposed=st.booleans(),
)  # fmt: skip
def test_ffn(tokens, experts, k, m, h, activation, bias, dtype, sub, transposed):
    small(dict.__setitem__, sub)
    both_passes(tokens, experts, k, m, h, activation, bias, dtype, transposed)


@pytest.mark.parametrize("activation", FORMS)
def test_every_form(activation):
    """Halves one after the other and in turns, a good part of them cut off where the activation does so."""
    args, _ = both_passes(9, 3, 2, 12, 18, activation, True, torch.float32, transposed=True, scale=4)
    cut = args[7] > LIMIT
    assert 0.05 < cut.float().mean() < 0.95


def test_only_what_is_needed_is_launched():
    args, needs = both_passes(9, 3, 2, 8, 16, "swiglu", True, torch.float32)
    whole = OPS["ffn_backward"].kernels["cuda"](*args, needs)
    for place, kernels in enumerate([
        ["gemm.rows_gemm", "rows.combine_rows"], ["backward.bias_dots", "rows.score_sums"],
        ["backward.weight_gemm"], ["backward.bias_sum"], ["backward.weight_gemm"], ["backward.bias_sum"],
    ]):  # fmt: skip
        with launches.recorded("sm_90", made=True) as seen:
            made = OPS["ffn_backward"].kernels["cuda"](*args, [i == place for i in range(6)])
        assert {launch.where for launch in seen} == {"gemm.tile_map", "backward.down_back", *kernels}
        assert [part.numel() > 0 for part in made] == [i == place for i in range(6)]
        assert torch.equal(made[place], whole[place])


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])  # sm_100 has the blocks of sm_90
def test_real_blocks(arch, monkeypatch):
    monkeypatch.setattr(choice, "machine", lambda device: (arch, ""))
    choice.TABLE.update(REAL)
    if arch == "sm_90":  # sm_80 has one configuration
        both_passes(80, 2, 1, 72, 136, "swiglu", False, torch.bfloat16)
    monkeypatch.setattr(choice, "MANY", 16)
    both_passes(80, 2, 2, 72, 136, "geglu.interleaved", False, torch.bfloat16)
    both_passes(40, 2, 1, 72, 72, "gelu", True, torch.float32)


def test_two_runs_give_the_same_bits():
    args, needs = both_passes(9, 3, 2, 12, 18, "geglu", True, torch.bfloat16)
    first, second = (OPS["ffn_backward"].kernels["cuda"](*args, needs) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_nothing_to_do_launches_nothing():
    p = experts_of(2, 3, 4, "swiglu", False, torch.float32)
    nothing = torch.empty(0, 2, dtype=torch.int64)
    groups = torch.zeros(2, 3, dtype=torch.int64)
    with launches.recorded("sm_90") as seen:
        y, z = ffn(torch.ones(0, 3), torch.ones(0, 2), *p, nothing, nothing.flatten(), groups, "swiglu", True)
        assert gmm(torch.ones(0, 3), torch.ones(2, 3, 4), groups).shape == (0, 4)
        assert gmm(torch.ones(5, 0), torch.ones(2, 0, 4), groups).eq(0).all()
        assert combine(torch.ones(0, 3), torch.full((4, 2), -1), torch.ones(4, 2)).eq(0).all()
    assert (y.shape, z.shape) == ((0, 3), (0, 8))
    assert seen == []


# --- more than 2^31 elements -------------------------------------------------------------------------------------


def test_offsets_past_two_to_the_31(monkeypatch):
    """Tensors whose last rows begin past 2^31 elements; only the pages that are touched take memory."""
    from triton.runtime import interpreter

    monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *_: None)  # it copies whole storages
    torch.use_deterministic_algorithms(False)  # so that new memory is not touched
    far = 2**30 + 64
    storage = torch.empty(2 * far + 4096, dtype=torch.float16)

    def spread(*shape):
        held = storage.as_strided(shape, (far, *torch.empty(shape[1:]).stride()))
        return held.copy_(torch.randn(shape))

    x = spread(3, 20)
    groups = torch.tensor([[0, 1, 0], [1, 2, 1], [2, 3, 2]])
    w = torch.randn(3, 20, 12).half()
    check("gmm", x, w, groups, dtype=torch.float16)
    check("gmm_dw", x, torch.randn(3, 7).half(), groups, 3, dtype=torch.float16)
    index = torch.tensor([[2], [0], [1]])
    check("combine", x, index, torch.ones(3, 1), dtype=torch.float16)
    check("expand", x, index, torch.ones(3, 1), 3, dtype=torch.float16)
    check("rowdot", x, torch.randn(3, 20).half(), index, dtype=torch.float16)
    w = spread(3, 20, 12)
    x = torch.randn(3, 20).half()
    check("gmm", x, w, groups, dtype=torch.float16)
    rows, columns = 2**22 + 3, 512  # the last tile alone of an output of more than 2^31 elements
    out = storage[: rows * columns].view(rows, columns) if rows * columns <= storage.numel() else None
    assert out is not None
    tiles = torch.tensor([[0], [3], [1]], dtype=torch.int32) + torch.tensor([[rows - 3], [rows - 3], [0]])
    a = torch.empty(1, 16).half().copy_(torch.randn(1, 16)).expand(rows, 16)
    m = torch.randn(2, 16, columns).half()
    launch(
        "gemm.rows_gemm", (columns // 16,), a, m, m, out, out, m, tiles.int(), tiles.int(), 16, columns, 1, 0, 1,
        0, *m.stride(), GATHER=False, SCATTER=False, SCALE=False, ACT=3, GATED=False, INTERLEAVED=False, BIAS=False,
        SAVE_Z=False, EVEN_K=True, PRECISION="ieee",
        UPCAST=False, BLOCK_M=16, BLOCK_N=16, BLOCK_K=16, GROUP_M=8,
    )  # fmt: skip
    oracle.assert_close(out[-3:], a[:3].double() @ m[1].double(), torch.float16)


# --- through the layer -------------------------------------------------------------------------------------------

CONFIG = fmoe.MoEConfig(num_experts=4, model_dim=20, hidden_dim=12, bias=True)


def with_kernels_only_in(layer):
    """The layer's result, and the names of all kernels it launched."""
    with launches.recorded("sm_90", made=True) as seen:
        made = layer()
    return made, [launch.where for launch in seen]


@pytest.mark.parametrize(
    ("activation", "capacity", "dtype"),
    [("swiglu", None, torch.float32), ("gelu", 1.0, torch.float32), ("geglu", 1.0, torch.bfloat16)],
)
def test_layer_forward_and_backward(activation, capacity, dtype):
    """The whole layer against the oracle, with every kernel of it from Triton."""
    config = dataclasses.replace(CONFIG, activation=activation)
    params = fmoe.init(config, seed=1).to(dtype)
    params = dataclasses.replace(params, router=fmoe.RouterParams(params.router.weight.float()))
    x, direction = torch.randn(17, 20).to(dtype), torch.randn(17, 20)
    leaves, tree = torch.utils._pytree.tree_flatten((params, x))
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]

    def run():
        p, tokens = torch.utils._pytree.tree_unflatten(leaves, tree)
        y, aux = fmoe.moe(p, tokens, config, capacity=capacity)
        return y, torch.autograd.grad((y.float() * direction).sum() + aux.z, leaves)

    (y, grads), names = with_kernels_only_in(run)
    assert set(names) >= {
        "routing.best_experts", "routing.count_choices", "routing.scan_blocks", "routing.place_slots",
        "routing.place_rows", "gemm.tile_map", "gemm.rows_gemm", "rows.combine_rows", "backward.down_back",
        "backward.bias_dots", "backward.weight_gemm", "backward.bias_sum", "rows.score_sums",
    }  # fmt: skip
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    p, tokens = torch.utils._pytree.tree_unflatten(wide, tree)
    named = {name: getattr(p.experts, name) for name in ("w_in", "w_out", "b_in", "b_out")}
    y_ref, aux_ref, _ = oracle.layer(tokens, p.router.weight, named, k=2, activation=activation, factor=capacity)
    expected = torch.autograd.grad((y_ref * direction).sum() + aux_ref["z"], wide)
    for a, b in zip([y, *grads], [y_ref, *expected], strict=True):
        oracle.assert_close(a, b, dtype)


def test_weights_whose_halves_lie_in_turns_are_read_as_they_lie():
    config = fmoe.MoEConfig(num_experts=3, model_dim=10, hidden_dim=12, activation="swiglu_oss", bias=True)
    params, x = fmoe.init(config, seed=4), 9 * torch.randn(7, 10)
    turned = lambda p: p.transpose(2, 3).contiguous().transpose(2, 3)  # noqa: E731
    experts = dataclasses.replace(params.experts, w_in=turned(params.experts.w_in))
    params = dataclasses.replace(params, experts=experts)

    def gradients(p, x):
        return grad(lambda p, x: fmoe.moe(p, x, config)[0].sin().sum(), (0, 1))(p, x)

    with launches.recorded("sm_90", made=True) as seen:
        found = gradients(params, x)
    through = [launch for launch in seen if launch.constants.get("GATED")]
    assert [launch.where for launch in through] == ["gemm.rows_gemm", "backward.down_back"]
    assert all(launch.constants["INTERLEAVED"] for launch in through)
    expected = gradients(torch.utils._pytree.tree_map(torch.Tensor.double, params), x.double())
    leaves = torch.utils._pytree.tree_leaves
    for a, b in zip(leaves(found), leaves(expected), strict=True):
        oracle.assert_close(a, b, torch.float32)


def test_transforms_of_the_layer():
    """grad, vmap of grad, jvp and grad of grad go through the same kernels: equal to plain float64."""
    config = fmoe.MoEConfig(num_experts=3, model_dim=10, hidden_dim=8)
    params, xs = fmoe.init(config, seed=2), torch.randn(2, 5, 10)

    def loss(p, x):
        return fmoe.moe(p, x, config)[0].sin().sum()

    def everything(p, data):
        flow = torch.ones_like(data[0])
        sharp = grad(lambda x: (grad(loss, 1)(p, x) * flow.cos()).sum())
        return [
            vmap(grad(loss), (None, 0))(p, data), jvp(lambda x: loss(p, x), (data[0],), (flow,))[1], sharp(data[1]),
        ]  # fmt: skip

    found, names = with_kernels_only_in(lambda: everything(params, xs))
    assert {"rows.expand_rows", "rows.row_dots", "backward.weight_gemm", "backward.down_back"} <= set(names)
    wide = torch.utils._pytree.tree_map(torch.Tensor.double, params)
    expected = everything(wide, xs.double())  # float64 has no kernel: the reference
    leaves = torch.utils._pytree.tree_leaves
    for a, b in zip(leaves(found), leaves(expected), strict=True):
        oracle.assert_close(a, b, torch.float32)


def test_experts_that_choose_their_tokens():
    """More choices than rows: a row may be of a choice past the number of rows."""
    config = fmoe.MoEConfig(num_experts=3, model_dim=12, hidden_dim=8, router=fmoe.ExpertChoice(1.0))
    params, x = fmoe.init(config, seed=3), torch.randn(14, 12)

    def gradients(p, x):
        return grad(lambda p, x: fmoe.moe(p, x, config)[0].sin().sum(), (0, 1))(p, x)

    found, names = with_kernels_only_in(lambda: gradients(params, x))
    assert "backward.down_back" in names
    expected = gradients(torch.utils._pytree.tree_map(torch.Tensor.double, params), x.double())
    leaves = torch.utils._pytree.tree_leaves
    for a, b in zip(leaves(found), leaves(expected), strict=True):
        oracle.assert_close(a, b, torch.float32)


@pytest.mark.parametrize(("bias", "k"), [(False, 2), (True, 2), (True, 1)])
def test_launches_are_those_of_the_steps(bias, k):
    """What really is launched, in order, in the real blocks."""
    choice.TABLE.update(REAL)
    sizes = steps.Sizes(24, k, 32, 128, 256, 4, 4, bias)
    index, order, groups = routed(24, 5, k, dropped=0.0)
    groups = groups[:4]
    p = experts_of(4, 32, 128, "swiglu", bias, torch.float32)
    x, weights = torch.randn(24, 32), torch.rand(24, k)
    with launches.recorded("sm_90", made=True) as seen:
        _, z = ffn(x, weights, *p, index, order, groups, "swiglu", True)
        forward = len(seen)
        OPS["ffn_backward"](
            x, x, weights, *p, z, index, order, groups, groups[:, 2], 4, "swiglu", [True, True, True, bias, True, bias]
        )
    names = [launch.where for launch in seen]
    assert names[:forward] == [step.kernel for step in steps.forward_steps(sizes)]
    assert names[forward:] == [step.kernel for step in steps.backward_steps(sizes)]


def test_tiles_cover_every_row_once():
    """Rows of groups with their matrix, rows between with none, and no more tiles than were launched."""
    for sizes in itertools.product([0, 1, 16, 33], repeat=3):
        groups, last = [], 2
        for e, size in enumerate(sizes):
            groups.append([last, last + size, e])
            last += size + (e == 1)
        rows = last + 3
        over = cuda_gemm.Pass.over(choice.Target("sm_90", "ieee"), torch.tensor(groups), rows, 3)
        owner = [[] for _ in range(rows)]
        for first, end, matrix in over.tiles.t().tolist():
            assert end - first <= 16
            for r in range(first, end):
                owner[r].append(matrix)
        expected = [[next((e for a, b, e in groups if a <= r < b), -1)] for r in range(rows)]
        assert owner == expected


def test_blocks_of_rows():
    for width in (1, 63, 64, 65, 1000, 5000):
        rows, columns = cuda_rows.row_blocks(width)
        assert rows * columns == cuda_rows.ELEMENTS
        assert columns >= min(width, 1024)


def test_saved_bytes():
    """What autograd keeps of a layer, counted, is what is stated."""
    from fmoe.ops.kernels.cuda_ffn import saved_bytes

    tokens, k, m, h = 10, 2, 16, 24
    params = fmoe.init(fmoe.MoEConfig(num_experts=4, model_dim=m, hidden_dim=h), seed=0).experts
    p, activation = flat_experts(params, "swiglu")
    index, order, groups = routed(tokens, 4, k, dropped=0.0)
    x, weights = torch.randn(tokens, m, requires_grad=True), torch.rand(tokens, k, requires_grad=True)
    own = {t.untyped_storage().data_ptr() for t in (p.w_in, p.w_out, groups)}
    kept: dict[int, int] = {}

    def pack(t):
        if t.untyped_storage().data_ptr() not in own:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        ffn(x, weights, p.w_in, None, p.w_out, None, index, order, groups, activation, True)
    assert sum(kept.values()) == saved_bytes(tokens, k, m, 2 * h, 4)

"""GPU kernels without a GPU: values in Triton's interpreter, machine code ahead of time, launches and bytes."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import launches
import pytest
import torch

import fmoe
from fmoe.ops import OPS
from fmoe.ops.binding import binding, experts_binding
from fmoe.ops.kernels import choice, cuda_routing, steps

TESTS = pathlib.Path(__file__).parent
ARCHITECTURES = list(choice.ARCHITECTURES.values())
SHARED = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024}
PLAIN = 3


def test_in_the_interpreter():
    """Values and gradients of every kernel: `interpreted.py`, in a process where Triton interprets."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(TESTS / "interpreted.py")]
    run = subprocess.run(
        command, cwd=TESTS.parent, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert re.search(r"^\d\d passed", run.stdout, re.MULTILINE), run.stdout[-2000:]


# --- machine code ------------------------------------------------------------------------------------------------


def sources() -> dict[launches.Source, launches.Launch]:
    """Every kernel, and every configuration of the table, for every architecture, with a launch that needs it.

    Each once, in the variant with most in it: bias, weights, gathers, halves that take turns, the GELU. Besides,
    in the large blocks of 16 bit: two products for the halves, and rows times matrices that are transposed.
    """
    seen: dict[launches.Source, launches.Launch] = {}
    kept = torch.backends.cuda.matmul.fp32_precision
    try:
        for arch in ARCHITECTURES:
            with launches.recorded(arch) as got:
                for tokens in (2048, 512):  # 512 and 128 rows an expert: many and few
                    for activation in ("geglu.interleaved", "geglu", "gelu"):
                        launches.whole_layer(torch.bfloat16, tokens, 2048, 768, 32, 8, activation, bias=True)
                launches.whole_layer(torch.bfloat16, 2048 * 8, 2048, 768, 32, 1, bias=True)
                launches.single_operations(torch.bfloat16, 2048, 2048, 768, 32, 8)
                if arch == "sm_90":  # only beside torch's own grouped matmul
                    launches.single_operations(torch.bfloat16, 8192, 2048, 768, 32, 8)
                for precision in ("tf32", "ieee"):
                    torch.backends.cuda.matmul.fp32_precision = precision
                    for activation in ("geglu.interleaved", "gelu"):
                        launches.whole_layer(torch.float32, 512, 2048, 768, 32, 8, activation, bias=True)
            most: dict[tuple, launches.Launch] = {}
            for launch in got:
                key = variant(launch)
                if key not in most or parts_of(launch) >= parts_of(most[key]):
                    most[key] = launch
            seen |= {launches.specialised(launch, arch): launch for launch in most.values()}
    finally:
        torch.backends.cuda.matmul.fp32_precision = kept
    return seen


def variant(launch) -> tuple:
    """What is compiled once."""
    kernel, c = table_kernel(launch), launch.constants
    if kernel is None:
        return (launch.where,)
    special = None
    if kind_of(launch) == "16" and c["BLOCK_M"] == 128:
        special = {"up": c.get("INTERLEAVED"), "rows": launch.args[1].stride(-1) == 1}.get(kernel)
    return kernel, kind_of(launch), blocks_of(launch), special


def parts_of(launch) -> int:
    return sum(value is True for value in launch.constants.values())


def blocks_of(launch) -> choice.Blocks:
    c = launch.constants
    return choice.Blocks(c["BLOCK_M"], c["BLOCK_N"], c["BLOCK_K"], launch.warps, launch.stages, c.get("SUB", 1))


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    """(arch, launch, code) of all `sources`, as a GPU would compile them."""
    seen = sources()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))  # nothing from an earlier run
        made = launches.compiled_all(list(seen))
    return [(source.arch, seen[source], made[source]) for source in seen]


def table_kernel(launch) -> str | None:
    """The kernel's name in the table."""
    if launch.where == "gemm.rows_gemm":
        return "up" if launch.constants["GATED"] else "rows" if launch.constants["ACT"] == PLAIN else "act"
    return {"backward.down_back": "down_back", "backward.weight_gemm": "weights"}.get(launch.where)


def kind_of(launch) -> str:
    return "16" if launch.args[0].dtype != torch.float32 else launch.constants["PRECISION"]


def test_every_kernel_and_every_configuration_is_compiled(code):
    sources = "".join(path.read_text() for path in (TESTS.parent / "fmoe/ops/kernels").glob("cuda_*.py"))
    launched = set(re.findall(r'"((?:gemm|backward|rows|routing)\.\w+)"', sources))
    assert len(launched) == 18
    used = set()
    for arch in ARCHITECTURES:
        there = {launch.where for a, launch, _ in code if a == arch}
        assert launched - there == ({"gemm.zero_gaps"} if arch != "sm_90" else set())
    for arch, launch, _ in code:
        if table_kernel(launch):
            used.add((table_kernel(launch), kind_of(launch), arch, blocks_of(launch)))
    assert used == {(*key, blocks) for key, pair in choice.TABLE.items() for blocks in pair}


def test_nothing_spills(code):
    for arch, launch, made in code:
        assert made.stack == 0, (arch, launch.where, launch.constants, made)
        assert made.registers <= 255
        assert made.shared <= SHARED[arch]


def test_matrix_instructions_where_meant(code):
    for arch, launch, made in code:
        meant = table_kernel(launch) is not None and kind_of(launch) != "ieee"
        assert (made.matrix > 0) == meant, (arch, launch.where, launch.constants, made)


def test_wide_loads_where_meant(code):
    """16-bit operands of matmuls come in copies of 16 bytes, all of them; so do rows that are moved."""
    for arch, launch, made in code:
        c = launch.constants
        if table_kernel(launch) and kind_of(launch) == "16":
            tile = c["BLOCK_M"] * c["BLOCK_K"] + c["BLOCK_K"] * c["BLOCK_N"] * (
                2 if table_kernel(launch) == "up" else 1
            )
            assert made.wide_loads >= 2 * tile // 16 // (32 * launch.warps), (arch, launch.where, c, made)
        if launch.where in launches.WIDE_ROWS:
            assert made.wide_loads > 0, (arch, launch.where, c, made)


def test_row_tiles_of_a_pass_agree():
    for (kernel, kind, arch), pair in choice.TABLE.items():
        if kernel != "weights":
            rows = choice.TABLE["rows", kind, arch]
            assert [blocks.m for blocks in pair] == [blocks.m for blocks in rows], kernel


@pytest.mark.parametrize("bias", [False, True])
def test_sizes_of_one_are_typed(bias):
    """Triton makes constants of arguments that are 1: every kernel still types."""
    seen = {}
    with launches.recorded("sm_90") as got:
        launches.whole_layer(torch.bfloat16, 1, 1, 1, 1, 1, "swiglu" if bias else "relu", bias)
        launches.whole_layer(torch.float16, 3, 1, 1, 2, 1, "swiglu", bias)
        launches.single_operations(torch.float16, 1, 1, 1, 1, 1)
        launches.single_operations(torch.float32, 5, 3, 1, 1, 9)
    for launch in got:
        seen.setdefault(launches.specialised(launch, "sm_90"), launch)
    for source in seen:
        launches.checked_by_frontend(source)
    assert len(seen) > 30


# --- launches and bytes ------------------------------------------------------------------------------------------

#: tokens, M, H, E, K, and GB forward and backward if every product and sum moves its tensors once: the roofline
#: of this plan, with x and the gradient read once, weights in bf16.
ROOFLINES = {
    "Mixtral-like": (32768, 4096, 14336, 8, 2, 12.0, 26.6),
    "Qwen3-30B-like": (32768, 2048, 768, 128, 8, 5.23, 9.13),
    "DeepSeek-V3-like": (16384, 7168, 2048, 32, 8, 9.19, 15.7),
    "DeepSeek-V3-like, rows that were received": (131072, 7168, 2048, 32, 1, 8.72, 18.5),
}


def bytes_of(launch) -> int:
    """Bytes of the distinct tensors of a launch; of what is written where a choice was dropped, none here."""
    if launch.where == "rows.zero_dropped":
        return launch.args[0].numel() * 8
    tensors = {id(arg): arg for arg in launch.args if isinstance(arg, torch.Tensor)}
    return sum(t.numel() * t.element_size() for t in tensors.values())


@pytest.mark.parametrize("name", ROOFLINES)
def test_launches_and_bytes_are_near_the_least(name):
    """4 launches forward and 7 backward; bytes as priced, as launched, and within 3 % of the roofline."""
    tokens, model_dim, hidden, experts, k, forward, backward = ROOFLINES[name]
    sizes = steps.Sizes(tokens, k, model_dim, hidden, 2 * hidden, experts, 2)
    with launches.recorded("sm_100") as seen:  # where torch's grouped matmul takes no part
        launches.whole_layer(torch.bfloat16, tokens, model_dim, hidden, experts, k)
    seen = [launch for launch in seen if not launch.where.startswith("routing")]
    parts = {"forward": (seen[:4], steps.forward_steps(sizes)), "backward": (seen[4:], steps.backward_steps(sizes))}
    for which, (made, priced) in parts.items():
        assert [launch.where for launch in made] == [step.kernel for step in priced]
        moved = sum(map(bytes_of, made))
        assert moved == pytest.approx(steps.total(priced).moved, rel=0.01)
        assert moved <= 1.03 * 1e9 * (forward if which == "forward" else backward)
    assert (len(seen[:4]), len(seen[4:])) == (4, 7)


def test_routing_is_seven_launches():
    with launches.recorded("sm_90") as seen:
        launches.whole_layer(torch.bfloat16, 4096, 512, 512, 64, 4)
    assert [launch.where for launch in seen if launch.where.startswith("routing")] == [
        "routing.best_experts",
        "routing.count_choices", "routing.scan_blocks", "routing.place_slots",
        "routing.count_choices", "routing.scan_blocks", "routing.place_rows",
    ]  # fmt: skip


def test_a_program_prices_its_kernels():
    config = fmoe.MoEConfig(num_experts=4, model_dim=8, hidden_dim=16)
    params, x = fmoe.init(config, seed=0), torch.ones(10, 8)
    layer = lambda p, x: fmoe.moe(p, x, config)[0]  # noqa: E731
    traced = fmoe.trace(layer)(params, x)
    sizes = steps.Sizes(10, 2, 8, 16, 32, 4, 4)
    for plan in ("dp", "ep"):
        cost = traced.plan(fmoe.ShardingSpec(fmoe.make_mesh(4, world=1), plan=plan)).cost()
        assert cost.forward == steps.total(steps.forward_steps(sizes))
        assert cost.backward == steps.total(steps.backward_steps(sizes))
    there = traced.plan(fmoe.ShardingSpec(fmoe.make_mesh(4, world=2), plan="ep layout=padded")).cost()
    assert (there.forward.launches, there.backward.launches) == (4, 7)


def test_activation_memory():
    """At 32768 tokens, M=2048, H=768, k=8 in bf16 forward keeps 0.945 GB: x, z, weights, index and order."""
    from fmoe.ops.kernels.cuda_ffn import saved_bytes

    per_token = saved_bytes(1, 8, 2048, 2 * 768, 2)
    assert per_token == 2 * 2048 + 8 * (2 * 2 * 768 + 4 + 8 + 8)
    assert 32768 * per_token == 944766976
    # x and z alone are 0.9395 GB: weights, index and order are 0.6 % of it all
    assert 32768 * (2 * 2048 + 8 * 2 * 2 * 768) == 939524096


# --- what is bound, and why --------------------------------------------------------------------------------------


def test_what_runs_and_why_not_the_other(monkeypatch):
    cuda = torch.device("cuda")
    monkeypatch.setattr(choice, "machine", lambda device: ("sm_90", ""))
    assert binding("combine", cuda, torch.bfloat16) == "triton.combine"
    assert binding("ffn", cuda, torch.float64) == "reference (no kernel for f64)"
    bound = lambda dtype, *sizes, **more: experts_binding(cuda, dtype, "swiglu", *sizes, **more)  # noqa: E731
    assert bound(torch.bfloat16, 65536, 8, 4096, 14336) == (
        "triton.ffn [sm_90 16; up 128x64x64; down torch.grouped_mm, from 8192 rows each]"
    )
    assert bound(torch.bfloat16, 65536, 8, 4096, 14336, biases=True) == (
        "triton.ffn [sm_90 16; up 128x64x64; down 128x256x64; not torch.grouped_mm: it has no bias]"
    )
    assert bound(torch.float16, 65536, 8, 4096, 14336).endswith(
        "not torch.grouped_mm: it is fast only in bf16 on sm_90, not f16 on sm_90]"
    )
    assert bound(torch.bfloat16, 1024, 8, 4096, 14336) == (
        "triton.ffn [sm_90 16; up 64x64x64; down 64x128x64; not torch.grouped_mm: it pays from 1024 rows a group, "
        "not 128]"
    )
    assert "not torch.grouped_mm: it takes dims in multiples of 8, not 12 and 16]" in bound(
        torch.bfloat16, 65536, 8, 16, 12
    )
    clamped = experts_binding(cuda, torch.bfloat16, "swiglu_oss.interleaved", 1024, 8, 4096, 14336)
    assert clamped == bound(torch.bfloat16, 1024, 8, 4096, 14336)
    monkeypatch.setattr(choice, "machine", lambda device: ("", "triton is not installed"))
    assert binding("ffn", cuda, torch.bfloat16) == "reference (triton is not installed)"
    assert bound(torch.bfloat16, 64, 8, 16, 16) == "reference (triton is not installed)"


def test_machines_without_kernels(monkeypatch):
    device, machine = torch.device("cuda"), choice.machine.__wrapped__
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert machine(device) == ("", "no kernels for sm_89, only for sm_80, sm_90, sm_100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert machine(device) == ("sm_90", "")
    monkeypatch.setattr(choice.importlib.util, "find_spec", lambda name: None)
    assert machine(device) == ("", "triton is not installed")
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert machine(device) == ("", "kernels are for NVIDIA GPUs")


def test_without_a_kernel_the_reference_runs(monkeypatch):
    """Unknown machines and fp64 on one that is known: the same values, from the reference."""
    x, w, sizes = torch.randn(5, 3), torch.randn(2, 3, 4), torch.tensor([2, 3])
    expected = fmoe.grouped_matmul(x, w, sizes)
    for op in OPS.values():
        if op.kernels["cuda"] is not None:
            monkeypatch.setitem(op.kernels, "cpu", op.kernels["cuda"])
    monkeypatch.setattr(choice, "machine", lambda device: ("", "triton is not installed"))
    assert torch.equal(fmoe.grouped_matmul(x, w, sizes), expected)
    monkeypatch.setattr(choice, "machine", lambda device: ("sm_90", ""))
    torch.testing.assert_close(fmoe.grouped_matmul(x.double(), w.double(), sizes), expected.double())


def test_the_text_of_a_compiled_program_says_what_is_bound(monkeypatch):
    config = fmoe.MoEConfig(num_experts=4, model_dim=8, hidden_dim=16)
    params, x = fmoe.init(config, seed=0), torch.ones(10, 8)
    planned = fmoe.trace(lambda p, x: fmoe.moe(p, x, config)[0])(params, x).plan(
        fmoe.ShardingSpec(fmoe.make_mesh(4, world=1), plan="dp")
    )
    lines = planned.compile().as_text().split("\n")
    assert [line.split(" -> ")[1] for line in lines if " = combine" in line or " = dispatch" in line] == [
        "cpu.row_index", "cpu.ffn",
    ]  # fmt: skip
    monkeypatch.setattr(fmoe.text, "_device", lambda planned: torch.device("cuda"))
    monkeypatch.setattr(choice, "machine", lambda device: ("sm_90", ""))
    text = planned.compile().as_text()
    assert "= route[router=TopK(k=2) groups=1] x p.router.weight  -> triton.top_k, triton.assign_slots\n" in text
    assert "= dispatch[layout=ragged] x experts slots  -> triton.row_index\n" in text
    assert (
        "= combine tokens_1 weights  -> triton.ffn [sm_90 ieee; up 64x32x16; down 64x64x16; not torch.grouped_mm: "
        "it is fast only in bf16 on sm_90, not f32 on sm_90]\n"
    ) in text
    wide = fmoe.trace(lambda p, x: fmoe.moe(p, x, config)[0])(params.to(torch.float64), x.double())
    text = wide.plan(fmoe.ShardingSpec(fmoe.make_mesh(4, world=1), plan="dp")).compile().as_text()
    assert "x experts slots  -> triton.row_index\n" in text
    assert "= combine tokens_1 weights  -> reference (no kernel for f64)\n" in text
    monkeypatch.setattr(choice, "machine", lambda device: ("", "no kernels for sm_75"))
    assert "= combine tokens_1 weights  -> reference (no kernels for sm_75)\n" in planned.compile().as_text()


def test_what_runs_the_routing(monkeypatch):
    """On CPUs, and on GPUs with the limits of the kernels; of the operations that a router really calls."""

    def bound(router, x=None, **arguments):
        config = fmoe.MoEConfig(num_experts=4, model_dim=8, hidden_dim=16, router=router)
        x = torch.ones(10, 8) if x is None else x
        params = fmoe.init(config, seed=0).to(x.dtype)
        traced = fmoe.trace(lambda p, x: fmoe.moe(p, x, config, **arguments)[0])(params, x)
        text = fmoe.text.bound_text(traced.plan(fmoe.ShardingSpec(fmoe.make_mesh(4, world=1), plan="dp")))
        return next(line.split(" -> ")[1] for line in text.split("\n") if "= route" in line)

    assert bound(fmoe.TopK(2)) == "cpu.top_k, cpu.assign_slots"
    monkeypatch.setattr(fmoe.text, "_device", lambda planned: torch.device("cuda"))
    monkeypatch.setattr(choice, "machine", lambda device: ("sm_90", ""))
    assert bound(fmoe.Sigmoid(2)) == "triton.top_k, triton.assign_slots"
    assert bound(fmoe.Hash(1), token_ids=torch.arange(10)) == "triton.assign_slots"
    sizes = "reference (no kernel for groups of different sizes)"
    assert bound(fmoe.TopK(2), groups=(3, 7)) == f"triton.top_k, {sizes}"
    wide = torch.ones(10, 8, dtype=torch.float64)
    assert bound(fmoe.TopK(2), wide) == "reference (no kernel for f64), triton.assign_slots"
    monkeypatch.setattr(cuda_routing, "MOST_EXPERTS", 3)
    assert bound(fmoe.TopK(2)) == "reference (no kernel for 2 of 4, only up to 64 of 3), triton.assign_slots"


def test_triton_is_not_imported_before_a_launch():
    code = (
        "import sys, torch; before = 'triton' in sys.modules; import fmoe; from fmoe.ops import binding; "
        "c = fmoe.MoEConfig(num_experts=2, model_dim=4, hidden_dim=4); "
        "fmoe.moe(fmoe.init(c, seed=0), torch.ones(3, 4), c); "
        "print(before, 'triton' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "False"]

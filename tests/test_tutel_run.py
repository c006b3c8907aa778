"""Tutel's layer in a run of several processes: ranks without tokens, pickled copies, the plan of auto."""

from __future__ import annotations

import pickle

import pytest
import ranks
import torch
import torch.distributed as dist
import tutel_loop
from oracle import assert_close
from test_tutel_ranks import WORLD, Case, M
from torch.distributed.tensor import DTensor

import fmoe
from fmoe.integrations import tutel
from fmoe.integrations.tutel.layout import Layer, part_of


def some_empty(kind: str, experts: int, parallel_type: str) -> tuple:
    """Weights on the input, and tokens on ranks 0 and 3 alone: this rank's output, and its experts' gradients."""
    case = Case(kind, experts, 0.0, {"is_postscore": False, "parallel_type": parallel_type})
    layer, state = case.make(None), case.state()
    tutel.checkpoint.load(layer, state)
    rank = dist.get_rank()
    x = case.tokens(rank)[: 5 if rank in (0, 3) else 0].requires_grad_(True)
    y = layer(x)
    y.square().sum().backward()
    return y.detach(), {name: p.grad for name, p in layer.experts.named_parameters()}


EMPTY = [("ffn", 2, "adaptive:0"), ("ffn", 2, "adaptive:2"), ("llama_ffn", 4, "auto"), ("custom", 4, "adaptive:1")]


@pytest.mark.parametrize("which", EMPTY)
def test_ranks_without_tokens(which, results):
    case = Case(*which[:2])
    whole = {name: entry.requires_grad_(True) for name, entry in case.state().items()}
    x = torch.cat([case.tokens(rank)[:5] for rank in (0, 3)])
    logits = x @ whole["gates.0.wg.weight"].t()
    want, _ = tutel_loop.layer(x, logits, case.functions(whole), k=2, factor=0.0, postscore=False)
    want.square().sum().backward()
    for rank, result in enumerate(results):
        y, grads = result["empty"][which]
        assert_close(y, {0: want[:5], 3: want[5:]}.get(rank, want[:0]), what=f"rank {rank}")
        for name, grad in grads.items():
            part = part_of(Layer("", case.experts, M), name, whole[f"experts.{name}"].grad, rank, WORLD)
            assert_close(grad, part, what=f"{name} on rank {rank}")


def auto() -> list:
    """What the planner says before and after steps with all first choices on one expert, and their gradients."""
    layer = Case("ffn", 2, layer={"parallel_type": "auto"}).make(None)
    x = torch.rand(6, M)
    layer(x)
    found = [layer._runner._auto.explain()]
    with torch.no_grad():
        layer.gates[0].wg.weight.copy_(torch.tensor([[9.0], [0.0]]).expand(2, M))
    for call in (layer, lambda x: torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)):
        for _ in range(5):
            layer.zero_grad()
            call(x).square().sum().backward()
        found += [layer._runner._auto.explain(), layer.experts.batched_fc1_w.grad]
    return found


def test_auto_chooses_by_prediction_and_stays(results):
    before, after, grad, last, _ = results[0]["auto"]
    assert before == after == last
    assert "runs" in before
    assert grad.any()
    for result in results:
        assert result["auto"][0] == result["auto"][3] == before
        assert torch.equal(result["auto"][2], result["auto"][4])


def distributed(folder: str) -> list:
    """Rank files of 2 ranks as fmoe's parameters on 4, and back: outputs under plans, and the state."""
    state = tutel.checkpoint.read(f"{folder}/{{rank}}.pt")
    params = tutel.checkpoint.moe_params(state)
    spec = fmoe.ShardingSpec(fmoe.make_mesh(2))
    config = fmoe.MoEConfig(2, M, 8, router=fmoe.TopK(2), activation="relu")
    step = fmoe.auto(lambda params, x: fmoe.moe(params, x, config)[0], spec)
    home, found = fmoe.distribute(params, spec), []
    for plan in ("dp", "ep r=1", "ep r=2"):
        step.use(plan)
        found.append(step(home, CASE.tokens(dist.get_rank())).detach())
    whole = torch.utils._pytree.tree_map(lambda p: p.full_tensor() if isinstance(p, DTensor) else p, home)
    back = tutel.checkpoint.moe_state(whole)
    return [*found, all(torch.equal(back[key], state[key]) for key in state) and len(back) == len(state)]


CASE = Case("ffn", 2)


def test_files_become_fmoes_parameters_on_any_number_of_ranks(results):
    state = CASE.state()
    for rank, result in enumerate(results):
        x = CASE.tokens(rank)
        want, _ = tutel_loop.layer(x, x @ state["gates.0.wg.weight"].t(), CASE.functions(state), k=2, factor=0.0)
        *found, back = result["distributed"]
        for y in found:
            assert_close(y, want, what=f"rank {rank}")
        assert back


class Double:
    """A callable without a hash."""

    __hash__ = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def copies(pair) -> list:
    """What pickled layers are elsewhere: this rank's own, another rank's, and one of a group."""
    case = Case("ffn", 2, options={"activation_fn": Double()})
    layer, x = case.make(None), case.tokens(dist.get_rank())
    found = [torch.equal(pickle.loads(pickle.dumps(layer))(x), layer(x))]
    others = [None] * WORLD
    dist.all_gather_object(others, pickle.dumps(layer))
    for call in (lambda: pickle.loads(others[1]), lambda: pickle.dumps(case.make(pair))):
        try:
            call()
        except ValueError as error:
            found.append(str(error))
    return found


def test_pickled_layers(results):
    of_a_group = (
        "moe_layer: a layer on a group= cannot be pickled, as a process group lives in this run alone: save its "
        "state_dict(), and load that into a layer made on the group."
    )
    elsewhere = (
        "moe_layer: the pickled layer holds the experts of rank 1 of 4, but this is rank {} of 4: make the layer here, "
        "and load files of all ranks by fmoe.integrations.tutel.checkpoint.load."
    )
    for rank, result in enumerate(results):
        assert result["copies"] == [True, *([] if rank == 1 else [elsewhere.format(rank)]), of_a_group]


def work(rank: int, folder: str) -> dict:
    torch.set_default_dtype(torch.float64)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return {
        "empty": {which: some_empty(*which) for which in EMPTY},
        "copies": copies(pairs[rank // 2]),
        "auto": auto(),
        "distributed": distributed(folder),
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("files"))
    tutel.checkpoint.write(CASE.state(), f"{folder}/{{rank}}.pt", ranks=2)
    return ranks.launch(work, WORLD, folder)

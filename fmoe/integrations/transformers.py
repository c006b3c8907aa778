"""Experts of Hugging Face models: ``experts_implementation="fmoe"`` after this module is imported.

Every model of transformers 5 whose experts go through its ExpertsInterface then runs them here, in training and in
generation: the model's own weights, read as they are stored, its own router, its own state_dict. Experts whose
activation fmoe has by name run fused; any other activation, and norms behind the experts, run between grouped
matmuls as the model wrote them.

    import fmoe.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="fmoe")
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from .._autocast import autocast_dtype
from .._errors import refuse
from .._typing import type_text
from ..functional.combine import combine
from ..functional.dispatch import dispatch
from ..functional.experts import expert_apply
from ..functional.tokens import Tokens
from ..ops.activations import ACTIVATIONS, INTERLEAVED, form_of
from ..ops.differentiable import is_transformed
from ..ops.ffn import up
from ..ops.kernels.cpu_decode import MOST_CHOICES, decode_cpu
from ..ops.routing import assign_slots
from ..values import ExpertParams, Routing

NAME = "fmoe"
_NEEDS = (
    "fmoe.integrations.transformers needs the ExpertsInterface of transformers 5, but {found}: "
    "pip install -U 'transformers>=5'."
)


def _interface() -> Any:
    try:
        import transformers
    except ImportError:
        raise ImportError(_NEEDS.format(found="transformers is not installed")) from None
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError:
        raise ImportError(_NEEDS.format(found=f"transformers {transformers.__version__} has none")) from None
    return ALL_EXPERTS_FUNCTIONS


def use(model: Any) -> Any:
    """Switches a model that is loaded already to fmoe's experts, or says why it cannot.

    Args:
        model: a `transformers.PreTrainedModel`.

    Returns:
        The model.

    Raises:
        ValueError: if none of its experts go through transformers' ExpertsInterface, or their weights cannot be
            served; the model is then as it was.

    Example:
        >>> import transformers
        >>> sizes = {"hidden_size": 8, "intermediate_size": 4, "num_hidden_layers": 1, "vocab_size": 16}
        >>> heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4}
        >>> model = use(transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads)))
        >>> model(torch.tensor([[1, 2]])).logits.shape
        torch.Size([1, 2, 16])
    """
    if not hasattr(model, "set_experts_implementation"):
        refuse(
            "use",
            [
                f"model is a {type(model).__name__}, but it must be a transformers.PreTrainedModel, before it is "
                "wrapped."
            ],
        )
    found = [module for module in model.modules() if _goes_through(module)]
    if not found:
        refuse(
            "use",
            [
                f"{type(model).__name__} has no experts that go through transformers' ExpertsInterface: its MoE, if it "
                "has one, is code of its own. Build the layer with fmoe.MoE instead."
            ],
        )
    refuse("use", {problem: None for module in found for problem in _problems(module)})
    for module in found:
        activation_of(module)
    model.set_experts_implementation(NAME)
    return model


def _goes_through(module: nn.Module) -> bool:
    return all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed", "is_concatenated"))


def experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The forward of an experts module of transformers.

    Args:
        module: its weights, activation and layout.
        hidden_states: ``[T,M]``.
        top_k_index: ``[T,K]`` experts of each token. Where the module is expert-parallel, numbers from
            ``num_experts`` on are experts of other ranks: they add exactly 0.
        top_k_weights: ``[T,K]``.

    Returns:
        ``[T,M]``, of the dtype of hidden_states.

    Raises:
        ValueError: if the weights cannot be served, with the reason.

    Example:
        >>> experts_forward(model.model.layers[0].mlp.experts, x, ids, weights)  # doctest: +SKIP
    """
    refuse(f"{type(module).__name__} on fmoe", _problems(module))
    if torch.compiler.is_compiling():
        _watch(module)
    x, name = hidden_states, activation_of(module)
    if autocast_dtype(x) is None:
        x = x.to(module.down_proj.dtype)
        if name is not None and _is_decoding(module, x, top_k_index):
            y = decode_cpu(x, top_k_weights, experts=top_k_index, activation=name, **_weights(module))
            return y.to(hidden_states.dtype)
    routing = _routing(module, top_k_index, top_k_weights)
    tokens = dispatch(x, routing)
    if name is None:
        tokens = tokens.with_rows(_composed(module, tokens))
    else:
        tokens = expert_apply(_experts(module, name), tokens, activation=name.removesuffix(INTERLEAVED))
    return combine(tokens, routing).to(hidden_states.dtype)


# --- what the module holds -----------------------------------------------------------------------------------------


def _weights(module: Any) -> dict[str, Any]:
    """The leaves of `ExpertParams` as views ``[E,in,out]`` and ``[E,out]`` of the module's own parameters."""
    first = "gate_up_proj" if module.has_gate else "up_proj"
    w_in, w_out = getattr(module, first), module.down_proj
    if not module.is_transposed:
        w_in, w_out = w_in.transpose(1, 2), w_out.transpose(1, 2)
    b_in, b_out = (getattr(module, f"{first}_bias"), module.down_proj_bias) if module.has_bias else (None, None)
    return {"w_in": w_in, "b_in": b_in, "w_out": w_out, "b_out": b_out}


def _experts(module: Any, name: str) -> ExpertParams:
    """The same with the gate's halves apart: ``w_in [E,M,2,H]``, a view in any order of storage."""
    made = _weights(module)
    if form_of(name).gated:
        for leaf in ("w_in", "b_in") if module.has_bias else ("w_in",):
            flat = made[leaf]
            if name.endswith(INTERLEAVED):
                made[leaf] = flat.unflatten(-1, (-1, 2)).transpose(-2, -1)
            else:
                made[leaf] = flat.unflatten(-1, (2, -1))
    return ExpertParams(**made)


def _problems(module: Any) -> list[str]:
    """Why its weights cannot be served."""
    problems = []
    names = ["gate_up_proj" if module.has_gate else "up_proj", "down_proj"]
    for name in names + [f"{name}_bias" for name in names if module.has_bias]:
        leaf = getattr(module, name, None)
        if not isinstance(leaf, Tensor):
            found = "missing" if leaf is None else f"a {type(leaf).__name__}"
            problems.append(
                f"{name} is {found}, but it must be one stacked tensor: choose experts_implementation='eager'."
            )
        elif not leaf.is_floating_point() or leaf.element_size() < 2:
            problems.append(
                f"{name} is {type_text(leaf)}: quantized experts are not served; load the model without "
                "quantization, or choose experts_implementation='grouped_mm'."
            )
        elif hasattr(leaf, "placements"):
            problems.append(
                f"{name} is a DTensor {tuple(leaf.placements)}: only transformers' own expert parallelism, which gives "
                "local tensors, and FSDP are served."
            )
    return problems


def _routing(module: Any, experts: Tensor, weights: Tensor) -> Routing:
    ids, count = experts.to(torch.int64), module.num_experts
    if module._is_expert_parallel:
        ids = torch.where(ids < count, ids, -1)
    tokens = ids.shape[0]
    slots, counts = assign_slots(ids.unsqueeze(0), ids.new_full((1, 1), tokens * ids.shape[1]), [tokens], count)
    return Routing(ids, weights, slots.squeeze(0), counts.squeeze(0), num_experts=count, shape=(tokens,))


def _is_decoding(module: Any, x: Tensor, experts: Tensor) -> bool:
    """Whether there are few rows on a CPU, their numbers can be read, and nothing is differentiated."""
    few = experts.numel() <= MOST_CHOICES and x.device.type == "cpu" and not torch.is_grad_enabled()
    if not few or not experts.numel() or module._is_expert_parallel or torch.compiler.is_compiling():
        return False
    return type(x) is Tensor and not is_transformed(x) and not is_transformed(experts)


def _composed(module: Any, tokens: Tokens) -> Tensor:
    """``[N,M] -> [N,M]``: grouped matmuls with the model's own functions of the rows between and behind them."""
    rows, p = tokens.ragged_rows(), _weights(module)
    dtype = autocast_dtype(rows)
    if dtype is not None:
        rows, p = rows.to(dtype), {name: leaf if leaf is None else leaf.to(dtype) for name, leaf in p.items()}
    z = up(rows, p["w_in"], p["b_in"], tokens.groups)
    h = module._apply_gate(z) if module.has_gate else module.act_fn(z)
    y = up(h, p["w_out"], p["b_out"], tokens.groups)
    return module.post_expert_norm(y) if module.has_post_expert_norm else y


# --- which activation it is ------------------------------------------------------------------------------------------

#: By module, and by what its code reads: see `_read`.
_known: WeakKeyDictionary[nn.Module, dict[Any, str | None]] = WeakKeyDictionary()
_MOST_KNOWN = 8
_PLAIN = frozenset([bool, int, float, str])


@torch.compiler.assume_constant_result  # the trial is no part of a compiled model
def activation_of(module: Any) -> str | None:
    """The name of fmoe's activation that does what the module's own code does to its hidden rows; None if none does.

    It is found by trying: the module's code runs on numbers of every size and sign, in float64, and must give
    what the activation gives. So it does not matter what a model calls it, or where it clamps. It is tried
    again when `act_fn` or a number that the module holds has changed. An `act_fn` that learns, or does otherwise in
    training, is none of fmoe's.

    Args:
        module: experts of transformers.

    Example:
        >>> from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralExperts
        >>> activation_of(MixtralExperts(MixtralConfig(hidden_size=8, intermediate_size=4)))
        'swiglu'
    """
    known, read = _known.setdefault(module, {}), _read(module)
    if read not in known:
        if len(known) >= _MOST_KNOWN:
            known.clear()
        known[read] = None if module.has_post_expert_norm or _has_state(module) else _tried(module)
    return known[read]


def _read(module: Any) -> tuple[Any, ...]:
    """What its activation may depend on: functions and modules in it, and all plain numbers that they hold."""
    held, own = list(module.modules()), vars(module)
    plain = [(name, item) for part in held for name, item in vars(part).items() if type(item) in _PLAIN]
    return own.get("act_fn"), own.get("_apply_gate"), *held[1:], *plain


@torch.compiler.assume_constant_result
def _names(module: Any) -> tuple[tuple[str, ...], ...]:
    """Of the modules in it, and of its own numbers."""
    plain = tuple(name for name, item in vars(module).items() if type(item) in _PLAIN)
    return tuple(name for name, _ in module.named_children()), plain


def _watch(module: Any) -> None:
    """Makes a compiled model compile again where `activation_of` would try again: reading sets a guard."""
    children, plain = _names(module)
    assert all(isinstance(getattr(module, name), nn.Module) for name in children)
    assert all(isinstance(getattr(module, name), (bool, int, float, str)) for name in plain)


def _has_state(module: Any) -> bool:
    """Whether a module in it may give another result for the same input: it learns, counts, or draws."""
    stateful = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase, nn.RReLU)
    inner = list(module.modules())[1:]
    tensors = [leaf for part in inner for leaf in (*part.parameters(), *part.buffers())]
    return bool(tensors) or any(isinstance(part, stateful) for part in inner)


def _tried(module: Any) -> str | None:
    """The trial, on tensors that are real even while a compiler or exporter watches, and on the CPU."""
    with _disable_current_modes(), torch.device("cpu"), torch.no_grad():
        sizes = torch.logspace(-3, 5, 49, dtype=torch.float64)
        numbers = torch.cat([-sizes, sizes.new_zeros(1), sizes])
        gate, value = torch.meshgrid(numbers, numbers, indexing="ij")
        z = torch.stack([gate.flatten(), value.flatten()], dim=-1).unflatten(0, (-1, 1))  # [N,1,2]: one hidden feature
        pairs = torch.cat([z, z.flip(0)], dim=1)  # two hidden features, [N,2,2]
        for name, act in ACTIVATIONS.items():
            if act.gated != module.has_gate:
                continue
            for suffix in (INTERLEAVED, "") if act.gated else ("",):
                rows = (pairs if suffix else pairs.transpose(1, 2)).flatten(1)
                try:
                    found = module._apply_gate(rows) if act.gated else module.act_fn(rows)
                except Exception:  # code for tensors of this model's sizes, devices or dtypes only
                    return None
                wanted = form_of(name + suffix)(rows)
                if found.shape == wanted.shape and torch.allclose(found, wanted, rtol=1e-9, atol=1e-12):
                    return name + suffix
    return None


_interface().register(NAME, experts_forward)

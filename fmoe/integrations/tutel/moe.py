"""Tutel's MoE layer as its users call it: ``from fmoe.integrations.tutel import moe as tutel_moe``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..._autocast import autocast_dtype, without_autocast
from ..._errors import is_whole, refuse
from ..._typing import type_text
from .arguments import Asked, experts_asked, gates_asked, is_number, split_of
from .experts import BUILT_IN, Experts, Runner, apply_custom
from .gates import GATES, Routed, auxiliary_loss, capacity_of, route, top_k_of, with_noise
from .ranks import Ranks, plan_text, world_of

__all__ = ["MOELayer", "moe_layer"]


class MOELayer(torch.nn.Module):
    """Tutel's MoE layer on fmoe: its arguments, its parameters, its initialisation, its ``l_aux``.

    How it differs from Tutel's is in the table of `fmoe.integrations.tutel`.

    Args:
        gate_type: a dict, or a list of dicts of which ``gate_index`` picks one per call: ``{"type": "top"}`` or
            ``"cosine_top"`` with k, fp32_gate, gate_noise, capacity_factor (and proj_dim, init_t), or
            ``{"type": "custom", "module": cls}`` with any options: ``cls(model_dim=, num_global_experts=, **options)``
            makes logits ``[T,E]`` of tokens and has ``top_k``. capacity_factor is above 0 for a fixed share, 0
            to drop nothing, below 0 for as much as needed and at most that share.
        model_dim: M, the features of a token.
        experts: a dict: ``{"type": "ffn"}`` with hidden_size_per_expert, output_dim, activation_fn,
            has_fc1_bias, has_fc2_bias; ``"llama_ffn"`` with hidden_size_per_expert, activation_fn; or
            ``{"type": "custom", "module": cls}``: ``cls(model_dim=, num_experts_per_device=, sharded_count=,
            **options)`` maps ``([n,C,M], layer)`` to ``[n,C,O]``. All take num_experts_per_device: n, or -n for an
            expert on n ranks.
        scan_expert_func: called with the name and the parameter of each of the experts' parameters.
        result_func: what the layer returns is this function of the output.
        group: the process group that shares the experts; by default all ranks.
        seeds: (of the gates, of the experts, of what comes after), or any of them None.
        a2a_ffn_overlap_degree: into how many pieces exchanges are cut to overlap with compute.
        is_postscore: whether a choice's weight multiplies the expert's result, rather than its input.
        batch_prioritized_routing: whether tokens with the largest scores are served first.
        normalize_gate: whether the weights of a token add up to 1 (for k > 1).
        is_gshard_loss: whether ``l_aux`` is GShard's loss; otherwise the importance and load losses.
        parallel_type: ``"adaptive:r"`` (0 gathers the weights, r splits an expert over r ranks), ``"data"`` (r=1),
            ``"model"`` (all ranks of an expert) or ``"auto"``: the plan with the least predicted time for even
            loads. It learns from no load and no time, as a call changes no plan, which recomputation relies on;
            for one that learns, take `checkpoint.moe_params` to `fmoe.auto`.
        use_2dh: whether to exchange inside nodes first, where there are several.
        **kwargs: none; an unknown argument is refused by name.

    Raises:
        ValueError: if an argument is unknown or does not fit.

    Example:
        >>> layer = moe_layer(
        ...     gate_type={"type": "top", "k": 2, "capacity_factor": 1.25},
        ...     model_dim=8,
        ...     experts={"type": "ffn", "num_experts_per_device": 4, "hidden_size_per_expert": 16},
        ... )
        >>> y = layer(torch.ones(2, 3, 8))
        >>> y.shape, y.l_aux.shape
        (torch.Size([2, 3, 8]), torch.Size([]))

    References:
        Tutel (arXiv 2206.03382); the public source of microsoft/tutel 0.3 for names, defaults and initialisation.
    """

    l_aux: Tensor | None
    _num_global_experts: Tensor

    def __init__(
        self,
        gate_type: Any,
        model_dim: int,
        experts: Any = None,
        scan_expert_func: Callable[[str, torch.nn.Parameter], Any] | None = None,
        result_func: Callable[[Tensor], Any] | None = None,
        group: Any = None,
        seeds: Sequence[int | None] | None = None,
        a2a_ffn_overlap_degree: int = 1,
        is_postscore: bool = True,
        batch_prioritized_routing: bool = False,
        normalize_gate: bool = True,
        is_gshard_loss: bool = True,
        parallel_type: str = "adaptive:1",
        use_2dh: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        kwargs.pop("pad_samples", None)  # Tutel ignores it as well
        problems = [f"the argument {name}= is not known: leave it out." for name in kwargs]
        if not is_whole(model_dim, 1):
            problems.append(f"model_dim={model_dim!r}, but it must be a whole number of at least 1.")
        if seeds is not None and (isinstance(seeds, (str, int)) or len(seeds) < 2):
            problems.append(f"seeds={seeds!r}, but it must be (of the gates, of the experts, of what comes after).")
        refuse("moe_layer", problems + _overlap_problems(a2a_ffn_overlap_degree))
        wanted, count = experts_asked(experts)
        gates = gates_asked(gate_type)
        num_experts, self.sharded_count = split_of(count, world_of(group))
        self.ranks = Ranks(group, num_experts)
        self.num_local_experts = max(1, num_experts // self.ranks.world)
        self.num_global_experts = num_experts  # the buffer is for files: reading it would wait for the device
        self.register_buffer("_num_global_experts", torch.tensor(num_experts))
        self.valid_rs = [0] + [r for r in range(1, self.sharded_count + 1) if self.sharded_count % r == 0]
        self.adaptive_degree, self.auto_parallel = self._degree(parallel_type)
        self.model_dim, self.result_func = model_dim, result_func
        self.is_postscore, self.batch_prioritized_routing = is_postscore, batch_prioritized_routing
        self.normalize_gate, self.is_gshard_loss = normalize_gate, is_gshard_loss
        self.a2a_ffn_overlap_degree, self.use_2dh = a2a_ffn_overlap_degree, use_2dh
        self.megablocks_size, self.l_aux = 0, None
        self._runner: Runner | None = None
        seeds = (None, None, None) if seeds is None else (*seeds, None)
        _seed(seeds[1])
        self.experts = self._experts(wanted)
        for name, p in self.experts.named_parameters():
            if scan_expert_func is not None:
                scan_expert_func(name, p)
            p._tutel_expert = True  # type: ignore[attr-defined]
            if self.ranks.world > 1:  # each rank has its own
                p.skip_allreduce = True  # type: ignore[attr-defined]
        self.gates = torch.nn.ModuleList()
        for i, gate in enumerate(gates):
            _seed(None if seeds[0] is None else seeds[0] + i)
            self.gates.append(self._gate(gate))
        _seed(seeds[2])

    @staticmethod
    def global_expert_count(num_local_experts: int | float, group: Any = None) -> int:
        """The experts of all ranks, for Tutel's num_experts_per_device.

        Example:
            >>> MOELayer.global_expert_count(4)
            4
        """
        return split_of(num_local_experts, world_of(group))[0]

    @property
    def group(self) -> Any:
        """The process group that shares the experts; None for all ranks."""
        return self.ranks.group

    @property
    def world_size(self) -> int:
        """How many ranks share the experts."""
        return self.ranks.world

    def get_parameter_iterator(self, param_type: str) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Names and parameters of the ``"gate"`` or the ``"local_experts"``.

        Raises:
            ValueError: for another type.
        """
        parts = {"gate": self.gates, "local_experts": self.experts}
        if param_type not in parts:
            refuse("get_parameter_iterator", [f"param_type={param_type!r}: choose one of 'gate', 'local_experts'."])
        return parts[param_type].named_parameters()

    def forward(
        self,
        input: Tensor,
        gate_index: int = 0,
        capacity_factor: float | None = None,
        top_k: int | None = None,
        a2a_ffn_overlap_degree: int | None = None,
        reserve_dims: int = 1,
        inequivalent_tokens: bool = False,
        adaptive_r: int | None = None,
        megablocks_size: int = 0,
    ) -> Any:
        """The layer on this rank's tokens; every rank of the group must call.

        Args:
            input: ``[..., M]``, or with the features of a token in the last `reserve_dims` dims.
            gate_index: which gate.
            capacity_factor: in place of the gate's.
            top_k: in place of the gate's.
            a2a_ffn_overlap_degree: as at construction; stays for later calls.
            reserve_dims: how many dims a token has; custom experts see them.
            inequivalent_tokens: whether a capacity is a share of the most tokens of any rank, not of this one's.
            adaptive_r: another degree of parallelism; stays for later calls, and changes no result.
            megablocks_size: changes no result, and is not needed: rows are never padded.

        Returns:
            y ``[..., O]`` of the input's dtype with the auxiliary loss as ``y.l_aux``, or result_func of it.

        Raises:
            ValueError: if an argument does not fit.
        """
        given = {
            "capacity_factor": capacity_factor, "gate_index": gate_index, "reserve_dims": reserve_dims,
            "adaptive_r": adaptive_r, "megablocks_size": megablocks_size, "overlap": a2a_ffn_overlap_degree,
        }  # fmt: skip
        self._check_call(input, given)
        if a2a_ffn_overlap_degree is not None:
            self.a2a_ffn_overlap_degree = a2a_ffn_overlap_degree
        if adaptive_r is not None:
            self.adaptive_degree, self.auto_parallel = adaptive_r, False
        lead, features = input.shape[: input.dim() - reserve_dims], tuple(input.shape[input.dim() - reserve_dims :])
        x = input.reshape(math.prod(lead), self.model_dim)
        with self.ranks.active():
            h = x.to(autocast_dtype(x) or self._dtype(x.dtype))
            gate = self.gates[gate_index]
            routed, l_aux = self._routed(gate, x if isinstance(gate, tuple(GATES.values())) else h, capacity_factor,
                                         top_k, inequivalent_tokens)  # fmt: skip
            y = self._expert_rows(h, routed, features)
        y = y.reshape(*lead, *y.shape[1:]).to(input.dtype)
        self.l_aux = y.l_aux = l_aux  # type: ignore[attr-defined]
        return y if self.result_func is None else self.result_func(y)

    def _routed(
        self, gate: Any, x: Tensor, factor: float | None, top_k: int | None, inequivalent_tokens: bool
    ) -> tuple[Routed, Tensor]:
        k = top_k_of(gate, top_k, self.num_global_experts)
        factor = gate.capacity_factor if factor is None else factor
        made = gate(x)
        if not isinstance(made, Tensor) or made.shape != (x.shape[0], self.num_global_experts):
            found = type_text(made) if isinstance(made, Tensor) else f"a {type(made).__name__}"
            want = [x.shape[0], self.num_global_experts]
            refuse("moe_layer", [f"the gate made {found} of {type_text(x)}, but logits are [T,E]: {want}."])
        samples = self.ranks.most(x.shape[0]) if inequivalent_tokens else x.shape[0]
        with without_autocast(x.device.type):
            logits, noisy = with_noise(made, gate.gate_noise, self.training)
            routed = route(
                noisy,
                k,
                capacity=capacity_of(factor, k, samples, self.num_global_experts),
                batch_prioritized_routing=self.batch_prioritized_routing,
                normalize_gate=self.normalize_gate,
            )
            l_aux = auxiliary_loss(
                logits, noisy, routed.experts, is_gshard_loss=self.is_gshard_loss, gate_noise=gate.gate_noise
            )
        return routed, l_aux

    def _expert_rows(self, h: Tensor, routed: Routed, features: tuple[int, ...]) -> Tensor:
        tokens, k = routed.experts.shape
        if not self.is_postscore:
            h = (h.unsqueeze(1) * routed.weights.unsqueeze(2)).to(h.dtype).flatten(0, 1)
            routed = routed.repeated()
        if isinstance(self.experts, Experts):
            if self._runner is None:
                self._runner = Runner(self.experts, self.num_global_experts)
            plan = None if self.auto_parallel else plan_text(
                self.adaptive_degree, self.a2a_ffn_overlap_degree, self.use_2dh, self.ranks.mesh
            )  # fmt: skip
            y = self._runner(h, routed, plan)
            if len(features) > 1:
                if y.shape[1] != h.shape[1]:
                    refuse("moe_layer", [f"reserve_dims={len(features)} needs output_dim=model_dim for these experts."])
                y = y.reshape(-1, *features)
        else:
            y = apply_custom(self, h, routed, features)
        return y if self.is_postscore else y.unflatten(0, (tokens, k)).sum(1)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        super()._apply(*args, **kwargs)
        with torch.no_grad():
            self._num_global_experts.fill_(self.num_global_experts)  # to_empty leaves any number there
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        own, errors = self.num_global_experts, rest[-1]
        count = int(state_dict.setdefault(f"{prefix}_num_global_experts", torch.tensor(own)))
        if count != own:
            errors.append(f"{prefix}_num_global_experts is {count}, but the layer has {own} experts.")
        for name, p in self.experts.named_parameters():
            entry = state_dict.get(f"{prefix}experts.{name}", p)
            if entry.shape != p.shape:
                errors.append(
                    f"{prefix}experts.{name} is {type_text(entry)}, but here it is {type_text(p)}: a file of another "
                    "number of ranks is read by fmoe.integrations.tutel.checkpoint.load."
                )
        super()._load_from_state_dict(state_dict, prefix, *rest)

    # --- construction -------------------------------------------------------------------------------------------

    def _degree(self, parallel_type: str) -> tuple[int, bool]:
        """r, and whether the planner chooses instead."""
        named = {"data": 1, "model": self.sharded_count, "auto": 1}
        kind, _, text = str(parallel_type).partition(":")
        number = text.removeprefix("-")
        if parallel_type in named:
            return named[parallel_type], parallel_type == "auto"
        if kind != "adaptive" or not number.isdecimal():
            refuse(
                "moe_layer",
                [f"parallel_type={parallel_type!r}: choose 'adaptive:r' with a degree r, 'data', 'model' or 'auto'."],
            )
        r = min(max(int(text), 0), self.sharded_count)
        refuse("moe_layer", self._degree_problems("parallel_type", parallel_type, r))
        return r, False

    def _degree_problems(self, name: str, given: Any, r: Any) -> list[str]:
        if is_whole(r, 0) and r in self.valid_rs:
            return []
        choices = ", ".join(map(str, self.valid_rs))
        return [f"{name}={given!r}, but {self.sharded_count} ranks share an expert: choose a degree of {choices}."]

    def _experts(self, wanted: Asked) -> torch.nn.Module:
        options, n = dict(wanted.options), self.num_local_experts
        if wanted.module is None:
            return BUILT_IN[wanted.type](self.model_dim, n, self.ranks, **options)
        options |= {"model_dim": self.model_dim, "sharded_count": self.sharded_count}
        return _made("experts", wanted.module, options, ({"num_experts_per_device": n}, {"local_experts": n}))

    def _gate(self, wanted: Asked) -> torch.nn.Module:
        sizes = {"model_dim": self.model_dim, "num_global_experts": self.num_global_experts}
        own = {"gate_noise": wanted.options.get("gate_noise", 0.0)}
        own["capacity_factor"] = wanted.options.get("capacity_factor", 1.0)
        if wanted.module is None:
            options = {name: value for name, value in wanted.options.items() if name not in own}
            gate: torch.nn.Module = GATES[wanted.type](**sizes, **options)
        else:
            gate = _made("gate_type", wanted.module, {**sizes, **wanted.options}, ({},))
        for name, value in own.items():
            if not hasattr(gate, name):
                setattr(gate, name, value)
        return gate

    # --- calls ----------------------------------------------------------------------------------------------------

    def _dtype(self, default: torch.dtype) -> torch.dtype:
        return next((p.dtype for p in self.experts.parameters()), default)

    def _check_call(self, x: Any, given: Mapping[str, Any]) -> None:
        problems = []
        dims, index = given["reserve_dims"], given["gate_index"]
        if not is_whole(dims, 1):
            problems.append(f"reserve_dims={dims!r}, but it must be a whole number of at least 1.")
        elif not isinstance(x, Tensor) or x.dim() <= dims or not x.is_floating_point():
            found = type_text(x) if isinstance(x, Tensor) else f"a {type(x).__name__}"
            problems.append(f"input is {found}, but it must be floating [..., M] of more than {dims} dims.")
        elif math.prod(x.shape[x.dim() - dims :]) != self.model_dim:
            problems.append(
                f"input is {type_text(x)}, but a token, its last {dims} dims, has model_dim={self.model_dim} features."
            )
        if not is_whole(index, -len(self.gates)) or index >= len(self.gates):
            problems.append(f"gate_index={index!r}, but there are {len(self.gates)} gates.")
        factor, size = given["capacity_factor"], given["megablocks_size"]
        if factor is not None and not is_number(factor):
            problems.append(f"capacity_factor={factor!r}, but it must be a number, or None for the gate's.")
        if not is_whole(size, 0):
            problems.append(f"megablocks_size={size!r}, but it must be a whole number of at least 0.")
        if given["adaptive_r"] is not None:
            problems += self._degree_problems("adaptive_r", given["adaptive_r"], given["adaptive_r"])
        if given["overlap"] is not None:
            problems += _overlap_problems(given["overlap"])
        refuse("moe_layer", problems)

    def extra_repr(self) -> str:
        """Choices per token, and where the experts are."""
        gates = ", ".join(f"k={getattr(g, 'top_k', None)} noise={g.gate_noise}" for g in self.gates)
        return f"gates=[{gates}], num_global_experts={self.num_global_experts}, world_size={self.world_size}"

    def __getstate__(self) -> dict[str, Any]:
        # a copy has no call behind it: neither a loss, nor programs
        return {**self.__dict__, "l_aux": None, "_runner": None}


def _seed(seed: int | None) -> None:
    if seed is not None:
        torch.manual_seed(seed)


def _overlap_problems(degree: Any) -> list[str]:
    if is_whole(degree, 1):
        return []
    return [f"a2a_ffn_overlap_degree={degree!r}, but it must be a whole number of at least 1."]


def _made(
    name: str, module: Callable[..., Any], options: dict[str, Any], tries: Sequence[dict[str, Any]]
) -> torch.nn.Module:
    """A custom module; older ones name the number of experts otherwise."""
    errors = []
    for more in tries:
        try:
            made: torch.nn.Module = module(**options, **more)
        except TypeError as error:
            errors.append(error)
            continue
        if not isinstance(made, torch.nn.Module):
            refuse("moe_layer", [f"the module of {name} made a {type(made).__name__}: it must be a torch.nn.Module."])
        return made
    raise ValueError(f"moe_layer: the module of {name} does not take its options: {errors[0]}") from errors[0]


moe_layer = MOELayer

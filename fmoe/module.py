"""The layer as a `torch.nn.Module`, for code that is made of modules.

`MoE` holds parameters and calls the pure functions; nothing else is in it. `params_of` and `call` turn a whole
model with such layers in it into a pure function of one tree, which every transform, `fmoe.distribute` and
`fmoe.auto` take.

Gradients under a spec are those of the sum over ranks of the local losses, and come back complete. The rest of
a model must follow: `data_parallel` sums where DDP would average, and leaves the complete ones alone. FSDP2
does so by ``fully_shard(model, ignored_params=set(complete_parameters(model).values()))`` and
``model.set_gradient_divide_factor(1.0)``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ._errors import refuse
from .auto import Auto
from .functional.config import MoEConfig
from .functional.gate import replay_ids, unused_bias
from .functional.init import init
from .functional.moe import moe
from .ops.processes import is_up
from .sharding.distribute import distribute
from .sharding.spec import ShardingSpec
from .trace import recorder
from .values import Aux, ExpertParams, MoEParams, RouterParams


class Leaves(nn.Module):
    """Named parameters, so that they stand under a name of their own in a state_dict.

    Example:
        >>> list(Leaves({"weight": torch.ones(2)}).state_dict())
        ['weight']
    """

    def __init__(self, tensors: Mapping[str, Tensor]):
        super().__init__()
        self.names = tuple(tensors)
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor))

    def tensors(self) -> dict[str, Tensor]:
        """The parameters as they are now, by name."""
        return {name: getattr(self, name) for name in self.names}


class MoE(nn.Module):
    """One MoE layer: ``y, aux = layer(x)``, which is ``fmoe.moe(layer.params, x, config)``.

    Keys of its state_dict are ``router.weight``, ``experts.w_in``, ``experts.w_out`` and, where there are such,
    ``experts.b_in``, ``experts.b_out`` and the router's other leaves. Nothing is stored in a call: losses and
    counts are in `aux`.

    Under a spec the parameters are DTensors in the home layout, x is this rank's tokens, every rank calls, and
    gradients come back complete. Checkpoint the layer with ``use_reentrant=False``: torch's other kind
    drops the gradients of tensors inside a tree, and so those of `aux`.

    Args:
        config: sizes and choices.
        spec: a sharding spec; None for one device.
        params: the parameters to start from, whole tensors, which are copied; by default
            ``fmoe.init(config, seed=seed)``. With ``config.fn`` they are needed, and their ``experts`` is a dict of
            stacked tensors.
        seed: of `init`; the same on every rank.
        dtype: of the parameters that `init` makes.
        device: of the parameters that `init` makes.

    Attributes:
        config: sizes and choices; it may be set anew, and the layer is then planned anew, under the same spec.
        step: under a spec, the `fmoe.Auto` that runs the layer: ``layer.step.update(aux)`` once per optimizer
            step lets the planner learn, ``use(plan)`` fixes a plan, ``explain()`` prints the prices.

    Raises:
        ValueError: if an argument is missing or not of this kind, or a spec is given before torch.distributed is
            started; see `init` and `moe`.
        SpecError: if torch.distributed has another number of ranks than the spec's mesh.

    Example:
        >>> import fmoe
        >>> layer = MoE(fmoe.MoEConfig(num_experts=4, model_dim=8, hidden_dim=16))
        >>> y, aux = layer(torch.ones(2, 3, 8))
        >>> y.shape, list(layer.state_dict())
        (torch.Size([2, 3, 8]), ['router.weight', 'experts.w_in', 'experts.w_out'])

    References:
        Shazeer et al., "Outrageously large neural networks" (arXiv 1701.06538).
    """

    def __init__(
        self,
        config: MoEConfig,
        spec: ShardingSpec | None = None,
        *,
        params: MoEParams | None = None,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        refuse("MoE", _problems(config, spec))
        self._config, self.spec = config, spec
        given = params is not None
        if params is None and config.fn is None:
            params = init(config, seed=seed, dtype=dtype, device=device)
        if params is None or not isinstance(params, MoEParams):
            found = "None" if params is None else f"a {type(params).__name__}"
            refuse("MoE", [f"params is {found}, but with config.fn it must be an MoEParams whose experts is a dict."])
        assert params is not None
        if not isinstance(params.experts, ExpertParams if config.fn is None else dict):
            wanted = "an ExpertParams" if config.fn is None else "a dict of stacked tensors, as config.fn is yours"
            refuse("MoE", [f"params.experts is a {type(params.experts).__name__}, but it must be {wanted}."])
        refuse("MoE", _leaf_problems(params, config))
        if given:
            params = pytree.tree_map(lambda leaf: leaf.detach().clone(), params)
        if spec is not None:
            params = distribute(params, spec)
        self.router, self.experts = Leaves(_named(params.router)), Leaves(_named(params.experts))
        self.step = None if spec is None else Auto(self._call, spec)

    @property
    def config(self) -> MoEConfig:
        """Sizes and choices."""
        return self._config

    @config.setter
    def config(self, config: MoEConfig) -> None:
        refuse("MoE", _problems(config, None))
        self._config = config
        if self.step is not None:
            self.step = Auto(self._call, self.step.spec)

    @property
    def params(self) -> MoEParams:
        """The parameters as the pure functions take them: the very tensors, in a tree."""
        experts: dict[str, Any] = self.experts.tensors()
        tree: Any = ExpertParams(**experts) if self.config.fn is None else experts
        return MoEParams(RouterParams(**self.router.tensors()), tree)

    def _call(self, params: MoEParams, x: Tensor, **gate_arguments: Any) -> tuple[Tensor, Aux]:
        return moe(params, x, self.config, **gate_arguments)

    def forward(self, x: Tensor, **gate_arguments: Any) -> tuple[Tensor, Aux]:
        """The layer on tokens ``[..., M]``.

        Args:
            x: ``[..., M]``; under a spec, this rank's tokens.
            **gate_arguments: of `fmoe.functional.gate`: capacity, groups, noise, mask, token_ids, bias, replay.

        Returns:
            y, of x's shape and dtype, and the auxiliary losses and statistics.
        """
        if self.step is None or recorder() is not None:  # in a captured function, the plan is that function's
            return self._call(self.params, x, **gate_arguments)
        if "replay" in gate_arguments:
            gate_arguments["replay"] = replay_ids(gate_arguments["replay"])
        result: tuple[Tensor, Aux] = self.step(self.params, x, **gate_arguments)
        return result

    def extra_repr(self) -> str:
        """Sizes, router and spec."""
        c = self.config
        text = f"num_experts={c.num_experts}, model_dim={c.model_dim}, hidden_dim={c.hidden_dim}, router={c.router}"
        return text if self.spec is None else f"{text}, mesh={self.spec.mesh}"

    def __getstate__(self) -> dict[str, Any]:
        """Without what was planned and compiled: a copy plans anew."""
        return {name: item for name, item in super().__getstate__().items() if name != "step"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.step = None if self.spec is None else Auto(self._call, self.spec)


def _problems(config: Any, spec: Any) -> list[str]:
    """What is wrong with the arguments of a layer."""
    problems = []
    if not isinstance(config, MoEConfig):
        problems.append(f"config is a {type(config).__name__}, but it must be an fmoe.MoEConfig.")
    if spec is not None and not isinstance(spec, ShardingSpec):
        problems.append(f"spec is a {type(spec).__name__}, but it must be an fmoe.ShardingSpec(mesh, plan=...).")
    elif spec is not None and spec.mesh.world == 1 and not is_up():
        problems.append(
            "spec= is given, whose parameters are DTensors, but torch.distributed is not started: call "
            "torch.distributed.init_process_group first, or leave spec= out."
        )
    return problems


def _leaf_problems(params: MoEParams, config: MoEConfig) -> list[str]:
    """Which parameters the layer would not read, or cannot hold under their names."""
    problems = unused_bias(params.router, config.router)
    if not isinstance(params.experts, dict):
        return problems
    taken = Leaves({})
    for name, leaf in params.experts.items():
        where = f"params.experts[{name!r}]"
        if not isinstance(leaf, Tensor):
            problems.append(
                f"{where} is a {type(leaf).__name__}, but it must be a tensor stacked over experts: give one flat dict."
            )
        elif not isinstance(name, str) or not name or "." in name:
            problems.append(f"{where}: the name must be a word without dots, as it is a part of the state_dict's keys.")
        elif hasattr(taken, name):
            problems.append(f"{where}: the name is one of torch.nn.Module's own or of fmoe's: choose another.")
    return problems


def _named(leaves: Any) -> dict[str, Tensor]:
    """The tensors of a record of parameters or a dict, by name."""
    if isinstance(leaves, dict):
        return leaves
    held = {f.name: getattr(leaves, f.name) for f in dataclasses.fields(leaves)}
    return {name: leaf for name, leaf in held.items() if isinstance(leaf, Tensor)}


# --- models with such layers in them -------------------------------------------------------------------------------


def _layers(model: nn.Module) -> dict[str, MoE]:
    return {name: module for name, module in model.named_modules() if isinstance(module, MoE)}


def params_of(model: nn.Module) -> dict[str, Any]:
    """All parameters of a model as one tree.

    Args:
        model: any module.

    Returns:
        For every `MoE` in it an `MoEParams` under the layer's name, and every other parameter under its own. What
        stands under two names is there once, under the first.

    Raises:
        ValueError: if a layer shares single parameters with another module, or they are parametrized: they would
            not be leaves of a tree.

    Example:
        >>> import fmoe
        >>> config = fmoe.MoEConfig(num_experts=2, model_dim=3, hidden_dim=5, activation="relu")
        >>> model = nn.Sequential(nn.Linear(3, 3, bias=False), MoE(config))
        >>> {name: type(leaf).__name__ for name, leaf in params_of(model).items()}
        {'1': 'MoEParams', '0.weight': 'Parameter'}
    """
    layers = _layers(model)
    refuse("params_of", _not_leaves(model, layers))
    tree: dict[str, Any] = {name: layer.params for name, layer in layers.items()}
    inside = {f"{name}.{key}".lstrip(".") for name, layer in layers.items() for key, _ in layer.named_parameters()}
    return tree | {name: leaf for name, leaf in model.named_parameters() if name not in inside}


def call(model: nn.Module, params: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
    """The model as a pure function of its parameters: ``torch.func.functional_call`` for the tree of `params_of`.

    Args:
        model: whose code runs; its own parameters are not read where params has others.
        params: a tree as `params_of` makes, such as one of DTensors from `fmoe.distribute`.
        *args: of the model.
        **kwargs: of the model.

    Returns:
        What the model returns.

    Example:
        >>> import fmoe
        >>> model = MoE(fmoe.MoEConfig(num_experts=2, model_dim=3, hidden_dim=5))
        >>> x, params = torch.ones(4, 3), params_of(model)
        >>> grads = torch.func.grad(lambda p: call(model, p, x)[0].sum())(params)
        >>> step = fmoe.auto(lambda p, x: call(model, p, x), fmoe.ShardingSpec(fmoe.make_mesh(2)))
        >>> torch.equal(step(params, x)[0], model(x)[0])
        True
    """
    flat: dict[str, Tensor] = {}
    for name, leaf in params.items():
        if not isinstance(leaf, MoEParams):
            flat[name] = leaf
            continue
        for part, leaves in (("router", leaf.router), ("experts", leaf.experts)):
            flat |= {f"{name}.{part}.{key}".lstrip("."): tensor for key, tensor in _named(leaves).items()}
    for names in _places(model).values():  # of one parameter in several modules
        given = [name for name in names if name in flat]
        if given:
            flat |= {name: flat[given[0]] for name in names if name not in flat}
    # torch's own tie_weights would set a module's parameter twice where the module has two names, and restore neither
    return torch.func.functional_call(model, flat, args, kwargs, tie_weights=False)


def _places(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Where every parameter is: one name for each module that holds it."""
    places: dict[nn.Parameter, list[str]] = {}
    for name, module in model.named_modules():
        for key, leaf in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(leaf, []).append(f"{name}.{key}".lstrip("."))
    return places


def _not_leaves(model: nn.Module, layers: Mapping[str, MoE]) -> list[str]:
    """Why the parameters of the layers cannot be leaves of one tree."""
    problems = []
    held: dict[nn.Parameter, dict[str, None]] = {}
    for name, layer in layers.items():
        for key, leaf in layer.named_parameters():
            held.setdefault(leaf, {})[f"{name}.{key}".lstrip(".")] = None
    places = _places(model)
    for leaf, names in held.items():
        names |= dict.fromkeys(places[leaf])
        if len(names) > 1:
            problems.append(
                f"{' and '.join(names)} are one parameter, which an MoEParams of each layer would hold as two: use one "
                "MoE under both names, or torch.func.functional_call, which takes parameters by name."
            )
    for name, layer in layers.items():
        for part in ("router", "experts"):
            if nn.utils.parametrize.is_parametrized(getattr(layer, part)):
                problems.append(
                    f"{f'{name}.{part}'.lstrip('.')} is parametrized, so its parameters are not those of the layer: "
                    "call torch.nn.utils.parametrize.remove_parametrizations, or use torch.func.functional_call."
                )
    return problems


def complete_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters whose gradients are complete on every rank: those of every `MoE` under a spec.

    Args:
        model: any module.

    Returns:
        The parameters by name. Nothing else may reduce their gradients again.

    Example:
        >>> import fmoe
        >>> complete_parameters(MoE(fmoe.MoEConfig(num_experts=2, model_dim=3, hidden_dim=5)))
        {}
    """
    layers = {name: layer for name, layer in _layers(model).items() if layer.spec is not None}
    return {
        f"{name}.{key}".lstrip("."): leaf for name, layer in layers.items() for key, leaf in layer.named_parameters()
    }


def data_parallel(model: nn.Module, **kwargs: Any) -> nn.parallel.DistributedDataParallel:
    """DDP for a model with layers under a spec: their parameters are left alone, all others summed.

    Every gradient is then that of the sum over ranks of the local losses. So give each rank its share of
    the loss, ``spec.mean(loss, tokens=n)``, and not its mean.

    Args:
        model: with at least one parameter outside of such layers.
        **kwargs: of `torch.nn.parallel.DistributedDataParallel`; a device_mesh stands for its process group alone.

    Returns:
        The wrapped model.

    Example:
        >>> data_parallel(nn.Linear(2, 2))  # doctest: +SKIP
        DistributedDataParallel(...)
    """
    mesh = kwargs.get("device_mesh")
    if mesh is not None and mesh.ndim == 1 and kwargs.get("process_group") is None:
        # given a part of a larger mesh, DDP would replace every DTensor by its local part, the layers' too
        kwargs = {name: item for name, item in kwargs.items() if name != "device_mesh"}
        kwargs["process_group"] = mesh.get_group()
    ignored = list(complete_parameters(model))
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    wrapped = nn.parallel.DistributedDataParallel(model, **kwargs)
    wrapped.register_comm_hook(wrapped.process_group, lambda group, bucket: _sum(group, bucket.buffer()))
    return wrapped


def _sum(group: Any, gradients: Tensor) -> Any:
    future = dist.all_reduce(gradients, group=group, async_op=True).get_future()
    return future.then(lambda done: done.value()[0])

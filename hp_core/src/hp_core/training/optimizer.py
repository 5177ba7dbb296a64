"""The optimizer: which parameters it holds, in which groups, and that it holds exactly those of the model."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hp_core.config.schema import OptimizerConfig
from hp_core.config.targets import instantiate, load_target
from hp_core.errors import ConfigError, TrainingError


def build_optimizer(model: nn.Module, config: OptimizerConfig, lr: float) -> torch.optim.Optimizer:
    """The configured optimizer over the trainable parameters of `model`, which is already sharded.

    Two parameter groups, with weight decay and without. Where parameters lie on several device meshes (or on none)
    there are two per mesh, because multi-tensor kernels take the tensors of a group together and cannot mix meshes.
    Raises ConfigError for an argument that the optimizer does not take and for a glob that matches nothing,
    TrainingError when the model has nothing to train.
    """
    parameters = {fqn: param for fqn, param in model.named_parameters() if param.requires_grad}
    if not parameters:
        raise TrainingError("the model has no trainable parameter: requires_grad is False for all of them")
    no_decay = _no_decay(model, config.no_decay_params)
    groups: dict[tuple[bool, DeviceMesh | None], list[nn.Parameter]] = defaultdict(list)
    for fqn, param in parameters.items():
        groups[fqn in no_decay, param.device_mesh if isinstance(param, DTensor) else None].append(param)
    optimizer = instantiate(
        config.target,
        _arguments(load_target(config.target), config),
        [{"params": params} | ({"weight_decay": 0.0} if exempt else {}) for (exempt, _), params in groups.items()],
        lr=lr,
    )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer._target_: {config.target} gives a {type(optimizer).__name__}, not an Optimizer")
    return optimizer


def check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Raise TrainingError unless `optimizer` holds each trainable parameter of `model` once, and nothing else.

    One that was built before sharding holds tensors that nobody uses any more, and would silently train nothing.
    """
    held = [id(param) for group in optimizer.param_groups for param in group["params"]]
    trainable = {id(param): fqn for fqn, param in model.named_parameters() if param.requires_grad}
    missing = [trainable[key] for key in trainable.keys() - set(held)]
    num_foreign = sum(key not in trainable for key in held)
    if missing or num_foreign or len(held) != len(set(held)):
        examples = f" ({', '.join(sorted(missing)[:3])})" if missing else ""
        raise TrainingError(
            f"{type(optimizer).__name__} does not hold exactly the model's {len(trainable)} trainable parameters: "
            f"{len(missing)} missing{examples}, {num_foreign} not the model's, "
            f"{len(held) - len(set(held))} twice. Build it from the model after sharding."
        )


def _no_decay(model: nn.Module, globs: list[str] | None) -> set[str]:
    """Names of the parameters without weight decay. A glob may use any name of a shared parameter."""
    names = dict(model.named_parameters(remove_duplicate=False))
    if globs is None:
        return {fqn for fqn, param in names.items() if param.ndim < 2}
    matched: set[int] = set()
    for glob in globs:
        found = [id(param) for fqn, param in names.items() if fnmatchcase(fqn, glob)]
        if not found:
            close = ", ".join(get_close_matches(glob, names, n=3, cutoff=0.0))
            raise ConfigError(f'optimizer.no_decay_params "{glob}": matches no parameter. Closest: {close}.')
        matched.update(found)
    return {fqn for fqn, param in names.items() if id(param) in matched}


def _arguments(factory: Callable[..., Any], config: OptimizerConfig) -> Mapping[str, Any]:
    """The keyword arguments for `factory`. What it does not take may only be left at its default."""
    accepted = inspect.signature(factory).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
    arguments = dict(config.args)
    for name in ("weight_decay", "betas", "eps"):
        value = getattr(config, name)
        if name in accepted or value != getattr(OptimizerConfig, name):
            arguments[name] = value
    for name in arguments:
        if name not in accepted and not takes_any:
            known = ", ".join(key for key in accepted if key not in ("params", "lr"))
            raise ConfigError(f"optimizer.{name}: {config.target} takes no such argument. It takes {known}.")
    return arguments

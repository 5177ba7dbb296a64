"""Which parameters FSDP shards, which it replicates, and which it leaves to core. Pure."""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase

import torch
from torch import nn

from hp_core import (
    ConfigError,
    MeshSpec,
    ParamFragment,
    PlanError,
    PlanFragment,
    Precision,
    Replicate,
    Shard,
)
from hp_strategies_fsdp.options import MixPrecision, Options

SHARD_AXIS = "dp_shard"


def plan_sharding(model: nn.Module, mesh: MeshSpec, options: Options, precision: Precision) -> PlanFragment:
    """Shard dim 0 of every parameter over `dp_shard`; FSDP itself sums the gradients over all data axes.

    Left to core (replicated, reduced after backward): scalars, which cannot be sharded, and the few parameters
    whose dtype is not the storage dtype of the run, since FSDP reduces one dtype per group.
    """
    if options.edp_shard_size is not None:
        raise ConfigError(
            f"fsdp_config.edp_shard_size: {options.edp_shard_size}, but no strategy asks for an expert axis. "
            "Remove the key or add expert parallelism."
        )
    for name in ("forward_prefetch_depth", "backward_prefetch_depth"):
        if (depth := getattr(options, name)) < 0:
            raise ConfigError(f"fsdp_config.{name}: expected 0 or more, found {depth}")
    parameters = dict(model.named_parameters())
    replicated = _match(options.replicate_params, parameters)
    reduced = {axis: Replicate() for axis in mesh.storage_batch_axes if axis != SHARD_AXIS}
    fragments = {}
    for fqn, param in parameters.items():
        if is_left_out(param, precision.storage):
            continue
        placement = Replicate() if fqn in replicated else Shard(0)
        fragments[fqn] = ParamFragment(
            layout={SHARD_AXIS: placement}, grad={**reduced, SHARD_AXIS: placement}, offload=options.enable_offload
        )
    return PlanFragment(params=fragments, precision=_precision(precision, options.mix_precision))


def is_left_out(param: nn.Parameter, dtype: torch.dtype) -> bool:
    return param.ndim == 0 or param.dtype != dtype


def _match(patterns: list[str], parameters: dict[str, nn.Parameter]) -> set[str]:
    found: set[str] = set()
    for pattern in patterns:
        matches = {fqn for fqn in parameters if fnmatchcase(fqn, pattern)}
        if not matches:
            close = get_close_matches(pattern, parameters, n=1, cutoff=0)
            raise PlanError(f'fsdp_config.replicate_params "{pattern}": matches no parameter. Closest: "{close[0]}".')
        found |= matches
    return found


def _precision(precision: Precision, own: MixPrecision) -> Precision:
    return replace(
        precision,
        compute=_dtype("param_dtype", own.param_dtype) or precision.compute,
        reduce=_dtype("reduce_dtype", own.reduce_dtype) or precision.reduce,
    )


def _dtype(key: str, name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(
            f'fsdp_config.mix_precision.{key}: "{name}" is no floating-point dtype. Use float32, bfloat16 or float16.'
        )
    return dtype


def output_dtype(own: MixPrecision) -> torch.dtype | None:
    """The dtype that the model's outputs are cast to; None leaves them."""
    return _dtype("output_dtype", own.output_dtype)

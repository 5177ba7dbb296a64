"""FSDP for hp: fully sharded data parallelism, and hybrid sharding, by torch's `fully_shard`."""

from __future__ import annotations

from typing import cast

from torch import nn
from torch.distributed.fsdp import FSDPModule

from hp_core import Mesh, MeshAxis, MeshSpec, PlanFragment, Precision, ShardingPlan, hookimpl
from hp_strategies_fsdp.apply import apply_plan
from hp_strategies_fsdp.options import Options as FsdpOptions
from hp_strategies_fsdp.plan import SHARD_AXIS, plan_sharding

__all__ = ["plugin"]


class FsdpPlugin:
    """The plugin object; its hooks are documented in `hp_core.hookspecs`."""

    name = "fsdp"
    Options = FsdpOptions
    axes = (MeshAxis(SHARD_AXIS, role="data", option="dp_shard_size"),)
    must_follow = ("*",)

    @hookimpl
    def hp_plan_sharding(
        self, model: nn.Module, mesh: MeshSpec, options: FsdpOptions, precision: Precision
    ) -> PlanFragment:
        return plan_sharding(model, mesh, options, precision)

    @hookimpl
    def hp_apply_plan(self, model: nn.Module, mesh: Mesh, plan: ShardingPlan, options: FsdpOptions) -> nn.Module:
        return cast(nn.Module, apply_plan(model, mesh, plan, options))

    @hookimpl
    def hp_begin_micro_batch(self, model: nn.Module, index: int, count: int, options: FsdpOptions) -> None:
        is_last = index == count - 1
        sharded = cast(FSDPModule, model)
        if not options.requires_grad_sync:
            sharded.set_requires_gradient_sync(is_last)
        if not options.reshard_after_backward:
            # What stays gathered over the optimizer step would be stale in the next forward.
            sharded.set_reshard_after_backward(is_last)


plugin = FsdpPlugin()

"""Carrying out the plan with torch's FSDP2: one group per decoder block, the rest in the root's group."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import Shard as DTensorShard

from hp_core import Mesh, Shard, ShardingPlan, decoder_blocks
from hp_strategies_fsdp.options import Options
from hp_strategies_fsdp.plan import SHARD_AXIS, is_left_out, output_dtype


def apply_plan(model: nn.Module, mesh: Mesh, plan: ShardingPlan, options: Options) -> FSDPModule:
    """Turn the parameters of `model` (on the meta device) into sharded DTensors and install FSDP's hooks."""
    parameters = dict(model.named_parameters())
    left_out = {param for param in parameters.values() if is_left_out(param, plan.precision.storage)}
    data_mesh = _data_mesh(mesh)
    replicated = {
        param
        for fqn, param in parameters.items()
        if param not in left_out and not isinstance(plan.params[fqn].layout[SHARD_AXIS], Shard)
    }
    placement = _placement_of(replicated, data_mesh) if replicated else None
    blocks = list(decoder_blocks(model).values())
    for module in (*blocks, model):
        fully_shard(
            module,
            mesh=data_mesh,
            reshard_after_forward=None if module is model else options.reshard_after_forward,
            shard_placement_fn=placement,
            mp_policy=_mixed_precision(plan, options, root=module is model),
            offload_policy=CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
            if options.enable_offload
            else OffloadPolicy(),
            ignored_params=left_out,
        )
    sharded = cast(FSDPModule, model)
    # Ranks may use different parameters (experts without tokens): without this their reductions would not match.
    sharded.set_reduce_scatter_unused_params(True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The loss already carries the step's denominator, so gradients are summed, never averaged. Forcing plain
            # sums also avoids the pre-multiplied reduction that gloo and HCCL lack.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    model.register_forward_hook(_free_without_backward)
    set_prefetch(sharded, [cast(FSDPModule, block) for block in blocks], options)
    return sharded


def _free_without_backward(model: nn.Module, args: object, output: object) -> None:
    """The root keeps its gathered parameters for backward; an evaluation has none, and what follows may be a save."""
    if not torch.is_grad_enabled():
        cast(FSDPModule, model).reshard()


def set_prefetch(root: FSDPModule, blocks: list[FSDPModule], options: Options) -> None:
    """Gather the next `forward_prefetch_depth` blocks ahead in forward, the previous ones in backward."""
    root.set_modules_to_forward_prefetch(blocks[: options.forward_prefetch_depth])
    for i, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + options.forward_prefetch_depth])
        earlier = blocks[max(0, i - options.backward_prefetch_depth) : i][::-1]
        # With an empty list FSDP would prefetch one group on its own; asking for a block that is gathered does nothing.
        block.set_modules_to_backward_prefetch(earlier or [block])


def _data_mesh(mesh: Mesh) -> DeviceMesh:
    axes = mesh.spec.storage_batch_axes
    wanted = tuple(axis for axis in axes if axis == SHARD_AXIS or mesh.spec.size(axis) > 1)
    return mesh.storage[wanted if len(wanted) > 1 else wanted[0]]


def _placement_of(
    replicated: set[nn.Parameter], data_mesh: DeviceMesh
) -> Callable[[nn.Parameter], ShardPlacementResult]:
    """FSDP's per-parameter placement: a replicated parameter is "sharded" over one rank, replicated over all."""
    sharded_info = (
        FSDPMeshInfo(data_mesh, shard_mesh_dim=0)
        if data_mesh.ndim == 1
        else HSDPMeshInfo(data_mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    )
    flat = data_mesh if data_mesh.ndim == 1 else data_mesh._flatten("dp_all")
    whole = flat._unflatten(0, (flat.size(), 1), ("dp_whole", "dp_single"))
    replicated_info = HSDPMeshInfo(whole, shard_mesh_dim=1, replicate_mesh_dim=0)

    def placement(param: nn.Parameter) -> ShardPlacementResult:
        info = replicated_info if param in replicated else sharded_info
        return ShardPlacementResult(placement=DTensorShard(0), mesh_info=info)

    return placement


def _mixed_precision(plan: ShardingPlan, options: Options, root: bool) -> MixedPrecisionPolicy:
    precision = plan.precision
    return MixedPrecisionPolicy(
        param_dtype=precision.compute if precision.compute != precision.storage else None,
        reduce_dtype=precision.reduce,
        output_dtype=output_dtype(options.mix_precision) if root else None,
        cast_forward_inputs=options.mix_precision.cast_forward_inputs,
    )

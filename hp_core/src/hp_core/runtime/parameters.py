"""Parameters: DTensors over the model axes where they are stored, plain local tensors where they are used."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as DTensorReplicate
from torch.distributed.tensor import Shard as DTensorShard

from hp_core.mesh import Mesh
from hp_core.plan import Partial, Placement, Replicate, Shard, ShardingPlan, local_chunks, local_part
from hp_core.runtime.injection import Forward, inject


def distribute_parameters(model: nn.Module, mesh: Mesh, plan: ShardingPlan) -> None:
    """Turn every parameter of `model`, on the meta device, into a DTensor over the model axes of `mesh`.

    Does nothing when no model axis has more than one rank. Shared parameters stay shared. What a DTensor cannot
    express it holds in another order: ranks' chunks of packed sections stand one after the other.
    """
    axes = _split_axes(mesh)
    if not axes:
        return
    sizes = dict(mesh.spec.storage.axes)
    device_mesh = mesh.storage[axes if len(axes) > 1 else axes[0]]
    made: dict[int, nn.Parameter] = {}
    names = {id(param): fqn for fqn, param in model.named_parameters()}
    for module in model.modules():
        for name, param in list(module._parameters.items()):
            if param is None:
                continue
            if id(param) not in made:
                layout = {axis: plan.params[names[id(param)]].layout[axis] for axis in axes}
                last = local_chunks(tuple(param.shape), layout, sizes, mesh.storage_coordinates)[-1]
                local = torch.empty([s.stop for s in last.local], dtype=param.dtype, device=param.device)
                made[id(param)] = nn.Parameter(
                    _to_dtensor(local, param, device_mesh, list(layout.values())), requires_grad=param.requires_grad
                )
            module._parameters[name] = made[id(param)]


def compute_on_local_tensors(model: nn.Module, blocks: Mapping[str, nn.Module], mesh: Mesh, plan: ShardingPlan) -> None:
    """Let every forward find plain tensors in the place of its parameters: what the plan says that it computes with.

    A block hands them to all modules in it, since HF code also reads the weights of modules that it does not call;
    a module outside of the blocks to itself. Gradients are what this rank contributes: core sums those that are
    partial after the last backward.
    """
    if not _split_axes(mesh):
        return
    names = {id(param): fqn for fqn, param in model.named_parameters()}
    inside = {id(module) for block in blocks.values() for module in block.modules()}
    units: Iterator[tuple[nn.Module, list[nn.Module]]] = iter(
        [
            *((block, list(block.modules())) for block in blocks.values()),
            *((module, [module]) for module in model.modules() if id(module) not in inside),
        ]
    )
    for unit, modules in units:
        owned = [
            (module._parameters, name, _local_view(names[id(param)], mesh, plan))
            for module in modules
            for name, param in module._parameters.items()
            if param is not None
        ]
        if owned:
            inject(unit, functools.partial(_with_local_parameters, owned))


def whole_tensor(stored: torch.Tensor, plan: ShardingPlan, fqn: str) -> torch.Tensor:
    """All of parameter `fqn`, or of its gradient, of which this rank stores its part. Collective."""
    rank = dist.get_rank()
    local = local_part(stored.detach())
    whole = local.new_zeros(plan.params[fqn].shape)
    if plan.owns(fqn, rank):
        for chunk in plan.chunks(fqn, rank):
            whole[chunk.whole] = local[chunk.local]
    dist.all_reduce(whole)
    return whole


View = Callable[[torch.Tensor], torch.Tensor]


def _with_local_parameters(owned: list[tuple[dict[str, Any], str, View]], forward: Forward) -> Forward:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        stored = [(parameters, name, parameters[name]) for parameters, name, _ in owned]
        try:
            for parameters, name, view in owned:
                parameters[name] = view(parameters[name])
            return forward(*args, **kwargs)
        finally:
            for parameters, name, param in stored:
                parameters[name] = param

    return wrapper


def _local_view(fqn: str, mesh: Mesh, plan: ShardingPlan) -> View:
    """What takes the stored parameter, as FSDP hands it out or as it is, to what this rank computes with."""
    param = plan.params[fqn]
    changes: list[View] = []
    for axis, placement in param.compute.items():
        size, rank = mesh.spec.size(axis), mesh.storage_coordinates[axis]
        match placement:
            case Replicate(groups=int(groups)):
                chunk = param.shape[0] // groups
                start = chunk * (rank * groups // size)
                changes.append(functools.partial(torch.narrow, dim=0, start=start, length=chunk))
            case Partial():
                if rank:
                    changes.append(lambda x: x * 0)
            case _:
                raise AssertionError(f"{fqn}: cannot compute with {placement} on {axis}")

    def view(stored: torch.Tensor) -> torch.Tensor:
        # The gradient is said to lie as the parameter does: sums over model axes are left to the end of the step.
        local = stored.to_local(grad_placements=stored.placements) if isinstance(stored, DTensor) else stored
        for change in changes:
            local = change(local)
        return local

    return view


def _split_axes(mesh: Mesh) -> tuple[str, ...]:
    return tuple(axis for axis in mesh.spec.model_axes if mesh.spec.size(axis) > 1)


def _to_dtensor(
    local: torch.Tensor, whole: torch.Tensor, device_mesh: DeviceMesh, placements: list[Placement]
) -> DTensor:
    return DTensor.from_local(
        local,
        device_mesh,
        [DTensorShard(p.dim) if isinstance(p, Shard) else DTensorReplicate() for p in placements],
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )

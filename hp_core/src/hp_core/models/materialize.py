"""From meta parameters to allocated ones, whatever they are sharded into."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import swap_tensors

from hp_core.plan import ShardingPlan, as_stored


def materialize(model: nn.Module, plan: ShardingPlan, device: torch.device | str) -> None:
    """Give every meta parameter of `model` memory, its values undefined, and move buffers to `device`.

    Parameters that the plan offloads live on the CPU, the others on `device`. A DTensor gets memory for its local
    shard only, an empty one included. Parameters stay the same Python objects, so tied ones stay tied and FSDP2
    keeps managing those it knows; `nn.Module.to_empty` would break the ties and wipe the buffers. Call it after
    sharding and before building an optimizer.
    """
    for fqn, param in model.named_parameters():
        if param.is_meta:
            home = "cpu" if plan.params[fqn].offload else device
            swap_tensors(param, nn.Parameter(_allocate(param, home), param.requires_grad))  # type: ignore[no-untyped-call]
    moved: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(module, name, moved.setdefault(buffer, buffer.to(device)))


def _allocate(param: nn.Parameter, device: torch.device | str) -> torch.Tensor:
    with torch.no_grad():
        if not isinstance(param, DTensor):
            return torch.empty_like(param, device=device)
        return as_stored(torch.empty_like(param.to_local(), device=device), param)

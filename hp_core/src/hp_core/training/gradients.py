"""Gradients after backward: the reductions that the plan leaves to core, one global norm, clipping."""

from __future__ import annotations

from collections import defaultdict

import torch
import torch.distributed as dist
from torch import nn

from hp_core.mesh import Mesh
from hp_core.plan import ShardingPlan, as_stored, local_part


@torch.no_grad()
def reduce_partial_gradients(model: nn.Module, mesh: Mesh, plan: ShardingPlan) -> None:
    """Sum every gradient over the axes on which the plan says that it is partial. Collective.

    One all-reduce per set of axes. A parameter that some ranks did not use counts as zero there; one that no rank
    used keeps no gradient, as in a single process.
    """
    buckets: dict[tuple[tuple[str, ...], torch.dtype], list[nn.Parameter]] = defaultdict(list)
    parameters = dict(model.named_parameters())
    for fqn in sorted(plan.params):
        axes = tuple(axis for axis in plan.params[fqn].partial_axes if mesh.spec.size(axis) > 1)
        if axes and parameters[fqn].requires_grad:
            buckets[axes, parameters[fqn].dtype].append(parameters[fqn])
    for (axes, _), params in sorted(buckets.items(), key=lambda item: str(item[0])):
        grads = [torch.zeros_like(local_part(p)) if p.grad is None else local_part(p.grad) for p in params]
        used = grads[0].new_tensor([float(p.grad is not None) for p in params])
        flat = torch.cat([used, *(grad.flatten() for grad in grads)])
        for axis in axes:
            dist.all_reduce(flat, group=mesh.storage.get_group(axis))
        any_used, *sums = torch.split(flat, [len(params), *(grad.numel() for grad in grads)])
        for param, grad, total, is_used in zip(params, grads, sums, any_used.tolist(), strict=True):
            if is_used:
                grad.copy_(total.view_as(grad))
                if param.grad is None:
                    param.grad = as_stored(grad, param)


@torch.no_grad()
def gradient_norm(model: nn.Module, mesh: Mesh, plan: ShardingPlan) -> torch.Tensor:
    """The 2-norm of the whole model's gradient: every element once, whatever mesh it lies on. Collective.

    Each rank adds the squares of the parts that it owns (see `ShardingPlan.owns`), then one sum over the world.
    """
    squares = []
    for fqn, param in model.named_parameters():
        if param.grad is not None and plan.owns(fqn, mesh.rank):
            squares.append(local_part(param.grad).float().square().sum())
    device = torch.device(mesh.device_type)
    total = torch.stack([s.to(device) for s in squares]).sum() if squares else torch.zeros((), device=device)
    dist.all_reduce(total)
    return total.sqrt()


@torch.no_grad()
def clip_gradients(model: nn.Module, norm: torch.Tensor, max_norm: float) -> None:
    """Scale all gradients so that the global norm, given as `norm`, is at most `max_norm`."""
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for param in model.parameters():
        if param.grad is not None:
            grad = local_part(param.grad)
            grad.mul_(scale.to(grad.device))


@torch.no_grad()
def first_non_finite(model: nn.Module) -> str | None:
    """The first parameter, in model order, whose gradient on this rank holds a NaN or an infinity."""
    for fqn, param in model.named_parameters():
        if param.grad is not None and not torch.isfinite(local_part(param.grad)).all():
            return fqn
    return None

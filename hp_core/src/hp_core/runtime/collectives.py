"""Moving a tensor from one placement to another over one mesh axis, with the right movement back in backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hp_core.errors import PlacementError
from hp_core.mesh import Mesh
from hp_core.plan import Edge, Partial, Placement, Replicate, Shard

Move = Callable[[torch.Tensor], torch.Tensor]

_functional = torch.ops._c10d_functional


@dataclass(frozen=True)
class AxisGroup:
    """The ranks of one mesh axis that this rank belongs to, and its place among them."""

    group: dist.ProcessGroup
    size: int
    rank: int

    @property
    def name(self) -> str:
        return str(self.group.group_name)


def axis_group(mesh: Mesh, axis: str) -> AxisGroup:
    """The group of `axis` as this rank sees it."""
    in_storage = axis in mesh.spec.storage.names
    group = (mesh.storage if in_storage else mesh.compute).get_group(axis)
    coordinates = mesh.storage_coordinates if in_storage else mesh.compute_coordinates
    return AxisGroup(group, mesh.spec.size(axis), coordinates[axis])


def compile_edge(edge: Edge, axis: AxisGroup, what: str) -> Move | None:
    """The function that carries a tensor over `edge`, or None if there is nothing to do.

    `what` names the tensor in errors.
    """
    forward = compile_move(edge.src, edge.dst, axis, edge.length, what)
    backward = compile_move(edge.dst_grad, edge.src_grad, axis, edge.length, f"gradient of {what}")
    if forward is None and backward is None:
        return None

    def cross(tensor: torch.Tensor) -> torch.Tensor:
        moved: torch.Tensor = _Crossing.apply(tensor, forward, backward)  # type: ignore[no-untyped-call]
        return moved

    return cross


class _Crossing(torch.autograd.Function):
    """`forward` on the value, `backward` on the gradient; None is the identity."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, forward: Move | None, backward: Move | None) -> torch.Tensor:
        ctx.move = backward
        return forward(tensor) if forward is not None else tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return (ctx.move(gradient) if ctx.move is not None else gradient), None, None


def compile_move(src: Placement, dst: Placement, axis: AxisGroup, length: int | None, what: str) -> Move | None:
    """The function that takes this rank's part of a tensor from `src` to `dst`, or None for no change.

    Splitting follows `torch.chunk`. `length` is the whole length of the dim that is split or joined; without it the
    dim has to be a multiple of the axis' size (PlacementError otherwise).
    """
    match src, dst:
        case _ if src == dst:
            return None
        case Replicate(), Shard():
            return lambda x: _take(x, dst.dim, axis, length, what)
        case Replicate(), Partial():
            return (lambda x: x) if axis.rank == 0 else torch.zeros_like
        case Shard(), Replicate():
            return lambda x: _all_gather(x, src.dim, axis, length)
        case Shard(), Partial():
            return lambda x: _pad(x, src.dim, axis, length)
        case Partial(), Replicate():
            return lambda x: _wait(_functional.all_reduce(x.contiguous(), "sum", axis.name))
        case Partial(), Shard():
            return lambda x: _reduce_scatter(x, dst.dim, axis, what)
    raise PlacementError(f"{what}: nothing takes {src} to {dst}")


def _wait(tensor: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _functional.wait_tensor(tensor)
    return result


def _take(tensor: torch.Tensor, dim: int, axis: AxisGroup, length: int | None, what: str) -> torch.Tensor:
    if dim == -2 and tensor.ndim > 3:
        raise PlacementError(f"{what}: expected [batch, sequence, features], found {list(tensor.shape)}")
    whole = tensor.shape[dim]
    if length is None and whole % axis.size:
        raise PlacementError(
            f"{what}: dim {dim} of {whole} does not divide into the {axis.size} ranks of its mesh axis"
        )
    chunk = -(-whole // axis.size)
    start = min(chunk * axis.rank, whole)
    return tensor.narrow(dim, start, min(chunk, whole - start)).contiguous()


def _all_gather(tensor: torch.Tensor, dim: int, axis: AxisGroup, length: int | None) -> torch.Tensor:
    dim = dim % tensor.ndim
    whole = tensor.shape[dim] * axis.size if length is None else length
    chunk = -(-whole // axis.size)
    if tensor.shape[dim] < chunk:  # an uneven last chunk
        pad = [0, 0] * (tensor.ndim - 1 - dim) + [0, chunk - tensor.shape[dim]]
        tensor = torch.nn.functional.pad(tensor, pad)
    gathered = _wait(_functional.all_gather_into_tensor(tensor.contiguous(), axis.size, axis.name))
    if dim:
        gathered = torch.cat(gathered.chunk(axis.size), dim)
    return gathered.narrow(dim, 0, whole) if gathered.shape[dim] != whole else gathered


def _pad(tensor: torch.Tensor, dim: int, axis: AxisGroup, length: int | None) -> torch.Tensor:
    dim = dim % tensor.ndim
    whole = tensor.shape[dim] * axis.size if length is None else length
    shape = list(tensor.shape)
    shape[dim] = whole
    padded = tensor.new_zeros(shape)
    start = min(-(-whole // axis.size) * axis.rank, whole)
    padded.narrow(dim, start, tensor.shape[dim]).copy_(tensor)
    return padded


def _reduce_scatter(tensor: torch.Tensor, dim: int, axis: AxisGroup, what: str) -> torch.Tensor:
    dim = dim % tensor.ndim
    whole = tensor.shape[dim]
    chunk = -(-whole // axis.size)
    if whole % axis.size:
        pad = [0, 0] * (tensor.ndim - 1 - dim) + [0, chunk * axis.size - whole]
        tensor = torch.nn.functional.pad(tensor, pad)
    if dim:
        tensor = torch.cat(tensor.chunk(axis.size, dim))
    scattered = _wait(_functional.reduce_scatter_tensor(tensor.contiguous(), "sum", axis.size, axis.name))
    if whole % axis.size:
        start = min(chunk * axis.rank, whole)
        scattered = scattered.narrow(dim, 0, min(chunk, whole - start))
    return scattered

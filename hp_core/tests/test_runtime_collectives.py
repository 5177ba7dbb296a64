"""Edges: every movement and its way back, for dims that divide and that do not."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.distributed as dist

from hp_core import Edge, MeshAxis, Partial, Placement, PlacementError, Replicate, Shard, axis_group, enter, leave
from hp_core.mesh import Mesh, plan_mesh
from hp_core.runtime.collectives import compile_edge
from hp_core.testing import RankPools

PLACEMENTS: tuple[Placement, ...] = (Replicate(), Shard(1), Shard(-1), Partial())


def mesh_of_all() -> Mesh:
    size = dist.get_world_size()
    return Mesh(plan_mesh(size, [(MeshAxis("tp", "model", "tp_size"), size)]), "cpu")


def held(whole: torch.Tensor, placement: Placement, rank: int, size: int) -> torch.Tensor:
    """What a rank has of `whole`; partial values are unequal parts that add up to it, exactly."""
    match placement:
        case Shard(dim=dim):
            chunk = -(-whole.shape[dim] // size)
            start = min(chunk * rank, whole.shape[dim])
            return whole.narrow(dim, start, min(chunk, whole.shape[dim] - start)).clone()
        case Partial():
            return whole - (size - 1) * 3 if rank == 0 else torch.full_like(whole, 3)
    return whole.clone()


def joined(parts: list[torch.Tensor], placement: Placement) -> torch.Tensor:
    """The whole, from what all ranks have."""
    match placement:
        case Shard(dim=dim):
            return torch.cat(parts, dim)
        case Partial():
            return torch.stack(parts).sum(0)
    assert all(torch.equal(part, parts[0]) for part in parts)
    return parts[0]


def cross(edge: Edge, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    mesh = mesh_of_all()
    move = compile_edge(edge, axis_group(mesh, "tp"), "x")
    whole, gradient = wholes(length)
    mine = held(whole, edge.src, mesh.rank, dist.get_world_size()).requires_grad_()
    result = move(mine) if move is not None else mine * 1
    result.backward(held(gradient, edge.dst_grad, mesh.rank, dist.get_world_size()))
    assert mine.grad is not None
    return result.detach(), mine.grad


def wholes(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A value and the gradient of what becomes of it: integers, whose sums are exact."""
    generator = torch.Generator().manual_seed(0)
    shape = (2, length, length)
    value, gradient = torch.randint(-50, 50, (2, *shape), generator=generator).float()
    return value, gradient


MOVES = [
    (make, src, dst)
    for make, (src, dst) in product((enter, leave), product(PLACEMENTS, PLACEMENTS))
    if not (isinstance(src, Shard) and isinstance(dst, Shard) and src != dst)
    and not (src == dst == Partial())
    and not (make is enter and src == Partial())
    and not (make is leave and dst == Partial())
]


@pytest.mark.parametrize("length", [6, 7])
@pytest.mark.parametrize(("make", "src", "dst"), MOVES)
def test_value_and_gradient_survive_an_edge(
    pool: RankPools, make: type, src: Placement, dst: Placement, length: int
) -> None:
    edge = make(src, dst, length)
    value, gradient = wholes(length)
    results = pool(3).run(cross, edge, length)
    assert torch.equal(joined([result for result, _ in results], edge.dst), value)
    assert torch.equal(joined([result for _, result in results], edge.src_grad), gradient)


def cross_without_length() -> None:
    move = compile_edge(enter(Replicate(), Shard(1)), axis_group(mesh_of_all(), "tp"), "x")
    assert move is not None
    move(torch.zeros(2, 7, 3))


def test_a_dim_that_does_not_divide_is_refused_unless_its_length_is_declared(pool: RankPools) -> None:
    with pytest.raises(PlacementError, match="x: dim 1 of 7 does not divide into the 3 ranks of its mesh axis"):
        pool(3).run(cross_without_length)

"""Reductions that the plan leaves to core, and the one clip norm."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Replicate as DReplicate
from torch.distributed.tensor import Shard as DShard

from hp_core import Mesh, MeshAxis, ParamFragment, PlanFragment, Precision, Replicate, Shard
from hp_core.mesh import plan_mesh
from hp_core.plan import local_part, merge_fragments
from hp_core.testing import RankPools
from hp_core.training.gradients import clip_gradients, gradient_norm, reduce_partial_gradients

FP32 = Precision(torch.float32, torch.float32, torch.float32)
SHARD_AXIS = MeshAxis("dp_shard", "data", "size")


class Weights(nn.Module):
    def __init__(self, **params: torch.Tensor) -> None:
        super().__init__()
        for name, value in params.items():
            self.register_parameter(name, nn.Parameter(value))


def reduce(used_by: dict[str, list[int]]) -> dict[str, list[float] | None]:
    """Each parameter has gradient rank + 1 on the ranks that used it."""
    spec = plan_mesh(dist.get_world_size(), [])
    mesh = Mesh(spec, "cpu")
    model = Weights(**{name: torch.zeros(2) for name in used_by})
    for name, param in model.named_parameters():
        if mesh.rank in used_by[name]:
            param.grad = torch.full((2,), mesh.rank + 1.0)
    reduce_partial_gradients(model, mesh, merge_fragments(model, spec, FP32, ()))
    return {n: None if p.grad is None else p.grad.tolist() for n, p in model.named_parameters()}


def test_partial_gradients_are_summed_and_a_parameter_that_one_rank_skipped_counts_as_zero_there(
    pool: RankPools,
) -> None:
    for result in pool(2).run(reduce, {"both": [0, 1], "one": [1], "none": []}):
        assert result == {"both": [3.0, 3.0], "one": [2.0, 2.0], "none": None}


@pytest.mark.parametrize(("world", "shard"), [(1, 1), (2, 2), (4, 4), (4, 2), (4, 1)])
def test_gn01_gn04_the_norm_counts_every_element_once_on_every_mesh(pool: RankPools, world: int, shard: int) -> None:
    """Two 4x4 gradients of ones on different meshes: sqrt(32) on every rank, whatever shards and replicates."""
    for norm, scaled in pool(world).run(norm_and_clip, shard, 1.0):
        assert norm == pytest.approx(math.sqrt(32), rel=1e-6)
        assert scaled == pytest.approx(1 / math.sqrt(32), rel=1e-5)


def test_gradients_below_the_limit_are_not_scaled(pool: RankPools) -> None:
    assert all(scaled == 1.0 for _, scaled in pool(2).run(norm_and_clip, 2, 100.0))


def norm_and_clip(shard: int, max_norm: float) -> tuple[float, float]:
    spec = plan_mesh(dist.get_world_size(), [(SHARD_AXIS, shard)])
    mesh = Mesh(spec, "cpu")
    model = Weights(sharded=torch.zeros(4, 4), whole=torch.zeros(4, 4))
    fragment = PlanFragment(
        {
            "sharded": ParamFragment({"dp_shard": Shard(0)}, grad={"dp_shard": Shard(0), "dp_replicate": Replicate()}),
        }
    )
    plan = merge_fragments(model, spec, FP32, [("alpha", fragment)])
    model.sharded = nn.Parameter(distribute_tensor(torch.zeros(4, 4), mesh.storage, [DReplicate(), DShard(0)]))
    model.sharded.grad = distribute_tensor(torch.ones(4, 4), mesh.storage, [DReplicate(), DShard(0)])
    model.whole.grad = torch.ones(4, 4)
    norm = gradient_norm(model, mesh, plan)
    clip_gradients(model, norm, max_norm)
    assert isinstance(model.sharded.grad, DTensor)
    values = torch.cat([local_part(model.sharded.grad).flatten(), model.whole.grad.flatten()])
    assert bool((values == values[0]).all())
    return norm.item(), values[0].item()


def test_gn06_a_rank_without_any_gradient_takes_part(pool: RankPools) -> None:
    """Six rows over four ranks of which the last holds none; and a model without a single gradient."""
    assert pool(4).run(norm_of_rows, 6) == [pytest.approx(math.sqrt(6))] * 4
    assert pool(4).run(norm_of_rows, 0) == [0.0] * 4


def norm_of_rows(rows: int) -> float:
    spec = plan_mesh(dist.get_world_size(), [(SHARD_AXIS, None)])
    mesh = Mesh(spec, "cpu")
    model = Weights(sharded=torch.zeros(6, 1))
    fragment = PlanFragment({"sharded": ParamFragment({"dp_shard": Shard(0)}, grad={"dp_shard": Shard(0)})})
    plan = merge_fragments(model, spec, FP32, [("alpha", fragment)])
    model.sharded = nn.Parameter(plan.part("sharded", mesh.rank, torch.zeros(6, 1)))
    if rows and model.sharded.numel():
        model.sharded.grad = torch.ones_like(model.sharded)
    return gradient_norm(model, mesh, plan).item()

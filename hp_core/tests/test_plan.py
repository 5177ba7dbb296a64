"""The sharding plan: merging, conflicts, which part of a tensor a rank holds, and who owns it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import nn

from hp_core import (
    MeshAxis,
    ParamFragment,
    Partial,
    PlanError,
    PlanFragment,
    Precision,
    Replicate,
    Shard,
    ShardingPlan,
)
from hp_core.mesh import MeshSpec, plan_mesh
from hp_core.plan import local_chunks, merge_fragments

FP32 = Precision(torch.float32, torch.float32, torch.float32)
MESH = plan_mesh(8, [(MeshAxis("tp", "model", "s"), 2), (MeshAxis("dp_shard", "data", "s"), 2)])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.LayerNorm(3, bias=False)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def merge(*fragments: tuple[str, PlanFragment], precision: Precision = FP32, mesh: MeshSpec = MESH) -> ShardingPlan:
    return merge_fragments(Tied(), mesh, precision, fragments)


def on(axis: str, name: str = "embed.weight") -> PlanFragment:
    return PlanFragment({name: ParamFragment(layout={axis: Shard(0)}, grad={axis: Shard(0)})})


def test_what_nobody_claims_is_replicated_and_its_gradient_summed_over_the_data_ranks() -> None:
    param = merge().params["norm.weight"]
    assert param.layout == {"dp_replicate": Replicate(), "dp_shard": Replicate(), "tp": Replicate()}
    assert param.grad == {"dp_replicate": Partial(), "dp_shard": Partial(), "tp": Replicate()}
    assert param.partial_axes == ("dp_replicate", "dp_shard")
    assert set(param.sources.values()) == {"core"}


def test_fragments_of_two_strategies_join_by_axis() -> None:
    param = merge(("alpha", on("tp")), ("beta", on("dp_shard"))).params["embed.weight"]
    assert param.layout == {"dp_replicate": Replicate(), "dp_shard": Shard(0), "tp": Shard(0)}
    assert param.sources == {"dp_replicate": "core", "dp_shard": "beta", "tp": "alpha"}


def test_a_tied_parameter_has_one_entry_that_either_name_reaches() -> None:
    plan = merge(("alpha", on("dp_shard", "head.weight")))
    assert set(plan.params) == {"embed.weight", "norm.weight"}
    assert plan.params["embed.weight"].tied_names == ("head.weight",)
    assert plan.params["embed.weight"].layout["dp_shard"] == Shard(0)


@pytest.mark.parametrize(
    ("fragments", "message"),
    [
        (
            [("alpha", on("tp")), ("beta", on("tp", "head.weight"))],
            'embed.weight on mesh axis "tp" is placed by both "alpha" and "beta"',
        ),
        ([("alpha", on("tp", "emed.weight"))], 'strategy "alpha" plans parameter "emed.weight", which the model does'),
        ([("alpha", on("ep"))], 'strategy "alpha": embed.weight is placed on mesh axis "ep", which is not there'),
    ],
)
def test_contradictions_name_both_sides(fragments: list[tuple[str, PlanFragment]], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        merge(*fragments)


def test_a_precision_that_nobody_applies_is_refused() -> None:
    mixed = replace(FP32, compute=torch.bfloat16)
    with pytest.raises(PlanError, match="no strategy computes in torch"):
        merge(precision=mixed)
    assert merge(("alpha", PlanFragment(precision=mixed)), precision=mixed).precision == mixed
    with pytest.raises(PlanError, match='precision is applied by both "alpha" and "beta"'):
        merge(("alpha", PlanFragment(precision=mixed)), ("beta", PlanFragment(precision=mixed)))


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("sizes", [{"a": 1}, {"a": 4}, {"a": 2, "b": 3}])
def test_chunks_are_those_of_torch_chunk_and_cover_every_row_once(rows: int, sizes: dict[str, int]) -> None:
    tensor = torch.arange(rows)
    layout = dict.fromkeys(sizes, Shard(0))
    parts = []
    for point in product(*(range(size) for size in sizes.values())):
        coordinates = dict(zip(sizes, point, strict=True))
        (chunk,) = local_chunks((rows,), layout, sizes, coordinates)
        part = tensor[chunk.whole]
        expected = tensor
        for axis, size in sizes.items():
            chunks = expected.chunk(size) if expected.numel() else (expected,)
            at = coordinates[axis]
            expected = chunks[at] if at < len(chunks) else tensor[:0]
        assert part.tolist() == expected.tolist()
        parts.append(part)
    assert torch.cat(parts).tolist() == tensor.tolist()


def test_every_element_has_exactly_one_owner() -> None:
    plan = merge(("alpha", on("dp_shard")), ("beta", on("tp")))
    for fqn, param in plan.params.items():
        counts = torch.zeros(param.shape)
        for rank in range(MESH.world_size):
            if plan.owns(fqn, rank):
                for chunk in plan.chunks(fqn, rank):
                    counts[chunk.whole] += 1
        assert torch.equal(counts, torch.ones(param.shape)), fqn


def test_the_digest_changes_with_the_plan_and_only_then() -> None:
    assert merge(("alpha", on("tp"))).digest() == merge(("alpha", on("tp"))).digest()
    assert merge(("alpha", on("tp"))).digest() != merge(("beta", on("tp"))).digest()
    assert merge(("alpha", on("tp"))).digest() != merge(("alpha", on("dp_shard"))).digest()

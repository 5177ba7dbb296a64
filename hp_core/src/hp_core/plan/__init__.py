"""The sharding plan and its vocabulary."""

from hp_core.plan.boundaries import EVERY, Boundary, Edge, enter, leave, outside, within
from hp_core.plan.merge import merge_fragments
from hp_core.plan.placements import (
    Chunk,
    Layout,
    Partial,
    Placement,
    Replicate,
    Shard,
    as_stored,
    local_chunks,
    local_part,
)
from hp_core.plan.sharding_plan import ParamFragment, ParamPlan, PlanFragment, Precision, ShardingPlan

__all__ = [
    "EVERY",
    "Boundary",
    "Chunk",
    "Edge",
    "Layout",
    "ParamFragment",
    "ParamPlan",
    "Partial",
    "Placement",
    "PlanFragment",
    "Precision",
    "Replicate",
    "Shard",
    "ShardingPlan",
    "as_stored",
    "enter",
    "leave",
    "local_chunks",
    "local_part",
    "merge_fragments",
    "outside",
    "within",
]

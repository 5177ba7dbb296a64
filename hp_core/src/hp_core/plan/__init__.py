"""The sharding plan and its vocabulary."""

from hp_core.plan.merge import merge_fragments
from hp_core.plan.placements import Layout, Partial, Placement, Replicate, Shard, local_part, local_slices
from hp_core.plan.sharding_plan import ParamFragment, ParamPlan, PlanFragment, Precision, ShardingPlan

__all__ = [
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
    "local_part",
    "local_slices",
    "merge_fragments",
]

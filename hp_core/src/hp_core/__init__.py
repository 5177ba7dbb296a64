"""hp: train unmodified HuggingFace models on many devices from one YAML file.

The public names below are what strategies and kernels may import; everything else is internal.
"""

from typing import TYPE_CHECKING, Any

from hp_core.data import IGNORE_INDEX, Batch
from hp_core.errors import ConfigError, HpError, ModelError, PlacementError, PlanError, PluginError, WeightsError
from hp_core.hookspecs import hookimpl
from hp_core.mesh import Mesh, MeshAxis, MeshSpec
from hp_core.plan import (
    EVERY,
    Boundary,
    Edge,
    Layout,
    ParamFragment,
    ParamPlan,
    Partial,
    Placement,
    PlanFragment,
    Precision,
    Replicate,
    Shard,
    ShardingPlan,
    enter,
    leave,
    outside,
    within,
)
from hp_core.runtime import axis_group, inject
from hp_core.training import Term

if TYPE_CHECKING:
    from hp_core.models import decoder_blocks

__all__ = [
    "EVERY",
    "IGNORE_INDEX",
    "Batch",
    "Boundary",
    "ConfigError",
    "Edge",
    "HpError",
    "Layout",
    "Mesh",
    "MeshAxis",
    "MeshSpec",
    "ModelError",
    "ParamFragment",
    "ParamPlan",
    "Partial",
    "Placement",
    "PlacementError",
    "PlanError",
    "PlanFragment",
    "PluginError",
    "Precision",
    "Replicate",
    "Shard",
    "ShardingPlan",
    "Term",
    "WeightsError",
    "axis_group",
    "decoder_blocks",
    "enter",
    "hookimpl",
    "inject",
    "leave",
    "outside",
    "within",
]


def __getattr__(name: str) -> Any:
    """`decoder_blocks` on demand: hp_core.models imports transformers, which takes seconds."""
    if name == "decoder_blocks":
        from hp_core.models import decoder_blocks

        return decoder_blocks
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

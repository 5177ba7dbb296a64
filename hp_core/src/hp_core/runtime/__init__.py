"""The plan in production: parameters as DTensors, forwards on plain local tensors, collectives at edges."""

from hp_core.runtime.boundaries import install_boundaries
from hp_core.runtime.collectives import AxisGroup, axis_group
from hp_core.runtime.injection import inject
from hp_core.runtime.parameters import compute_on_local_tensors, distribute_parameters, whole_tensor

__all__ = [
    "AxisGroup",
    "axis_group",
    "compute_on_local_tensors",
    "distribute_parameters",
    "inject",
    "install_boundaries",
    "whole_tensor",
]

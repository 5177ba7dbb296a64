"""Packed sections in a checkpoint: one plain tensor per section.

A DTensor cannot say that a rank holds a chunk of each of several parts of a dim. Each part alone it can: so a stored
parameter with sections is saved and loaded as several tensors, which do not depend on how many ranks split them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch
from torch.distributed.tensor import DTensor

from hp_core.plan.placements import Shard
from hp_core.plan.sharding_plan import ShardingPlan

_NAME = re.compile(r"(.*)\.section\d+")


def stored_tensors(name: str, value: torch.Tensor, fqn: str, plan: ShardingPlan) -> dict[str, torch.Tensor]:
    """Under which names, and as which tensors, a checkpoint stores `value`: parameter `fqn` or a state of its shape.

    What is returned shares memory with `value`: loading into it loads `value`.
    """
    for axis, placement in plan.params[fqn].layout.items():
        if isinstance(placement, Shard) and placement.sections and isinstance(value, DTensor):
            return {
                f"{name}.section{i}": section
                for i, section in enumerate(_sections(value, placement, plan.mesh.size(axis)))
            }
    return {name: value}


def base_name(name: str) -> str:
    """The name of the parameter that a stored tensor is, or is a section of."""
    match = _NAME.fullmatch(name)
    return match[1] if match else name


def section_names(names: Iterable[str]) -> Mapping[str, list[str]]:
    """Stored names by the name that they are sections of, in order; a tensor without sections under its own name."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(base_name(name), []).append(name)
    return {name: sorted(parts, key=lambda part: (len(part), part)) for name, parts in found.items()}


def join_sections(sections: list[torch.Tensor], shape: torch.Size) -> torch.Tensor:
    """The tensor of `shape` that whole sections make up."""
    if len(sections) == 1:
        return sections[0]
    dim = next(i for i, length in enumerate(shape) if sections[0].shape[i] != length)
    return torch.cat(sections, dim)


def _sections(value: DTensor, placement: Shard, size: int) -> Iterable[torch.Tensor]:
    local, start = value.to_local(), 0
    for section in placement.sections:
        part = local.narrow(placement.dim, start, section // size)
        start += section // size
        shape = list(value.shape)
        shape[placement.dim] = section
        stride = torch.empty(shape, device="meta").stride()
        yield DTensor.from_local(
            part, value.device_mesh, value.placements, run_check=False, shape=torch.Size(shape), stride=stride
        )

"""Placements: what one mesh axis does to one tensor; and the chunks of a tensor that a rank then holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Shard:
    """The axis splits tensor dim `dim` into equal chunks, the last ones shorter or empty (as `torch.chunk`)."""

    dim: int

    def __str__(self) -> str:
        return f"shard({self.dim})"


@dataclass(frozen=True)
class Replicate:
    """Every rank of the axis holds the same values."""

    def __str__(self) -> str:
        return "replicate"


@dataclass(frozen=True)
class Partial:
    """The value is the sum over the ranks of the axis."""

    def __str__(self) -> str:
        return "partial"


Placement = Shard | Replicate | Partial
Layout = Mapping[str, Placement]
"""A placement per mesh axis. Axes that shard one dim split it in the order in which they stand here."""


def local_slices(
    shape: tuple[int, ...], layout: Layout, sizes: Mapping[str, int], coordinates: Mapping[str, int]
) -> tuple[slice, ...]:
    """The part of a tensor of `shape` that the rank at `coordinates` holds: one slice with step 1 per dim."""
    bounds = [(0, length) for length in shape]
    for axis, placement in layout.items():
        if isinstance(placement, Shard):
            start, stop = bounds[placement.dim]
            chunk = -(-(stop - start) // sizes[axis])
            first = min(start + chunk * coordinates[axis], stop)
            bounds[placement.dim] = (first, min(first + chunk, stop))
    return tuple(slice(start, stop) for start, stop in bounds)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's values of a tensor that may be a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

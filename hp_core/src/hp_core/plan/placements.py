"""Placements: what one mesh axis does to one tensor; and the chunks of a tensor that a rank then holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

import torch
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Shard:
    """The axis splits tensor dim `dim` into equal chunks, the last ones shorter or empty (as `torch.chunk`).

    With `sections`, the lengths of parts that are packed along `dim` (gate and up, say), every part is split on its
    own and a rank holds a chunk of each. Their sum is the length of `dim`, and the axis divides each of them.
    """

    dim: int
    sections: tuple[int, ...] = ()

    def __str__(self) -> str:
        sections = f", sections=[{', '.join(map(str, self.sections))}]" if self.sections else ""
        return f"shard({self.dim}{sections})"


@dataclass(frozen=True)
class Replicate:
    """Every rank of the axis holds the same values.

    With `groups`, each rank holds the whole but computes with one of `groups` equal chunks of dim 0, neighbours with
    the same one: key and value heads that are fewer than the ranks.
    """

    groups: int | None = None

    def __str__(self) -> str:
        return "replicate" if self.groups is None else f"replicate(groups={self.groups})"


@dataclass(frozen=True)
class Partial:
    """The value is the sum over the ranks of the axis."""

    def __str__(self) -> str:
        return "partial"


Placement = Shard | Replicate | Partial
Layout = Mapping[str, Placement]
"""A placement per mesh axis. Axes that shard one dim split it in the order in which they stand here."""


@dataclass(frozen=True)
class Chunk:
    """A block of a tensor that a rank holds: where it is in the whole tensor, and where in the rank's own."""

    whole: tuple[slice, ...]
    local: tuple[slice, ...]


def local_chunks(
    shape: tuple[int, ...], layout: Layout, sizes: Mapping[str, int], coordinates: Mapping[str, int]
) -> tuple[Chunk, ...]:
    """What the rank at `coordinates` holds of a tensor of `shape`: blocks that tile its local tensor, in order."""
    # Per dim, the runs of the whole tensor's indices that the rank holds, one after the other.
    runs = [[(0, length)] for length in shape]
    for axis, placement in layout.items():
        if isinstance(placement, Shard):
            dim, size, at = placement.dim, sizes[axis], coordinates[axis]
            length = sum(stop - start for start, stop in runs[dim])
            wanted = []
            first = 0
            for section in placement.sections or (length,):
                chunk = -(-section // size)
                wanted.append((first + min(chunk * at, section), first + min(chunk * (at + 1), section)))
                first += section
            assert first == length, (shape, layout)
            runs[dim] = _select(runs[dim], wanted)
    return tuple(
        Chunk(tuple(whole for whole, _ in block), tuple(local for _, local in block))
        for block in product(*map(_with_local, runs))
    )


def _select(runs: list[tuple[int, int]], wanted: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The parts `wanted` of what `runs` hold, counted along the runs; adjoining ones joined, one empty if none."""
    found: list[tuple[int, int]] = []
    for start, stop in wanted:
        at = 0
        for first, last in runs:
            begin, end = max(start - at, 0) + first, min(stop - at + first, last)
            at += last - first
            if begin < end:
                if found and found[-1][1] == begin:
                    found[-1] = (found[-1][0], end)
                else:
                    found.append((begin, end))
    return found or [(wanted[0][0], wanted[0][0])]


def _with_local(runs: list[tuple[int, int]]) -> list[tuple[slice, slice]]:
    at, result = 0, []
    for start, stop in runs:
        result.append((slice(start, stop), slice(at, at + stop - start)))
        at += stop - start
    return result


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's values of a tensor that may be a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def as_stored(local: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's values as a tensor that is held as `like` is: a DTensor, if that is one."""
    if not isinstance(like, DTensor):
        return local
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )

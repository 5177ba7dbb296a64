"""Meshes: pure data for planning (`MeshSpec`), process groups for running (`Mesh`).

The same ranks are seen in two ways, both row-major with the last axis innermost:

- compute: data x sequence x model, who works on which part of the batch;
- storage: dp_replicate x dp_shard x model, who stores which part of a dense parameter. Its first two axes
  together are the data and sequence ranks of the compute view.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hp_core.errors import PlanError

Role = Literal["data", "sequence", "model", "expert"]

DATA_AXIS = "dp"
REPLICATE_AXIS = "dp_replicate"


@dataclass(frozen=True)
class MeshAxis:
    """A mesh axis that a strategy asks for: a plain attribute of its plugin.

    `option` names the field of the plugin's `Options` that holds the size. A `data` axis shards storage over
    the data and sequence ranks; its size may be None or -1, which means all of them. Other sizes are at least 1.
    """

    name: str
    role: Role
    option: str


@dataclass(frozen=True)
class MeshView:
    """An ordered set of named axes whose sizes multiply to the world size."""

    axes: tuple[tuple[str, int], ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.axes)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of `rank` on every axis."""
        result = {}
        for name, size in reversed(self.axes):
            rank, result[name] = divmod(rank, size)
        return result

    def groups(self, *axes: str) -> list[list[int]]:
        """Ranks that differ only in their coordinates on `axes`, sorted by their first rank."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank, point in enumerate(product(*(range(size) for size in self.sizes))):
            key = tuple(c for c, name in zip(point, self.names, strict=True) if name not in axes)
            found.setdefault(key, []).append(rank)
        return sorted(found.values())


@dataclass(frozen=True)
class MeshSpec:
    """Names, sizes and roles of all mesh axes of a run. Needs no process group and no devices."""

    world_size: int
    compute: MeshView
    storage: MeshView
    roles: Mapping[str, Role]

    def size(self, axis: str) -> int:
        """Size of `axis`; 1 for an axis that nobody asked for."""
        return dict((*self.compute.axes, *self.storage.axes)).get(axis, 1)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Compute axes over which tokens differ: a gradient is a sum over them."""
        return tuple(name for name in self.compute.names if self.roles[name] in ("data", "sequence"))

    @property
    def storage_batch_axes(self) -> tuple[str, ...]:
        """The same ranks as `batch_axes`, as the storage view names them."""
        return tuple(name for name in self.storage.names if self.roles[name] == "data")

    @property
    def model_axes(self) -> tuple[str, ...]:
        """Axes that split the model itself: their ranks hold different parts of it."""
        return tuple(name for name in self.storage.names if self.roles[name] == "model")

    def describe(self) -> str:
        """The mesh in words, with the groups of rank 0."""
        lines = [f"mesh of {self.world_size} ranks"]
        for title, view in (("compute", self.compute), ("storage", self.storage)):
            sizes = " x ".join(f"{name} {size}" for name, size in view.axes)
            groups = ", ".join(f"{name} {view.groups(name)[0]}" for name in view.names)
            lines.append(f"  {title}: {sizes}; groups of rank 0: {groups}")
        return "\n".join(lines)


def plan_mesh(world_size: int, requests: Iterable[tuple[MeshAxis, int | None]]) -> MeshSpec:
    """Lay the requested axes over `world_size` ranks: what sequence and model axes leave is data parallel.

    Raises PlanError when a size does not divide what it has to divide.
    """
    inner: dict[str, list[tuple[str, int]]] = {"sequence": [], "model": []}
    shard: tuple[str, int | None] | None = None
    roles: dict[str, Role] = {DATA_AXIS: "data", REPLICATE_AXIS: "data"}
    for axis, size in requests:
        if axis.name in roles:
            raise PlanError(f'mesh axis "{axis.name}" is asked for twice; two strategies cannot share one axis')
        roles[axis.name] = axis.role
        if axis.role == "data":
            if shard is not None:
                raise PlanError(f'mesh axes "{shard[0]}" and "{axis.name}" both shard storage over the data ranks')
            shard = (axis.name, size)
        elif axis.role == "expert":
            raise PlanError(f'mesh axis "{axis.name}": expert axes are not supported by this version of hp-core')
        else:
            if size is None or size < 1:
                raise PlanError(f'mesh axis "{axis.name}" ({axis.option}): expected a size of at least 1, found {size}')
            inner[axis.role].append((axis.name, size))
    compute_inner = [*inner["sequence"], *inner["model"]]
    split = math.prod(size for _, size in compute_inner)
    if world_size % split:
        names = " x ".join(f"{name} {size}" for name, size in compute_inner)
        raise PlanError(
            f"{world_size} ranks cannot be divided into {names} = {split}. Start a multiple of {split} ranks."
        )
    data_size = world_size // split
    batch_size = data_size * math.prod(size for _, size in inner["sequence"])
    storage: list[tuple[str, int]] = [(REPLICATE_AXIS, batch_size)]
    if shard is not None:
        name, wanted = shard
        size = batch_size if wanted in (None, -1) else wanted
        assert size is not None
        if size < 1 or batch_size % size:
            divisors = ", ".join(str(n) for n in range(1, batch_size + 1) if batch_size % n == 0)
            raise PlanError(
                f"{name}: {size} does not divide the {batch_size} data and sequence ranks. Use {divisors} or -1."
            )
        storage = [(REPLICATE_AXIS, batch_size // size), (name, size)]
    return MeshSpec(
        world_size=world_size,
        compute=MeshView(((DATA_AXIS, data_size), *compute_inner)),
        storage=MeshView((*storage, *inner["model"])),
        roles=roles,
    )


class Mesh:
    """The process groups of a `MeshSpec`, seen from this rank."""

    def __init__(self, spec: MeshSpec, device_type: str) -> None:
        """Create the groups. Collective: every rank calls it, with the same spec, after `init_process_group`."""
        self.spec = spec
        self.rank = dist.get_rank()
        self.device_type = device_type
        self._root = init_device_mesh(device_type, (spec.world_size,), mesh_dim_names=("world",))
        self.compute: DeviceMesh = self._root._unflatten(0, spec.compute.sizes, spec.compute.names)
        self.storage: DeviceMesh = self._root._unflatten(0, spec.storage.sizes, spec.storage.names)
        # Flattened under another name than the axes, which are unique per root.
        axes = spec.batch_axes
        batch = self.compute[axes if len(axes) > 1 else axes[0]]
        self._batch = batch._flatten("batch") if len(axes) > 1 else batch

    @cached_property
    def compute_coordinates(self) -> dict[str, int]:
        return self.spec.compute.coordinates(self.rank)

    @cached_property
    def storage_coordinates(self) -> dict[str, int]:
        return self.spec.storage.coordinates(self.rank)

    @property
    def data_rank(self) -> int:
        """Which part of the global batch this rank reads."""
        return self.compute_coordinates[DATA_AXIS]

    @property
    def data_size(self) -> int:
        return self.spec.size(DATA_AXIS)

    @property
    def batch_group(self) -> dist.ProcessGroup:
        """The ranks that hold different tokens and the same model part: sums over tokens run over it."""
        return self._batch.get_group()

"""The sharding plan: frozen data that says, for every parameter, where it lies and what its gradient needs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from hp_core.mesh import MeshSpec
from hp_core.plan.placements import Layout, Partial, Shard, local_slices


@dataclass(frozen=True)
class Precision:
    """Dtypes of stored parameters, of the computation, and of gradient reductions."""

    storage: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype


@dataclass(frozen=True)
class ParamFragment:
    """What one strategy says of one parameter, for the axes that it owns.

    `layout` is where the values lie. `grad` is the gradient's layout after backward: an axis that the strategy
    has reduced itself is not `Partial` there. `offload`: values and optimizer state live on the CPU.
    """

    layout: Layout = field(default_factory=dict)
    grad: Layout = field(default_factory=dict)
    offload: bool = False


@dataclass(frozen=True)
class PlanFragment:
    """A strategy's contribution to the plan: parameter FQN to fragment. `precision` is what the strategy will cast
    to, None when it casts nothing; at most one strategy casts."""

    params: Mapping[str, ParamFragment] = field(default_factory=dict)
    precision: Precision | None = None


@dataclass(frozen=True)
class ParamPlan:
    """One parameter. `layout` and `grad` name every axis of the storage view; `sources` says who said so."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout
    grad: Layout
    sources: Mapping[str, str]
    tied_names: tuple[str, ...] = ()
    offload: bool = False

    @property
    def partial_axes(self) -> tuple[str, ...]:
        """Axes over which core has to sum the gradient after backward."""
        return tuple(axis for axis, placement in self.grad.items() if isinstance(placement, Partial))


@dataclass(frozen=True)
class ShardingPlan:
    """Everything that apply, weights, reduction, clipping and checkpoints need to know. Data, no behaviour."""

    mesh: MeshSpec
    precision: Precision
    params: Mapping[str, ParamPlan]

    def slices(self, fqn: str, rank: int) -> tuple[slice, ...]:
        """The part of parameter `fqn` that `rank` holds: one slice per dim of the global tensor."""
        param = self.params[fqn]
        view = self.mesh.storage
        return local_slices(param.shape, param.layout, dict(view.axes), view.coordinates(rank))

    def owns(self, fqn: str, rank: int) -> bool:
        """Whether `rank` counts its part of `fqn` in sums over all elements: exactly one holder of each does."""
        layout = self.params[fqn].layout
        at = self.mesh.storage.coordinates(rank)
        return all(at[axis] == 0 for axis in self.mesh.storage.names if not isinstance(layout[axis], Shard))

    def to_json(self) -> dict[str, object]:
        """The plan as plain JSON data, keys sorted by FQN."""
        return {
            "world_size": self.mesh.world_size,
            "compute": dict(self.mesh.compute.axes),
            "storage": dict(self.mesh.storage.axes),
            "precision": {name: str(getattr(self.precision, name)) for name in ("storage", "compute", "reduce")},
            "params": {
                fqn: {
                    "shape": list(param.shape),
                    "dtype": str(param.dtype),
                    "layout": {axis: str(p) for axis, p in param.layout.items()},
                    "grad": {axis: str(p) for axis, p in param.grad.items()},
                    "sources": dict(param.sources),
                    "tied_names": list(param.tied_names),
                    "offload": param.offload,
                }
                for fqn, param in sorted(self.params.items())
            },
        }

    def digest(self) -> str:
        """SHA-256 of the plan: equal plans have equal digests."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()


def freeze(layout: Layout) -> Layout:
    return MappingProxyType(dict(layout))

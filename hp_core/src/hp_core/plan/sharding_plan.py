"""The sharding plan: frozen data that says, for every parameter, where it lies and what its gradient needs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from hp_core.mesh import MeshSpec
from hp_core.plan.boundaries import Boundary
from hp_core.plan.placements import Chunk, Layout, Partial, Shard, local_chunks


@dataclass(frozen=True)
class Precision:
    """Dtypes of stored parameters, of the computation, and of gradient reductions."""

    storage: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype


@dataclass(frozen=True)
class ParamFragment:
    """What one strategy says of one parameter, for the axes that it owns.

    `layout` is where the values lie. `compute`, for a model axis, is what the rank computes with where that is not
    what it holds: a `Replicate(groups=...)`, or `Partial`, which gives the values to the axis' first rank and zeros
    to the others (a bias that is added before a sum). `grad` is the gradient's layout after backward: an axis that
    the strategy has reduced itself is not `Partial` there. `offload`: values and optimizer state live on the CPU.
    `source` says why, for people: an HF plan key, a rule.
    """

    layout: Layout = field(default_factory=dict)
    compute: Layout = field(default_factory=dict)
    grad: Layout = field(default_factory=dict)
    offload: bool = False
    source: str = ""


@dataclass(frozen=True)
class PlanFragment:
    """A strategy's contribution to the plan.

    `params`: parameter FQN to fragment. `boundaries`: module FQN to what crosses the module's edge. `injections`:
    module FQN to a name for the code that the strategy will put inside (in `hp_apply_plan`). `attributes`: module FQN
    to attributes that get another value, such as a number of heads. `precision` is what the strategy will cast to,
    None when it casts nothing; at most one strategy casts. `notes` are for the people who read the plan.
    """

    params: Mapping[str, ParamFragment] = field(default_factory=dict)
    boundaries: Mapping[str, Boundary] = field(default_factory=dict)
    injections: Mapping[str, str] = field(default_factory=dict)
    attributes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    precision: Precision | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ParamPlan:
    """One parameter. `layout` and `grad` name every axis of the storage view, model axes first, as they split a dim;
    `compute` only those on which the rank computes with something else (see `ParamFragment`). `sources` says, per
    axis, who said so."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout
    compute: Layout
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
    """Everything that apply, weights, reduction, clipping and checkpoints need to know. Data, no behaviour.

    `boundaries` has those of a module in the configured order of strategies: inputs pass them in this order, outputs
    in the reverse.
    """

    mesh: MeshSpec
    precision: Precision
    params: Mapping[str, ParamPlan]
    boundaries: Mapping[str, tuple[Boundary, ...]] = field(default_factory=dict)
    injections: Mapping[str, str] = field(default_factory=dict)
    attributes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def of(self, name: str) -> ParamPlan:
        """The plan of a parameter by any of its names. Raises KeyError for an unknown one."""
        if name in self.params:
            return self.params[name]
        for param in self.params.values():
            if name in param.tied_names:
                return param
        raise KeyError(name)

    def chunks(self, fqn: str, rank: int) -> tuple[Chunk, ...]:
        """The blocks of parameter `fqn` that `rank` holds."""
        param = self.params[fqn]
        view = self.mesh.storage
        return local_chunks(param.shape, param.layout, dict(view.axes), view.coordinates(rank))

    def local_shape(self, fqn: str, rank: int) -> tuple[int, ...]:
        """Shape of what `rank` holds of parameter `fqn`."""
        return tuple(s.stop for s in self.chunks(fqn, rank)[-1].local)

    def part(self, fqn: str, rank: int, whole: torch.Tensor) -> torch.Tensor:
        """What `rank` holds of parameter `fqn`, copied from a tensor that has all of it."""
        part = whole.new_empty(self.local_shape(fqn, rank))
        for chunk in self.chunks(fqn, rank):
            part[chunk.local] = whole[chunk.whole]
        return part

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
                    "layout": _words(param.layout),
                    "compute": _words(param.compute),
                    "grad": _words(param.grad),
                    "sources": dict(param.sources),
                    "tied_names": list(param.tied_names),
                    "offload": param.offload,
                }
                for fqn, param in sorted(self.params.items())
            },
            "boundaries": {
                fqn: [boundary.to_json() for boundary in boundaries]
                for fqn, boundaries in sorted(self.boundaries.items())
            },
            "injections": dict(sorted(self.injections.items())),
            "attributes": {fqn: dict(sorted(values.items())) for fqn, values in sorted(self.attributes.items())},
            "notes": list(self.notes),
        }

    def digest(self) -> str:
        """SHA-256 of the plan: equal plans have equal digests."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()


def freeze(layout: Layout) -> Layout:
    return MappingProxyType(dict(layout))


def _words(layout: Layout) -> dict[str, str]:
    return {axis: str(placement) for axis, placement in layout.items()}

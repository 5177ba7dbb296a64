"""Merging the fragments of all strategies into one plan. The merge key is (FQN, mesh axis)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from torch import nn

from hp_core.errors import PlanError
from hp_core.mesh import MeshSpec
from hp_core.plan.boundaries import Boundary
from hp_core.plan.placements import Partial, Placement, Replicate
from hp_core.plan.sharding_plan import ParamPlan, PlanFragment, Precision, ShardingPlan, freeze

CORE = "core"

Value = TypeVar("Value")


def merge_fragments(
    model: nn.Module, mesh: MeshSpec, precision: Precision, fragments: Iterable[tuple[str, PlanFragment]]
) -> ShardingPlan:
    """Join (plugin name, fragment) pairs. What nobody claims is replicated, its gradient summed by core.

    `precision` is what the configuration asks for. Raises PlanError for two owners of one key, an unknown parameter,
    an axis that is not in the mesh, or a precision that nobody applies.
    """
    fragments = tuple(fragments)
    names = _parameter_names(model)
    canonical = {alias: fqn for fqn, (_, aliases) in names.items() for alias in (fqn, *aliases)}
    layouts: dict[tuple[str, str], tuple[Placement, str]] = {}
    owners: dict[tuple[str, str], str] = {}
    computes: dict[tuple[str, str], Placement] = {}
    grads: dict[tuple[str, str], Placement] = {}
    offloaded: set[str] = set()
    for plugin, fragment in fragments:
        for name, claim in fragment.params.items():
            if name not in canonical:
                raise PlanError(f'strategy "{plugin}" plans parameter "{name}", which the model does not have')
            fqn = canonical[name]
            for axis, placement in claim.layout.items():
                if axis not in mesh.storage.names:
                    raise PlanError(f'strategy "{plugin}": {name} is placed on mesh axis "{axis}", which is not there')
                if (fqn, axis) in layouts:
                    other = owners[fqn, axis]
                    raise PlanError(f'{fqn} on mesh axis "{axis}" is placed by both "{other}" and "{plugin}"')
                owners[fqn, axis] = plugin
                layouts[fqn, axis] = (placement, f"{plugin}: {claim.source}" if claim.source else plugin)
            computes.update({(fqn, axis): placement for axis, placement in claim.compute.items()})
            grads.update({(fqn, axis): placement for axis, placement in claim.grad.items()})
            if claim.offload:
                offloaded.add(fqn)
    params = {}
    for fqn, (param, aliases) in names.items():
        layout, grad, sources = {}, {}, {}
        for axis in (*mesh.model_axes, *mesh.storage_batch_axes):
            layout[axis], sources[axis] = layouts.get((fqn, axis), (Replicate(), CORE))
            unclaimed = Partial() if axis in mesh.storage_batch_axes else Replicate()
            grad[axis] = grads.get((fqn, axis), unclaimed)
        params[fqn] = ParamPlan(
            shape=tuple(param.shape),
            dtype=param.dtype,
            layout=freeze(layout),
            compute=freeze({axis: computes[fqn, axis] for axis in layout if (fqn, axis) in computes}),
            grad=freeze(grad),
            sources=sources,
            tied_names=aliases,
            offload=fqn in offloaded,
        )
    modules = frozenset(name for name, _ in model.named_modules())
    return ShardingPlan(
        mesh=mesh,
        precision=_agreed_precision(precision, fragments),
        params=params,
        boundaries=_join_boundaries(modules, mesh, fragments),
        injections=_join("injects code into", modules, [(plugin, f.injections) for plugin, f in fragments]),
        attributes=_join("changes attributes of", modules, [(plugin, f.attributes) for plugin, f in fragments]),
        notes=tuple(f"{plugin}: {note}" for plugin, fragment in fragments for note in fragment.notes),
    )


def _join_boundaries(
    modules: frozenset[str], mesh: MeshSpec, fragments: Iterable[tuple[str, PlanFragment]]
) -> dict[str, tuple[Boundary, ...]]:
    joined: dict[str, dict[str, tuple[str, Boundary]]] = {}
    for plugin, fragment in fragments:
        for fqn, boundary in fragment.boundaries.items():
            if fqn not in modules:
                raise PlanError(f'strategy "{plugin}" plans a boundary of "{fqn}", which the model does not have')
            if boundary.axis not in (*mesh.compute.names, *mesh.storage.names):
                raise PlanError(f'strategy "{plugin}": boundary of {fqn} on mesh axis "{boundary.axis}", not there')
            by_axis = joined.setdefault(fqn, {})
            if boundary.axis in by_axis:
                raise PlanError(
                    f'{fqn} on mesh axis "{boundary.axis}" has a boundary from both "{by_axis[boundary.axis][0]}" '
                    f'and "{plugin}"'
                )
            by_axis[boundary.axis] = (plugin, boundary)
    return {fqn: tuple(boundary for _, boundary in by_axis.values()) for fqn, by_axis in joined.items()}


def _join(what: str, modules: frozenset[str], parts: Iterable[tuple[str, Mapping[str, Value]]]) -> dict[str, Value]:
    joined: dict[str, Value] = {}
    owners: dict[str, str] = {}
    for plugin, entries in parts:
        for fqn, value in entries.items():
            if fqn not in modules:
                raise PlanError(f'strategy "{plugin}" {what} "{fqn}", which the model does not have')
            if fqn in owners:
                raise PlanError(f'both "{owners[fqn]}" and "{plugin}": {what} {fqn}')
            joined[fqn], owners[fqn] = value, plugin
    return joined


def _agreed_precision(wanted: Precision, fragments: Iterable[tuple[str, PlanFragment]]) -> Precision:
    applied = [(plugin, fragment.precision) for plugin, fragment in fragments if fragment.precision is not None]
    if len(applied) > 1:
        raise PlanError(f'precision is applied by both "{applied[0][0]}" and "{applied[1][0]}"')
    if applied:
        return applied[0][1]
    if wanted.compute != wanted.storage:
        raise PlanError(
            f"mixed_precision.enabled: no strategy computes in {wanted.compute}. Add one that casts parameters, "
            "or set mixed_precision.enabled to false."
        )
    return wanted


def _parameter_names(model: nn.Module) -> dict[str, tuple[nn.Parameter, tuple[str, ...]]]:
    """Each parameter once, under its first name, with the other names that share it."""
    by_id: dict[int, tuple[str, nn.Parameter, list[str]]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if id(param) in by_id:
            by_id[id(param)][2].append(name)
        else:
            by_id[id(param)] = (name, param, [])
    return {name: (param, tuple(aliases)) for name, param, aliases in by_id.values()}

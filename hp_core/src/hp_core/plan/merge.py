"""Merging the fragments of all strategies into one plan. The merge key is (parameter FQN, mesh axis)."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from hp_core.errors import PlanError
from hp_core.mesh import MeshSpec
from hp_core.plan.placements import Partial, Placement, Replicate
from hp_core.plan.sharding_plan import ParamPlan, PlanFragment, Precision, ShardingPlan, freeze

CORE = "core"


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
                    other = layouts[fqn, axis][1]
                    raise PlanError(f'{fqn} on mesh axis "{axis}" is placed by both "{other}" and "{plugin}"')
                layouts[fqn, axis] = (placement, plugin)
            grads.update({(fqn, axis): placement for axis, placement in claim.grad.items()})
            if claim.offload:
                offloaded.add(fqn)
    params = {}
    for fqn, (param, aliases) in names.items():
        layout, grad, sources = {}, {}, {}
        for axis in mesh.storage.names:
            layout[axis], sources[axis] = layouts.get((fqn, axis), (Replicate(), CORE))
            unclaimed = Partial() if axis in mesh.storage_batch_axes else Replicate()
            grad[axis] = grads.get((fqn, axis), unclaimed)
        params[fqn] = ParamPlan(
            shape=tuple(param.shape),
            dtype=param.dtype,
            layout=freeze(layout),
            grad=freeze(grad),
            sources=sources,
            tied_names=aliases,
            offload=fqn in offloaded,
        )
    return ShardingPlan(mesh=mesh, precision=_agreed_precision(precision, fragments), params=params)


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

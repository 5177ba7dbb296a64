"""Boundaries in production: hooks at the edges of modules, compiled once from the plan."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from hp_core.errors import PlanError
from hp_core.mesh import Mesh
from hp_core.plan import EVERY, Boundary, ShardingPlan
from hp_core.runtime.collectives import AxisGroup, Move, axis_group, compile_edge


def install_boundaries(model: nn.Module, mesh: Mesh, plan: ShardingPlan) -> None:
    """Make inputs and outputs of modules cross the boundaries that `plan` declares.

    They are module hooks, outside of what a module computes: outside of the code that strategies inject, and of the
    recomputation of a checkpointed block. Raises PlanError for an input that the module's forward does not have.
    """
    for fqn, boundaries in sorted(plan.boundaries.items()):
        module = model.get_submodule(fqn)
        for boundary in boundaries:
            _install(module, fqn, boundary, axis_group(mesh, boundary.axis))


def _install(module: nn.Module, fqn: str, boundary: Boundary, axis: AxisGroup) -> None:
    inputs = _compile(boundary.inputs, axis, fqn)
    outputs = _compile(boundary.outputs, axis, f"{fqn} output")
    every = inputs.pop(EVERY, None)
    names = [name for name, _ in _parameters(module)]
    for name in inputs:
        if name not in names:
            raise PlanError(f'{fqn}: the boundary names input "{name}", but the forward has {", ".join(names)}')
    if every is not None or inputs:
        positions = {names.index(name): cross for name, cross in inputs.items()}
        module.register_forward_pre_hook(_input_hook(every, inputs, positions), with_kwargs=True)
    if outputs:
        module.register_forward_hook(_output_hook({int(name): cross for name, cross in outputs.items()}))


def _compile(edges: Mapping[str, Any], axis: AxisGroup, what: str) -> dict[str, Move]:
    compiled = {name: compile_edge(edge, axis, f"{what} {name}") for name, edge in edges.items()}
    return {name: cross for name, cross in compiled.items() if cross is not None}


def _parameters(module: nn.Module) -> list[tuple[str, inspect.Parameter]]:
    # Of the class: what has been put in the place of an instance's forward takes *args, **kwargs.
    parameters = list(inspect.signature(type(module).forward).parameters.items())[1:]
    return [(name, p) for name, p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _input_hook(
    every: Move | None, by_name: Mapping[str, Move], by_position: Mapping[int, Move]
) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]:
    def hook(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        moved_args = tuple(_cross(value, by_position.get(i, every)) for i, value in enumerate(args))
        moved_kwargs = {name: _cross(value, by_name.get(name, every)) for name, value in kwargs.items()}
        return moved_args, moved_kwargs

    def _cross(value: Any, cross: Move | None) -> Any:
        if cross is None or not isinstance(value, torch.Tensor):
            return value
        if cross is every and not (value.is_floating_point() and value.requires_grad):
            return value
        return cross(value)

    return hook


def _output_hook(outputs: Mapping[int, Move]) -> Callable[[nn.Module, Any, Any], Any]:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, torch.Tensor):
            return outputs[0](output) if 0 in outputs else output
        return type(output)(outputs[i](value) if i in outputs else value for i, value in enumerate(output))

    return hook

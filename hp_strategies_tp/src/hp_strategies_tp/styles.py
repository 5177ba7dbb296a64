"""What a style means for the parameters of the module that has it."""

from __future__ import annotations

from torch import nn
from transformers.pytorch_utils import Conv1D

from hp_core import ParamFragment, Partial, PlanError, Replicate, Shard
from hp_strategies_tp.hf_plan import Style

AXIS = "tp"


def column_dim(module: nn.Module, weight: nn.Parameter) -> int:
    """The dim of `weight` that makes the outputs of a linear module."""
    return weight.ndim - 1 if isinstance(module, Conv1D) else weight.ndim - 2


def row_dim(module: nn.Module, weight: nn.Parameter) -> int:
    """The dim of `weight` that takes the inputs of a linear module."""
    return weight.ndim - 2 if isinstance(module, Conv1D) else weight.ndim - 1


def num_outputs(module: nn.Module) -> int:
    """Length of the last dim of what a linear module gives."""
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    return weight.shape[column_dim(module, weight)]


def num_inputs(module: nn.Module) -> int:
    """Length of the last dim of what a linear module takes."""
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    return weight.shape[row_dim(module, weight)]


def column_parameters(fqn: str, module: nn.Module, source: str) -> dict[str, ParamFragment]:
    """Outputs split: each rank makes a share of the output features."""
    fragments = {}
    for name, param in _linear_parameters(fqn, module):
        if name == "weight":
            fragments[f"{fqn}.{name}"] = sharded(column_dim(module, param), source)
        else:
            is_split = param.ndim == 1 and len(param) == num_outputs(module)
            fragments[f"{fqn}.{name}"] = sharded(0, source) if is_split else summed(source)
    return fragments


def row_parameters(fqn: str, module: nn.Module, source: str) -> dict[str, ParamFragment]:
    """Inputs split: each rank makes a share of the sum. The bias enters the sum once, with the first rank."""
    fragments = {}
    for name, param in _linear_parameters(fqn, module):
        if name == "weight":
            fragments[f"{fqn}.{name}"] = sharded(row_dim(module, param), source)
        else:
            fragments[f"{fqn}.{name}"] = once(source) if name == "bias" else summed(source)
    return fragments


def _linear_parameters(fqn: str, module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Weight, bias and what scales the output."""
    parameters = list(module.named_parameters(recurse=False))
    unknown = [name for name, param in parameters if name != "weight" and param.ndim > 1]
    if unknown or "weight" not in dict(parameters) or dict(parameters)["weight"].ndim < 2:
        raise PlanError(
            f"{fqn}: the model's plan splits it as a linear module, but {type(module).__name__} is none that hp knows "
            f"(parameters: {', '.join(name for name, _ in parameters) or 'none'})"
        )
    return parameters


def single_parameter(fqn: str, param: nn.Parameter, style: Style, source: str) -> ParamFragment:
    """A parameter that is styled by itself: stacked experts, or a vector with an entry per head."""
    if style is Style.ADDED_ONCE:
        return once(source)
    dim = {
        Style.COLUMN: max(param.ndim - 2, 0),
        Style.ROW: param.ndim - 1,
        Style.PACKED_COLUMN: max(param.ndim - 2, 0),
        Style.PACKED_ROW: param.ndim - 1,
    }.get(style)
    if dim is None:
        raise PlanError(f'{fqn}: style "{style.value}" is for modules, not for a parameter')
    if style in (Style.PACKED_COLUMN, Style.PACKED_ROW):
        return sharded(dim, source, sections=(param.shape[dim] // 2,) * 2)
    return sharded(dim, source)


def sharded(dim: int, source: str, sections: tuple[int, ...] = ()) -> ParamFragment:
    """Split along `dim`; its gradient is each rank's own."""
    placement = Shard(dim, sections)
    return ParamFragment(layout={AXIS: placement}, grad={AXIS: placement}, source=source)


def summed(source: str) -> ParamFragment:
    """Whole on every rank, used on its share only: the gradients are summed."""
    return ParamFragment(layout={AXIS: Replicate()}, grad={AXIS: Partial()}, source=source)


def once(source: str) -> ParamFragment:
    """Whole on every rank, used by the first one only."""
    return ParamFragment(layout={AXIS: Replicate()}, compute={AXIS: Partial()}, grad={AXIS: Partial()}, source=source)


def grouped(groups: int, source: str) -> ParamFragment:
    """Whole on every rank, which uses the chunk of its group."""
    return ParamFragment(
        layout={AXIS: Replicate()}, compute={AXIS: Replicate(groups)}, grad={AXIS: Partial()}, source=source
    )

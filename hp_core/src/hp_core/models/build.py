"""Building a HuggingFace model whose parameters are on the meta device and whose buffers are real.

Buffers (rotary tables, masks, a user's own constants) are in no checkpoint, or small; they are computed on the CPU
by the model's own code, exactly as in a normal build. Parameters leave for the meta device when their module
registers them, so that at most one of them is in memory, and mostly none: `torch.empty` does not touch its pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PreTrainedModel
from transformers.core_model_loading import build_glob_alternation

from hp_core.errors import ModelError
from hp_core.models.writes import TensorWrites

INITIAL_VALUES = "hp_initial_values"
_MAX_KEPT_NUMEL = 1 << 16


def build_on_meta(construct: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """Call `construct` so that the model's parameters end on the meta device and its buffers are real.

    Parameters get the dtype that HF's `from_pretrained` would give them (`_keep_in_fp32_modules` included); tied
    ones are tied. Values that constructors gave to parameters (a norm's ones) are kept, where they are one number or
    few, in `model.hp_initial_values`, FQN to tensor, for random init. The result does not depend on, and
    does not change, the global random state. Raises ModelError for a buffer that has no values.
    """
    values: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
    with torch.random.fork_rng(devices=[]), TensorWrites() as writes:
        torch.default_generator.manual_seed(0)
        with _parameters_on_meta(writes, values), _no_weight_init():
            model = construct()
        fill_buffers(model)
    _keep_in_fp32(model)
    _check_buffers(model, writes)
    initial = {name: values[param] for name, param in model.named_parameters() if param in values}
    setattr(model, INITIAL_VALUES, initial)
    return model


def modules_in_init_order(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module, PreTrainedModel]]:
    """Every module once, children before parents, with its FQN and the (sub-)model whose `_init_weights` treats it."""
    seen: set[nn.Module] = set()

    def visit(name: str, module: nn.Module, owner: PreTrainedModel) -> Iterator[tuple[str, nn.Module, PreTrainedModel]]:
        if module in seen:
            return
        seen.add(module)
        if isinstance(module, PreTrainedModel):
            owner = module
        for child_name, child in module.named_children():
            yield from visit(f"{name}.{child_name}" if name else child_name, child, owner)
        yield name, module, owner

    yield from visit("", model, model)


def fill_buffers(model: PreTrainedModel) -> None:
    """Let HF compute the buffers once more: as `from_pretrained` does, under torch's default dtype.

    Constructors run under the model's dtype, in which a frequency computed on the way would be rounded.
    """
    with torch.no_grad():
        for _, module, owner in modules_in_init_order(model):
            if any(buffer is not None for buffer in module._buffers.values()):
                owner._init_weights(module)


@contextmanager
def _parameters_on_meta(writes: TensorWrites, values: WeakTensorKeyDictionary) -> Iterator[None]:
    moved: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def move(module: nn.Module, name: str, param: nn.Parameter) -> nn.Parameter:
        if param.is_meta:
            return param
        if param not in moved:
            # One parameter registered in two places stays one.
            moved[param] = meta = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
            meta.__dict__.update(param.__dict__)
            if not writes.is_unwritten(param) and (value := _compact(param.detach())) is not None:
                values[meta] = value
        found: nn.Parameter = moved[param]
        return found

    handle = register_module_parameter_registration_hook(move)  # type: ignore[arg-type]  # it may return
    try:
        yield
    finally:
        handle.remove()


def _compact(value: torch.Tensor) -> torch.Tensor | None:
    """`value`, as one number expanded to its shape if it is constant; None when it is neither that nor small."""
    if value.numel() and bool((value == value.flatten()[0]).all()):
        return value.flatten()[0].clone().expand(value.shape)
    return value.clone() if value.numel() <= _MAX_KEPT_NUMEL else None


@contextmanager
def _no_weight_init() -> Iterator[None]:
    """Constructors end in HF's weight init, which has nothing to do on the meta device; tying stays."""
    original = PreTrainedModel.initialize_weights
    PreTrainedModel.initialize_weights = lambda self: None
    try:
        yield
    finally:
        PreTrainedModel.initialize_weights = original


def _keep_in_fp32(model: PreTrainedModel) -> None:
    plan = model._get_dtype_plan(model.config.dtype)
    if not plan:
        return
    pattern, names, _ = build_glob_alternation(list(plan))
    for name, tensor in model.state_dict(keep_vars=True).items():
        match = pattern.search(name)
        if match is not None and tensor.is_floating_point():
            tensor.data = tensor.data.to(plan[names[match.lastgroup]])


def _check_buffers(model: PreTrainedModel, writes: TensorWrites) -> None:
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ModelError(
                f"{type(model).__name__}: buffer {name} has no values: it is made from a parameter or on the meta "
                "device. Compute it from the config in the constructor."
            )
        if writes.is_unwritten(buffer):
            raise ModelError(
                f"{type(model).__name__}: buffer {name} has no values: neither its constructor nor _init_weights "
                "writes any. Give it values in the constructor."
            )

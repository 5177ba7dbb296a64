"""Whether a model keeps the documents of a packed row apart.

hp calls a model with per-document `position_ids`, no attention mask and no cache. transformers then derives the
borders from the positions, but only where a model hands them to its mask functions, and only attention has masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from hp_core.models.blocks import decoder_blocks

# Layer types of transformers that see other tokens only through the mask, or see no other tokens.
_MASKED_LAYER_TYPES = frozenset(
    ("full_attention", "sliding_attention", "chunked_attention", "indexed_attention", "moe", "mlp", "sparse", "dense")
)
_POSITIONS = (0, 1, 0, 1)  # two documents of two tokens


def packing_fault(model: PreTrainedModel, *, micro_batch_size: int) -> str | None:
    """Why `model` would let the documents of a packed row see each other; None when it keeps them apart.

    Looks at the kinds of layers, then at the masks that the model's own code makes for two packed documents. Needs
    no weights: parameters may be on the meta device. Cheap, since no block runs.
    """
    name = type(model).__name__
    attention = str(model.config._attn_implementation)
    if "flash" in attention and micro_batch_size > 1:
        return (
            f"{name}: attention {attention} keeps packed documents apart only with training.micro_batch_size: 1, "
            f"found {micro_batch_size}"
        )
    layer_types = getattr(model.config.get_text_config(), "layer_types", None) or []
    for i, layer_type in enumerate(layer_types):
        if layer_type not in _MASKED_LAYER_TYPES:
            return f"{name}: layer {i} ({layer_type}) carries state over the borders of packed documents"
    for fqn, module in model.named_modules():
        if isinstance(module, nn.Conv1d):
            return f"{name}: the convolution {fqn} mixes tokens over the borders of packed documents"
    if model._is_stateful:
        return f"{name}: carries state over the borders of packed documents"
    try:
        masks = _masks_seen(model)
    except Exception as error:  # a model's own code may raise anything, and would in training
        return f"{name}: cannot be called with two packed documents: {' '.join(str(error).split())}"
    if not masks:
        return f"{name}: makes its attention masks itself, without regard to packed documents"
    if not all(masks):
        return f"{name}: does not give position_ids to its attention masks, so packed documents see each other"
    return None


class _FirstBlockReachedError(Exception):
    """Masks are made before the blocks run; what follows is of no interest."""


def _masks_seen(model: PreTrainedModel) -> list[bool]:
    """For each mask that the model makes: does it keep the second of two documents from seeing the first?"""
    found: list[bool] = []
    tensors = {name: _zeros_like(tensor) for name, tensor in model.named_parameters()}
    tensors |= {name: _zeros_like(tensor) for name, tensor in model.named_buffers() if tensor.device.type != "cpu"}
    inputs = {
        "input_ids": torch.zeros(1, len(_POSITIONS), dtype=torch.int64),
        "position_ids": torch.tensor([_POSITIONS]),
        "use_cache": False,
    }

    def stop(*_: Any) -> None:
        raise _FirstBlockReachedError

    hooks = [block.register_forward_pre_hook(stop) for block in decoder_blocks(model).values()]
    try:
        with _watched_masks(found), torch.no_grad():
            functional_call(model, tensors, kwargs=inputs)
    except _FirstBlockReachedError:
        pass
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _zeros_like(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros of the same shape on the CPU, in the memory of one element."""
    return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)


@contextmanager
def _watched_masks(found: list[bool]) -> Iterator[None]:
    """Note in `found` what every mask function that transformers calls is asked for."""
    names = ALL_MASK_ATTENTION_FUNCTIONS.valid_keys()
    for name in names:
        ALL_MASK_ATTENTION_FUNCTIONS[name] = partial(_watch, found, ALL_MASK_ATTENTION_FUNCTIONS[name])
    try:
        yield
    finally:
        for name in names:
            del ALL_MASK_ATTENTION_FUNCTIONS[name]  # the override, not what is registered


def _watch(found: list[bool], make_mask: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    first = torch.tensor(0)
    second_document, first_document = torch.tensor([[2], [3]]), torch.tensor([[0, 1]])
    visible = kwargs["mask_function"](first, first, second_document, first_document)
    found.append(not bool(torch.as_tensor(visible).any()))
    return make_mask(*args, **kwargs)

"""Cropping a model to its first layers, for trials of a large model on a small machine."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from hp_core.errors import ModelError
from hp_core.models.blocks import decoder_blocks
from hp_core.models.source import one_line


def crop_config(config: PretrainedConfig, num_hidden_layers: int) -> PretrainedConfig:
    """A copy of `config` with the first `num_hidden_layers` layers; widths, experts and vocabulary stay.

    Lists with one entry per layer (`layer_types` …) are shortened with it. Raises ModelError for a count that the
    model does not have, or whose config does not take it.
    """
    cropped = copy.deepcopy(config)
    text = cropped.get_text_config()
    total = getattr(text, "num_hidden_layers", None)
    what = f"model.num_hidden_layers: {num_hidden_layers}"
    if not isinstance(total, int):
        raise ModelError(f"{what}: {type(text).__name__} has no num_hidden_layers to change. Remove the key.")
    if not 1 <= num_hidden_layers <= total:
        raise ModelError(f"{what}: the model has {total} layers. Use 1 to {total}.")
    per_layer = {key: value for key, value in text.to_dict().items() if _is_per_layer(key, value, total)}
    try:
        text.num_hidden_layers = num_hidden_layers
        for key, value in per_layer.items():
            setattr(text, key, value[:num_hidden_layers])
    except Exception as error:  # Config classes are code of transformers, the user or a repository.
        raise ModelError(f"{what}: {type(text).__name__} does not take it: {one_line(error)}") from error
    if text.num_hidden_layers != num_hidden_layers:
        raise ModelError(f"{what}: {type(text).__name__} makes {text.num_hidden_layers} layers of it.")
    return cropped


def check_cropped(cropped: nn.Module, original: nn.Module, num_layers: int, original_num_layers: int) -> None:
    """Raises ModelError unless the blocks of `cropped` are the first of `original`, with nothing different in them.

    Some models use layers several times, choose what a layer is by counting from the last one, or have parameters
    for all layers in one.
    """
    blocks, all_blocks = decoder_blocks(cropped), decoder_blocks(original)
    who = f"model.num_hidden_layers: {num_layers}: {type(cropped).__name__} cannot be cropped to its first layers"
    if len(blocks) * original_num_layers != len(all_blocks) * num_layers:
        raise ModelError(
            f"{who}: {original_num_layers} layers are {len(all_blocks)} blocks, {num_layers} are {len(blocks)}. "
            "Use another number or remove the key."
        )
    shapes = {fqn: param.shape for fqn, param in original.named_parameters()}
    for fqn, param in cropped.named_parameters():
        if shapes.get(fqn) != param.shape:
            raise ModelError(f"{who}: {fqn} would not have the shape that it has in the whole model. Remove the key.")
    for fqn, block in blocks.items():
        whole = dict(_describe(all_blocks[fqn]))
        for name, description in _describe(block):
            if whole.pop(name, None) != description:
                raise ModelError(f"{who}: {fqn}{name} would not be what it is in the whole model. Remove the key.")
        if whole:
            raise ModelError(f"{who}: {fqn}{next(iter(whole))} would be missing. Remove the key.")


def _is_per_layer(key: str, value: Any, total: int) -> bool:
    return isinstance(value, list) and len(value) == total and ("layer" in key or key.endswith("_types"))


def _describe(block: nn.Module) -> Iterator[tuple[str, object]]:
    """What a block is made of: per submodule its class and its plain settings.

    Not floats: some models scale what a layer adds by the number of layers, which is right for a cropped one too.
    """
    for fqn, module in block.named_modules():
        settings = {key: value for key, value in vars(module).items() if isinstance(value, (bool, int, str))}
        yield f".{fqn}" if fqn else "", (type(module).__name__, settings)

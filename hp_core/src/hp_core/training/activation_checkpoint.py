"""Activation checkpointing: decoder blocks that compute their activations again in backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from hp_core.errors import ConfigError

MODES = ("off", "full", "selective")

_aten = torch.ops.aten
# What selective mode keeps: the results that cost most to compute again.
_KEPT = [
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten._grouped_mm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_fused_attention_overrideable.default,
]


def apply_activation_checkpoint(blocks: Mapping[str, nn.Module], mode: str) -> None:
    """Make each of `blocks` keep only its inputs (full), or its inputs, matrix products and attention (selective).

    The forward of each instance is replaced, not the module: names, classes and hooks stay, and hooks (FSDP's cast of
    the inputs, its gathering of parameters) run outside of what is computed again. Dropout draws the same numbers
    again. Raises ConfigError for an unknown mode.
    """
    if mode not in MODES:
        raise ConfigError(f'activation_checkpoint.mode: unknown mode "{mode}". Use {", ".join(MODES)}.')
    if mode == "off":
        return
    for block in blocks.values():
        # An instance attribute shadows the class's method; Module.__call__ finds it inside of the hooks.
        block.forward = _checkpointed(block.forward, selective=mode == "selective")


def _checkpointed(forward: Callable[..., Any], selective: bool) -> Callable[..., Any]:
    options: dict[str, Any] = {"use_reentrant": False}
    if selective:
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _KEPT)

    @functools.wraps(forward)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, **options, **kwargs)

    return wrapper

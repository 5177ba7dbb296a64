"""Arithmetic of training, for TFLOP/s and MFU (model FLOPs utilisation)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

# Dense bf16 FLOP/s of one device, from data sheets. Keys are parts of device names; the first that fits counts.
_PEAK_FLOPS = {
    "A100": 312e12,
    "A800": 312e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H20": 148e12,
    "B200": 2250e12,
    "L40S": 362e12,
    "910B2": 376e12,
    "910B3": 313e12,
    "910B4": 280e12,
}
# What configurations call the number of experts that a token visits.
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_top_k", "top_k_experts")


def flops_per_token(model: nn.Module, seq_length: int) -> float | None:
    """FLOPs of forward and backward per token of a sequence of `seq_length`; None when the model's are not known.

    6 N + 12 · heads · head_dim · context, the last summed over layers with softmax attention (Chowdhery et al. 2022,
    "PaLM", appendix B): N counts the weights that multiply an activation, so the head but no embedding, norm or bias,
    and of each expert weight the share that a token visits. `context` is `seq_length` or the attention window; as in
    the paper causality is not deducted, and recomputation, convolutions' and state-space scans are not counted.
    `model` may be on the meta device or sharded.
    """
    config: Any = model.config
    config = config.get_text_config()
    weights = 0.0
    for fqn, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            continue
        # Module by module, because a tied head shares its weight with an embedding but multiplies.
        for name, param in module.named_parameters(recurse=False):
            if param.ndim < 2 or "bias" in name:
                continue
            is_expert = "experts" in fqn.split(".") or (param.ndim == 3 and not isinstance(module, nn.Conv1d))
            share = _visited_share(config, param) if is_expert else 1.0
            if share is None:
                return None
            weights += param.numel() * share
    return 6 * weights + _attention_flops(config, seq_length)


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 FLOP/s that `device` could do; None for the CPU and for devices that are not in the table."""
    if device.type == "cpu":
        return None
    name: str = torch.get_device_module(device).get_device_name(device)
    return next((flops for part, flops in _PEAK_FLOPS.items() if part in name), None)


def _visited_share(config: Any, param: nn.Parameter) -> float | None:
    """How much of an experts weight `[E, ..., ...]` a token uses; None when that cannot be told."""
    visited = next((getattr(config, name) for name in _EXPERTS_PER_TOKEN if hasattr(config, name)), None)
    return None if visited is None or param.ndim != 3 else visited / param.shape[0]


def _attention_flops(config: Any, seq_length: int) -> float:
    """Scores and weighted values of all layers with softmax attention; other kinds of layers count nothing."""
    total = 0.0
    for index in range(config.num_hidden_layers):
        layer = config.per_layer_config[index]
        heads = getattr(layer, "num_attention_heads", None)
        if not heads:
            continue
        window = getattr(layer, "sliding_window", None) or seq_length
        kinds = getattr(layer, "layer_types", None)
        context = {
            "full_attention": seq_length,
            "sliding_attention": window,
            "chunked_attention": getattr(layer, "attention_chunk_size", None) or seq_length,
        }.get(kinds[index] if kinds else "sliding_attention", 0)
        query_dim = value_dim = getattr(layer, "head_dim", None) or layer.hidden_size // heads
        if getattr(layer, "qk_nope_head_dim", None):  # multi-head latent attention
            query_dim, value_dim = layer.qk_nope_head_dim + layer.qk_rope_head_dim, layer.v_head_dim
        total += 6 * heads * (query_dim + value_dim) * min(seq_length, context)
    return total

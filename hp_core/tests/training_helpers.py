"""Tiny random models for the tests of the training loop's parts."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

_COMMON = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
_MOE = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24}
_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _COMMON,
    "qwen3_moe": _COMMON | _MOE,
    "gemma3_text": _COMMON | {"sliding_window": 4, "query_pre_attn_scalar": 8},
}


def tiny_model(model_type: str, **changes: Any) -> PreTrainedModel:
    """A random fp32 model of `model_type`, the same on every call."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **(_CONFIGS[model_type] | changes))
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def tiny_batch(rows: int = 2, length: int = 16) -> torch.Tensor:
    """Token ids `[rows, length]`."""
    return torch.randint(0, 64, (rows, length), generator=torch.Generator().manual_seed(1))


def loss_of(model: torch.nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
    """A scalar that every parameter takes part in."""
    logits = model(input_ids=input_ids, use_cache=False).logits.float()
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())

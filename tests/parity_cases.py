"""What the parity tests train: tiny models of real architectures, and batches that make wrong scaling visible."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hp_core import IGNORE_INDEX, Batch

VOCAB, ROWS, LENGTH = 96, 16, 16

_BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MLA = {"kv_lora_rank": 8, "q_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _BASE),
    "qwen3_tied": ("qwen3", {**_BASE, "head_dim": 8, "tie_word_embeddings": True, "vocab_size": 95}),
    "qwen3_untied": ("qwen3", {**_BASE, "head_dim": 8, "tie_word_embeddings": False}),
    "qwen3_moe": ("qwen3_moe", {**_BASE, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    "gemma3": ("gemma3_text", {**_BASE, "head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8}),
    "gpt2": (
        "gpt2",
        {
            "vocab_size": VOCAB,
            "n_embd": 32,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 64,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            **_BASE,
            **_MLA,
            "num_key_value_heads": 4,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "hrm_text": ("hrm_text", {**_BASE, "head_dim": 8}),
    "kimi_linear": (
        "kimi_linear",
        {
            **_BASE,
            **_MLA,
            "num_key_value_heads": 4,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 16,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
}
# Linear attention carries state across document edges: these rows hold one document each.
UNPACKED = {"kimi_linear"}


def make_checkpoint(name: str, folder: Path) -> None:
    """Random weights of case `name`, saved by plain transformers. Norms and biases are not left at ones and zeros."""
    model_type, arguments = CASES[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **arguments), dtype=torch.float32)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.05)
    model.save_pretrained(folder)


def reference_model(folder: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.train()


def global_batch(name: str, seed: int = 0) -> Batch:
    """`ROWS` rows with very different numbers of valid tokens: the first half has few, one row has none at all."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(3, VOCAB - 1, (ROWS, LENGTH), generator=generator)
    labels = torch.roll(input_ids, -1, dims=1)
    labels[:, -1] = IGNORE_INDEX
    labels[: ROWS // 2, 3:] = IGNORE_INDEX
    labels[1] = IGNORE_INDEX
    edge = LENGTH if name in UNPACKED else 10
    index = torch.arange(LENGTH).expand(ROWS, LENGTH)
    if edge < LENGTH:
        labels[:, edge - 1] = IGNORE_INDEX
    return Batch(
        input_ids=input_ids,
        labels=labels,
        position_ids=torch.where(index < edge, index, index - edge),
        document_ids=(index >= edge).long(),
    )


def slice_rows(batch: Batch, rows: slice) -> Batch:
    return Batch(batch.input_ids[rows], batch.labels[rows], batch.position_ids[rows], batch.document_ids[rows])


def reference_loss(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """Mean cross-entropy over the valid tokens of the whole batch, by plain HF in one process."""
    logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
    total = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )
    return total / batch.num_valid_tokens

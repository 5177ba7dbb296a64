"""Models whose own loss has more terms than hp trains are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from transformers import AutoConfig

from hp_core import pipeline
from hp_core.errors import ModelError

SHAPE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "attn_layer_indices": [1]}


@pytest.mark.parametrize(
    ("model_type", "arguments", "key", "off", "on"),
    [
        ("qwen3_moe", EXPERTS, "output_router_logits", False, True),
        ("bamba", MAMBA, "z_loss_coefficient", 0.0, 0.1),
    ],
)
def test_a_further_term_is_refused_and_its_absence_is_not(
    tmp_path: Path, model_type: str, arguments: dict[str, Any], key: str, off: object, on: object
) -> None:
    path = tmp_path / "run.yaml"
    target = "hp_core.models.HyperAutoModelForCausalLM.from_config"
    model = {"_target_": target, "config_path": str(tmp_path)}
    OmegaConf.save(OmegaConf.create({"model": model, "dataset": {"path": "x", "packing": False}}), path)
    loaded = pipeline.load(path)
    shape = {**SHAPE, **HEADS, **arguments}
    AutoConfig.for_model(model_type, **shape, **{key: off}).save_pretrained(tmp_path)
    pipeline.build_model(loaded.config, loaded.plugins)
    AutoConfig.for_model(model_type, **shape, **{key: on}).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=rf"{key}: {on} .* adds a term .* Set it to"):
        pipeline.build_model(loaded.config, loaded.plugins)

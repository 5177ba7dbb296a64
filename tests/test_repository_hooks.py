"""Every hook of the contract is called, in firing order, and what it gives is used."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from all_hooks_plugin import AllHooks, OtherNorm

from hp_core import hookspecs, pipeline
from hp_core.testing import RankPools
from hp_core.training.device import select_device
from hp_core.training.step import accumulate_gradients

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
}
CONFIG = """
model:
  _target_: hp_core.models.HyperAutoModelForCausalLM.from_config
  config_path: {folder}
training: {{train_iters: 1, global_batch_size: 4, backend: gloo}}
dataset: {{path: {folder}/data.jsonl, format: tokens, seq_length: 8}}
strategies: [{{name: all_hooks, extra_loss: 0.25}}]
"""
METADATA = "Metadata-Version: 2.1\nName: all-hooks\nVersion: 1.0\nRequires-Dist: hp-core>=0.1\n"


def train_one_step(folder: Path) -> dict[str, Any]:
    sys.path.insert(0, str(folder))
    device = select_device("gloo")
    session = pipeline.prepare(pipeline.load(folder / "train.yaml"), device)
    micro_batches = pipeline.training_job(session).loader.next_step()
    assert micro_batches is not None
    loss = accumulate_gradients(session.model, micro_batches, session.mesh, session.plan, session.calls)
    from all_hooks_plugin import plugin  # the instance that the entry point named in this process

    assert isinstance(plugin, AllHooks)
    return {
        "fired": list(dict.fromkeys(plugin.fired)),
        "micro_batches": plugin.micro_batches,
        "terms": dict(loss.terms),
        "valid": loss.num_valid_tokens,
        "layers": len(session.model.model.layers),
        "replaced": isinstance(session.model.model.norm, OtherNorm),
        "weights": {float(value) for param in session.model.parameters() for value in torch.unique(param.detach())},
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "data.jsonl").write_text(json.dumps({"input_ids": [i % 32 for i in range(40)]}) + "\n")
    (tmp_path / "train.yaml").write_text(CONFIG.format(folder=tmp_path) + f"output_dir: {tmp_path}/out\n")
    metadata = tmp_path / "all_hooks-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(METADATA)
    (metadata / "entry_points.txt").write_text("[hp.plugins]\nall_hooks = all_hooks_plugin:plugin\n")
    return tmp_path


def test_every_hook_fires_in_order_and_its_answer_is_used(pool: RankPools, folder: Path) -> None:
    contract = [name for name in vars(hookspecs) if name.startswith("hp_")]
    results = pool(2).run(train_one_step, folder)
    for result in results:
        assert result["fired"][:5] == contract[:5]
        assert sorted(result["fired"][5:]) == sorted(contract[5:])
        assert result["micro_batches"] == [(0, 2), (1, 2)]
        assert result["layers"] == 1
        assert result["replaced"]
        assert result["weights"] == {0.5}
        assert result["terms"]["extra"] == pytest.approx(0.25)
        # All weights are equal, so all logits of a token are.
        assert result["terms"]["ce"] == pytest.approx(math.log(32), rel=1e-5)
        assert result["valid"] == 4 * 7, "the first label of every row is ignored"

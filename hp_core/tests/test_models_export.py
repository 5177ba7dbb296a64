"""HF in, HF out: what is exported has the names, dtypes, ties and files of the source, and the same logits."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models_cases import draw, make_config, make_plan, plain_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_models_auto import OwnLlama, write_repository_model
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import AutoModelForCausalLM, PreTrainedModel

from hp_core.errors import CheckpointError, ConfigError
from hp_core.models import (
    HyperAutoModelForCausalLM,
    export_hf,
    load_weights,
    materialize,
    save_assets,
)

TIED = {"tie_word_embeddings": True}
UNTIED = {"tie_word_embeddings": False}
BYTES = "150KB"


def save_training_checkpoint(model: PreTrainedModel, folder: Path) -> Path:
    """A training checkpoint of a model on the CPU, as hp writes it: each shared weight once, under its first name."""
    aliases = dict(model.named_parameters(remove_duplicate=False)).keys() - dict(model.named_parameters()).keys()
    state = {f"model.{fqn}": value for fqn, value in model.state_dict().items() if fqn not in aliases}
    save({**state, "optimizer.step": torch.tensor(3)}, checkpoint_id=folder, no_dist=True)
    (folder / "hf").mkdir()
    save_assets(model, folder / "hf")
    return folder


def load_into_memory(template: PreTrainedModel) -> PreTrainedModel:
    """The model, filled as one rank of one does it."""
    plan, model = make_plan(template), copy.deepcopy(template)
    materialize(model, plan, "cpu")
    load_weights(model, plan, template, 0, seed=1)
    return model.eval()


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}


def read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def logits(model: PreTrainedModel) -> torch.Tensor:
    """Of a copy: tensors mapped from a file are aligned as the file happens to be, which changes last bits."""
    with torch.no_grad():
        return copy.deepcopy(model)(input_ids=torch.arange(12).reshape(1, 12), use_cache=False).logits


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe", "nemotron_h", "gpt2"])
def test_random_models_are_filled_as_drawn_and_exported(model_type: str, tmp_path: Path) -> None:
    template = HyperAutoModelForCausalLM.from_config(make_config(model_type, **TIED))
    model = load_into_memory(template)
    drawn = draw(template, seed=1)
    assert all(torch.equal(param, drawn[fqn]) for fqn, param in model.named_parameters())
    export_hf(save_training_checkpoint(model, tmp_path / "checkpoint"), tmp_path / "out")
    again, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert torch.equal(logits(again), logits(model))


def test_missing_tensors_are_drawn_where_that_is_allowed(tmp_path: Path) -> None:
    source = tmp_path / "source"
    plain_model("llama", **UNTIED).save_pretrained(source)
    tensors = read_tensors(source)
    del tensors["lm_head.weight"]
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    template = HyperAutoModelForCausalLM.from_pretrained(source, init_missing_weights=True)
    model = load_into_memory(template)
    assert torch.equal(model.lm_head.weight, draw(template, seed=1)["lm_head.weight"])
    assert all(torch.equal(model.get_parameter(fqn), value) for fqn, value in tensors.items())


def test_repository_code_and_tokenizer_files_come_along(tmp_path: Path) -> None:
    write_repository_model(tmp_path / "source")
    (tmp_path / "source/tokenizer.json").write_text('{"a": 1}')
    (tmp_path / "source/generation_config.json").write_text('{"top_k": 7}')
    template = HyperAutoModelForCausalLM.from_config(tmp_path / "source", trust_remote_code=True)
    model = load_into_memory(template)
    export_hf(save_training_checkpoint(model, tmp_path / "checkpoint"), tmp_path / "out")
    for name in ("tokenizer.json", "generation_config.json", "modeling_bow.py"):
        assert (tmp_path / "out" / name).read_text() == (tmp_path / "source" / name).read_text()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True).state_dict()
    assert all(torch.equal(again[fqn], value) for fqn, value in model.state_dict().items())


@pytest.mark.parametrize("shard_size", ["1KB", BYTES])
def test_files_hold_what_the_index_says_whatever_their_size(shard_size: str, tmp_path: Path) -> None:
    model = load_into_memory(HyperAutoModelForCausalLM.from_config(make_config("qwen3_moe")))
    checkpoint = save_training_checkpoint(model, tmp_path / "checkpoint")
    export_hf(checkpoint, tmp_path / "whole")
    export_hf(checkpoint, tmp_path / "out", max_shard_size=shard_size)
    whole, parts = read_tensors(tmp_path / "whole"), read_tensors(tmp_path / "out")
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1


def test_export_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    model = load_into_memory(HyperAutoModelForCausalLM.from_config(make_config("llama")))
    checkpoint = save_training_checkpoint(model, tmp_path / "checkpoint")
    with pytest.raises(ConfigError, match="export --dtype: int4 is not a floating-point dtype"):
        export_hf(checkpoint, tmp_path / "out", "int4")
    with pytest.raises(CheckpointError, match="is not a training checkpoint of hp"):
        export_hf(tmp_path, tmp_path / "out")
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        export_hf(checkpoint, checkpoint)
    config = json.loads((checkpoint / "hf/config.json").read_text())
    (checkpoint / "hf/config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    with pytest.raises(CheckpointError, match=r"has no model\.model\.layers\.3\."):
        export_hf(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_export_that_fails_leaves_nothing_and_the_next_succeeds(tmp_path: Path) -> None:
    model = load_into_memory(HyperAutoModelForCausalLM.from_config(make_config("llama")))
    checkpoint = save_training_checkpoint(model, tmp_path / "checkpoint")
    data = next(checkpoint.glob("*.distcp"))
    content = data.read_bytes()
    data.write_bytes(content[: len(content) // 2])
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="cannot be read") as raised:
        export_hf(checkpoint, tmp_path / "out")
    assert "\n" not in str(raised.value)
    assert not list((tmp_path / "out").iterdir())
    data.write_bytes(content)
    export_hf(checkpoint, tmp_path / "out")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(model))

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


@pytest.mark.parametrize(
    "model_type", ["llama", "gpt2", "qwen3_moe", "hrm_text", "kimi_linear", "deepseek_v3", "jamba"]
)
def test_ls08_export_equals_the_source_checkpoint(model_type: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain_model(model_type).save_pretrained(tmp_path / "source")
    model = load_into_memory(HyperAutoModelForCausalLM.from_pretrained(tmp_path / "source"))
    export_hf(save_training_checkpoint(model, tmp_path / "checkpoint"), tmp_path / "out")
    source, exported = read_tensors(tmp_path / "source"), read_tensors(tmp_path / "out")
    assert exported.keys() == source.keys()
    for name, value in source.items():
        assert exported[name].dtype == value.dtype
        assert torch.equal(exported[name], value), name
    assert read_config(tmp_path / "out") == read_config(tmp_path / "source")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(model))


def test_ls08_a_source_with_stacked_experts_is_exported_with_stacked_experts(tmp_path: Path) -> None:
    plain_model("qwen3_moe").save_pretrained(tmp_path / "source", save_original_format=False)
    assert "model.layers.0.mlp.experts.down_proj" in read_tensors(tmp_path / "source")
    model = load_into_memory(HyperAutoModelForCausalLM.from_pretrained(tmp_path / "source"))
    export_hf(save_training_checkpoint(model, tmp_path / "checkpoint"), tmp_path / "out")
    assert read_tensors(tmp_path / "out").keys() == read_tensors(tmp_path / "source").keys()
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(model))


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, None], ids=["from fp32", "from bf16", "random"])
@pytest.mark.parametrize("train", ["float32", "bfloat16"])
@pytest.mark.parametrize("export", [None, "float32", "bfloat16"])
def test_ls09_float_tensors_have_exactly_the_dtype_that_was_asked_for(
    source: torch.dtype | None, train: str, export: str | None, tmp_path: Path
) -> None:
    config = make_config("nemotron_h")
    if source is None:
        template = HyperAutoModelForCausalLM.from_config(config, torch_dtype=train)
    else:
        plain_model("nemotron_h").to(source).save_pretrained(tmp_path / "source")
        template = HyperAutoModelForCausalLM.from_pretrained(tmp_path / "source", torch_dtype=train)
    model = load_into_memory(template)
    checkpoint = save_training_checkpoint(model, tmp_path / "checkpoint")
    export_hf(checkpoint, tmp_path / "out", export)
    exported = read_tensors(tmp_path / "out")
    names = read_tensors(tmp_path / "source") if source is not None else {}
    for name, value in exported.items():
        if export is not None:
            assert value.dtype == getattr(torch, export), name
        elif source is not None:
            assert value.dtype == names[name].dtype, name
    main = export or (str(source).removeprefix("torch.") if source is not None else train)
    assert read_config(tmp_path / "out")["dtype"] == main


def test_ls09_dtypes_are_those_of_each_source_tensor_and_integers_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source in bf16 with one tensor in fp32, and a model with a persistent int64 buffer."""
    own = type("CountingLlama", (OwnLlama,), {"__init__": _init_with_buffer, "__module__": __name__})
    monkeypatch.setitem(globals(), "CountingLlama", own)
    model = own(make_config("llama", **UNTIED)).to(torch.bfloat16)
    model.lm_head.float()
    model.save_pretrained(tmp_path / "source")
    template = HyperAutoModelForCausalLM.from_pretrained(
        tmp_path / "source", model_class=f"{__name__}.CountingLlama", torch_dtype="float32"
    )
    checkpoint = save_training_checkpoint(load_into_memory(template), tmp_path / "checkpoint")
    export_hf(checkpoint, tmp_path / "out")
    found = {name: value.dtype for name, value in read_tensors(tmp_path / "out").items()}
    assert found == {name: value.dtype for name, value in read_tensors(tmp_path / "source").items()}
    assert found["lm_head.weight"] == torch.float32
    assert found["steps"] == torch.int64
    assert read_config(tmp_path / "out")["dtype"] == "bfloat16"
    export_hf(checkpoint, tmp_path / "half", "float16")
    half = {name: value.dtype for name, value in read_tensors(tmp_path / "half").items()}
    assert half.pop("steps") == torch.int64
    assert set(half.values()) == {torch.float16}


def _init_with_buffer(self: OwnLlama, config: Any) -> None:
    super(OwnLlama, self).__init__(config)
    self.register_buffer("steps", torch.tensor([7], dtype=torch.int64))
    self.post_init()


def test_tw04_index_and_files_of_a_sharded_tied_model_agree(tmp_path: Path) -> None:
    """The source lists the head, tied to the embedding, as a tensor of its own in another file."""
    source = tmp_path / "source"
    plain_model("llama", **TIED).save_pretrained(source, max_shard_size=BYTES)
    index = json.loads((source / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    embedding = read_tensors(source)["model.embed_tokens.weight"]
    save_file({**load_file(source / files[1]), "lm_head.weight": embedding}, source / files[1], {"format": "pt"})
    index["weight_map"]["lm_head.weight"] = files[1]
    (source / "model.safetensors.index.json").write_text(json.dumps(index))

    model = load_into_memory(HyperAutoModelForCausalLM.from_pretrained(source))
    export_hf(save_training_checkpoint(model, tmp_path / "checkpoint"), tmp_path / "out", max_shard_size=BYTES)
    out = tmp_path / "out"
    weight_map = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    in_files = {}
    for path in out.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            in_files.update(dict.fromkeys(file.keys(), path.name))
    assert weight_map == in_files
    assert in_files.keys() == read_tensors(source).keys() - {"lm_head.weight"}
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(out)), logits(model))


class HeadFirst(OwnLlama):
    """Registers its head before the embedding that the head is tied to, whose first name is then the head's."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._modules = {"lm_head": self.lm_head, "model": self.model}


def test_tw04_a_tied_weight_is_exported_under_the_name_that_transformers_ties_to(tmp_path: Path) -> None:
    template = HyperAutoModelForCausalLM.from_config(make_config("llama", **TIED), model_class=HeadFirst)
    model = load_into_memory(template)
    assert "lm_head.weight" in dict(model.named_parameters())
    export_hf(save_training_checkpoint(model, tmp_path / "checkpoint"), tmp_path / "out")
    exported = read_tensors(tmp_path / "out")
    assert "lm_head.weight" not in exported
    assert torch.equal(exported["model.embed_tokens.weight"], model.lm_head.weight)


def test_cropped_models_are_exported_with_their_layers_only(tmp_path: Path) -> None:
    plain_model("qwen3_moe").save_pretrained(tmp_path / "source")
    template = HyperAutoModelForCausalLM.from_pretrained(tmp_path / "source", num_hidden_layers=2)
    model = load_into_memory(template)
    export_hf(save_training_checkpoint(model, tmp_path / "checkpoint"), tmp_path / "out")
    assert read_config(tmp_path / "out")["num_hidden_layers"] == 2
    expected = {name for name in read_tensors(tmp_path / "source") if ".layers.2." not in name}
    assert read_tensors(tmp_path / "out").keys() == expected
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(model))


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

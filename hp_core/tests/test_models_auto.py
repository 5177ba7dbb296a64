"""`HyperAutoModelForCausalLM`: folders, configs, own classes and repository code; cropping; a line for each mistake."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from models_cases import FAMILIES, make_config, plain_model
from transformers import AutoConfig, BertConfig, LlamaForCausalLM, T5Config

from hp_core.config import ModelConfig
from hp_core.errors import ConfigError, HpError, ModelError
from hp_core.models import (
    CheckpointSource,
    HyperAutoModelForCausalLM,
    RandomInit,
    build_from_config,
    decoder_blocks,
    vocabulary_size,
)

REPOSITORY_CODE = """
import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class BowConfig(PreTrainedConfig):
    model_type = "bow"

    def __init__(self, width=8, vocab_size=16, **kwargs):
        self.width, self.vocab_size = width, vocab_size
        super().__init__(**kwargs)


class BowForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = BowConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.register_buffer("scale", torch.arange(1, config.width + 1) / config.width, persistent=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed

    def forward(self, input_ids, **kwargs):
        return CausalLMOutputWithPast(logits=self.head(self.embed(input_ids) * self.scale))
"""


class OwnLlama(LlamaForCausalLM):
    """A user's modified class."""


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A folder with a tiny Llama of 3 layers in bf16."""
    plain_model("llama").to(torch.bfloat16).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def write_repository_model(folder: Path) -> None:
    """A model whose code is in its own folder."""
    folder.mkdir()
    (folder / "modeling_bow.py").write_text(REPOSITORY_CODE)
    auto_map = {"AutoConfig": "modeling_bow.BowConfig", "AutoModelForCausalLM": "modeling_bow.BowForCausalLM"}
    config = {"model_type": "bow", "architectures": ["BowForCausalLM"], "auto_map": auto_map, "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def test_from_pretrained_gives_the_plain_class_and_its_source(llama: Path) -> None:
    model = HyperAutoModelForCausalLM.from_pretrained(str(llama))
    assert type(model) is LlamaForCausalLM
    assert model.hp_weight_source == CheckpointSource(llama)
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    assert model.config.dtype == torch.bfloat16
    assert vocabulary_size(model) == 128


@pytest.mark.parametrize("suffix", ["", "config.json"])
def test_from_config_takes_folders_and_files(llama: Path, suffix: str) -> None:
    model = HyperAutoModelForCausalLM.from_config(llama / suffix, torch_dtype="float32")
    assert model.hp_weight_source == RandomInit(llama)
    assert {param.dtype for param in model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("requested", "expected"),
    [(None, torch.bfloat16), ("auto", torch.bfloat16), ("float32", torch.float32), (torch.float16, torch.float16)],
)
@pytest.mark.parametrize("in_config", [True, False])
def test_dtype_is_the_requested_or_the_configs_or_the_files(
    llama: Path, requested: Any, expected: torch.dtype, in_config: bool
) -> None:
    if not in_config:
        change_config(llama, dtype=None)
    model = HyperAutoModelForCausalLM.from_pretrained(llama, torch_dtype=requested)
    assert {param.dtype for param in model.parameters()} == {expected}


def test_attention_implementation_is_passed_on(llama: Path) -> None:
    model = HyperAutoModelForCausalLM.from_pretrained(llama, attn_implementation="eager")
    assert model.config._attn_implementation == "eager"


def test_a_users_own_class_by_type_or_dotted_path(llama: Path) -> None:
    assert type(HyperAutoModelForCausalLM.from_pretrained(llama, model_class=OwnLlama)) is OwnLlama
    assert type(HyperAutoModelForCausalLM.from_config(llama, model_class=f"{__name__}.OwnLlama")) is OwnLlama


def test_repository_code_needs_trust_and_has_real_buffers(tmp_path: Path) -> None:
    write_repository_model(tmp_path / "bow")
    with pytest.raises(ModelError, match="trust_remote_code"):
        HyperAutoModelForCausalLM.from_config(tmp_path / "bow")
    model = HyperAutoModelForCausalLM.from_config(tmp_path / "bow", trust_remote_code=True)
    assert type(model).__name__ == "BowForCausalLM"
    assert model.embed.weight.is_meta
    assert torch.equal(model.scale, torch.arange(1, 9) / 8)


def test_the_model_section_of_a_configuration_is_built(llama: Path) -> None:
    model = build_from_config(ModelConfig(pretrained_model_name_or_path=str(llama), num_hidden_layers=1))
    assert model.hp_weight_source == CheckpointSource(llama)
    target = "hp_core.models.HyperAutoModelForCausalLM.from_config"
    model = build_from_config(ModelConfig(target=target, config_path=str(llama), torch_dtype="float32"))
    assert model.hp_weight_source == RandomInit(llama)
    with pytest.raises(ModelError, match="expected a model from HyperAutoModelForCausalLM, found Linear"):
        build_from_config(ModelConfig(target=f"{__name__}.make_linear"))


def make_linear() -> torch.nn.Module:
    return torch.nn.Linear(1, 1)


CROPPABLE = sorted(FAMILIES.keys() - {"gemma4_text", "hrm_text", "minimax", "xlm"})


@pytest.mark.parametrize("model_type", CROPPABLE)
def test_cropped_models_have_the_first_layers(model_type: str) -> None:
    whole = HyperAutoModelForCausalLM.from_config(make_config(model_type))
    cropped = HyperAutoModelForCausalLM.from_config(make_config(model_type), num_hidden_layers=2)
    assert list(decoder_blocks(cropped)) == list(decoder_blocks(whole))[:2]
    shapes = {fqn: param.shape for fqn, param in whole.named_parameters()}
    assert all(shapes[fqn] == param.shape for fqn, param in cropped.named_parameters())
    # The config survives a save: its lists have the new length too.
    again = AutoConfig.for_model(**cropped.config.to_dict())
    assert again.num_hidden_layers == 2


@pytest.mark.parametrize(
    ("model_type", "layers", "message"),
    [
        ("llama", 4, "model.num_hidden_layers: 4: the model has 3 layers. Use 1 to 3."),
        ("llama", 0, "model.num_hidden_layers: 0: the model has 3 layers. Use 1 to 3."),
        ("hrm_text", 2, "24 layers are 6 blocks, 2 are 6"),
        ("gemma4_text", 2, "model.embed_tokens_per_layer.weight would not have the shape"),
        ("minimax", 2, "model.layers.1.self_attn would not be what it is in the whole model"),
    ],
)
def test_models_that_cannot_be_cropped_so_say_it(model_type: str, layers: int, message: str) -> None:
    with pytest.raises(ModelError, match=re.escape(message)):
        HyperAutoModelForCausalLM.from_config(make_config(model_type), num_hidden_layers=layers)


def test_in06_a_folder_without_weights_asks_for_them_or_for_random_init(tmp_path: Path) -> None:
    make_config("llama").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"no weights \(\*\.safetensors\)\. Add them, or ask for random weights"):
        HyperAutoModelForCausalLM.from_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match=r"expected safetensors files, found pytorch_model\.bin"):
        HyperAutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/no/such/folder", "model /no/such/folder: no such folder"),
        ("no-such-owner/no-such-model", "not in the local HF cache"),
    ],
)
def test_a_model_that_is_not_there_is_one_line(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message) as raised:
        HyperAutoModelForCausalLM.from_pretrained(name)
    assert "\n" not in str(raised.value)


def test_a_name_in_the_local_cache_is_found(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "cache/models--owner--tiny"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.parent.mkdir(parents=True)
    llama.rename(snapshot)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    assert HyperAutoModelForCausalLM.from_pretrained("owner/tiny").hp_weight_source == CheckpointSource(snapshot)


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        ({"model_type": "nonesuch"}, {}, "nonesuch"),
        ({"model_type": None, "architectures": None}, {}, "model_type"),
        ({"num_attention_heads": "four"}, {}, "num_attention_heads"),
        ({"quantization_config": {"quant_method": "fp8"}}, {}, "its weights are quantised"),
        ({}, {"torch_dtype": "int8"}, "model.torch_dtype: int8 is not a floating-point dtype"),
        ({}, {"attn_implementation": "nonesuch"}, "nonesuch"),
        ({}, {"force_hf": False}, "model.force_hf: false is not supported"),
        ({}, {"model_class": torch.nn.Linear}, "expected a subclass of transformers.PreTrainedModel"),
        ({}, {"model_class": "no_such_package.Model"}, "no module no_such_package"),
    ],
    ids=lambda value: next(iter(value), "") if isinstance(value, dict) else None,
)
def test_wrong_configs_and_arguments_are_one_line(
    llama: Path, change: dict[str, Any], arguments: dict[str, Any], message: str
) -> None:
    change_config(llama, **change)
    with pytest.raises(HpError, match=message) as raised:
        HyperAutoModelForCausalLM.from_pretrained(llama, **arguments)
    assert isinstance(raised.value, (ModelError, ConfigError))
    assert "\n" not in str(raised.value)


def test_a_folder_without_config_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"there is no config\.json"):
        HyperAutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("config", "kind"), [(BertConfig(), "encoder"), (T5Config(), "encoder-decoder")], ids=["bert", "t5"]
)
def test_models_that_are_not_causal_are_refused(config: Any, kind: str) -> None:
    with pytest.raises(ModelError, match=f"is an {kind} model, not a causal language model"):
        HyperAutoModelForCausalLM.from_config(config)


def test_random_weights_of_a_quantised_models_config(llama: Path) -> None:
    change_config(llama, quantization_config={"quant_method": "fp8"})
    model = HyperAutoModelForCausalLM.from_config(llama)
    assert "quantization_config" not in model.config.to_dict()

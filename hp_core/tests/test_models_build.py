"""Models are built with meta parameters and with exactly the buffers of a normal build (cases IN-01, IN-02)."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models_cases import FAMILIES, llama_with, make_config, plain_model
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hp_core.errors import ModelError
from hp_core.models import HyperAutoModelForCausalLM

ROPE = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [2.0 + 0.3 * i for i in range(8)],
        "original_max_position_embeddings": 64,
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


class Constants(nn.Module):
    """A user's module with buffers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(0, 1, 7, dtype=torch.float32).cos(), persistent=False)
        self.register_buffer("mask", torch.tril(torch.ones(3, 3, dtype=torch.bool)), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


class Forgotten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.empty(4), persistent=False)


class Filled(LlamaForCausalLM):
    """Leaves a buffer to `_init_weights`."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.register_buffer("window", torch.empty(4, dtype=torch.float32), persistent=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self:
            module.window.copy_(torch.tensor(1.0).expand(4) / 3)


class FromWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("total", self.weight.detach().sum(), persistent=False)


class Shared(nn.Module):
    """One parameter in two places, without `_tied_weights_keys`."""

    def __init__(self) -> None:
        super().__init__()
        weight = nn.Parameter(torch.ones(4))
        self.first, self.second = nn.Module(), nn.Module()
        self.first.weight = weight
        self.second.weight = weight


def assert_same_tensors(built: PreTrainedModel, reference: PreTrainedModel) -> None:
    """Same buffers bit for bit; same names, shapes and dtypes of parameters, all on the meta device."""
    buffers, expected = dict(built.named_buffers()), dict(reference.named_buffers())
    assert list(buffers) == list(expected)
    for fqn, buffer in buffers.items():
        assert buffer.dtype == expected[fqn].dtype, fqn
        assert torch.equal(buffer, expected[fqn]), fqn
    params, expected_params = dict(built.named_parameters()), dict(reference.named_parameters())
    assert list(params) == list(expected_params)
    for fqn, param in params.items():
        assert param.is_meta, fqn
        assert (param.shape, param.dtype) == (expected_params[fqn].shape, expected_params[fqn].dtype), fqn


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "model_type", ["gpt2", "gpt_neox", "gemma3_text", "jamba", "deepseek_v3", "gpt_oss", "kimi_linear", "ernie4_5_moe"]
)
def test_in01_buffers_equal_those_of_from_pretrained(model_type: str, dtype: torch.dtype, tmp_path: Path) -> None:
    plain_model(model_type).save_pretrained(tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert_same_tensors(HyperAutoModelForCausalLM.from_pretrained(tmp_path, torch_dtype=dtype), reference)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ROPE)
def test_in01_scaled_rotary_tables_equal_those_of_from_pretrained(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    plain_model("llama", rope_parameters=dict(ROPE[kind])).save_pretrained(tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    built = HyperAutoModelForCausalLM.from_pretrained(tmp_path, torch_dtype=dtype)
    assert_same_tensors(built, reference)
    assert "model.rotary_emb.inv_freq" in dict(built.named_buffers())


def test_in02_rotary_table_stays_fp32_in_a_bf16_model() -> None:
    model = HyperAutoModelForCausalLM.from_config(make_config("llama"), torch_dtype="bfloat16")
    inv_freq = model.model.rotary_emb.inv_freq
    assert inv_freq.dtype == torch.float32
    assert inv_freq[0] == 1.0
    reference = plain_model("llama").model.rotary_emb
    x, position = torch.zeros(1), torch.tensor([[4096]])
    for table, expected in zip(model.model.rotary_emb(x, position), reference(x, position), strict=True):
        assert torch.equal(table, expected)


def test_in01_buffers_of_a_users_module_are_real() -> None:
    model = HyperAutoModelForCausalLM.from_config(
        make_config("llama"), model_class=llama_with(Constants), torch_dtype="bfloat16"
    )
    expected = Constants()
    for name, buffer in expected.named_buffers():
        found = model.extra.get_buffer(name)
        assert found.dtype == buffer.dtype
        assert torch.equal(found, buffer)


def test_in01_buffers_are_filled_by_init_weights_without_rounding() -> None:
    model = HyperAutoModelForCausalLM.from_config(make_config("llama"), model_class=Filled, torch_dtype="bfloat16")
    assert torch.equal(model.window, torch.ones(4) / 3)


@pytest.mark.parametrize(
    ("module", "buffer", "reason"),
    [(Forgotten, "extra.window", "neither its constructor nor"), (FromWeight, "extra.total", "made from a parameter")],
)
def test_in01_a_buffer_that_cannot_be_built_is_an_error(module: type[nn.Module], buffer: str, reason: str) -> None:
    with pytest.raises(ModelError, match=rf"buffer {buffer} has no values: .*{reason}"):
        HyperAutoModelForCausalLM.from_config(make_config("llama"), model_class=llama_with(module))


def test_parameters_kept_in_fp32_are_built_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.LlamaPreTrainedModel._keep_in_fp32_modules_strict", {"o_proj"}, raising=False)
    model = HyperAutoModelForCausalLM.from_config(make_config("llama"), torch_dtype="bfloat16")
    fp32 = {fqn for fqn, param in model.named_parameters() if param.dtype == torch.float32}
    assert fp32 == {f"model.layers.{i}.self_attn.o_proj.weight" for i in range(3)}


def test_tied_and_shared_parameters_stay_one() -> None:
    config = make_config("llama", tie_word_embeddings=True)
    model = HyperAutoModelForCausalLM.from_config(config, model_class=llama_with(Shared))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.extra.first.weight is model.extra.second.weight


def test_building_does_not_touch_the_random_state() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    HyperAutoModelForCausalLM.from_config(make_config("nemotron_h"))
    assert torch.equal(torch.rand(4), expected)


def test_a_copy_of_a_built_model_is_as_good() -> None:
    model = HyperAutoModelForCausalLM.from_config(make_config("llama", tie_word_embeddings=True))
    again = copy.deepcopy(model)
    assert again.hp_weight_source == model.hp_weight_source
    assert again.hp_initial_values.keys() == model.hp_initial_values.keys()
    assert again.lm_head.weight is again.model.embed_tokens.weight


def test_a_30b_model_is_built_in_little_memory() -> None:
    code = """
import resource
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig
from hp_core.models import HyperAutoModelForCausalLM
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
config = Qwen3MoeConfig(hidden_size=2048, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4,
    head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, vocab_size=151936)
before = peak()
model = HyperAutoModelForCausalLM.from_config(config, torch_dtype="bfloat16")
print(sum(p.numel() for p in model.parameters()), peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    numel, mebibytes = map(float, done.stdout.split())
    assert numel > 30e9
    assert mebibytes < 300


def test_every_family_is_built_as_transformers_builds_it() -> None:
    for model_type in FAMILIES:
        built = HyperAutoModelForCausalLM.from_config(make_config(model_type), torch_dtype="float32")
        assert_same_tensors(built, plain_model(model_type))

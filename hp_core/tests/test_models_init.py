"""Random init: HF's own statistics, the same on every topology (case IN-04), and nothing left without values."""

from __future__ import annotations

import math

import pytest
import torch
from models_cases import FAMILIES, draw, llama_with, make_config, make_plan, plain_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hp_core.errors import ModelError
from hp_core.models import HyperAutoModelForCausalLM, init_shards


class OldStyle(LlamaForCausalLM):
    """Code as it is found in repositories: only linear layers are initialised, the rest keeps its constructor's."""

    def __init__(self, config: object) -> None:
        super().__init__(config)
        self.gate = nn.Parameter(torch.full((3,), 0.5))
        self.ramp = nn.Parameter(torch.arange(5.0))
        self.norm = nn.LayerNorm(6)
        self.conv = nn.Conv2d(1, 1, 3)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(std=0.5)


class Tower(PreTrainedModel):
    """A sub-model with an init of its own."""

    config_class = LlamaConfig

    def __init__(self) -> None:
        super().__init__(LlamaConfig())
        self.proj = nn.Linear(100, 100)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=3.0)
            nn.init.constant_(module.bias, 2.0)


class Unwritten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(4))


def build(model_type: str, **changes: object) -> LlamaForCausalLM:
    return HyperAutoModelForCausalLM.from_config(make_config(model_type, **changes), torch_dtype="float32")


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "qwen3_moe", "nemotron_h"])
def test_in04_init_is_the_same_on_1_2_and_4_ranks(model_type: str) -> None:
    template = build(model_type)
    whole = draw(template)
    for world_size in (2, 4):
        gathered = draw(template, world_size)
        assert gathered.keys() == whole.keys()
        for fqn, value in whole.items():
            assert torch.equal(gathered[fqn], value), fqn


def test_in04_no_two_row_blocks_are_equal() -> None:
    seen: dict[bytes, str] = {}
    for fqn, value in draw(build("llama")).items():
        if value.ndim == 2:
            for index, block in enumerate(value.chunk(4)):
                key = block.flatten()[:16].numpy().tobytes()
                assert key not in seen, (fqn, index, seen.get(key))
                seen[key] = f"{fqn}[{index}]"


@pytest.mark.parametrize("model_type", FAMILIES)
def test_statistics_are_those_of_plain_transformers(model_type: str) -> None:
    torch.manual_seed(0)
    expected = dict(plain_model(model_type).named_parameters())
    found = draw(build(model_type))
    assert found.keys() == expected.keys()
    for fqn, reference in expected.items():
        value, reference = found[fqn], reference.detach()
        assert (value.shape, value.dtype) == (reference.shape, reference.dtype), fqn
        if reference.numel() == 1 or reference.std() == 0:  # norms, biases, gates
            assert torch.equal(value, reference), fqn
        elif not torch.equal(value, reference) and reference.numel() > 20:
            noise = 6 / math.sqrt(reference.numel())
            assert abs(value.std() / reference.std() - 1) < noise, fqn
            assert abs(value.mean() - reference.mean()) < noise * reference.std(), fqn


def test_writes_into_other_modules_parameters_are_kept() -> None:
    """GPT-2's attention and MLP modules scale the output projections, which are modules of their own."""
    found = draw(build("gpt2"))
    narrow = {
        found[f"transformer.h.{i}.{part}.c_proj.weight"].std().item() for i in range(3) for part in ("attn", "mlp")
    }
    assert all(abs(std / (0.02 / math.sqrt(6)) - 1) < 0.1 for std in narrow)
    assert abs(found["transformer.h.0.attn.c_attn.weight"].std().item() / 0.02 - 1) < 0.1


def test_padding_row_is_zero_and_tied_weights_are_drawn_once() -> None:
    found = draw(build("llama", tie_word_embeddings=True, pad_token_id=5))
    assert "lm_head.weight" not in found
    embedding = found["model.embed_tokens.weight"]
    assert (embedding == 0).all(dim=1).nonzero().flatten().tolist() == [5]


def test_an_init_of_some_parameters_has_the_values_of_the_whole() -> None:
    template = build("gpt2")
    names = {"transformer.h.1.mlp.c_proj.weight", "transformer.h.2.ln_1.weight", "transformer.wte.weight"}
    whole, some = draw(template), draw(template, names=names)
    assert some.keys() == names
    assert all(torch.equal(some[fqn], whole[fqn]) for fqn in names)


def test_values_depend_on_the_seed_and_not_on_the_random_state() -> None:
    template = build("llama")
    fqn = "model.layers.0.mlp.up_proj.weight"
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = draw(template, seed=1)[fqn]
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    assert torch.equal(draw(template, seed=1)[fqn], first)
    assert not torch.equal(draw(template, seed=2)[fqn], first)


@pytest.mark.parametrize("model_type", ["gpt2", "jamba"])
def test_the_template_is_the_same_afterwards(model_type: str) -> None:
    template = build(model_type, tie_word_embeddings=True)
    params = list(template.named_parameters(remove_duplicate=False))
    buffers = [(fqn, buffer, buffer.clone()) for fqn, buffer in template.named_buffers()]
    draw(template)
    again = list(template.named_parameters(remove_duplicate=False))
    assert all(a[0] == b[0] and a[1] is b[1] and b[1].is_meta for a, b in zip(params, again, strict=True))
    assert all(template.get_buffer(fqn) is buffer and torch.equal(buffer, value) for fqn, buffer, value in buffers)


def test_what_init_weights_leaves_alone_keeps_its_constructors_values() -> None:
    template = HyperAutoModelForCausalLM.from_config(make_config("llama"), model_class=OldStyle)
    found = draw(template)
    assert torch.equal(found["gate"], torch.full((3,), 0.5))
    assert torch.equal(found["ramp"], torch.arange(5.0))
    assert torch.equal(found["model.norm.weight"], torch.ones(64))
    assert torch.equal(found["norm.weight"], torch.ones(6))
    assert torch.equal(found["norm.bias"], torch.zeros(6))
    assert 0 < found["conv.weight"].std() < 1  # by torch's reset_parameters
    assert abs(found["lm_head.weight"].std() - 0.5) < 0.05


def test_sub_models_are_initialised_by_their_own_rules() -> None:
    found = draw(HyperAutoModelForCausalLM.from_config(make_config("llama"), model_class=llama_with(Tower)))
    assert abs(found["extra.proj.weight"].std() - 3.0) < 0.2
    assert torch.equal(found["extra.proj.bias"], torch.full((100,), 2.0))


def test_a_parameter_without_values_is_an_error_that_names_it() -> None:
    template = HyperAutoModelForCausalLM.from_config(make_config("llama"), model_class=llama_with(Unwritten))
    with pytest.raises(ModelError, match=r"gives no values to parameter extra\.alpha"):
        draw(template)


def test_shards_own_their_memory() -> None:
    template = build("llama")
    plan = make_plan(template, world_size=4)
    sizes = {}
    init_shards(template, plan, 1, 1, lambda fqn, value: sizes.update({fqn: (value, value.untyped_storage().nbytes())}))
    assert all(nbytes == value.numel() * value.itemsize for value, nbytes in sizes.values())

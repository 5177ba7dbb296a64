"""The repeated blocks of many families, in forward order."""

from __future__ import annotations

import torch
from models_cases import FAMILIES, make_config
from torch import nn

from hp_core.models import HyperAutoModelForCausalLM, decoder_blocks

# Families whose blocks are not `model.layers.<i>`.
PREFIXES = {
    "gpt2": "transformer.h",
    "gptj": "transformer.h",
    "codegen": "transformer.h",
    "bloom": "transformer.h",
    "gpt_neox": "gpt_neox.layers",
    "opt": "model.decoder.layers",
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(2, 2)) for _ in range(2)])


class Unmarked(nn.Module):
    """A user's model that marks no blocks: eleven of them, a list inside each, and a list of plain layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(11)])
        self.heads = nn.ModuleList([nn.Linear(2, 2)])


class Marked(Unmarked):
    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.layers[3].nested = nn.ModuleList([Block()])
        self.again = nn.ModuleList([self.layers[0]])


def test_blocks_of_every_family() -> None:
    for model_type in FAMILIES:
        model = HyperAutoModelForCausalLM.from_config(make_config(model_type))
        blocks = decoder_blocks(model)
        if model_type == "hrm_text":
            expected = [f"model.{stack}_module.layers.{i}" for stack in "LH" for i in range(3)]
        elif model_type == "xlm":
            # Attention and feed-forward modules lie in lists of their own.
            expected = [f"transformer.{kind}.{i}" for kind in ("attentions", "ffns") for i in range(2)]
        else:
            layers = range(model.config.num_hidden_layers)
            expected = [f"{PREFIXES.get(model_type, 'model.layers')}.{i}" for i in layers]
        assert list(blocks) == expected, model_type
        assert all(model.get_submodule(fqn) is block for fqn, block in blocks.items())


def test_blocks_hold_nearly_all_parameters_but_embeddings() -> None:
    model = HyperAutoModelForCausalLM.from_config(make_config("jamba"))
    inside = {id(param) for block in decoder_blocks(model).values() for param in block.parameters()}
    outside = {fqn for fqn, param in model.named_parameters() if id(param) not in inside}
    assert outside == {"model.embed_tokens.weight", "model.final_layernorm.weight", "lm_head.weight"}


def test_blocks_run_in_the_order_in_which_they_are_listed() -> None:
    model = HyperAutoModelForCausalLM.from_config(make_config("nemotron_h")).to_empty(device="cpu")
    order: list[str] = []
    for fqn, block in decoder_blocks(model).items():
        block.register_forward_pre_hook(lambda *_, fqn=fqn: order.append(fqn))
    with torch.no_grad():
        model(input_ids=torch.zeros(1, 8, dtype=torch.int64), use_cache=False)
    assert order == list(decoder_blocks(model))


def test_unmarked_blocks_are_the_composite_elements_of_outer_lists() -> None:
    assert list(decoder_blocks(Unmarked())) == [f"layers.{i}" for i in range(11)]


def test_blocks_inside_blocks_and_shared_blocks_are_not_listed_twice() -> None:
    assert list(decoder_blocks(Marked())) == [f"layers.{i}" for i in range(11)]


def test_a_model_without_blocks_has_none() -> None:
    assert decoder_blocks(nn.Sequential(nn.Linear(2, 2))) == {}

"""What TP contributes to the plan: styles, heads, refusals. No ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from hp_core import ConfigError, MeshAxis, ModelError, Partial, PlanError, PlanFragment, Precision, Replicate, Shard
from hp_core.mesh import plan_mesh
from hp_core.plan import merge_fragments
from hp_strategies_tp import plugin
from hp_strategies_tp.options import Options

TINY = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
}
LAYER = "model.layers.0"


def build(model_type: str = "qwen3", **changes: Any) -> nn.Module:
    config = AutoConfig.for_model(model_type, **{**TINY, **changes})
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def plan(model: nn.Module, size: int = 2, **options: bool) -> PlanFragment:
    mesh = plan_mesh(size, [(MeshAxis("tp", "model", "tp_size"), size)])
    fragment = plugin.hp_plan_sharding(model, mesh, Options(tp_size=size, **options))
    assert fragment is not None
    precision = Precision(torch.float32, torch.float32, torch.float32)
    merge_fragments(model, mesh, precision, [("tp", fragment)])  # what it says fits the model
    return fragment


def test_columns_rows_vocabulary_and_norms_of_a_decoder() -> None:
    params = plan(build(tie_word_embeddings=False)).params
    assert params[f"{LAYER}.self_attn.q_proj.weight"].layout == {"tp": Shard(0)}
    assert params[f"{LAYER}.self_attn.o_proj.weight"].layout == {"tp": Shard(1)}
    assert params[f"{LAYER}.mlp.down_proj.weight"].layout == {"tp": Shard(1)}
    assert params["model.embed_tokens.weight"].layout == params["lm_head.weight"].layout == {"tp": Shard(0)}
    # GR-08: every rank sees its own heads, so the norm over head_dim has a partial gradient.
    norm = params[f"{LAYER}.self_attn.q_norm.weight"]
    assert (norm.layout, norm.grad) == ({"tp": Replicate()}, {"tp": Partial()})
    assert f"{LAYER}.input_layernorm.weight" not in params


def test_an_attention_has_one_collective_in_forward_and_one_in_backward() -> None:
    boundaries = plan(build()).boundaries
    inside = {fqn: b for fqn, b in boundaries.items() if fqn.startswith(f"{LAYER}.self_attn")}
    edges = [edge for b in inside.values() for edge in (*b.inputs.values(), *b.outputs.values())]
    assert sorted(edge.forward for edge in edges) == ["all-reduce", "none"]
    assert sorted(edge.backward for edge in edges) == ["all-reduce", "none"]


def test_tv01_more_ranks_than_key_value_heads_share_them_in_groups() -> None:
    fragment = plan(build(), size=4)
    key = fragment.params[f"{LAYER}.self_attn.k_proj.weight"]
    assert (key.layout, key.compute) == ({"tp": Replicate()}, {"tp": Replicate(2)})
    assert fragment.attributes[f"{LAYER}.self_attn"] == {"num_key_value_groups": 1}


@pytest.mark.parametrize(
    ("changes", "size", "line"),
    [
        (
            {},
            3,
            "accelerator.tp_size: 3 does not divide num_attention_heads = 4 (model.layers.0.self_attn). Use 1, 2 or 4.",
        ),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 3},
            2,
            "accelerator.tp_size: 2 neither divides num_key_value_heads = 3 nor is a multiple of it "
            "(model.layers.0.self_attn)",
        ),
    ],
)
def test_tv01_heads_that_cannot_be_shared_are_refused(changes: dict[str, int], size: int, line: str) -> None:
    with pytest.raises(PlanError) as error:
        plan(build(**changes), size=size)
    assert str(error.value) == line


def test_pl01_names_with_digits_match() -> None:
    model = build()
    model._tp_plan = {**model.tp_plan, "model.layers.*.mlp.w1": "colwise", "model.layers.*.mlp.w2": "rowwise"}
    mlp = model.get_submodule(f"{LAYER}.mlp")
    mlp.w1, mlp.w2 = nn.Linear(16, 32, device="meta"), nn.Linear(32, 16, device="meta")
    params = plan(model).params
    assert params[f"{LAYER}.mlp.w1.weight"].layout == {"tp": Shard(0)}
    assert params[f"{LAYER}.mlp.w2.weight"].layout == {"tp": Shard(1)}


def test_pl02_a_key_that_matches_nothing_is_reported() -> None:
    model = build()
    model._tp_plan = {**model.tp_plan, "model.layers.*.mlp.nothing": "colwise"}
    assert plan(model).notes == ("HF plan key model.layers.*.mlp.nothing matches nothing",)


def test_pl07_an_unknown_style_is_an_error_that_names_it() -> None:
    model = build()
    model._tp_plan = {**model.tp_plan, "model.layers.*.mlp.up_proj": "diagonal"}
    with pytest.raises(PlanError, match=r"mlp\.up_proj: .* has style \"diagonal\", which hp does not know\. Known: "):
        plan(model)


def test_row_bias_enters_the_sum_once() -> None:
    bias = plan(build("starcoder2", use_bias=True)).params[f"{LAYER}.self_attn.o_proj.bias"]
    assert (bias.layout, bias.compute, bias.grad) == ({"tp": Replicate()}, {"tp": Partial()}, {"tp": Partial()})


def test_packed_experts_are_split_gate_by_gate() -> None:
    model = build("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, mlp_only_layers=[])
    params = plan(model).params
    assert params[f"{LAYER}.mlp.experts.gate_up_proj"].layout == {"tp": Shard(1, (8, 8))}
    assert params[f"{LAYER}.mlp.experts.down_proj"].layout == {"tp": Shard(2)}


def test_experts_that_do_not_divide_are_refused() -> None:
    model = build("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=9, mlp_only_layers=[])
    with pytest.raises(PlanError, match="2 does not divide the 9 intermediate features of"):
        plan(model)


def test_what_a_plan_leaves_out_inside_of_a_region_is_summed() -> None:
    apertus = plan(build("apertus")).params
    assert apertus[f"{LAYER}.mlp.act_fn.alpha_p"].grad == {"tp": Partial()}
    assert apertus[f"{LAYER}.self_attn.q_norm.weight"].grad == {"tp": Partial()}


def test_sequence_parallelism_splits_norms_and_gathers_regions() -> None:
    fragment = plan(build(), sequence_parallel=True)
    assert fragment.params[f"{LAYER}.input_layernorm.weight"].grad == {"tp": Partial()}
    attention = fragment.boundaries[f"{LAYER}.self_attn"].inputs["hidden_states"]
    assert (attention.forward, attention.backward) == ("all-gather", "reduce-scatter")
    output = fragment.boundaries[f"{LAYER}.self_attn.o_proj"].outputs["0"]
    assert (output.forward, output.backward) == ("reduce-scatter", "all-gather")


def test_sequence_parallelism_refuses_a_layer_whose_arguments_it_does_not_know() -> None:
    model = build()
    block = model.get_submodule(LAYER)

    class Block(type(block)):  # type: ignore[misc]
        def forward(self, hidden_states: torch.Tensor, per_layer_input: torch.Tensor) -> torch.Tensor:
            return hidden_states + per_layer_input

    block.__class__ = Block
    with pytest.raises(ModelError, match=r"model\.layers\.0 \(Block\) takes per_layer_input: it is not known whether"):
        plan(model, sequence_parallel=True)


def test_tokens_sorted_by_expert_are_refused_by_sequence_parallelism() -> None:
    model = build("llama4_text", num_local_experts=2, intermediate_size_mlp=32, moe_layers=[0])
    plan(model)
    with pytest.raises(ModelError, match="sorts tokens by expert"):
        plan(model, sequence_parallel=True)


@pytest.mark.parametrize("name", ["sequence_parallel", "loss_parallel"])
def test_one_rank_cannot_share(name: str) -> None:
    mesh = plan_mesh(1, [(MeshAxis("tp", "model", "tp_size"), 1)])
    with pytest.raises(ConfigError, match=rf"accelerator\.{name}: needs accelerator\.tp_size of at least 2, found 1"):
        plugin.hp_plan_sharding(build(), mesh, Options(**{name: True}))
    assert plugin.hp_plan_sharding(build(), mesh, Options()) is None

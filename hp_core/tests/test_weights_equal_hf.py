"""Loaded in parts, every parameter and persistent buffer equals what transformers loads, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2Model
from weights_cases import (
    CONFIGS,
    LLAMA,
    QWEN3_MOE,
    assert_is_part,
    build_template,
    load_rank,
    make_plan,
    save_checkpoint,
)

GPT2 = {"vocab_size": 101, "n_positions": 32, "n_embd": 24, "n_layer": 2, "n_head": 2}
TIED = {"qwen3": True, "llama": False}


def assert_all_parts_equal(folder: Path, dtype: torch.dtype, splits: list[tuple[int, int]]) -> None:
    template = build_template(folder, dtype)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    for world_size, dim in splits:
        plan = make_plan(template, world_size, dim)
        for rank in range(world_size):
            model, report = load_rank(template, plan, folder, rank)
            assert_is_part(plan, rank, model, reference)
            assert not report.missing
            assert not report.cropped


@pytest.mark.parametrize("model_type", CONFIGS)
def test_parts_equal_transformers_for_every_family(model_type: str, tmp_path: Path) -> None:
    """fp32 on 1, 2, 3 ranks by rows (uneven ones too), on 2 by columns and by the third dim; bf16 on 2."""
    save_checkpoint(tmp_path, model_type, CONFIGS[model_type], shard_size="300KB")
    assert_all_parts_equal(tmp_path, torch.float32, [(1, 0), (2, 0), (3, 0), (2, 1), (2, 2)])
    assert_all_parts_equal(tmp_path, torch.bfloat16, [(2, 0), (2, 1)])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma3_text"])
def test_tied_and_untied(model_type: str, tied: bool, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, model_type, {**CONFIGS[model_type], "tie_word_embeddings": tied, "vocab_size": 101})
    assert_all_parts_equal(tmp_path, torch.float32, [(1, 0), (2, 0), (3, 0)])
    model, _ = load_rank(build_template(tmp_path), make_plan(build_template(tmp_path), 2), tmp_path, 1)
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied


def test_gpt2_with_and_without_the_prefix(tmp_path: Path) -> None:
    """A published gpt2 file has the names of the base model: no `transformer.`, no head."""
    save_checkpoint(tmp_path / "head", "gpt2", GPT2)
    assert_all_parts_equal(tmp_path / "head", torch.float32, [(2, 0), (2, 1)])
    GPT2Model(GPT2Config(**GPT2)).save_pretrained(tmp_path / "base")
    with safe_open(tmp_path / "base/model.safetensors", framework="pt") as file:
        assert "wte.weight" in file.keys()  # noqa: SIM118 (not a mapping)
    assert_all_parts_equal(tmp_path / "base", torch.float32, [(2, 0)])


def test_experts_are_separate_in_the_file_and_stacked_in_the_model(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "qwen3_moe", QWEN3_MOE)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert "model.layers.0.mlp.experts.3.up_proj.weight" in file.keys()  # noqa: SIM118 (not a mapping)
    template = build_template(tmp_path)
    assert "model.layers.0.mlp.experts.gate_up_proj" in template.state_dict()


def test_conversions_in_several_blocks_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hp_core.models.weights.BLOCK_BYTES", 1)  # one expert at a time
    save_checkpoint(tmp_path, "qwen3_moe", QWEN3_MOE)
    assert_all_parts_equal(tmp_path, torch.float32, [(1, 0), (3, 0), (2, 1), (2, 2)])


def test_a_rank_reads_only_its_own_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LS-06 too: with experts that hold their own number, rank r has those from r * E / ranks on."""
    num_experts = int(QWEN3_MOE["num_experts"])
    save_checkpoint(tmp_path, "qwen3_moe", QWEN3_MOE)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, tensor in tensors.items():
        if ".experts." in name:
            tensor.fill_(float(name.split(".experts.")[1].split(".")[0]))
    save_file(tensors, tmp_path / "model.safetensors")
    touched: list[str] = []
    monkeypatch.setattr("hp_core.models.checkpoint_files.FileTensor.rows", lambda self, rows: _noting(self, touched))
    template = build_template(tmp_path)
    plan = make_plan(template, 2)
    model, _ = load_rank(template, plan, tmp_path, 1)
    mine = range(num_experts // 2, num_experts)
    stacked = model.get_parameter("model.layers.1.mlp.experts.down_proj")
    assert stacked[:, 0, 0].tolist() == [float(i) for i in mine]
    assert len(touched) == 2 * 3 * len(mine)  # layers, projections


def _noting(tensor: Any, touched: list[str]) -> torch.Tensor:
    touched.append(tensor.path.name)
    whole: torch.Tensor = tensor.data[...]
    return whole


def test_ls11_a_shard_has_its_own_memory(tmp_path: Path) -> None:
    """Storage is as large as the shard, and writing to it changes neither the file nor a later load."""
    save_checkpoint(tmp_path, "llama", LLAMA)
    template = build_template(tmp_path)
    plan = make_plan(template, 4)
    before = (tmp_path / "model.safetensors").read_bytes()
    first, _ = load_rank(template, plan, tmp_path, 2)
    for param in first.parameters():
        assert param.untyped_storage().nbytes() == param.nbytes
        param.data.fill_(3.0)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    second, _ = load_rank(template, plan, tmp_path, 2)
    assert_is_part(plan, 2, second, AutoModelForCausalLM.from_pretrained(tmp_path))


def test_saving_with_the_transforms_of_the_report_restores_the_file_names(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "in", "mixtral", CONFIGS["mixtral"])
    template = build_template(tmp_path / "in")
    model, report = load_rank(template, make_plan(template), tmp_path / "in")
    model._weight_conversions = list(report.transforms)
    model.save_pretrained(tmp_path / "out")
    ours, theirs = (load_file(tmp_path / side / "model.safetensors") for side in ("out", "in"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)

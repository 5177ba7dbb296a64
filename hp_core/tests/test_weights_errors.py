"""What is wrong with a checkpoint is said in one line, the same on every rank, before any value is written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from weights_cases import (
    CONFIGS,
    LLAMA,
    QWEN3_MOE,
    assert_is_part,
    build_template,
    load_rank,
    make_local_model,
    make_plan,
    save_checkpoint,
)

from hp_core.errors import WeightsError
from hp_core.models.weights import load_checkpoint

Tensors = dict[str, torch.Tensor]
INDEX = "model.safetensors.index.json"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """An untied llama of two layers in one file."""
    save_checkpoint(tmp_path, "llama", LLAMA)
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """The same in three files."""
    save_checkpoint(tmp_path, "llama", LLAMA, shard_size="160KB")
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    return tmp_path


def edit(folder: Path, change: Callable[[Tensors], object]) -> None:
    """Rewrite `model.safetensors` after `change` has edited its tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def edit_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def assert_refused(folder: Path, *parts: str, world_size: int = 2) -> str:
    """Every rank raises the same one-line WeightsError, with all `parts`, and has written nothing."""
    template = build_template(folder)
    plan = make_plan(template, world_size)
    messages = set()
    for rank in range(world_size):
        model = make_local_model(template, plan, rank)
        with pytest.raises(WeightsError) as caught:
            load_checkpoint(model, plan, template, folder, rank)
        messages.add(str(caught.value))
        assert all(bool((param == 7.0).all()) for param in model.parameters())
    assert len(messages) == 1
    message = messages.pop()
    assert "\n" not in message
    for part in (str(folder), *parts):
        assert part in message
    return message


def test_ls01_missing_tensor_is_an_error(llama: Path) -> None:
    edit(llama, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    assert_refused(llama, "1 tensor missing: model.layers.1.mlp.up_proj.weight", "model.init_missing_weights: true")


def test_ls01_missing_head_of_an_untied_model_is_an_error(llama: Path) -> None:
    edit(llama, lambda tensors: tensors.pop("lm_head.weight"))
    assert_refused(llama, "1 tensor missing: lm_head.weight")


def test_ls01_ten_names_and_the_total(llama: Path) -> None:
    edit(llama, lambda tensors: [tensors.pop(name) for name in list(tensors) if ".layers." in name])
    message = assert_refused(llama, "18 tensors missing: ", "(18 in all)")
    assert len(re.findall(r"model\.layers\.", message)) == 10


def test_ls01_opt_in_reports_what_is_missing(llama: Path) -> None:
    edit(llama, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    template = build_template(llama)
    model, report = load_rank(template, make_plan(template), llama, init_missing=True)
    assert report.missing == ("model.layers.1.mlp.up_proj.weight",)
    assert bool((model.get_parameter(report.missing[0]) == 7.0).all())


def test_missing_persistent_buffer_is_an_error(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "deepseek_v3", CONFIGS["deepseek_v3"])
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    edit(tmp_path, lambda tensors: tensors.pop(name))
    assert_refused(tmp_path, f"1 tensor missing: {name}")


def test_missing_expert_is_named(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "qwen3_moe", QWEN3_MOE)
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    edit(tmp_path, lambda tensors: tensors.pop(name))
    assert_refused(tmp_path, f"1 part of stacked or fused tensors missing: {name}")


def test_last_expert_missing_everywhere_is_named(tmp_path: Path) -> None:
    """The stacks then fit together, with too few rows."""
    save_checkpoint(tmp_path, "qwen3_moe", QWEN3_MOE)
    last = f".experts.{int(QWEN3_MOE['num_experts']) - 1}."
    edit(tmp_path, lambda tensors: [tensors.pop(name) for name in list(tensors) if last in name])
    assert_refused(tmp_path, "6 parts of stacked or fused tensors missing", f"model.layers.0.mlp{last}down_proj.weight")


def test_expert_of_the_wrong_shape(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "qwen3_moe", QWEN3_MOE)
    name = "model.layers.0.mlp.experts.3.down_proj.weight"
    edit(tmp_path, lambda tensors: tensors.update({name: tensors[name][:-1].contiguous()}))
    assert_refused(tmp_path, "model.layers.0.mlp.experts.down_proj", "cannot be")


def test_expert_of_the_wrong_shape_in_a_file_without_the_prefix(tmp_path: Path) -> None:
    """Nothing is missing from a file of the base model, whose names lack `model.`."""
    save_checkpoint(tmp_path, "qwen3_moe", {**QWEN3_MOE, "tie_word_embeddings": True})
    name = "layers.0.mlp.experts.3.down_proj.weight"

    def change(tensors: Tensors) -> None:
        for old in list(tensors):
            tensors[old.removeprefix("model.")] = tensors.pop(old)
        tensors[name] = tensors[name][:-1].contiguous()

    edit(tmp_path, change)
    message = assert_refused(tmp_path, "of the wrong shape: model.layers.0.mlp.experts.down_proj")
    assert "missing" not in message


def test_projection_both_fused_and_on_its_own(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "hrm_text", CONFIGS["hrm_text"])
    template = build_template(tmp_path)
    own = next(name for name in template.state_dict() if name.endswith("up_proj.weight"))
    edit(tmp_path, lambda tensors: tensors.update({own: torch.zeros(template.state_dict()[own].shape)}))
    assert_refused(tmp_path, f"1 tensor present both as it is and as part of a fused one: {own}")


def test_unexpected_tensor(llama: Path) -> None:
    edit(llama, lambda tensors: tensors.update({"model.layers.0.mlp.extra.weight": torch.ones(2)}))
    assert_refused(llama, "1 tensor unexpected: model.layers.0.mlp.extra.weight")


def test_missing_and_unexpected_are_told_together(llama: Path) -> None:
    edit(llama, lambda tensors: tensors.update({"model.last_norm.weight": tensors.pop("model.norm.weight")}))
    assert_refused(llama, "missing: model.norm.weight", "unexpected: model.last_norm.weight")


def test_wrong_shape_gives_both_shapes(llama: Path) -> None:
    edit(llama, lambda tensors: tensors.update({"model.norm.weight": torch.ones(65)}))
    assert_refused(llama, "1 tensor of the wrong shape: model.norm.weight is [65] in the file, [64] in the model")


def test_ln_no_matching_tensor_gives_three_names_of_each_side(llama: Path) -> None:
    renamed = {f"{letter}.weight": torch.ones(2) for letter in "abcde"}
    save_file(renamed, llama / "model.safetensors")
    assert_refused(
        llama,
        "none of its 5 tensors",
        "a.weight, b.weight, c.weight ... (5 in all)",
        "LlamaForCausalLM expects model.embed_tokens.weight, model.layers.0.self_attn.q_proj.weight, ",
    )


def test_same_parameter_under_two_names(llama: Path) -> None:
    edit(llama, lambda tensors: tensors.update({"norm.weight": torch.ones(64)}))
    with pytest.raises(WeightsError, match=r"model\.norm\.weight.* more than once, as model\.norm\.weight, norm"):
        load_rank(build_template(llama), make_plan(build_template(llama)), llama)


def test_ls02_shard_in_the_index_but_not_in_the_folder(sharded: Path) -> None:
    """On every rank, also those that need nothing of it."""
    absent = sorted(sharded.glob("*.safetensors"))[1]
    absent.unlink()
    assert_refused(sharded, INDEX, absent.name, "not in the folder", world_size=4)


def test_index_places_a_tensor_in_a_file_that_lacks_it(sharded: Path) -> None:
    first, second, _ = sorted(path.name for path in sharded.glob("*.safetensors"))
    edit_index(sharded, lambda places: places.update({"model.norm.weight": first}))
    assert_refused(sharded, INDEX, "model.norm.weight", first)
    edit_index(sharded, lambda places: places.update({"model.norm.weight": second, "model.other": second}))
    assert_refused(sharded, INDEX, second)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_index_that_is_not_an_index(text: str, sharded: Path) -> None:
    (sharded / INDEX).write_text(text)
    assert_refused(sharded, INDEX, "weight_map")


def test_tensor_in_two_files(sharded: Path) -> None:
    first, second, _ = sorted(sharded.glob("*.safetensors"))
    save_file({**load_file(second), **load_file(first)}, second)
    assert_refused(sharded, " is both in ", first.name, second.name)


def test_truncated_file(llama: Path) -> None:
    path = llama / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert_refused(llama, "not a whole safetensors file", f"{path.stat().st_size} bytes")


CORRUPT = {"empty": b"", "garbage": b"\xff" * 64, "git-lfs pointer": b"version https://git-lfs.github.com/spec/v1\n"}


@pytest.mark.parametrize("content", CORRUPT.values(), ids=CORRUPT)
def test_corrupt_header(content: bytes, sharded: Path) -> None:
    path = sorted(sharded.glob("*.safetensors"))[-1]
    path.write_bytes(content)
    assert_refused(sharded, path.name, "not a whole safetensors file")


def test_folder_with_only_pickled_weights(llama: Path) -> None:
    (llama / "model.safetensors").rename(llama / "pytorch_model.bin")
    assert_refused(llama, "found pytorch_model.bin", "save_pretrained")


def test_folder_without_weights(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    assert_refused(llama, "found no weight files")


def test_no_folder(llama: Path) -> None:
    template = build_template(llama)
    with pytest.raises(WeightsError, match="no such folder"):
        load_rank(template, make_plan(template), llama / "nowhere")


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path, "llama", {**LLAMA, "tie_word_embeddings": True})
    return tmp_path


def test_tw_tied_head_that_is_present_and_equal(tied: Path) -> None:
    edit(tied, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    template = build_template(tied)
    plan = make_plan(template, 2)
    model, _ = load_rank(template, plan, tied, 1)
    assert_is_part(plan, 1, model, AutoModelForCausalLM.from_pretrained(tied))


def test_tw_tied_head_that_is_equal_in_another_dtype(tied: Path) -> None:
    def change(tensors: Tensors) -> None:
        half = tensors["model.embed_tokens.weight"].to(torch.bfloat16)
        tensors["lm_head.weight"], tensors["model.embed_tokens.weight"] = half, half.float()

    edit(tied, change)
    template = build_template(tied)
    load_rank(template, make_plan(template), tied)


def test_tw_tied_head_that_differs(tied: Path) -> None:
    """Only the last row differs, which rank 0 does not hold; it raises all the same."""

    def change(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][-1] += 1

    edit(tied, change)
    assert_refused(tied, "model.embed_tokens.weight and lm_head.weight", "tie_word_embeddings: false")


def test_tw_only_the_tied_head_is_present(tied: Path) -> None:
    edit(tied, lambda tensors: tensors.update({"lm_head.weight": tensors.pop("model.embed_tokens.weight")}))
    template = build_template(tied)
    plan = make_plan(template, 2)
    model, report = load_rank(template, plan, tied, 1)
    assert report.missing == ()
    assert_is_part(plan, 1, model, AutoModelForCausalLM.from_pretrained(tied))


def test_tw_neither_is_present(tied: Path) -> None:
    edit(tied, lambda tensors: tensors.pop("model.embed_tokens.weight"))
    assert_refused(tied, "1 tensor missing: model.embed_tokens.weight")


def test_heads_for_multi_token_prediction_are_reported(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "ernie4_5_moe", CONFIGS["ernie4_5_moe"])
    edit(tmp_path, lambda tensors: tensors.update({"model.mtp_block.0.weight": torch.ones(2)}))
    template = build_template(tmp_path)
    _, report = load_rank(template, make_plan(template), tmp_path)
    assert report.ignored == ("model.mtp_block.0.weight",)


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_layers_of_a_cropped_model_are_left_out(model_type: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, model_type, {**CONFIGS[model_type], "num_hidden_layers": 3})
    template = build_template(tmp_path, num_hidden_layers=2)
    model, report = load_rank(template, make_plan(template), tmp_path)
    in_file = set(load_file(tmp_path / "model.safetensors"))
    assert set(report.cropped) == {name for name in in_file if ".layers.2." in name}
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, num_hidden_layers=2)
    assert_is_part(make_plan(template), 0, model, reference)


def test_layers_that_the_config_does_not_count_are_unexpected(llama: Path) -> None:
    edit(llama, lambda tensors: tensors.update({"model.layers.2.mlp.up_proj.weight": torch.ones(2)}))
    assert_refused(llama, "1 tensor unexpected: model.layers.2.mlp.up_proj.weight")
    template = build_template(llama, num_hidden_layers=1)
    with pytest.raises(WeightsError, match=r"1 tensor unexpected: model\.layers\.2\.mlp\.up_proj\.weight"):
        load_rank(template, make_plan(template), llama)

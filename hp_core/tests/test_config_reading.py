"""Reading: values, origins, overrides and interpolations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from config_helpers import MODEL, SHARD, load, read

from hp_core.errors import ConfigError


@pytest.fixture(autouse=True)
def _empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("text", ["1e-5", "1E-5", "1.0e-5", "0.00001", "10e-6"])
def test_cf01_scientific_notation_is_a_number(text: str) -> None:
    assert load(f"{MODEL}lr_scheduler: {{lr: {text}}}\n").lr_scheduler.lr == 1e-5
    assert load(MODEL, f"--lr_scheduler.lr={text}").lr_scheduler.lr == 1e-5


def test_cf01_text_for_a_number_names_the_key() -> None:
    with pytest.raises(ConfigError, match=r'^lr_scheduler\.lr: expected a number, found text "1e-5 per step"'):
        load(f"{MODEL}lr_scheduler: {{lr: 1e-5 per step}}\n")


@pytest.mark.parametrize("text", ["null", "~", "", "Null"])
def test_cf03_null_in_all_its_forms(text: str) -> None:
    config = load(f"{MODEL}checkpoint:\n  restore_from: {text}\n")
    assert config.checkpoint.restore_from is None
    assert load(f"{MODEL}checkpoint: {{restore_from: there}}", f"checkpoint.restore_from={text}") == config


@pytest.mark.parametrize("text", ["None", "none", "NONE", "' None'", "''"])
def test_cf03_none_is_never_text(text: str) -> None:
    for arguments in [(f"checkpoint: {{restore_from: {text}}}",), ("", f"--checkpoint.restore_from={text}")]:
        with pytest.raises(ConfigError, match=r"^checkpoint\.restore_from: .*For nothing write null\.  \("):
            load(*arguments)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("--optimizer.weight_deca=3", "optimizer.weight_deca: no argument of torch.optim.AdamW."
         " Did you mean weight_decay?  (--optimizer.weight_deca=3)"),
        ("--trainer.seed=3", "trainer: unknown key. Did you mean training?  (--trainer.seed=3)"),
        ("--seed=3", "seed: unknown key. Did you mean training.seed?  (--seed=3)"),
        ("--training.lr=3", "training.lr: unknown key. Did you mean lr_scheduler.lr?  (--training.lr=3)"),
    ],
)  # fmt: skip
def test_cf05_misspelt_override_is_not_added(override: str, line: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(MODEL, override)
    assert str(error.value) == line


@pytest.mark.parametrize("text", ["", "optimizer: {betas: [0.9, 0.95]}\n"], ids=["default", "written"])
@pytest.mark.parametrize(
    "override", ["optimizer.betas[1]=0.99", "--optimizer.betas.1=0.99", "optimizer.betas=[0.9, 0.99]"]
)
def test_cf07_one_element_of_a_list(text: str, override: str) -> None:
    assert load(MODEL + text, override).optimizer.betas == (0.9, 0.99)


def test_cf07_elements_of_nested_lists() -> None:
    raw = read("strategies: [one, {name: two, sizes: [1, 2]}]\n", "strategies[1].sizes[0]=7", "strategies.0=zero")
    assert raw.tree == {"strategies": ["zero", {"name": "two", "sizes": [7, 2]}]}


def test_cf08_interpolation_of_an_unset_value_names_it() -> None:
    text = "checkpoint: {checkpoint_dir: '${output_dir}/ckpt'}\noutput_dir: ???\n"
    with pytest.raises(ConfigError) as error:
        read(text)
    assert str(error.value) == ("output_dir: has to be set, here or with --output_dir=VALUE; found ???  (train.yaml:2)")
    assert read(text, "--output_dir=runs").tree["checkpoint"] == {"checkpoint_dir": "runs/ckpt"}


def test_cf08_derived_values_follow_an_override_of_their_source() -> None:
    text = "training: {seed: 1, eval_iters: '${training.seed}'}\ndataset: {seq_length: '${training.eval_iters}'}\n"
    assert read(text).tree["dataset"] == {"seq_length": 1}
    tree = read(text, "--training.seed=5").tree
    assert tree == {"training": {"seed": 5, "eval_iters": 5}, "dataset": {"seq_length": 5}}
    assert read(text, "dataset.seq_length=9").tree["training"] == {"seed": 1, "eval_iters": 1}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("null", None),
        ("3", 3),
        ("-1e-5", -1e-5),
        ("[1, two, null]", [1, "two", None]),
        ("{a: 1, b: {c: [2]}}", {"a": 1, "b": {"c": [2]}}),
        ("'3'", "3"),
        ("a=b", "a=b"),
        ("s3://bucket/x y", "s3://bucket/x y"),
        ("${training.seed}", 7),
    ],
)
def test_values_of_overrides_are_yaml(text: str, value: Any) -> None:
    assert read("training: {seed: 7}", f"--dataset.path={text}").tree["dataset"] == {"path": value}


def test_overrides_are_applied_together_before_anything_is_checked() -> None:
    overrides = ["--training.train_iters=null", "--training.num_epochs=2"]
    text = f"{MODEL}training: {{train_iters: 100}}\n"
    for order in (overrides, overrides[::-1]):
        training = load(text, *order).training
        assert (training.train_iters, training.num_epochs) == (None, 2)


def test_last_of_two_overrides_counts_and_a_mapping_replaces() -> None:
    text = "training: {seed: 1, eval_iters: 2}\n"
    assert read(text, "training.seed=3", "training.seed=4").tree["training"] == {"seed": 4, "eval_iters": 2}
    raw = read(text, "--training={seed: 5}")
    assert raw.tree["training"] == {"seed": 5}
    assert raw.where("training.eval_iters") == raw.where("training.seed") == "--training={seed: 5}"


def test_where_every_value_comes_from() -> None:
    text = """\
training: &training
  seed: 1
  backend: gloo
dataset:
  path:
    - a
    - b
  <<: {shuffle: false}
checkpoint: ${dataset}
debug: *training
"""
    raw = read(text, "--training.backend=nccl", "optimizer.betas[0]=0.5", "new.deep.key=1")
    places = {
        "training": "train.yaml:1",
        "training.seed": "train.yaml:2",
        "training.backend": "--training.backend=nccl",
        "dataset.path": "train.yaml:5",
        "dataset.path[1]": "train.yaml:7",
        "dataset.shuffle": "train.yaml:8",
        "checkpoint.path[0]": "train.yaml:9",
        "debug.seed": "train.yaml:10",
        "optimizer.betas[0]": "optimizer.betas[0]=0.5",
        "new.deep": "new.deep.key=1",
        "model.target": "train.yaml",
    }
    assert {path: raw.where(path) for path in places} == places


def test_override_of_an_alias_leaves_its_anchor_alone() -> None:
    tree = read("training: &a {seed: 1}\ndebug: *a\n", "--debug.seed=2").tree
    assert tree == {"training": {"seed": 1}, "debug": {"seed": 2}}


def test_yaml_of_many_aliases_is_refused_quickly() -> None:
    levels = "".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]\n" for n in range(1, 9))
    with pytest.raises(ConfigError, match=r"^train\.yaml:\d+: not valid YAML: YAML node expansion exceeds"):
        read(f"l0: &l0 [x]\n{levels}")


def test_off_is_a_mode_and_empty_sections_are_defaults() -> None:
    config = load(f"{MODEL}activation_checkpoint:\n  mode: off\ntraining:\nfsdp_config:\n", plugins=[SHARD])
    assert config.activation_checkpoint.mode == "off"
    assert config == load(f"{MODEL}fsdp_config: {{}}\n", plugins=[SHARD])


def test_empty_file_has_no_keys() -> None:
    assert read("# nothing\n").tree == {}

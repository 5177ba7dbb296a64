"""Validation: the typed configuration, options of plugins, misspellings, and writing it down again."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from config_helpers import ACME, MODEL, SHARD, AcmeOptions, MixPrecision, ShardOptions, load, read

from hp_core.config import PluginOptions, RawConfig, RunConfig, build_config, config_to_yaml, install_hints
from hp_core.config.build import SECTIONS, VALUES
from hp_core.config.keys import default_of, yaml_fields
from hp_core.config.reference import reference
from hp_core.errors import ConfigError, PluginError

# The reference system's announcement, apart from its plan_overrides.
ANNOUNCEMENT = """\
model:
  _target_: hyper_parallel.models.HyperAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: /path/to/Qwen3-30B-A3B
  torch_dtype: bfloat16
  force_hf: true
fsdp_config:
  dp_shard_size: 2
  edp_shard_size: 2
  reshard_after_forward: true
  reshard_after_backward: true
  forward_prefetch_depth: 1
  backward_prefetch_depth: 1
"""


@pytest.fixture(autouse=True)
def _empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_announcement_loads() -> None:
    config = load(ANNOUNCEMENT, plugins=[SHARD])
    assert config.model.target == "hp_core.models.HyperAutoModelForCausalLM.from_pretrained"
    assert config.model.pretrained_model_name_or_path == "/path/to/Qwen3-30B-A3B"
    assert config.model.torch_dtype == "bfloat16"
    assert config.options == {"shard": ShardOptions(dp_shard_size=2, edp_shard_size=2)}


def test_defaults_are_those_of_the_dataclasses() -> None:
    config = load(MODEL)
    assert dataclasses.replace(config, model=RunConfig().model) == RunConfig()


def test_sizes_of_one_and_switches_that_are_off_need_no_plugin() -> None:
    off = (
        "accelerator: {pp_size: 1, tp_size: 1, cp_size: 1, ep_size: 1, sequence_parallel: false, loss_parallel: null}\n"
    )
    assert load(MODEL + off) == load(MODEL)


def test_options_come_from_keys_sections_and_strategies() -> None:
    by_key = "accelerator: {acme_size: 4}\nacme_config: {depth: 2}\nfsdp_config: {mix_precision: {param_dtype: x}}\n"
    by_entry = "strategies: [{name: shard, mix_precision: {param_dtype: x}}, {name: acme, acme_size: 4, depth: 2}]\n"
    expected = {"shard": ShardOptions(mix_precision=MixPrecision("x")), "acme": AcmeOptions(4, 2)}
    for text in (by_key, by_entry):
        options = load(MODEL + text, plugins=[SHARD, ACME]).options
        assert options == expected
        assert list(options) == ["shard", "acme"]


def test_override_of_an_option_in_strategies() -> None:
    text = f"{MODEL}strategies: [acme, {{name: acme, acme_size: 4}}]\n"
    assert load(text, "--strategies[1].depth=3", plugins=[ACME]).options == {"acme": AcmeOptions(4, 3)}


@pytest.mark.parametrize(
    ("key", "line"),
    [
        ("training.seed", "training.seed is owned by a plugin, but it is a key of hp-core"),
        ("accelerator.dept", 'plugin "acme" owns accelerator.dept, but its Options has no field dept'),
    ],
)
def test_plugin_with_a_wrong_key(key: str, line: str) -> None:
    @dataclasses.dataclass(frozen=True)
    class Options:
        seed: int = 1

    with pytest.raises(PluginError) as error:
        load(MODEL, plugins=[PluginOptions("acme", Options, (key,), {}, "train.yaml")])
    assert str(error.value) == line


def test_option_of_a_type_that_yaml_does_not_have() -> None:
    @dataclasses.dataclass(frozen=True)
    class Options:
        where: Path = Path()

    with pytest.raises(PluginError, match=r"^acme_config\.where: values of its type, .*Path.*, cannot be written"):
        load("acme_config: {where: here}", plugins=[PluginOptions("acme", Options, ("acme_config",), {}, "train.yaml")])


def test_further_keys_of_the_optimizer_are_its_arguments() -> None:
    config = load(f"{MODEL}optimizer: {{_target_: torch.optim.SGD, momentum: 0.9, weight_decay: 0}}\n").optimizer
    assert (config.target, config.args, config.weight_decay) == ("torch.optim.SGD", {"momentum": 0.9}, 0.0)
    assert load(f"{MODEL}optimizer: {{amsgrad: true}}\n").optimizer.args == {"amsgrad": True}


def test_section_that_a_factory_takes_over() -> None:
    text = """\
model: {_target_: config_helpers.load, text: x, torch_dtype: anything}
dataset: {_target_: config_helpers.read, text: y, overrides: 3}
lr_scheduler: {_target_: torch.optim.lr_scheduler.StepLR, step_size: 3, lr: 0.5}
trusted_targets: [config_helpers]
"""
    with pytest.raises(ConfigError, match=r"^model\.torch_dtype: no argument of config_helpers\.load\. "):
        load(text)
    with pytest.raises(ConfigError, match=r"^dataset\.overrides: no argument of config_helpers\.read\. "):
        load(text.replace(", torch_dtype: anything", ""))
    config = load(text.replace(", torch_dtype: anything", "").replace(", overrides: 3", ""))
    assert (config.model.target, config.model.args) == ("config_helpers.load", {"text": "x"})
    assert (config.dataset.target, config.dataset.args) == ("config_helpers.read", {"text": "y"})
    assert (config.lr_scheduler.lr, config.lr_scheduler.args) == (0.5, {"step_size": 3})


def test_modules_of_selected_plugins_are_trusted() -> None:
    text = f"{MODEL}fsdp_config: {{}}\ndataset: {{_target_: config_helpers.read, text: x}}\n"
    assert load(text, plugins=[SHARD]).dataset.target == "config_helpers.read"


EVERYTHING = f"""\
{ANNOUNCEMENT}
accelerator: {{acme_size: 3}}
strategies: [shard, {{name: acme, depth: 2, note: "None of 1e-5, $\\\\{{x}}"}}]
training: {{train_iters: 10, seed: 3, max_grad_norm: null, backend: gloo}}
dataset: {{path: [a, '1e-5', 'on', '012', 'null'], text_key: "\\\\${{not.an.interpolation}}"}}
dataloader: {{_target_: config_helpers.read, text: {{_target_: torch.nn.Linear, in_features: 2, out_features: 3}}}}
optimizer: {{_target_: torch.optim.SGD, momentum: 0.9, no_decay_params: ['*.bias']}}
lr_scheduler: {{lr: 5e-5, lr_decay_style: wsd}}
activation_checkpoint: {{mode: off}}
"""


@pytest.mark.parametrize("text", [MODEL, ANNOUNCEMENT, EVERYTHING], ids=["defaults", "announcement", "everything"])
def test_the_written_configuration_loads_again(text: str) -> None:
    used = [SHARD, ACME] if "acme" in text else [SHARD]
    config = load(text, plugins=used)
    written = config_to_yaml(config)
    assert load(written, plugins=used) == config
    assert config_to_yaml(load(written, plugins=used)) == written


def misspellings(name: str) -> set[str]:
    """Those that differ from `name` in one character, at every place: left out, an e added, an e instead of it."""
    cuts = [(name[:index], name[index:]) for index in range(len(name) + 1)]
    return {wrong for head, tail in cuts for wrong in (head + tail[1:], f"{head}e{tail}", f"{head}e{tail[1:]}")}


def schema_keys() -> list[tuple[str, str, Any]]:
    """(section, key, a right value) of every key; the section is empty for keys of the root."""
    keys: list[tuple[str, str, Any]] = [("", name, {}) for name in SECTIONS]
    keys += [("", name, default_of(yaml_fields(RunConfig)[name])) for name in VALUES]
    for section, cls in (*SECTIONS.items(), ("fsdp_config", ShardOptions)):
        keys += [(section, name, default_of(field)) for name, field in yaml_fields(cls).items()]
    return keys


@pytest.mark.parametrize(("section", "name", "value"), schema_keys(), ids=lambda part: str(part) or "-")
def test_any_misspelt_letter_is_refused_with_the_right_key(section: str, name: str, value: Any) -> None:
    known = {key for place, key, _ in schema_keys() if place == section}
    for wrong in sorted(misspellings(name)):
        path = f"{section}.{wrong}" if section else wrong
        if wrong in known or path in install_hints().keys or not wrong:
            continue
        tree = {section: {wrong: value}} if section else {wrong: value}
        with pytest.raises(ConfigError) as error:
            build_config(RawConfig("train.yaml", tree, {}), [SHARD])
        # Two keys that differ in a letter may both have been meant.
        meant = [key for key in sorted(known) if key == name or wrong in misspellings(key)]
        assert str(error.value).startswith(f"{path}: ")
        assert str(error.value).endswith(f" Did you mean {meant[0]}?  (train.yaml)"), str(error.value)


def test_reference_page_is_current() -> None:
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
    command = "python -m hp_core.config.reference > docs/configuration.md"
    assert page == reference(), f"Run {command}"
    for text in (command, *SECTIONS, *(key for cls in SECTIONS.values() for key in yaml_fields(cls))):
        assert text in page


def test_every_key_says_what_it_means() -> None:
    for cls in (*SECTIONS.values(), RunConfig):
        for name, field in yaml_fields(cls).items():
            assert name in SECTIONS or field.metadata["key"].doc, f"{cls.__name__}.{name}"
        assert cls.__doc__
        assert not cls.__doc__.startswith(cls.__name__)  # dataclass's own


def test_a_size_of_1_asks_an_installed_plugin_that_is_not_in_use_for_nothing() -> None:
    raw = read(f"{MODEL}accelerator: {{acme_size: 1}}\n")
    build_config(raw, installed=["accelerator.acme_size"])
    with pytest.raises(ConfigError, match=r"accelerator\.acme_size: unknown key"):
        build_config(raw)
    with pytest.raises(ConfigError, match=r"accelerator\.acme_size: unknown key"):
        build_config(read(f"{MODEL}accelerator: {{acme_size: 2}}\n"), installed=["accelerator.acme_size"])

"""Stand-in plugins and a way to load YAML text, for the tests of the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hp_core.config import PluginOptions, RawConfig, RunConfig, build_config, key, read_config

MODEL = "model: {pretrained_model_name_or_path: some/model}\n"


@dataclass(frozen=True)
class MixPrecision:
    param_dtype: str | None = None
    cast_forward_inputs: bool = True


@dataclass(frozen=True)
class ShardOptions:
    dp_shard_size: int | None = None
    edp_shard_size: int | None = None
    replicate_params: tuple[str, ...] = ()
    reshard_after_forward: bool = True
    reshard_after_backward: bool = True
    forward_prefetch_depth: int = key(1, "blocks", minimum=0)
    backward_prefetch_depth: int = key(1, "blocks", minimum=0)
    mix_precision: MixPrecision = field(default_factory=MixPrecision)


@dataclass(frozen=True)
class AcmeOptions:
    acme_size: int
    depth: int = 1
    note: str | None = None

    def __post_init__(self) -> None:
        if self.depth > 9:
            raise ValueError(f"a depth of {self.depth} is more than acme can do")


SHARD = PluginOptions("shard", ShardOptions, ("fsdp_config",), {}, "train.yaml:1")
ACME = PluginOptions("acme", AcmeOptions, ("accelerator.acme_size", "acme_config"), {}, "train.yaml:1")


def read(text: str, *overrides: str) -> RawConfig:
    """Read `text` as train.yaml in the current folder."""
    Path("train.yaml").write_text(text, encoding="utf-8")
    return read_config(Path("train.yaml"), overrides)


def load(text: str, *overrides: str, plugins: Sequence[PluginOptions] = ()) -> RunConfig:
    """Read and validate `text`; the options of `plugins` may also stand in `strategies`."""
    raw = read(text, *overrides)
    return build_config(raw, [inline(plugin, raw) for plugin in plugins])


def inline(plugin: PluginOptions, raw: RawConfig) -> PluginOptions:
    """`plugin` with the options of its entry in `strategies`, as the registry would hand it over."""
    for index, entry in enumerate(raw.tree.get("strategies", [])):
        if isinstance(entry, dict) and entry["name"] == plugin.name:
            options: dict[str, Any] = {name: value for name, value in entry.items() if name != "name"}
            return PluginOptions(
                plugin.name, plugin.options_class, plugin.keys, options, raw.where(f"strategies[{index}]")
            )
    return plugin


def make_optimizer(params: Any, lr: float, momentum: float = 0.0, weight_decay: float = 0.0) -> None:
    """The signature of an optimizer."""


def make_schedule(optimizer: Any, step_size: int) -> None:
    """The signature of a schedule."""

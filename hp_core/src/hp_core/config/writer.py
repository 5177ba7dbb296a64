"""Writing a configuration, so that it reads again as the same `RunConfig`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

from hp_core.config.keys import TARGET, default_of, key_info, yaml_fields
from hp_core.config.schema import RunConfig
from hp_core.config.targeted import TYPED_FACTORIES
from hp_core.config.targets import accepted_arguments, load_target


def config_to_yaml(config: RunConfig) -> str:
    """The resolved configuration: every key of core, and the options of each plugin in its entry of `strategies`."""
    tree: dict[str, Any] = {
        "strategies": [{"name": name, **dataclasses.asdict(options)} for name, options in config.options.items()]
    }
    for name in yaml_fields(RunConfig):
        value = getattr(config, name)
        tree[name] = _section(value) if dataclasses.is_dataclass(value) else value
    text: str = OmegaConf.to_yaml(OmegaConf.create(_plain(tree)))
    return text


def _section(section: Any) -> dict[str, Any]:
    """The keys of a section. One that a factory has taken over has the shared keys and the factory's arguments only."""
    fields = yaml_fields(type(section))
    values = {name: getattr(section, field.name) for name, field in fields.items()}
    target = values.get(TARGET)
    if target is None:
        values.pop(TARGET, None)
        return values
    if target in TYPED_FACTORIES:
        return values
    accepted = accepted_arguments(load_target(target))
    for name, field in fields.items():
        info = key_info(field)
        untaken = accepted is not None and info.argument and name not in accepted
        if info.role == "key" and (not info.shared or (untaken and values[name] == default_of(field))):
            del values[name]
    return {**values, **section.args}


def _plain(value: Any) -> Any:
    """Only what YAML knows, and text with `${` written so that it is not an interpolation."""
    if isinstance(value, Mapping):
        return {name: _plain(child) for name, child in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(child) for child in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value

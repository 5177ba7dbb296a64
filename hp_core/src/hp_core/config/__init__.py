"""The run configuration: reading with overrides, validating, building what it names, writing."""

from hp_core.config.build import PluginOptions, build_config
from hp_core.config.hints import InstallHints, install_hints
from hp_core.config.keys import key
from hp_core.config.raw import RawConfig, read_config
from hp_core.config.schema import ModelConfig, RunConfig
from hp_core.config.targets import instantiate, load_target, resolve_target
from hp_core.config.writer import config_to_yaml

__all__ = [
    "InstallHints",
    "ModelConfig",
    "PluginOptions",
    "RawConfig",
    "RunConfig",
    "build_config",
    "config_to_yaml",
    "install_hints",
    "instantiate",
    "key",
    "load_target",
    "read_config",
    "resolve_target",
]

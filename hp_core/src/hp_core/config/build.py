"""Validation: from what the user wrote to the typed `RunConfig`, in one pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

from hp_core.config.checks import check_run
from hp_core.config.convert import convert, make, read_section, type_hints
from hp_core.config.keys import TARGET, key_info, yaml_fields
from hp_core.config.raw import RawConfig
from hp_core.config.schema import RunConfig
from hp_core.config.targeted import read_targeted_section
from hp_core.config.unknown_keys import KeyChecker
from hp_core.config.words import found
from hp_core.errors import ConfigError, PluginError

STRATEGIES = "strategies"
SECTIONS: dict[str, type[Any]] = {
    name: hint for name, hint in type_hints(RunConfig).items() if isinstance(hint, type) and is_dataclass(hint)
}
VALUES = tuple(name for name in yaml_fields(RunConfig) if name not in SECTIONS)


@dataclass(frozen=True)
class PluginOptions:
    """What a selected plugin may be configured with.

    `keys` are the dotted keys (`accelerator.acme_size`: the field `acme_size`) and the sections (`acme_config`: the
    other fields) that it owns. `inline` are the options in its entry of `strategies`, without the name; `where` is
    the place that selects it.
    """

    name: str
    options_class: type[Any]
    keys: tuple[str, ...]
    inline: Mapping[str, Any]
    where: str

    def fields_by_key(self) -> dict[str, str]:
        """Every dotted key of the plugin, and the field that it sets. Raises PluginError for one without a field."""
        single = {key: key.rpartition(".")[2] for key in self.keys if "." in key}
        fields = yaml_fields(self.options_class)
        for key, name in single.items():
            if name not in fields:
                raise PluginError(f'plugin "{self.name}" owns {key}, but its Options has no field {name}')
        rest = [name for name in fields if name not in single.values()]
        sections = [key for key in self.keys if "." not in key]
        return single | {f"{section}.{name}": name for section in sections for name in rest}


def build_config(raw: RawConfig, plugins: Sequence[PluginOptions] = (), installed: Iterable[str] = ()) -> RunConfig:
    """Validate everything once. `RunConfig.options` gets the options of `plugins`, in their order.

    `installed` are the keys that plugins own which are installed, whether in use or not: they may ask for nothing.
    Raises ConfigError for an unknown key, a wrong type or value, a key of an absent plugin, or values that contradict
    each other; PluginError when a plugin's options or keys cannot work.
    """
    core = {f"{section}.{name}" for section, cls in SECTIONS.items() for name in yaml_fields(cls)}
    owned = [key for plugin in plugins for key in plugin.fields_by_key()]
    for key in core.intersection(owned):
        raise PluginError(f"{key} is owned by a plugin, but it is a key of hp-core")
    keys = KeyChecker(
        raw.where,
        dotted=tuple(sorted({*core, *owned, *VALUES})),
        selected=frozenset(plugin.name for plugin in plugins),
        installed=frozenset(installed),
    )
    sections = list(dict.fromkeys([*SECTIONS, *(key.partition(".")[0] for key in owned)]))
    root = keys.check(raw.tree, [*sections, *VALUES, STRATEGIES], "")
    given = {name: _mapping(root.get(name), name, keys) for name in sections}
    hints = type_hints(RunConfig)
    values = {name: convert(root[name], hints[name], name, keys) for name in VALUES if name in root}
    roots = [plugin.options_class.__module__.partition(".")[0] for plugin in plugins]
    trusted = [*values.get("trusted_targets", []), *roots]
    for name in sections:
        siblings = [key.partition(".")[2] for key in (*core, *owned) if key.startswith(f"{name}.")]
        mine = {key: value for key, value in given[name].items() if f"{name}.{key}" not in owned}
        cls = SECTIONS.get(name)
        if cls is not None and TARGET in siblings:
            values[name] = read_targeted_section(cls, mine, name, keys, trusted)
            continue
        mine = keys.check(mine, siblings, name)
        if cls is not None:
            values[name] = read_section(cls, mine, name, keys)
    options = {plugin.name: _read_options(plugin, given, keys) for plugin in plugins}
    config = RunConfig(**values, options=options)
    check_run(config, keys, trusted)
    return config


def _mapping(value: Any, path: str, keys: KeyChecker) -> Mapping[str, Any]:
    """The entries of a section; a header with nothing below it has none."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise keys.fail(path, f"expected a section with keys, found {found(value)}")
    return value


def _read_options(plugin: PluginOptions, given: Mapping[str, Mapping[str, Any]], keys: KeyChecker) -> Any:
    """The Options instance of one plugin, from its keys and its entry in `strategies`."""
    inline = KeyChecker(lambda _: plugin.where)
    fields = yaml_fields(plugin.options_class)
    hints = type_hints(plugin.options_class)
    first: dict[str, str] = {}
    arguments = {}
    entries = [
        (key, field_name, given[section][name], keys)
        for key, field_name in plugin.fields_by_key().items()
        for section, _, name in [key.partition(".")]
        if name in given[section]
    ]
    entries += [
        (f"{plugin.name}.{name}", name, value, inline)
        for name, value in inline.check(plugin.inline, fields, plugin.name).items()
    ]
    for path, name, value, checker in entries:
        where = f"{path} ({checker.where(path)})"
        if name in first:
            raise ConfigError(f'option {name} of "{plugin.name}" is given twice: {first[name]} and {where}. Keep one.')
        first[name] = where
        arguments[fields[name].name] = convert(value, hints[fields[name].name], path, checker, key_info(fields[name]))
    paths = {field_name: key for key, field_name in plugin.fields_by_key().items()}
    return make(plugin.options_class, arguments, plugin.name, inline, paths)

"""Keys that nobody reads: what each should have been, or what has to be installed for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from hp_core.config.hints import install_hints
from hp_core.config.keys import asks_for_nothing
from hp_core.config.words import found, suggestion
from hp_core.config.yaml_source import child_path
from hp_core.errors import ConfigError


@dataclass(frozen=True)
class KeyChecker:
    """Refuses unknown keys. `where` gives the place of a dotted path, `dotted` are all keys of the configuration,
    `selected` the names of the plugins in use, `installed` the keys of all plugins that could be."""

    where: Callable[[str], str]
    dotted: tuple[str, ...] = ()
    selected: frozenset[str] = frozenset()
    installed: frozenset[str] = frozenset()

    def fail(self, path: str, message: str) -> ConfigError:
        """The error that `message` is true of `path`."""
        return ConfigError(f"{path}: {message}  ({self.where(path)})")

    def check(self, values: Mapping[str, Any], known: Iterable[str], path: str) -> dict[str, Any]:
        """The entries of `values` that are in `known`. Raises ConfigError for any other, unless it asks an absent
        plugin for nothing."""
        names = list(known)
        for name, value in values.items():
            if name not in names and not self._asks_for_nothing(child_path(path, name), value):
                raise self.unknown(name, value, names, path)
        return {name: value for name, value in values.items() if name in names}

    def unknown(self, name: str, value: Any, known: Iterable[str], path: str, what: str = "unknown key") -> ConfigError:
        """The error for one key of the mapping at `path`, which knows the names `known`."""
        child = child_path(path, name)
        hints = install_hints()
        if child in hints.unsupported:
            return self.fail(child, f"not a key of this version of hp. {hints.unsupported[child]}")
        plugin = self._absent_plugin(child)
        if plugin is not None:
            return self._absent(child, value, plugin)
        # A mapping is a section: no key of another section was meant.
        others = [] if isinstance(value, Mapping) else [key for key in self.dotted if not key.startswith(f"{path}.")]
        return self.fail(child, f"{what}.{suggestion(name, known, others)}")

    def _absent_plugin(self, path: str) -> str | None:
        plugin = install_hints().keys.get(path)
        return None if plugin in self.selected else plugin

    def _asks_for_nothing(self, path: str, value: Any) -> bool:
        if "." not in path or (self._absent_plugin(path) is None and path not in self.installed):
            return False
        return asks_for_nothing(path, value)

    def _absent(self, path: str, value: Any, plugin: str) -> ConfigError:
        package = install_hints().plugins[plugin]
        kind = "strategy" if package.startswith("hp-strategies-") else "plugin"
        try:
            metadata.distribution(package)
        except metadata.PackageNotFoundError:
            is_section = value is None or isinstance(value, Mapping | list)
            asked = f"the configuration has {path}" if is_section else f"{path} = {found(value)}"
            return ConfigError(f'{kind} "{plugin}" is not installed but {asked}. pip install {package}')
        return self.fail(path, f'belongs to {kind} "{plugin}", which is not selected. Add {plugin} to strategies.')

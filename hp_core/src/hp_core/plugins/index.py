"""What is installed: plugins and the configuration keys that they own, read from metadata alone.

Nothing here imports a plugin, so a broken distribution does no harm until a configuration uses it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import Distribution, EntryPoint, distributions, version
from operator import attrgetter
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from hp_core.config import install_hints
from hp_core.errors import PluginError

PLUGIN_GROUP = "hp.plugins"
KEY_GROUP = "hp.keys"
CORE = "hp-core"


@dataclass(frozen=True)
class FoundPlugin:
    """A plugin that a distribution announces. `location` is the folder on `sys.path` that holds its metadata."""

    name: str
    distribution: str
    version: str
    location: Path
    entry_point: EntryPoint
    keys: tuple[str, ...]
    requires: tuple[str, ...]

    def __str__(self) -> str:
        return f'plugin "{self.name}" of {self.distribution} {self.version}'

    @property
    def source(self) -> str:
        """The distribution, its version and where it lies."""
        return f"{self.distribution} {self.version} ({self.location})"

    def requirement_problem(self) -> str | None:
        """Why the installed hp-core is not one that this distribution declares to work with; None if it is.

        pip checks `Requires-Dist` only when it resolves dependencies; `pip install --no-deps` does not.
        """
        ranges = []
        for line in self.requires:
            try:
                requirement = Requirement(line)
            except InvalidRequirement:
                return f"{self} declares a requirement that cannot be read: {line!r}. Reinstall {self.distribution}."
            applies = requirement.marker is None or requirement.marker.evaluate()
            if canonicalize_name(requirement.name) == CORE and applies:
                ranges.append(requirement.specifier)
        if not ranges:
            return f'{self} declares no requirement on hp-core. Its author has to add one, such as "hp-core>=0.1,<0.2".'
        accepted, found = SpecifierSet(",".join(str(each) for each in ranges)), version(CORE)
        if not accepted.contains(found, prereleases=True):
            return f"{self} needs hp-core {accepted}, found hp-core {found}. pip install a matching pair."
        return None


@dataclass(frozen=True)
class PluginIndex:
    """Everything that was found, sorted by name. `unreadable` has one line per distribution that made no sense."""

    plugins: tuple[FoundPlugin, ...]
    unreadable: tuple[str, ...] = ()

    def get(self, name: str) -> FoundPlugin:
        """The one plugin of that name. Raises PluginError when there is none, or more than one."""
        found = [plugin for plugin in self.plugins if plugin.name == name]
        if not found:
            raise PluginError(f'strategy "{name}" is not installed. {self._advice(name)}')
        if problem := self._name_clash(name):
            raise PluginError(problem)
        return found[0]

    def owner(self, key: str) -> FoundPlugin:
        """The one plugin that owns the configuration key `key`. Raises PluginError when it has two owners."""
        if problem := self._key_clash(key):
            raise PluginError(problem)
        return self.get(next(plugin.name for plugin in self.plugins if key in plugin.keys))

    @property
    def keys(self) -> tuple[str, ...]:
        """All owned configuration keys, sorted."""
        return tuple(sorted({key for plugin in self.plugins for key in plugin.keys}))

    def clash(self, plugin: FoundPlugin) -> str | None:
        """Who else claims the name or a key of `plugin`, in one line; None if they are its alone."""
        clashes = [self._name_clash(plugin.name), *(self._key_clash(key) for key in plugin.keys)]
        return next((clash for clash in clashes if clash), None)

    def problem(self, plugin: FoundPlugin) -> str | None:
        """What the metadata alone says against `plugin`, in one line; None if nothing."""
        return self.clash(plugin) or plugin.requirement_problem()

    def _name_clash(self, name: str) -> str | None:
        same = [plugin.source for plugin in self.plugins if plugin.name == name]
        if len(same) < 2:
            return None
        return (
            f'strategy "{name}" is claimed by {len(same)} distributions: {" and ".join(same)}. Uninstall all but one.'
        )

    def _key_clash(self, key: str) -> str | None:
        owners = {plugin.name: str(plugin) for plugin in self.plugins if key in plugin.keys}
        if len(owners) < 2:
            return None
        return f"{key}: owned by {' and '.join(owners.values())}. Uninstall all but one."

    def _advice(self, name: str) -> str:
        if package := install_hints().plugins.get(name):
            return f"pip install {package}"
        installed = sorted({plugin.name for plugin in self.plugins})
        if close := difflib.get_close_matches(name, installed, n=1):
            return f'Closest installed: "{close[0]}".'
        return f"Installed: {', '.join(installed) or 'none'}."


def find_plugins() -> PluginIndex:
    """Read the entry-point groups `hp.plugins` and `hp.keys` of every distribution on `sys.path`."""
    plugins: list[FoundPlugin] = []
    unreadable: list[str] = []
    for distribution in _distinct(distributions(), unreadable):
        entry_points = distribution.entry_points
        announced = [each for each in entry_points if each.group == PLUGIN_GROUP]
        keys = [each for each in entry_points if each.group == KEY_GROUP]
        name, location = distribution.name, Path(str(distribution.locate_file("")))
        values = {each.value for each in announced}
        unreadable += [
            f'{name} {distribution.version} ({location}): key "{key.name}" points to {key.value}, '
            f"which is none of its plugins."
            for key in keys
            if key.value not in values
        ]
        plugins += [
            FoundPlugin(
                name=plugin.name,
                distribution=name,
                version=distribution.version,
                location=location,
                entry_point=plugin,
                keys=tuple(sorted(key.name for key in keys if key.value == plugin.value)),
                requires=tuple(distribution.requires or ()),
            )
            for plugin in announced
        ]
    return PluginIndex(tuple(sorted(plugins, key=attrgetter("name", "distribution", "version"))), tuple(unreadable))


def _distinct(found: Iterable[Distribution], unreadable: list[str]) -> list[Distribution]:
    """Distributions with hp entry points, each once.

    One installation can be seen twice (lib64 is often a link to lib): the same normalised name and version is one
    distribution, and the first on `sys.path` is the one that an import gets. Two versions are two, since nobody can
    tell which of them the modules belong to.
    """
    distinct: dict[tuple[str, str], Distribution] = {}
    for distribution in found:
        try:
            text = distribution.read_text("entry_points.txt") or ""
            if f"[{PLUGIN_GROUP}]" in text or f"[{KEY_GROUP}]" in text:
                list(distribution.entry_points)
                distinct.setdefault((canonicalize_name(distribution.name), distribution.version), distribution)
        except (TypeError, ValueError, KeyError) as error:
            folder = distribution.locate_file("")
            unreadable.append(f"{folder}: a distribution with unreadable metadata ({type(error).__name__}: {error}).")
    return list(distinct.values())

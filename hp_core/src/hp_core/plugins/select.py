"""Which plugins a configuration uses, decided without importing any of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hp_core.config import RawConfig
from hp_core.config.build import STRATEGIES
from hp_core.config.keys import asks_for_nothing
from hp_core.errors import PluginError
from hp_core.plugins.index import FoundPlugin, PluginIndex

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Selection:
    """A plugin that the configuration uses.

    `inline` are the options given in `strategies:`, `where` is the line that selects it. `in_order` says that the
    user decided its place, by `strategies:`; otherwise `load_plugins` places it by its `must_follow`.
    """

    found: FoundPlugin
    inline: Mapping[str, Any]
    where: str
    in_order: bool


def select_plugins(index: PluginIndex, raw: RawConfig) -> tuple[Selection, ...]:
    """The plugins that `strategies:` lists, in its order; without it, those whose keys are used, by name.

    A key is used when it is a section that is there, a size other than 1, or another value that is set and not
    false. Raises PluginError for a name that is absent, given twice or claimed by two distributions, and for a key
    that is used while `strategies:` leaves its plugin out.
    """
    used = [key for key in index.keys if _is_used(key, raw.tree)]
    listed = raw.tree.get(STRATEGIES)
    selections = _implied(index, raw, used) if listed is None else _listed(index, raw, listed)
    names = {selection.found.name for selection in selections}
    for key in used:
        owner = index.owner(key)
        if owner.name not in names:
            raise PluginError(
                f'{key}: belongs to strategy "{owner.name}", which is not in strategies. '
                f"Add {owner.name} to strategies or remove the key.  ({raw.where(key)})"
            )
    for plugin in index.plugins:
        if plugin.name not in names and (problem := index.problem(plugin)):
            logger.warning("not used here, but broken: %s", problem)
    return selections


def _implied(index: PluginIndex, raw: RawConfig, used: Sequence[str]) -> tuple[Selection, ...]:
    owners: dict[str, Selection] = {}
    for key in used:
        owner = index.owner(key)
        owners.setdefault(owner.name, Selection(owner, {}, raw.where(key), in_order=False))
    return tuple(owners[name] for name in sorted(owners))


def _listed(index: PluginIndex, raw: RawConfig, listed: Any) -> tuple[Selection, ...]:
    if not isinstance(listed, list):
        raise PluginError(
            f"strategies: expected a list of names, found {type(listed).__name__}. Write strategies: [NAME, ...].  "
            f"({raw.where(STRATEGIES)})"
        )
    selections: list[Selection] = []
    for position, entry in enumerate(listed):
        path = f"{STRATEGIES}[{position}]"
        where = raw.where(path)
        inline = dict(entry) if isinstance(entry, Mapping) else {"name": entry}
        name = inline.pop("name", None)
        if not isinstance(name, str):
            raise PluginError(f"{path}: expected a name or {{name: ..., options}}, found {entry!r}.  ({where})")
        try:
            found = index.get(name)
        except PluginError as error:
            raise PluginError(f"{path}: {error}  ({where})") from error
        if any(selection.found.name == name for selection in selections):
            raise PluginError(f'{path}: strategy "{name}" is listed twice. Remove one.  ({where})')
        selections.append(Selection(found, inline, where, in_order=True))
    return tuple(selections)


def _is_used(key: str, tree: Mapping[str, Any]) -> bool:
    section, _, name = key.rpartition(".")
    if not section:
        return name in tree
    value = tree.get(section)
    return isinstance(value, Mapping) and not asks_for_nothing(key, value.get(name))

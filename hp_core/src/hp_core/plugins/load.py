"""Import the selected plugins and check each against the contract in `hp_core.hookspecs`."""

from __future__ import annotations

import dataclasses
import difflib
import logging
from collections.abc import Sequence
from types import FunctionType, ModuleType
from typing import Any, get_args

import pluggy

from hp_core.errors import PluginError
from hp_core.mesh import MeshAxis, Role
from hp_core.plugins.index import FoundPlugin
from hp_core.plugins.plugin_set import LoadedPlugin, PluginSet, new_manager
from hp_core.plugins.select import Selection

logger = logging.getLogger(__name__)

ALL_OTHERS = "*"


def load_plugins(selections: Sequence[Selection]) -> PluginSet:
    """Import the selected plugins, and nothing else, and check them and their order.

    Raises PluginError, one line that names plugin, distribution and version, for the first thing that is wrong.
    """
    plugins = tuple(
        LoadedPlugin(selection.found, load_plugin(selection.found), selection.inline, selection.where)
        for selection in selections
    )
    if all(selection.in_order for selection in selections):
        _check_order(plugins)
    else:
        plugins = _arrange(plugins)
        order = ", ".join(f"{plugin.name} ({plugin.where})" for plugin in plugins)
        logger.info("strategies not given, taken from the keys that are used, in this order: %s", order)
    return PluginSet(plugins)


def load_plugin(found: FoundPlugin) -> Any:
    """Import one plugin and check it. Returns the instance; raises PluginError for the first thing that is wrong."""
    if problem := found.requirement_problem():
        raise PluginError(problem)
    try:
        plugin = found.entry_point.load()
    except (Exception, SystemExit) as error:
        # Whatever its modules do at import is the plugin's fault, and has to be said in its name.
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        raise PluginError(f"{found} cannot be imported: {cause}") from error
    if problem := _attribute_problem(found, plugin) or _hook_problem(plugin):
        raise PluginError(f"{found}: {problem}")
    return plugin


def _attribute_problem(found: FoundPlugin, plugin: Any) -> str | None:
    """What is wrong with the attributes `name`, `Options`, `axes` and `must_follow`; None if nothing."""
    value = found.entry_point.value
    for kind, text in ((type, "a class"), (ModuleType, "a module"), (FunctionType, "a function")):
        if isinstance(plugin, kind):
            return f"{value} is {text}, expected an instance. Name the instance in the entry point."
    if type(plugin).__hash__ is None:
        return f"{value} cannot be hashed. A dataclass needs eq=False or frozen=True for that."
    name = getattr(plugin, "name", None)
    if name != found.name:
        return f'its name attribute is {name!r}, expected "{found.name}", the name of its entry point.'
    options = getattr(plugin, "Options", None)
    if not isinstance(options, type) or not dataclasses.is_dataclass(options):
        return f"Options is {options!r}, expected a frozen dataclass."
    if not options.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        return "Options is not frozen. Decorate it with @dataclass(frozen=True)."
    fields = {field.name for field in dataclasses.fields(options)}
    axes = getattr(plugin, "axes", None)
    if not isinstance(axes, tuple) or not all(isinstance(axis, MeshAxis) for axis in axes):
        return f"axes is {axes!r}, expected a tuple of MeshAxis (empty for none)."
    for axis in axes:
        if axis.option not in fields:
            return f'axis "{axis.name}" takes its size from Options.{axis.option}, which does not exist.'
        if axis.role not in get_args(Role):
            return f'axis "{axis.name}" has role {axis.role!r}, expected one of {", ".join(get_args(Role))}.'
    for key in found.keys:
        section, _, field = key.rpartition(".")
        if section and field not in fields:
            return f"it owns the key {key}, but Options has no field {field}."
    follows = getattr(plugin, "must_follow", None)
    if not isinstance(follows, tuple) or not all(isinstance(each, str) for each in follows):
        return f"must_follow is {follows!r}, expected a tuple of plugin names (empty for none)."
    return None


def _hook_problem(plugin: Any) -> str | None:
    """What is wrong with the hook implementations of `plugin`; None if nothing."""
    manager = new_manager()
    known = set(vars(manager.hook))
    try:
        manager.register(plugin, plugin.name)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        unknown = next((name for name in vars(manager.hook) if name not in known), None)
        if unknown is not None:
            return f"there is no hook {unknown}. {_closest(unknown, known)}"
        return " ".join(str(error).split())
    for name in dir(plugin):
        is_marked = manager.parse_hookimpl_opts(plugin, name) is not None
        if name in known and not is_marked and callable(getattr(plugin, name)):
            return f"its {name} is not marked as a hook. Decorate it with hp_core.hookimpl."
    implementations = [impl for name in sorted(known) for impl in getattr(manager.hook, name).get_hookimpls()]
    for impl in implementations:
        hook = impl.function.__name__
        if impl.tryfirst or impl.trylast:
            return (
                f"{hook} uses tryfirst or trylast. The order in the configuration is the only order: use must_follow."
            )
    wrappers = {impl.function.__name__ for impl in implementations if impl.wrapper or impl.hookwrapper}
    if wrappers and len(wrappers) < len(implementations):
        return (
            f"{sorted(wrappers)[0]} is a wrapper, but the plugin also implements hooks. "
            "Wrappers are for observers, which do nothing else: make it a plugin of its own."
        )
    return None


def _closest(name: str, known: set[str]) -> str:
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return f"Did you mean {close[0]}?" if close else f"There are: {', '.join(sorted(known))}."


def _check_order(plugins: Sequence[LoadedPlugin]) -> None:
    for position, plugin in enumerate(plugins):
        for later in plugins[position + 1 :]:
            if _follows(plugin, later):
                valid = ", ".join(each.name for each in _arrange(plugins))
                raise PluginError(
                    f'strategies: "{plugin.name}" must follow "{later.name}" but comes before it. '
                    f"A valid order: {valid}.  ({plugin.where})"
                )


def _arrange(plugins: Sequence[LoadedPlugin]) -> tuple[LoadedPlugin, ...]:
    """The given order with as little change as `must_follow` allows."""
    waiting, placed = list(plugins), []
    while waiting:
        ready = [plugin for plugin in waiting if not any(_follows(plugin, other) for other in waiting)]
        if not ready:
            names = " and ".join(f'"{plugin.name}"' for plugin in waiting)
            raise PluginError(f"strategies: {names} must each follow another of them; no order can satisfy that.")
        placed.append(ready[0])
        waiting.remove(ready[0])
    return tuple(placed)


def _follows(plugin: LoadedPlugin, other: LoadedPlugin) -> bool:
    wanted = plugin.instance.must_follow
    return other is not plugin and (other.name in wanted or ALL_OTHERS in wanted)

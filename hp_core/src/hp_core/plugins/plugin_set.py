"""The loaded plugins of a run: an ordered set whose hooks are called one plugin at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import version
from typing import Any

import pluggy

from hp_core import hookspecs
from hp_core.config import PluginOptions
from hp_core.mesh import MeshAxis
from hp_core.plugins.index import CORE, FoundPlugin


def new_manager() -> pluggy.PluginManager:
    """A pluggy manager that knows the hooks of hp and no plugins."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


@dataclass(frozen=True)
class LoadedPlugin:
    """A plugin that was imported and checked. `inline` and `where` are those of its `Selection`."""

    found: FoundPlugin
    instance: Any
    inline: Mapping[str, Any]
    where: str

    @property
    def name(self) -> str:
        return self.found.name


@dataclass(frozen=True)
class PluginSet:
    """Plugins in the configured order, with each one's options once the configuration is validated."""

    plugins: tuple[LoadedPlugin, ...]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(plugin.name for plugin in self.plugins)

    @property
    def option_specs(self) -> tuple[PluginOptions, ...]:
        """What `hp_core.config.build_config` needs to know to make each plugin's options."""
        return tuple(
            PluginOptions(plugin.name, plugin.instance.Options, plugin.found.keys, plugin.inline, plugin.where)
            for plugin in self.plugins
        )

    def with_options(self, options: Mapping[str, Any]) -> PluginSet:
        """The same plugins with `options`: plugin name to the instance of its `Options`, such as `config.options`."""
        for plugin in self.plugins:
            assert isinstance(options[plugin.name], plugin.instance.Options), plugin.name
        return replace(self, options=options)

    def axis_requests(self) -> list[tuple[MeshAxis, int | None]]:
        """The mesh axes that the plugins ask for, with their sizes: what `hp_core.mesh.plan_mesh` takes."""
        return [
            (axis, getattr(self.options[plugin.name], axis.option))
            for plugin in self.plugins
            for axis in plugin.instance.axes
        ]

    def call(self, hook: str, **arguments: Any) -> list[tuple[str, Any]]:
        """Call `hook` on every plugin in order. Returns (plugin name, result) of those that did not return None."""
        results = [(name, self.call_one(name, hook, **arguments)) for name in self.names]
        return [(name, result) for name, result in results if result is not None]

    def first(self, hook: str, **arguments: Any) -> tuple[str, Any] | None:
        """Call `hook` on the plugins in order until one does not return None: (plugin name, result), or None."""
        for name in self.names:
            if (result := self.call_one(name, hook, **arguments)) is not None:
                return name, result
        return None

    def call_one(self, name: str, hook: str, **arguments: Any) -> Any:
        """Call `hook` on the plugin `name` with its own options. None when it does not implement the hook.

        Observers (plugins that only wrap hooks) wrap the call.
        """
        plugin = next(each.instance for each in self.plugins if each.name == name)
        hook_caller: pluggy.HookCaller = getattr(self._manager.hook, hook)
        if not any(impl.plugin is plugin and not _is_wrapper(impl) for impl in hook_caller.get_hookimpls()):
            return None
        assert hook_caller.spec is not None
        if "options" in hook_caller.spec.argnames:
            arguments["options"] = self.options[name]
        others = [impl.plugin for impl in hook_caller.get_hookimpls() if not _is_wrapper(impl)]
        only_this = self._manager.subset_hook_caller(hook, [other for other in others if other is not plugin])
        result = only_this(**arguments)
        if hook_caller.spec.opts["firstresult"]:
            return result
        return result[0] if result else None

    def versions(self) -> dict[str, str]:
        """Versions of hp-core, torch, transformers and the distributions of the plugins."""
        result = {name: version(name) for name in (CORE, "torch", "transformers")}
        result.update((plugin.found.distribution, plugin.found.version) for plugin in self.plugins)
        return result

    def describe(self) -> dict[str, Any]:
        """Order, origin and versions as plain data, equal on all ranks of a sound run: for their digest."""
        return {
            "order": [
                [plugin.name, plugin.found.entry_point.value, plugin.found.distribution] for plugin in self.plugins
            ],
            "versions": self.versions(),
        }

    @cached_property
    def _manager(self) -> pluggy.PluginManager:
        manager = new_manager()
        for plugin in self.plugins:
            manager.register(plugin.instance, plugin.name)
        return manager


def _is_wrapper(impl: pluggy.HookImpl) -> bool:
    return impl.wrapper or impl.hookwrapper

"""Plugins: find without importing, select, load with checks, call one at a time in the configured order."""

from hp_core.plugins.index import FoundPlugin, PluginIndex, find_plugins
from hp_core.plugins.load import load_plugin, load_plugins
from hp_core.plugins.plugin_set import LoadedPlugin, PluginSet
from hp_core.plugins.select import Selection, select_plugins

__all__ = [
    "FoundPlugin",
    "LoadedPlugin",
    "PluginIndex",
    "PluginSet",
    "Selection",
    "find_plugins",
    "load_plugin",
    "load_plugins",
    "select_plugins",
]

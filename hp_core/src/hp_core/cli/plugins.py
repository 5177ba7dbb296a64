"""`hp plugins [CONFIG]`: what is installed, whether it works, and what a configuration selects."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hp_core.config import read_config
from hp_core.errors import PluginError
from hp_core.plugins import FoundPlugin, PluginIndex, find_plugins, load_plugin, load_plugins, select_plugins

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add_parser(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the arguments of `hp plugins`."""
    parser = commands.add_parser(
        "plugins", help="list plugins: installed, selected, compatible, broken and why", allow_abbrev=False
    )
    parser.add_argument("config", nargs="?", type=Path, metavar="CONFIG", help="also tell what this YAML file selects")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    """Print the list. A broken plugin is a line of it, not a failure. Returns the exit code."""
    index = find_plugins()
    report: dict[str, Any] = {
        "plugins": [_describe(index, plugin) for plugin in index.plugins],
        "unreadable": list(index.unreadable),
    }
    if arguments.config is not None:
        raw = read_config(arguments.config, arguments.overrides)
        report["selected"] = list(load_plugins(select_plugins(index, raw)).names)
    print(json.dumps(report, indent=2) if arguments.json else _as_text(report))
    return 0


def _describe(index: PluginIndex, plugin: FoundPlugin) -> dict[str, Any]:
    status, problem = "ok", index.problem(plugin)
    if problem:
        status = "duplicate" if index.clash(plugin) else "incompatible"
    elif problem := _import_problem(plugin):
        status = "broken"
    return {
        "name": plugin.name,
        "distribution": plugin.distribution,
        "version": plugin.version,
        "location": str(plugin.location),
        "keys": list(plugin.keys),
        "status": status,
        "problem": problem,
    }


def _import_problem(plugin: FoundPlugin) -> str | None:
    # Whatever a plugin prints while it is imported is not part of this command's answer.
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            load_plugin(plugin)
        except PluginError as error:
            return str(error)
        except Exception as error:  # such as a property that raises; a line of the list like any other fault
            return f"{plugin}: {type(error).__name__}: {error}"
    return None


def _as_text(report: dict[str, Any]) -> str:
    rows = [
        (each["name"], f"{each['distribution']} {each['version']}", each["status"], ", ".join(each["keys"]))
        for each in report["plugins"]
    ]
    rows.insert(0, ("NAME", "DISTRIBUTION", "STATUS", "KEYS"))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]) for row in rows
    ]
    # A clash is the same line for both of its plugins.
    lines += dict.fromkeys(each["problem"] for each in report["plugins"] if each["problem"])
    lines += report["unreadable"]
    if "selected" in report:
        lines.append(f"selected, in this order: {', '.join(report['selected']) or 'none'}")
    return "\n".join(line.rstrip() for line in lines)

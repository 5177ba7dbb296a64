"""Overrides from the command line: `--a.b=c`, `--a.b[1]=c` (or `--a.b.1=c`), all applied before anything is checked."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from typing import Any

from hp_core.config.schema import RunConfig
from hp_core.config.yaml_source import child_path, parse_value
from hp_core.errors import ConfigError

PATH = re.compile(r"[^.\[\]\s]+(\.[^.\[\]\s]+|\[\d+\])*")


def apply_override(tree: dict[str, Any], origins: dict[str, str], override: str) -> None:
    """Set one value in `tree`, in place, and record the override as its origin. A map or list replaces what was there.

    Whether the key exists is left to validation. Raises ConfigError for a malformed override, a path through a value
    that has no keys, and an index that is not in the list.
    """
    dotted, equals, text = override.removeprefix("--").partition("=")
    if not equals or not PATH.fullmatch(dotted):
        raise ConfigError(f"{override}: not an override. Expected --section.key=value, or --section.key[0]=value")
    steps = re.findall(r"[^.\[\]]+|\[\d+\]", dotted)
    node: Any = tree
    path = ""
    for depth, name in enumerate(steps):
        step = _step(node, path, name, override)
        path = child_path(path, step)
        if depth == len(steps) - 1:
            value, found = parse_value(text, path, override)
            node[step] = value
            for old in [old for old in origins if re.match(rf"{re.escape(path)}[.\[]", old)]:
                del origins[old]
            origins.update(found)
        elif isinstance(node, dict) and node.get(step) is None:
            node[step] = _default_list(path) if steps[depth + 1].strip("[]").isdigit() else {}
            origins.setdefault(path, override)
        node = node[step]


def _step(node: Any, path: str, name: str, override: str) -> str | int:
    """The key or index that `name` is in `node`."""
    if isinstance(node, dict):
        if name.startswith("["):
            raise ConfigError(f"{override}: {path} is not a list in the configuration. Give the list: --{path}=[...]")
        return name
    if not isinstance(node, list):
        raise ConfigError(f"{override}: {path} is {node!r}, which has nothing inside")
    index = name.strip("[]")
    if not index.isdigit():
        raise ConfigError(f'{override}: {path} is a list. Expected an index, found "{name}"')
    if int(index) >= len(node):
        raise ConfigError(f"{override}: {path} has {len(node)} elements, counted from 0")
    return int(index)


def _default_list(path: str) -> list[Any] | dict[str, Any]:
    """A copy of the list that the key has by default; an empty mapping where there is none."""
    value: Any = RunConfig()
    for name in path.split("."):
        if not is_dataclass(value) or name not in {field.name for field in fields(value)}:
            return {}
        value = getattr(value, name)
    return list(value) if isinstance(value, list | tuple) else {}

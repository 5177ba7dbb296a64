"""Reading a configuration: one YAML file and the overrides, as plain data that remembers its origins."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hp_core.config.overrides import apply_override
from hp_core.config.words import closest
from hp_core.config.yaml_source import child_path, first_line, parse_document
from hp_core.errors import ConfigError

UNSET = "???"


@dataclass(frozen=True)
class RawConfig:
    """What the user wrote, before it is validated. `tree` holds plain mappings, lists and values: overrides are
    applied and interpolations resolved. `origins` gives the place of every dotted path (`a.b`, `a.c[0]`)."""

    source: str
    tree: Mapping[str, Any]
    origins: Mapping[str, str]

    def where(self, path: str) -> str:
        """Where the value of a dotted path was set: `train.yaml:14` or `--a.b=c`.

        A path without a place of its own (inside an interpolated mapping, say) has that of what it is in; one
        that is nowhere has the file's.
        """
        while path not in self.origins:
            parent = re.sub(r"(\.[^.\[]+|\[\d+\])$", "", path)
            if parent == path:
                return self.source
            path = parent
        return self.origins[path]


def read_config(path: Path, overrides: Sequence[str] = ()) -> RawConfig:
    """Read a YAML file, apply all `--a.b=c` together, then resolve `${...}`.

    Values of overrides are YAML. Raises ConfigError, one line with the place, for whatever cannot be read.
    """
    tree, origins = parse_document(_read(path), str(path))
    for override in overrides:
        apply_override(tree, origins, override)
    raw = RawConfig(str(path), tree, origins)
    for dotted, value in _leaves(tree, ""):
        if value == UNSET:
            raise ConfigError(
                f"{dotted}: has to be set, here or with --{dotted}=VALUE; found {UNSET}  ({raw.where(dotted)})"
            )
    return RawConfig(str(path), _resolve(raw), origins)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        names = [file.name for file in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        near = closest(path.name, names)
        hint = f" Did you mean {path.with_name(near)}?" if near else ""
        raise ConfigError(f"{path}: no such file.{hint}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}") from error


def _resolve(raw: RawConfig) -> dict[str, Any]:
    try:
        tree = OmegaConf.to_container(OmegaConf.create(dict(raw.tree)), resolve=True)
    except OmegaConfBaseException as error:
        path = str(error.full_key)
        leaves = dict(_leaves(raw.tree, ""))
        missing = re.match(r"Interpolation key '(.+)' not found", str(error))
        if missing is None:
            reason = first_line(error)
        else:
            near = closest(missing[1], [*leaves, *raw.tree])
            reason = f"{missing[1]} is not set in the configuration." + (f" Did you mean {near}?" if near else "")
        raise ConfigError(f'{path}: cannot resolve "{leaves.get(path)}": {reason}  ({raw.where(path)})') from error
    assert isinstance(tree, dict)
    return tree


def _leaves(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Dotted path and value of everything that is not a mapping or list."""
    if isinstance(node, Mapping):
        for name, child in node.items():
            yield from _leaves(child, child_path(path, name))
    elif isinstance(node, list):
        for index, child in enumerate(node):
            yield from _leaves(child, child_path(path, index))
    else:
        yield path, node

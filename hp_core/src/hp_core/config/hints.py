"""Known plugin packages and their keys, for what to say when they are absent. The table is data, not code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources


@dataclass(frozen=True)
class InstallHints:
    """`plugins`: plugin name to the distribution that has it. `keys`: dotted key or section to plugin name.
    `unsupported`: dotted key of the reference dialect to what to do instead."""

    plugins: Mapping[str, str]
    keys: Mapping[str, str]
    unsupported: Mapping[str, str]


@cache
def install_hints() -> InstallHints:
    """The table in `install_hints.json`."""
    text = resources.files("hp_core.config").joinpath("install_hints.json").read_text(encoding="utf-8")
    return InstallHints(**json.loads(text))

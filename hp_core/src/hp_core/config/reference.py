"""The page docs/configuration.md, from the schema: `python -m hp_core.config.reference > docs/configuration.md`."""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from hp_core.config.build import SECTIONS, VALUES
from hp_core.config.convert import describe, type_hints
from hp_core.config.hints import install_hints
from hp_core.config.keys import TARGET, default_of, key_info, yaml_fields
from hp_core.config.schema import RunConfig
from hp_core.config.targets import ALIASES, TRUSTED_ROOTS

INTRODUCTION = """\
# Configuration

<!-- Made by `python -m hp_core.config.reference > docs/configuration.md`. -->

A run is one YAML file and, on the command line, overrides. Everything is validated once, before anything starts. A key
that nobody reads is an error that says what was probably meant, never ignored.

## Writing it

- **Overrides.** `--training.seed=7` sets one key. Values are YAML: `1e-5`, `null`, `true`, `[1, 2]`, `{a: 1}`; a list
  or mapping replaces what was there. `--optimizer.betas[1]=0.99` (or `.1`) sets one element of a list. All overrides
  are applied, then interpolations resolved, then the whole is validated. Of two overrides of one key the last counts.
- **Interpolation.** `${training.seed}` is the value of another key that the file or an override sets; `${oc.env:HOME}`
  is an environment variable. `???` is a value that has to be given by an override.
- **Nothing** is written `null`, or left empty. `None` is refused where a key may be null, as is empty text.
- **Types are exact.** A quoted number is text and a number is not text. `5e-5` is a number. `012` (octal) and `1:30`
  (base 60) are refused.
- **strategies** lists the plugins of the run, in order: `strategies: [NAME, {name: NAME, depth: 2}]`. Options stand
  beside the name or under the plugin's own keys, not both. Without the list, the keys that are used select the plugins.
"""

TARGETS = """\
## Objects by name

In %s, `_target_` names what builds the object: a class or function by its dotted path. It may lie in hp's own packages,
in those of the selected plugins, in %s, or under a root in `trusted_targets`. The other keys of the section
are its arguments, checked against its signature; a mapping with a `_target_` among them is built first. Keys marked
with * keep their meaning beside a `_target_`.

%s
"""


def reference() -> str:
    """The whole page, as Markdown."""
    targeted = ", ".join(f"`{name}`" for name, cls in SECTIONS.items() if TARGET in yaml_fields(cls))
    aliases = "\n".join(f"`{alias}` is `{name}`." for alias, name in ALIASES.items())
    parts = [INTRODUCTION, TARGETS % (targeted, ", ".join(TRUSTED_ROOTS[1:]), aliases)]
    parts.append("## Keys without a section\n\n" + _table(RunConfig, VALUES))
    for name, cls in SECTIONS.items():
        parts.append(f"## {name}\n\n{inspect.cleandoc(cls.__doc__ or '')}\n\n" + _table(cls, yaml_fields(cls)))
    parts.append("## Keys of plugins\n\nThe package of each documents them.\n\n" + _plugin_table())
    return "\n".join(parts)


def _table(cls: type[Any], names: Iterable[str]) -> str:
    hints, fields = type_hints(cls), yaml_fields(cls)
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name in names:
        field = fields[name]
        info = key_info(field)
        bounds = {"at least": info.minimum, "more than": info.above}
        limits = "".join(f", {words} {bound}" for words, bound in bounds.items() if bound is not None)
        mark = "*" if info.shared else ""
        kind = describe(hints[field.name]) + limits
        lines.append(f"| `{name}`{mark} | {kind} | {_default(field)} | {info.doc} |")
    return "\n".join(lines) + "\n"


def _default(field: dataclasses.Field[Any]) -> str:
    value = default_of(field)
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def _plugin_table() -> str:
    hints = install_hints()
    rows: Mapping[str, str] = {key: hints.plugins[plugin] for key, plugin in hints.keys.items()}
    lines = ["| key | package |", "|---|---|", *(f"| `{key}` | {package} |" for key, package in rows.items())]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(reference())

"""What the schema says of one key beyond its type: its meaning, its range, and how it meets a `_target_`."""

from __future__ import annotations

import dataclasses
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal

TARGET = "_target_"

Role = Literal["key", "target", "collected"]


@dataclass(frozen=True)
class KeyInfo:
    """Metadata of one field.

    `minimum` is inclusive, `above` exclusive. The role `target` is the field of `_target_`; `collected` is filled from
    other keys and has none of its own. A `shared` key keeps its type when the section has a `_target_`; an `argument`
    is shared and also handed to the factory, if that takes it.
    """

    doc: str = ""
    minimum: float | None = None
    above: float | None = None
    role: Role = "key"
    shared: bool = False
    argument: bool = False


def key(
    default: Any,
    doc: str,
    *,
    minimum: float | None = None,
    above: float | None = None,
    role: Role = "key",
    shared: bool = False,
    argument: bool = False,
) -> Any:
    """A dataclass field with a default, its meaning and its range. The arguments are the fields of `KeyInfo`."""
    metadata = {"key": KeyInfo(doc, minimum, above, role, shared or argument, argument)}
    if isinstance(default, dict | list):
        return dataclasses.field(default_factory=lambda: copy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def asks_for_nothing(path: str, value: Any) -> bool:
    """Whether the value of a plugin's key, at the dotted `path`, leaves the plugin out: none, false, a size of 1."""
    # True == 1 in Python, hence the type.
    return value is None or value is False or (path.endswith("_size") and type(value) is int and value == 1)


def key_info(field: dataclasses.Field[Any]) -> KeyInfo:
    """The field's metadata; nothing in particular for a field that was not made by `key`."""
    info = field.metadata.get("key", KeyInfo())
    assert isinstance(info, KeyInfo)
    return info


def yaml_fields(cls: type[Any]) -> dict[str, dataclasses.Field[Any]]:
    """The fields of a section that can be written in YAML, by the key that they have there."""
    names = {"key": None, "target": TARGET}
    return {
        names[role] or field.name: field
        for field in dataclasses.fields(cls)
        if (role := key_info(field).role) != "collected"
    }


def default_of(field: dataclasses.Field[Any]) -> Any:
    """The field's default; `dataclasses.MISSING` when it has none."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default

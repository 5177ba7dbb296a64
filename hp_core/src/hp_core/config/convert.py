"""Plain YAML data to typed fields, exactly: a number is not text, and a flag is not a number."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hp_core.config.keys import KeyInfo, default_of, key_info, yaml_fields
from hp_core.config.unknown_keys import KeyChecker
from hp_core.config.words import closest, found
from hp_core.config.yaml_source import child_path, first_line
from hp_core.errors import HpError, PluginError

SCALARS: Mapping[Any, str] = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
NULL = type(None)


def read_section(cls: type[Any], values: Mapping[str, Any], path: str, keys: KeyChecker, **given: Any) -> Any:
    """An instance of the dataclass `cls` from a YAML mapping; the fields in `given` are taken as they are.

    Raises ConfigError for an unknown key, a wrong type, a value out of range, or a required key that is absent.
    """
    hints = type_hints(cls)
    fields = yaml_fields(cls)
    arguments = {
        fields[name].name: convert(
            value, hints[fields[name].name], child_path(path, name), keys, key_info(fields[name])
        )
        for name, value in keys.check(values, fields, path).items()
    }
    return make(cls, {**arguments, **given}, path, keys)


def make(
    cls: type[Any], arguments: Mapping[str, Any], path: str, keys: KeyChecker, paths: Mapping[str, str] | None = None
) -> Any:
    """Call the dataclass `cls`. A required key that was not given is an error, and so is what `cls` finds wrong itself.

    `paths` gives the dotted keys of fields that are not keys below `path`.
    """
    for name, field in yaml_fields(cls).items():
        if field.name not in arguments and default_of(field) is dataclasses.MISSING:
            key = (paths or {}).get(name, child_path(path, name))
            raise keys.fail(key, f"has to be set: expected {describe(type_hints(cls)[field.name])}")
    try:
        return cls(**arguments)
    except HpError:
        raise
    except (TypeError, ValueError) as error:
        raise keys.fail(path, first_line(error)) from error


def type_hints(cls: type[Any]) -> dict[str, Any]:
    """The resolved annotations of a dataclass. Raises PluginError when a name in them is not there at run time."""
    try:
        return get_type_hints(cls)
    except NameError as error:
        raise PluginError(f"{cls.__module__}.{cls.__qualname__}: an annotation cannot be resolved: {error}") from error


def convert(value: Any, hint: Any, path: str, keys: KeyChecker, info: KeyInfo | None = None) -> Any:
    """`value` as the type `hint`, with the range of `info`. Raises ConfigError when it is something else."""
    members = _members(hint)
    member = next((each for each in members if _fits(value, each, path)), None)
    if member is None:
        raise keys.fail(path, f"expected {describe(hint)}, found {found(value)}{_remedy(value, members)}")
    if member is str and NULL in members and value.strip().lower() in ("", "none"):
        raise keys.fail(path, f"expected {describe(hint)}, found {found(value)}. For nothing write null.")
    origin, arguments = get_origin(member), get_args(member)
    if dataclasses.is_dataclass(member):
        assert isinstance(member, type)
        return read_section(member, value or {}, path, keys)
    if origin is Literal:
        return "off" if value is False and "off" in arguments else value
    if origin in (list, tuple):
        return _elements(value, member, path, keys, info)
    if origin in (dict, Mapping):
        return {name: convert(child, arguments[1], child_path(path, name), keys, info) for name, child in value.items()}
    if member is float:
        value = float(value)
    if info and isinstance(value, int | float):
        _check_range(value, info, path, keys)
    return value


def describe(hint: Any) -> str:
    """A type in words: `an integer or null`, `one of text, chat, tokens`."""
    parts = []
    for member in sorted(_members(hint), key=lambda member: member is NULL):
        origin, arguments = get_origin(member) or member, get_args(member)
        if origin is Literal:
            choices = ", ".join(
                str(choice).lower() if isinstance(choice, bool) else str(choice) for choice in arguments
            )
            parts.append(f"one of {choices}" if len(arguments) > 1 else choices)
        elif origin is tuple and Ellipsis not in arguments:
            parts.append(f"a list of {len(arguments)} elements, each {describe(arguments[0])}")
        elif origin in (list, tuple):
            parts.append(f"a list of {describe(arguments[0])}" if arguments else "a list")
        elif origin in (dict, Mapping) or dataclasses.is_dataclass(origin):
            parts.append("a mapping")
        else:
            parts.append("null" if member is NULL else SCALARS.get(member, "anything"))
    return " or ".join(parts)


def _members(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a union, null first; a type that is no union is the only alternative."""
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(sorted(get_args(hint), key=lambda member: member is not NULL))
    return (hint,)


def _fits(value: Any, member: Any, path: str) -> bool:
    """Whether `value` is of the kind of `member`, which is no union; what is inside is not looked at."""
    origin = get_origin(member) or member
    if origin is Any:
        return True
    if origin is Literal:
        choices = get_args(member)
        same = any(value == choice and type(value) is type(choice) for choice in choices)
        # YAML reads a plain `off` as false.
        return same or (value is False and "off" in choices)
    if origin is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if origin in (bool, int, str, NULL):
        return type(value) is origin
    if origin in (list, tuple):
        return isinstance(value, list)
    if origin in (dict, Mapping):
        return isinstance(value, dict)
    if dataclasses.is_dataclass(origin):
        return value is None or isinstance(value, dict)
    raise PluginError(f"{path}: values of its type, {member}, cannot be written in YAML")


def _elements(value: Sequence[Any], member: Any, path: str, keys: KeyChecker, info: KeyInfo | None) -> Any:
    origin, arguments = get_origin(member), get_args(member)
    fixed = origin is tuple and Ellipsis not in arguments
    if fixed and len(value) != len(arguments):
        raise keys.fail(path, f"expected {describe(member)}, found a list of {len(value)}")
    hints = arguments if fixed else arguments[:1] * len(value)
    return origin(
        convert(child, hint, child_path(path, index), keys, info)
        for index, (child, hint) in enumerate(zip(value, hints, strict=True))
    )


def _check_range(value: float, info: KeyInfo, path: str, keys: KeyChecker) -> None:
    # Written so that nan, which compares with nothing, is out of range.
    if info.minimum is not None and not value >= info.minimum:
        raise keys.fail(path, f"expected at least {info.minimum}, found {value}")
    if info.above is not None and not value > info.above:
        raise keys.fail(path, f"expected more than {info.above}, found {value}")


def _remedy(value: Any, members: tuple[Any, ...]) -> str:
    """How to write the value right, where that is plain; starts with a full stop."""
    choices = [str(choice) for member in members if get_origin(member) is Literal for choice in get_args(member)]
    if isinstance(value, str):
        if value.strip().lower() == "none" and NULL in members:
            return ". For nothing write null."
        if int in members or float in members:
            with suppress(ValueError):
                float(value)
                return ". Remove the quotes."
        near = closest(value, choices)
        return f". Did you mean {near}?" if near else ""
    if isinstance(value, float) and value.is_integer() and int in members:
        return f". Write {int(value)}."
    if isinstance(value, int | float) and not isinstance(value, bool) and str in members:
        return ". Put it in quotes."
    return ""

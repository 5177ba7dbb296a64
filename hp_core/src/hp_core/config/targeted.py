"""Sections that a factory of the user's takes over: their keys are its arguments, checked against its signature."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hp_core.config.convert import read_section
from hp_core.config.keys import TARGET, default_of, key_info, yaml_fields
from hp_core.config.schema import FROM_CONFIG, FROM_PRETRAINED
from hp_core.config.targets import accepted_arguments, canonical_target, resolve_target
from hp_core.config.unknown_keys import KeyChecker
from hp_core.config.yaml_source import child_path
from hp_core.errors import ConfigError

TYPED_FACTORIES = (FROM_PRETRAINED, FROM_CONFIG)
"""hp's own: the fields of the section are their arguments."""

LATE_ARGUMENTS = {"optimizer": frozenset({"params", "lr"}), "lr_scheduler": frozenset({"optimizer"})}
"""What only the run knows and gives the section's factory."""


def read_targeted_section(
    cls: type[Any], values: Mapping[str, Any], path: str, keys: KeyChecker, trusted: Collection[str]
) -> Any:
    """A section that may have a `_target_`. Without one, or with hp's own, it is read as any other.

    Raises ConfigError for a target that is not there or not trusted and for arguments that it does not take.
    """
    fields = yaml_fields(cls)
    written = values.get(TARGET, default_of(fields[TARGET]))
    if not isinstance(written, str):
        return read_section(cls, values, path, keys)
    with located(child_path(path, TARGET), keys):
        target = canonical_target(written)
    if target in TYPED_FACTORIES:
        return read_section(cls, {**values, TARGET: target}, path, keys)
    infos = {name: key_info(field) for name, field in fields.items() if key_info(field).shared}
    kept = {name for name, info in infos.items() if not info.argument}
    arguments = {name: value for name, value in values.items() if name not in kept and name != TARGET}
    _check_call(target, arguments, path, keys, trusted, kept=kept, late=LATE_ARGUMENTS.get(path, frozenset()))
    typed = {name: value for name, value in values.items() if name in infos}
    rest = {name: value for name, value in arguments.items() if name not in infos}
    return read_section(cls, typed, path, keys, target=target, args=rest)


@contextmanager
def located(path: str, keys: KeyChecker) -> Iterator[None]:
    """Give the errors of a target the path and place of the key that names it."""
    try:
        yield
    except ConfigError as error:
        raise keys.fail(path, str(error)) from error


def _check_call(
    target: str,
    arguments: Mapping[str, Any],
    path: str,
    keys: KeyChecker,
    trusted: Collection[str],
    kept: Collection[str] = (),
    late: Collection[str] = (),
) -> None:
    """Refuse a factory that may not be called, and arguments that it does not take or that hp gives it (`late`)."""
    with located(child_path(path, TARGET), keys):
        accepted = accepted_arguments(resolve_target(target, trusted))
    for name, value in arguments.items():
        if name in late or (accepted is not None and name not in accepted):
            what = "given by hp itself" if name in late else f"no argument of {target}"
            raise keys.unknown(name, value, {*(accepted or ()), *kept, TARGET} - {*late}, path, what)
        _check_nodes(value, child_path(path, name), keys, trusted)


def _check_nodes(value: Any, path: str, keys: KeyChecker, trusted: Collection[str]) -> None:
    """Check every `_target_` inside an argument."""
    if isinstance(value, list):
        for index, child in enumerate(value):
            _check_nodes(child, child_path(path, index), keys, trusted)
    elif isinstance(value, Mapping):
        arguments = {name: child for name, child in value.items() if name != TARGET}
        if TARGET in value:
            _check_call(str(value[TARGET]), arguments, path, keys, trusted)
        else:
            for name, child in arguments.items():
                _check_nodes(child, child_path(path, name), keys, trusted)

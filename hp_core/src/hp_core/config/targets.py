"""`_target_`: objects that a configuration names by their dotted path and that are built late.

Which names a configuration may use is checked once, by `build_config`; whoever builds the object then only imports.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Mapping
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

from hp_core.config.keys import TARGET
from hp_core.config.words import closest, suggestion
from hp_core.config.yaml_source import first_line
from hp_core.errors import ConfigError, HpError

logger = logging.getLogger(__name__)

TRUSTED_ROOTS = ("hp_core", "torch", "transformers")
TRUSTED_PREFIXES = ("hp_strategies_", "hp_kernels_")
ALIAS_ROOT = "hyper_parallel"
ALIASES = {f"{ALIAS_ROOT}.models.HyperAutoModelForCausalLM": "hp_core.models.HyperAutoModelForCausalLM"}
"""Names of the reference dialect and what they are here; what follows a name is kept."""


def canonical_target(dotted: str) -> str:
    """`dotted` itself, or what it is an alias of; each alias is logged once. Raises ConfigError for what is not a
    dotted path, and for a name of the reference dialect that has no alias."""
    for alias, name in ALIASES.items():
        if dotted == alias or dotted.startswith(f"{alias}."):
            target = name + dotted.removeprefix(alias)
            _log_alias(dotted, target)
            return target
    if dotted.partition(".")[0] == ALIAS_ROOT:
        raise ConfigError(f"{dotted} has no counterpart in hp, which knows {', '.join(ALIASES)}")
    if "." not in dotted or not all(name.isidentifier() for name in dotted.split(".")):
        raise ConfigError(f'"{dotted}" is not a dotted path such as package.module.name')
    return dotted


def resolve_target(dotted: str, trusted: Collection[str] = ()) -> Callable[..., Any]:
    """The callable that a dotted path or an alias names, if it lies under a trusted import root.

    `trusted` are roots or longer prefixes, beside hp's packages, torch and transformers. Raises ConfigError when it
    is not trusted, cannot be imported, is not there or cannot be called.
    """
    target = canonical_target(dotted)
    root = target.partition(".")[0]
    if not (
        root.startswith(TRUSTED_PREFIXES) or any(f"{target}.".startswith(f"{r}.") for r in (*TRUSTED_ROOTS, *trusted))
    ):
        raise ConfigError(f"{target} is under no trusted import root. If you trust it: trusted_targets: [{root}]")
    return load_target(target)


def load_target(dotted: str) -> Callable[..., Any]:
    """The callable that a dotted path or an alias names, trusted or not. Raises ConfigError as `resolve_target`."""
    target = canonical_target(dotted)
    root, *names = target.split(".")
    try:
        found = _walk(root, names)
    except HpError:
        raise
    except Exception as error:
        # Whatever the user's own module raises while it is imported.
        raise ConfigError(f"importing {target} failed: {type(error).__name__}: {first_line(error)}") from error
    if not callable(found):
        raise ConfigError(f"{target} is of type {type(found).__name__}, which cannot be called")
    return found  # type: ignore[no-any-return]


def accepted_arguments(factory: Callable[..., Any]) -> frozenset[str] | None:
    """Names that `factory` takes as keyword arguments; None when it takes any."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return None  # Some builtins do not say.
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(parameter.name for parameter in parameters if parameter.kind in by_name)


def instantiate(target: str, arguments: Mapping[str, Any], *late: Any, **late_arguments: Any) -> Any:
    """Call the factory `target` with the arguments of the configuration and what only the run knows, by place or name.

    Mappings with a `_target_` inside `arguments` are built first. Raises ConfigError for an argument that the factory
    does not take or that is given from both sides, and for a TypeError or ValueError of the factory.
    """
    factory = load_target(target)
    for name in arguments:
        if name in late_arguments:
            raise ConfigError(f"{target}: the argument {name} is given by hp itself. Remove it from the configuration.")
    values = {**{name: _build(value) for name, value in arguments.items()}, **late_arguments}
    accepted = accepted_arguments(factory)
    for name in values:
        if accepted is not None and name not in accepted:
            raise ConfigError(f"{target} takes no argument {name}.{suggestion(name, accepted - late_arguments.keys())}")
    try:
        return factory(*late, **values)
    except HpError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{target} failed: {type(error).__name__}: {first_line(error)}") from error


def _build(value: Any) -> Any:
    if isinstance(value, Mapping):
        if TARGET in value:
            return instantiate(value[TARGET], {name: child for name, child in value.items() if name != TARGET})
        return {name: _build(child) for name, child in value.items()}
    return [_build(child) for child in value] if isinstance(value, list) else value


def _walk(root: str, names: list[str]) -> Any:
    found: Any = _import(root)
    if found is None:
        raise ConfigError(f"there is no module {root}. Is its folder on PYTHONPATH?")
    path = root
    for name in names:
        child = f"{path}.{name}"
        if isinstance(found, ModuleType) and not hasattr(found, name):
            _import(child)  # A submodule becomes an attribute.
        if not hasattr(found, name):
            near = closest(name, [each for each in dir(found) if not each.startswith("_")])
            raise ConfigError(f"{path} has no attribute {name}." + (f" Did you mean {near}?" if near else ""))
        found = getattr(found, name)
        if isinstance(found, ModuleType) and found.__name__.partition(".")[0] != root:
            # A module imported by a trusted one is not thereby trusted: torch.os.system.
            raise ConfigError(f"{child} is the module {found.__name__}, which is not part of {root}")
        path = child
    return found


def _import(name: str) -> ModuleType | None:
    """The module, or None when there is no such module."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return None


@cache
def _log_alias(dotted: str, target: str) -> None:
    logger.info("%s is %s here", dotted, target)

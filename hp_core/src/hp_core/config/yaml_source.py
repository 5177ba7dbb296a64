"""YAML text as plain data, where every value knows where it came from.

OmegaConf constructs the data (its loader reads `5e-5` as a number); the marks of PyYAML's nodes give the lines. What
YAML 1.1 would silently turn into something else is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hp_core.errors import ConfigError

INTEGER = "tag:yaml.org,2002:int"
FLOAT = "tag:yaml.org,2002:float"
TEXT = "tag:yaml.org,2002:str"
MERGE = "tag:yaml.org,2002:merge"

Place = Callable[[int], str]
"""Says where line number n is: `train.yaml:3`, or the override that the text came from."""


def parse_document(text: str, source: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The mapping in a YAML file, interpolations left as they are, and the origin (`source:line`) of each dotted path.

    Raises ConfigError for a syntax error, a root that is no mapping, a duplicate or non-text key, and a number in
    octal or base 60.
    """

    def place(line: int) -> str:
        return f"{source}:{line}"

    root = _compose(text, place)
    if root is None:
        return {}, {}
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f'{source}: expected sections such as "model:", found a {_KINDS[type(root)]}')
    return _construct(text, root, "", place)


def parse_value(text: str, path: str, origin: str) -> tuple[Any, dict[str, str]]:
    """The YAML value of an override of `path`, and the origins of the paths in it. Raises as `parse_document` does."""

    def place(_: int) -> str:
        return origin

    document = f"value: {text}"
    root = _compose(document, place)
    assert isinstance(root, yaml.MappingNode)
    data, origins = _construct(document, root.value[0][1], path, place)
    return data["value"], {path: origin, **origins}


def first_line(error: BaseException) -> str:
    """The first line of an error's text."""
    return str(error).partition("\n")[0]


def child_path(path: str, name: str | int) -> str:
    """The dotted path of a child: `a.b` for a key, `a[0]` for a list element."""
    if isinstance(name, int):
        return f"{path}[{name}]"
    return f"{path}.{name}" if path else name


_KINDS = {yaml.MappingNode: "mapping", yaml.SequenceNode: "list", yaml.ScalarNode: "single value"}


def _compose(text: str, place: Place) -> yaml.Node | None:
    try:
        node: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise _syntax_error(error, place) from error
    return node


def _construct(text: str, node: yaml.Node, path: str, place: Place) -> tuple[dict[str, Any], dict[str, str]]:
    origins = dict(_origins(node, path, place, set()))
    try:
        data = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except yaml.YAMLError as error:
        raise _syntax_error(error, place) from error
    except OmegaConfBaseException as error:
        # In an override the full key starts with the word "value", which stands for its path.
        full_key = str(error.full_key)
        found = path + full_key.removeprefix("value") if path else full_key
        raise ConfigError(
            f"{found}: not an interpolation: {first_line(error)}  ({origins.get(found, place(1))})"
        ) from error
    assert isinstance(data, dict)
    return data, origins


def _origins(node: yaml.Node, path: str, place: Place, seen: set[int]) -> Iterator[tuple[str, str]]:
    """Walk the nodes once each: an alias (also a recursive one) keeps the origin of the key that it stands under."""
    if id(node) in seen:
        return
    seen.add(id(node))
    here = place(node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        first: dict[str, str] = {}
        for name, value in node.value:
            if name.tag == MERGE:
                yield from _origins(value, path, place, seen)
                continue
            where = place(name.start_mark.line + 1)
            if name.tag != TEXT:
                written = name.value if isinstance(name, yaml.ScalarNode) else f"({_KINDS[type(name)]})"
                raise ConfigError(f"{where}: the key {written} is not text in YAML. Put it in quotes.")
            child = child_path(path, name.value)
            if name.value in first:
                raise ConfigError(f"{child}: given twice  ({first[name.value]} and {where})")
            first[name.value] = where
            yield child, where
            yield from _origins(value, child, place, seen)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            child = child_path(path, index)
            yield child, place(value.start_mark.line + 1)
            yield from _origins(value, child, place, seen)
    elif node.tag == INTEGER and re.fullmatch(r"[-+]?0[0-7_]+", node.value):
        octal = int(node.value.replace("_", ""), 8)
        raise ConfigError(
            f"{path}: YAML reads {node.value} as octal {octal}. Write {octal}, or quote it as text.  ({here})"
        )
    elif node.tag in (INTEGER, FLOAT) and ":" in node.value:
        raise ConfigError(f"{path}: YAML reads {node.value} as a number in base 60. Quote it as text.  ({here})")


def _syntax_error(error: yaml.YAMLError, place: Place) -> ConfigError:
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return ConfigError(f"{place(1)}: not valid YAML: {first_line(error)}")
    problem = ", ".join(part for part in (error.context, error.problem) if part)
    return ConfigError(f"{place(error.problem_mark.line + 1)}: not valid YAML: {problem}")

"""`_target_`: resolving names, and building what they name."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hp_core.config import instantiate, load_target, resolve_target
from hp_core.config.targets import accepted_arguments, canonical_target
from hp_core.errors import ConfigError, DataError

MODULE = """\
from __future__ import annotations
import os
from dataclasses import dataclass
from hp_core.errors import DataError

VALUE = 3

@dataclass
class Pair:
    left: object
    right: object = None

def anything(**keywords):
    return keywords

def strict(size: int):
    if size < 0:
        raise ValueError(f"size is {size}\\nand that is bad")
    if size == 0:
        raise DataError("own words")
    return [0] * size

def broken():
    raise RuntimeError("a fault of its own")
"""


@pytest.fixture(autouse=True)
def _user_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A package of the user's on the import path: my_parts, with a module that cannot be imported."""
    package = tmp_path / "my_parts"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "shapes.py").write_text(MODULE)
    (package / "faulty.py").write_text("import no_such_module\n")
    (package / "unready.py").write_text("raise SystemError('not here\\nnot now')\n")
    (package / "syntax.py").write_text("def :\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_parts"]:
        monkeypatch.delitem(sys.modules, name)


def test_resolves_what_lies_under_trusted_roots() -> None:
    assert resolve_target("torch.optim.SGD") is torch.optim.SGD
    assert resolve_target("hp_core.errors.DataError") is DataError
    assert resolve_target("my_parts.shapes.Pair", ["my_parts"]).__name__ == "Pair"
    assert resolve_target("my_parts.shapes.Pair", ["other", "my_parts.shapes"]).__name__ == "Pair"
    assert load_target("my_parts.shapes.anything")(a=1) == {"a": 1}


@pytest.mark.parametrize(
    ("target", "trusted", "line"),
    [
        (
            "my_parts.shapes.Pair",
            [],
            "my_parts.shapes.Pair is under no trusted import root. If you trust it: trusted_targets: [my_parts]",
        ),
        (
            "my_parts.shapes.Pair",
            ["my_parts.shapes.P", "my"],
            "my_parts.shapes.Pair is under no trusted import root. If you trust it: trusted_targets: [my_parts]",
        ),
        ("my_parts.shapes.Pear", ["my_parts"], "my_parts.shapes has no attribute Pear. Did you mean Pair?"),
        ("my_parts.shape.Pair", ["my_parts"], "my_parts has no attribute shape."),
        ("my_parts.shapes.Pair.rght", ["my_parts"], "my_parts.shapes.Pair has no attribute rght. Did you mean right?"),
        ("my_parts.shapes.VALUE", ["my_parts"], "my_parts.shapes.VALUE is of type int, which cannot be called"),
        ("my_parts.shapes", ["my_parts"], "my_parts.shapes is of type module, which cannot be called"),
        (
            "my_parts.shapes.os.system",
            ["my_parts"],
            "my_parts.shapes.os is the module os, which is not part of my_parts",
        ),
        ("my_part.shapes.Pair", ["my_part"], "there is no module my_part. Is its folder on PYTHONPATH?"),
        (
            "my_parts.faulty.x",
            ["my_parts"],
            "importing my_parts.faulty.x failed: ModuleNotFoundError: No module named 'no_such_module'",
        ),
        ("my_parts.unready.x", ["my_parts"], "importing my_parts.unready.x failed: SystemError: not here"),
        (
            "my_parts.syntax.x",
            ["my_parts"],
            "importing my_parts.syntax.x failed: SyntaxError: invalid syntax (syntax.py, line 1)",
        ),
        ("Pair", [], '"Pair" is not a dotted path such as package.module.name'),
        ("torch..SGD", [], '"torch..SGD" is not a dotted path such as package.module.name'),
        (
            "hyper_parallel.trainer.Trainer",
            [],
            "hyper_parallel.trainer.Trainer has no counterpart in hp, which knows"
            " hyper_parallel.models.HyperAutoModelForCausalLM",
        ),
    ],
)
def test_target_that_cannot_be_used(target: str, trusted: list[str], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve_target(target, trusted)
    assert str(error.value) == line


def test_alias_of_the_reference_dialect_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    canonical_target.__globals__["_log_alias"].cache_clear()
    caplog.set_level(logging.INFO)
    name = "models.HyperAutoModelForCausalLM"
    for method in ("from_config", "from_config", "from_pretrained"):
        assert canonical_target(f"hyper_parallel.{name}.{method}") == f"hp_core.{name}.{method}"
    assert [record.getMessage() for record in caplog.records] == [
        f"hyper_parallel.{name}.{method} is hp_core.{name}.{method} here"
        for method in ("from_config", "from_pretrained")
    ]


def test_builds_with_late_arguments_and_nested_targets() -> None:
    inner = {"_target_": "my_parts.shapes.strict", "size": 2}
    built = instantiate("my_parts.shapes.Pair", {"left": [inner, {"deep": inner, "n": 1}]}, right="late")
    assert built.left == [[0, 0], {"deep": [0, 0], "n": 1}]
    assert built.right == "late"
    assert instantiate("my_parts.shapes.Pair", {"right": 2}, "by place").left == "by place"


@pytest.mark.parametrize(
    ("target", "arguments", "late", "line"),
    [
        ("Pair", {"left": 1, "rigt": 2}, {}, "my_parts.shapes.Pair takes no argument rigt. Did you mean right?"),
        ("Pair", {"left": 1}, {"seed": 2}, "my_parts.shapes.Pair takes no argument seed. Known here: left, right."),
        (
            "Pair",
            {"left": 1},
            {"left": 2},
            "my_parts.shapes.Pair: the argument left is given by hp itself. Remove it from the configuration.",
        ),
        (
            "Pair",
            {},
            {},
            "my_parts.shapes.Pair failed: TypeError: Pair.__init__() missing 1 required positional argument: 'left'",
        ),
        ("strict", {"size": -1}, {}, "my_parts.shapes.strict failed: ValueError: size is -1"),
        (
            "strict",
            {"size": "x"},
            {},
            "my_parts.shapes.strict failed: TypeError: '<' not supported between instances of 'str' and 'int'",
        ),
        (
            "Pair",
            {"left": {"_target_": "my_parts.shapes.strict", "sise": 1}},
            {},
            "my_parts.shapes.strict takes no argument sise. Did you mean size?",
        ),
        ("strict", {"size": 0}, {}, "own words"),
    ],
)
def test_factory_that_cannot_be_called_so(
    target: str, arguments: dict[str, Any], late: dict[str, Any], line: str
) -> None:
    with pytest.raises((ConfigError, DataError)) as error:
        instantiate(f"my_parts.shapes.{target}", arguments, **late)
    assert str(error.value) == line


def test_faults_of_a_factory_keep_their_traceback() -> None:
    with pytest.raises(RuntimeError, match="a fault of its own"):
        instantiate("my_parts.shapes.broken", {})


def test_arguments_that_a_factory_takes() -> None:
    assert accepted_arguments(load_target("my_parts.shapes.Pair")) == {"left", "right"}
    assert accepted_arguments(load_target("my_parts.shapes.anything")) is None
    assert accepted_arguments(print) == {"sep", "end", "file", "flush"}
    assert accepted_arguments(dict) is None

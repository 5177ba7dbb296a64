"""Rules that hold for the whole repository and for every distribution in it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import hp_core

ROOT = Path(__file__).parents[1]
DISTRIBUTIONS = sorted(path.parent for path in ROOT.glob("hp_*/pyproject.toml"))
PLUGINS = [path for path in DISTRIBUTIONS if path.name != "hp_core"]
MAX_LINES = 400
each_distribution = pytest.mark.parametrize("folder", DISTRIBUTIONS, ids=lambda path: path.name)
each_plugin = pytest.mark.parametrize("folder", PLUGINS, ids=lambda path: path.name)


def project(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text())["project"]


def python_files() -> list[Path]:
    folders = [*DISTRIBUTIONS, *(ROOT / name for name in ("tests", "examples", "benchmarks", "docs"))]
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def find_test_files(folder: Path = ROOT) -> list[Path]:
    return [path for path in python_files() if path.name.startswith("test_") and path.is_relative_to(folder)]


def imports(path: Path) -> Iterator[tuple[str, str | None, int]]:
    """(module, imported name or None, line) of every import statement in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name, node.lineno) for alias in node.names)


def test_repository_has_distributions() -> None:
    assert {"hp_core", "hp_strategies_fsdp"} <= {folder.name for folder in DISTRIBUTIONS}


@each_distribution
def test_distribution_is_complete(folder: Path) -> None:
    metadata = project(folder)
    assert canonicalize_name(metadata["name"]) == canonicalize_name(folder.name)
    assert (folder / "src" / folder.name / "__init__.py").is_file()
    assert find_test_files(folder), "no tests of its own"
    assert len((folder / "README.md").read_text().splitlines()) > 3, "README.md says nothing"
    assert f"\n## {metadata['version']}\n" in (folder / "CHANGELOG.md").read_text(), "CHANGELOG.md lacks the version"


@each_distribution
def test_dependencies_are_ranges_that_hold_here(folder: Path) -> None:
    metadata = project(folder)
    for line in metadata["dependencies"]:
        requirement = Requirement(line)
        operators = {specifier.operator for specifier in requirement.specifier}
        assert ">=" in operators, f"{line}: no lower bound"
        assert not operators & {"==", "===", "~="}, f"{line}: not a range"
        assert requirement.specifier.contains(version(requirement.name)), f"{line}: {version(requirement.name)} is here"
    core = [line for line in metadata["dependencies"] if Requirement(line).name == "hp-core"]
    assert folder.name == "hp_core" or (core and "<" in core[0]), "plugins need a closed range of hp-core"


def test_constraints_pin_every_dependency() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    pinned = {canonicalize_name(Requirement(line).name): line for line in lines}
    assert all("==" in line for line in pinned.values())
    wanted = {
        canonicalize_name(Requirement(line).name)
        for folder in DISTRIBUTIONS
        for line in project(folder)["dependencies"]
    }
    ours = {canonicalize_name(folder.name) for folder in DISTRIBUTIONS}
    assert wanted - ours <= pinned.keys()


@each_distribution
def test_wheel_contains_the_package_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    metadata = f"{folder.name}-{project(folder)['version']}.dist-info"
    assert {name.split("/")[0] for name in names} == {folder.name, metadata}
    source = folder / "src"
    expected = {
        str(path.relative_to(source)) for path in source.rglob("*") if path.suffix in (".py", ".json", ".typed")
    }
    assert {name for name in names if name.startswith(f"{folder.name}/")} == expected


@each_plugin
def test_plugins_import_only_public_names_of_core_and_no_other_plugin(folder: Path) -> None:
    others = {path.name for path in PLUGINS if path != folder}
    for path in (folder / "src").rglob("*.py"):
        for module, name, line in imports(path):
            where = f"{path.relative_to(ROOT)}:{line}"
            package = module.split(".")[0]
            assert package not in others, f"{where} imports another plugin: {module}"
            if package == "hp_core":
                public = module == "hp_core" and name in hp_core.__all__
                assert public, f"{where}: {module}.{name} is not a public name of hp_core"


def test_core_names_no_plugin() -> None:
    entry_points = [project(folder).get("entry-points", {}) for folder in PLUGINS]
    names = {"fsdp", "tp", "cp", "ep"} | {name for each in entry_points for name in each.get("hp.plugins", {})}
    keys = {name for each in entry_points for name in each.get("hp.keys", {})}
    packages = {folder.name for folder in PLUGINS}
    for path in (ROOT / "hp_core/src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert node.value not in names | keys, f"{path.relative_to(ROOT)}:{node.lineno} names {node.value!r}"
        for module, _, line in imports(path):
            assert module.split(".")[0] not in packages, f"{path.relative_to(ROOT)}:{line} imports {module}"


def hook_names() -> dict[str, str | None]:
    """Every hook of the contract with its docstring."""
    tree = ast.parse((ROOT / "hp_core/src/hp_core/hookspecs.py").read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("hp_")]
    return {function.name: ast.get_docstring(function) for function in functions}


def test_every_hook_is_documented_and_exercised() -> None:
    guide = (ROOT / "docs/plugins.md").read_text()
    own = (Path(__file__), *(ROOT / "hp_core/src").rglob("*.py"))
    implemented = "\n".join(path.read_text() for path in python_files() if path not in own)
    hooks = hook_names()
    assert len(hooks) >= 8
    for name, docstring in hooks.items():
        assert docstring, f"{name} has no docstring"
        assert f"`{name}`" in guide, f"{name} is not in docs/plugins.md"
        assert f"def {name}(" in implemented, f"no plugin and no test implements {name}"


def test_files_are_short() -> None:
    long = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in python_files()}
    assert not {name: lines for name, lines in long.items() if lines > MAX_LINES}


def test_names_of_test_files_are_unique() -> None:
    counts = Counter(path.name for path in find_test_files())
    assert not [name for name, count in counts.items() if count > 1]


def test_sources_have_no_unfinished_business() -> None:
    words = re.compile(r"\b(TODO|FIXME|XXX)\b")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in python_files()
        if path != Path(__file__)
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if words.search(line)
    ]
    assert not found


def test_links_between_documents_lead_somewhere() -> None:
    documents = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(folder / "README.md" for folder in DISTRIBUTIONS)]
    for document in documents:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.relative_to(ROOT)}: {target} does not exist"

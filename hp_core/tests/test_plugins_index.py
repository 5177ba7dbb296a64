"""Finding plugins: metadata only, each distribution once, clashes told by name."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from fake_distributions import write_distribution

from hp_core.errors import PluginError
from hp_core.plugins import find_plugins


def names_in(folder: Path) -> list[str]:
    return [plugin.name for plugin in find_plugins().plugins if plugin.location == folder]


def test_a_plugin_is_found_without_being_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_distribution(tmp_path, source="raise RuntimeError('imported')", keys=["accelerator.acme_size", "acme_config"])
    monkeypatch.syspath_prepend(tmp_path)
    found = find_plugins().get("acme")
    assert str(found) == 'plugin "acme" of acme-plugin 1.0'
    assert found.keys == ("accelerator.acme_size", "acme_config")
    assert found.entry_point.value == "acme_module:plugin"
    assert "acme_module" not in sys.modules


def test_pg01_one_distribution_on_two_paths_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lib, lib64 = tmp_path / "lib", tmp_path / "lib64"
    write_distribution(lib)
    lib64.symlink_to(lib)
    monkeypatch.syspath_prepend(lib64)
    monkeypatch.syspath_prepend(lib)
    assert [plugin.name for plugin in find_plugins().plugins].count("acme") == 1
    assert find_plugins().get("acme").location == lib


def test_pg01_a_copy_of_a_distribution_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_distribution(tmp_path / "a", distribution="acme-plugin")
    write_distribution(tmp_path / "b", distribution="Acme_Plugin")
    monkeypatch.syspath_prepend(tmp_path / "b")
    monkeypatch.syspath_prepend(tmp_path / "a")
    assert find_plugins().get("acme").location == tmp_path / "a"


def test_pg01_two_owners_of_a_name_are_an_error_naming_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_distribution(tmp_path / "a", distribution="acme-one")
    write_distribution(tmp_path / "b", distribution="acme-two", version="2.0")
    monkeypatch.syspath_prepend(tmp_path / "a")
    monkeypatch.syspath_prepend(tmp_path / "b")
    index = find_plugins()
    with pytest.raises(PluginError) as caught:
        index.get("acme")
    assert str(caught.value) == (
        f'strategy "acme" is claimed by 2 distributions: acme-one 1.0 ({tmp_path / "a"}) and '
        f"acme-two 2.0 ({tmp_path / 'b'}). Uninstall all but one."
    )


def test_two_versions_of_one_distribution_are_a_clash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_distribution(tmp_path, version="1.0")
    write_distribution(tmp_path, version="2.0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PluginError, match=r"acme-plugin 1\.0 .* and acme-plugin 2\.0 "):
        find_plugins().get("acme")


def test_two_owners_of_a_key_are_an_error_naming_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_distribution(tmp_path, "acme", keys=["shared_config"])
    write_distribution(tmp_path, "bolt", keys=["shared_config"])
    monkeypatch.syspath_prepend(tmp_path)
    index = find_plugins()
    # A clash of keys hurts only who uses the key.
    assert index.get("acme").name == "acme"
    assert index.problem(index.get("bolt")) == index.problem(index.get("acme"))
    with pytest.raises(PluginError) as caught:
        index.owner("shared_config")
    assert str(caught.value) == (
        'shared_config: owned by plugin "acme" of acme-plugin 1.0 and plugin "bolt" of bolt-plugin 1.0. '
        "Uninstall all but one."
    )


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("tp", "pip install hp-strategies-tp"),
        ("acne", 'Closest installed: "acme".'),
    ],
)
def test_a_name_that_is_not_installed(name: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_distribution(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(PluginError) as caught:
        find_plugins().get(name)
    assert str(caught.value) == f'strategy "{name}" is not installed. {advice}'


def test_a_distribution_with_unreadable_metadata_is_a_line_and_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_distribution(tmp_path, "acme")
    write_distribution(tmp_path, "bolt")
    broken = tmp_path / "bolt_plugin-1.0.dist-info" / "entry_points.txt"
    broken.write_text("[hp.plugins]\nthis is no entry point\n")
    (tmp_path / "binary-1.0.dist-info").mkdir()
    (tmp_path / "binary-1.0.dist-info" / "entry_points.txt").write_bytes(b"\xff\xfe")
    monkeypatch.syspath_prepend(tmp_path)
    index = find_plugins()
    assert names_in(tmp_path) == ["acme"]
    assert len(index.unreadable) == 2
    assert all(line.startswith(f"{tmp_path}: a distribution with unreadable metadata (") for line in index.unreadable)


def test_a_key_that_points_to_no_plugin_is_a_line_and_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_distribution(tmp_path, keys=["acme_config"])
    path = tmp_path / "acme_plugin-1.0.dist-info" / "entry_points.txt"
    path.write_text(path.read_text().replace("acme_config = acme_module:plugin", "acme_config = acme_module:plugim"))
    monkeypatch.syspath_prepend(tmp_path)
    assert find_plugins().unreadable == (
        f'acme-plugin 1.0 ({tmp_path}): key "acme_config" points to acme_module:plugim, which is none of its plugins.',
    )


@pytest.mark.parametrize(
    ("requires", "problem"),
    [
        (["hp-core>=0.1,<0.2"], None),
        (["hp_core"], None),
        (["numpy>=1", 'hp-core<0.1; python_version < "3"', "hp-core>=0.1"], None),
        (["hp-core>=99,<100"], "needs hp-core <100,>=99, found hp-core 0.1.0. pip install a matching pair."),
        (
            ["numpy>=1"],
            'declares no requirement on hp-core. Its author has to add one, such as "hp-core>=0.1,<0.2".',
        ),
        (
            ["hp-core is nice"],
            "declares a requirement that cannot be read: 'hp-core is nice'. Reinstall acme-plugin.",
        ),
    ],
)
def test_the_declared_range_of_hp_core_is_checked(
    requires: list[str], problem: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_distribution(tmp_path, requires=requires)
    monkeypatch.syspath_prepend(tmp_path)
    found = find_plugins().get("acme")
    assert found.requirement_problem() == (problem and f'plugin "acme" of acme-plugin 1.0 {problem}')


def test_a_distribution_installed_by_pip_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project, target = tmp_path / "project", tmp_path / "site"
    project.mkdir()
    (project / "acme_pip.py").write_text("plugin = object()\n")
    (project / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
        '[project]\nname = "acme-pip"\nversion = "3.1"\ndependencies = ["hp-core>=99"]\n'
        '[project.entry-points."hp.plugins"]\nacme = "acme_pip:plugin"\n'
        '[project.entry-points."hp.keys"]\n"accelerator.acme_size" = "acme_pip:plugin"\n'
        '[tool.hatch.build.targets.wheel]\ninclude = ["acme_pip.py"]\n'
    )
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
    command += ["--no-build-isolation", "--no-deps", "--target", str(target), str(project)]
    subprocess.run(command, check=True)
    monkeypatch.syspath_prepend(target)
    found = find_plugins().get("acme")
    assert found.keys == ("accelerator.acme_size",)
    # pip was told not to look at dependencies; hp looks.
    assert found.requirement_problem() == (
        f'plugin "acme" of acme-pip 3.1 needs hp-core >=99, found hp-core {version("hp-core")}. '
        "pip install a matching pair."
    )

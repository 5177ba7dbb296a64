"""`hp plugins`: every plugin is a line, whatever it does when it is imported."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_distributions import write_distribution

from hp_core.cli import main

NOISY = "import sys\nprint('noise')\nprint('noise', file=sys.stderr)\n"


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that is the whole of sys.path for metadata, with one good plugin and one of each broken kind."""
    folder = tmp_path / "site"
    write_distribution(folder, "acme", keys=["accelerator.acme_size"])
    write_distribution(folder, "bolt", keys=["bolt_config"], edits={"must_follow = ()": 'must_follow = ("*",)'})
    write_distribution(folder, "leaves", source=NOISY + "raise SystemExit(0)")
    write_distribution(folder, "olden", requires=["hp-core<0.1"])
    write_distribution(folder, "twice", distribution="twice-one")
    write_distribution(folder, "twice", distribution="twice-two")
    monkeypatch.setattr(sys, "path", [str(folder)])
    monkeypatch.chdir(tmp_path)
    yield folder
    for name in ("acme", "bolt", "leaves"):
        sys.modules.pop(f"{name}_module", None)


def test_every_plugin_is_a_line_and_each_fault_another(site: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins"]) == 0
    output = capfd.readouterr()
    assert output.out.splitlines() == [
        "NAME    DISTRIBUTION       STATUS        KEYS",
        "acme    acme-plugin 1.0    ok            accelerator.acme_size",
        "bolt    bolt-plugin 1.0    ok            bolt_config",
        "leaves  leaves-plugin 1.0  broken",
        "olden   olden-plugin 1.0   incompatible",
        "twice   twice-one 1.0      duplicate",
        "twice   twice-two 1.0      duplicate",
        'plugin "leaves" of leaves-plugin 1.0 cannot be imported: SystemExit: 0',
        'plugin "olden" of olden-plugin 1.0 needs hp-core <0.1, found hp-core 0.1.0. pip install a matching pair.',
        f'strategy "twice" is claimed by 2 distributions: twice-one 1.0 ({site}) and twice-two 1.0 ({site}). '
        "Uninstall all but one.",
    ]
    assert output.err == ""


def test_json_with_a_configuration_tells_what_it_selects(site: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Path("train.yaml").write_text("accelerator: {acme_size: 1}\nbolt_config: {depth: 1}\n")
    assert main(["plugins", "train.yaml", "--json", "--accelerator.acme_size=2"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["selected"] == ["acme", "bolt"]
    assert report["plugins"][0] == {
        "name": "acme",
        "distribution": "acme-plugin",
        "version": "1.0",
        "location": str(site),
        "keys": ["accelerator.acme_size"],
        "status": "ok",
        "problem": None,
    }


def test_a_configuration_that_cannot_select_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    Path("train.yaml").write_text("strategies: [bolt, acme]\n")
    assert main(["plugins", "train.yaml"]) == 2
    assert capfd.readouterr().err == (
        'strategies: "bolt" must follow "acme" but comes before it. A valid order: acme, bolt.  (train.yaml:1)\n'
    )

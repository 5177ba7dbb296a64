"""Every kind of wrong configuration, with the exact line that the user sees."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from config_helpers import ACME, SHARD, load

from hp_core.config import read_config, unknown_keys
from hp_core.errors import HpError

CASES = yaml.safe_load((Path(__file__).parent / "wrong_configs.yaml").read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def _no_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty folder, and a machine where no plugin package is installed."""

    def absent(name: str) -> Any:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(unknown_keys.metadata, "distribution", absent)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["case"])
def test_wrong_config(case: dict[str, Any]) -> None:
    plugins = [plugin for plugin in (SHARD, ACME) if plugin.name in case.get("plugins", ())]
    with pytest.raises(HpError) as error:
        load(case.get("yaml", ""), *case.get("overrides", ()), plugins=plugins)
    assert str(error.value) == case["line"]


def test_there_are_many_cases() -> None:
    assert len({case["case"] for case in CASES}) == len(CASES) >= 100


def test_key_of_an_installed_plugin_that_is_not_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unknown_keys.metadata, "distribution", lambda name: name)
    with pytest.raises(HpError) as error:
        load("accelerator: {tp_size: 1, sequence_parallel: true}")
    assert str(error.value) == (
        'accelerator.sequence_parallel: belongs to strategy "tp", which is not selected. Add tp to strategies.'
        "  (train.yaml:1)"
    )


@pytest.mark.parametrize("name", ["missing.yaml", "folder", "latin.yaml", "trainn.yaml"])
def test_file_that_cannot_be_read(name: str) -> None:
    Path("folder").mkdir()
    Path("train.yaml").write_text("training: {seed: 1}\n")
    Path("latin.yaml").write_bytes(b"output_dir: caf\xe9\n")
    lines = {
        "missing.yaml": "missing.yaml: no such file. Did you mean train.yaml?",
        "trainn.yaml": "trainn.yaml: no such file. Did you mean train.yaml?",
        "folder": "folder: cannot be read: Is a directory",
        "latin.yaml": "latin.yaml: not UTF-8 text: byte 15 is 0xe9",
    }
    with pytest.raises(HpError) as error:
        read_config(Path(name))
    assert str(error.value) == lines[name]

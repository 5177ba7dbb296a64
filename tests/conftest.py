"""Tiny checkpoints that several test files train from, each made once."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
from parity_cases import make_checkpoint


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")

    @cache
    def make(name: str) -> Path:
        make_checkpoint(name, root / name)
        return root / name

    class Checkpoints(dict[str, Path]):
        def __missing__(self, name: str) -> Path:
            return make(name)

    return Checkpoints()

"""Third-party plugin distributions, written by tests as pip would install them: a module and a .dist-info folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

GOOD = """
from dataclasses import dataclass

from hp_core import MeshAxis, hookimpl


class Plugin:
    name = "{name}"
    axes = (MeshAxis("{name}", "model", "{name}_size"),)
    must_follow = ()

    @dataclass(frozen=True)
    class Options:
        {name}_size: int = 1
        depth: int = 0

    @hookimpl
    def hp_shard_batch(self, batch, options):
        return (batch, self.name, options.depth)


plugin = Plugin()
"""


def write_distribution(
    folder: Path,
    name: str = "acme",
    *,
    distribution: str | None = None,
    version: str = "1.0",
    source: str | None = None,
    keys: Sequence[str] = (),
    requires: Sequence[str] = ("hp-core>=0.1,<1",),
    edits: Mapping[str, str] | None = None,
) -> str:
    """Write module `<name>_module` with `plugin` in it, and its metadata. Returns the distribution's name.

    Beside it lies the metadata of an hp-core 0.1.0, so that what is expected does not depend on the version under test.
    The module is GOOD with `edits` made to it (each has to apply), or `source`.
    """
    distribution = distribution or f"{name}-plugin"
    text = GOOD.format(name=name) if source is None else source
    for old, new in (edits or {}).items():
        assert old in text
        text = text.replace(old, new)
    core = folder / "hp_core-0.1.0.dist-info"
    core.mkdir(parents=True, exist_ok=True)
    (core / "METADATA").write_text("Metadata-Version: 2.1\nName: hp-core\nVersion: 0.1.0\n")
    module = f"{name}_module"
    info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (folder / f"{module}.py").write_text(text)
    metadata = ["Metadata-Version: 2.1", f"Name: {distribution}", f"Version: {version}"]
    metadata += [f"Requires-Dist: {each}" for each in requires]
    (info / "METADATA").write_text("\n".join(metadata) + "\n")
    entry_points = ["[hp.plugins]", f"{name} = {module}:plugin", "[hp.keys]"]
    entry_points += [f"{key} = {module}:plugin" for key in keys]
    (info / "entry_points.txt").write_text("\n".join(entry_points) + "\n")
    return distribution

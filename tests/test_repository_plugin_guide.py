"""docs/plugins.md: its plugin installs, is selected by its key and changes the loss; its test passes."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILE = re.compile(r"^`([\w./]+)`\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
YAML = re.compile(r"^```yaml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TEST = re.compile(r"^```python\n(import torch\.distributed.*?)^```$", re.MULTILINE | re.DOTALL)
VOCABULARY = 64
CONFIG = """
model:
  _target_: hp_core.models.HyperAutoModelForCausalLM.from_config
  config_path: {folder}/config.json
training: {{train_iters: 1, global_batch_size: 2, backend: gloo}}
dataset: {{path: {folder}/data.jsonl, format: tokens, seq_length: 8}}
lr_scheduler: {{lr: 0.0}}
output_dir: {folder}/{name}
"""
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "initializer_range": 1e-6,
}


@pytest.fixture(scope="module")
def guide() -> str:
    return (ROOT / "docs/plugins.md").read_text()


def call(*command: str, path: Path | None = None, folder: Path = ROOT) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": "", "PYTHONPATH": str(path or "")}
    done = subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def first_loss(folder: Path) -> float:
    return float(json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])["loss"])


def test_plugin_of_the_guide_runs(guide: str, tmp_path: Path) -> None:
    source, site = tmp_path / "source", tmp_path / "site"
    files = dict(FILE.findall(guide))
    assert set(files) == {"pyproject.toml", "src/acme_zloss/__init__.py"}
    for name, text in files.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    call("-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", str(site), str(source))
    listed = json.loads(call("-m", "hp_core.cli", "plugins", "--json", path=site))["plugins"]
    (found,) = (plugin for plugin in listed if plugin["name"] == "zloss")
    assert (found["status"], found["keys"]) == ("ok", ["zloss_config"])

    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "data.jsonl").write_text(json.dumps({"input_ids": list(range(64))}) + "\n")
    (section,) = YAML.findall(guide)
    for name, extra in (("without", ""), ("with", section)):
        (tmp_path / f"{name}.yaml").write_text(CONFIG.format(folder=tmp_path, name=name) + extra)
        call("-m", "hp_core.cli", "run", str(tmp_path / f"{name}.yaml"), path=site)
    # Weights near zero: every logit is 0, so log Z is the logarithm of the vocabulary's size.
    assert first_loss(tmp_path / "without") == pytest.approx(math.log(VOCABULARY), rel=1e-4)
    added = first_loss(tmp_path / "with") - first_loss(tmp_path / "without")
    assert added == pytest.approx(0.01 * math.log(VOCABULARY) ** 2, rel=1e-3)


def test_test_of_the_guide_passes(guide: str, tmp_path: Path) -> None:
    (text,) = TEST.findall(guide)
    (tmp_path / "test_guide.py").write_text(text)
    output = call("-m", "pytest", "-p", "hp_core.testing.pytest_plugin", "test_guide.py", folder=tmp_path)
    assert "1 passed" in output

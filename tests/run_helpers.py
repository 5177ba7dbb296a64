"""Whole runs for tests: a tiny model, data made here, ranks of the pool."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from hp_core import pipeline
from hp_core.pipeline import Session
from hp_core.plan import local_part
from hp_core.runtime import whole_tensor
from hp_core.training.device import select_device
from hp_core.training.loop import train


def write_tokens(path: Path, documents: Sequence[dict[str, list[int]]]) -> Path:
    path.write_text("".join(json.dumps(document) + "\n" for document in documents), encoding="utf-8")
    return path


def write_run(folder: Path, checkpoint: Path, data: Path, /, **sections: dict[str, Any]) -> Path:
    """A configuration that trains `checkpoint` with SGD on token records; `sections` add to it."""
    base = OmegaConf.create(
        {
            "model": {"pretrained_model_name_or_path": str(checkpoint), "torch_dtype": "float32"},
            "dataset": {"path": str(data), "format": "tokens", "seq_length": 8, "shuffle": False},
            "training": {
                "backend": "gloo",
                "global_batch_size": 4,
                "micro_batch_size": 1,
                "train_iters": 4,
                "max_grad_norm": None,
            },
            "optimizer": {"_target_": "torch.optim.SGD", "weight_decay": 0.0},
            "lr_scheduler": {"lr_decay_style": "constant", "lr": 0.1},
            "output_dir": str(folder / "out"),
        }
    )
    path = folder / "run.yaml"
    OmegaConf.save(OmegaConf.merge(base, OmegaConf.create(sections)), path)
    return path


def train_ranks(path: Path, overrides: Sequence[str] = ()) -> dict[str, torch.Tensor]:
    """On every rank: train to the end; all parameters."""
    session = pipeline.prepare(pipeline.load(path, overrides), select_device("gloo"))
    train(pipeline.training_job(session))
    parameters = {name: param.detach() for name, param in session.model.named_parameters()}
    return {name: whole(session, name, param) for name, param in parameters.items()}


def whole(session: Session, fqn: str, stored: torch.Tensor) -> torch.Tensor:
    """All of a parameter or gradient, of which every holder has the same values."""
    found = whole_tensor(stored, session.plan, fqn)
    mine = session.plan.part(fqn, session.mesh.rank, found)
    assert torch.equal(mine, local_part(stored)), f"rank {session.mesh.rank} has other values of {fqn} than its owner"
    return found


def metrics(path: Path) -> list[dict[str, Any]]:
    """The objects of the metrics file of the run that `path` configures."""
    output = Path(OmegaConf.load(path).output_dir)
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def column(path: Path, name: str) -> list[float]:
    """One value of every logged step."""
    return [record[name] for record in metrics(path) if name in record]

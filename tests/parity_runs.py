"""Running the parity cases: a split model on the ranks of the pool, and one process of plain HF beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from parity_cases import ROWS, UNPACKED, global_batch, reference_loss, reference_model, slice_rows
from run_helpers import whole

from hp_core import pipeline
from hp_core.testing import RankPools, assert_close_gradients
from hp_core.training.device import select_device
from hp_core.training.step import accumulate_gradients

STEPS, LR = 20, 0.05


@dataclass(frozen=True)
class Mode:
    """How a model is split: number of ranks, micro-batches per step, configuration."""

    world: int
    num_micro: int
    config: Mapping[str, Any]

    @property
    def data_size(self) -> int:
        """Ranks that hold different rows."""
        return self.world // int(self.config.get("accelerator", {}).get("tp_size", 1))


def check_gradients(pool: RankPools, folder: Path, checkpoint: Path, case: str, mode: Mode) -> None:
    """Loss and every gradient of one step equal those of one process."""
    path = write_config(folder, checkpoint, case, mode)
    loss, gradients, _ = pool(mode.world).run(train_ranks, path, case, mode.num_micro, 1)[0]
    model = reference_model(checkpoint)
    expected = reference_loss(model, global_batch(case))
    expected.backward()
    assert loss[0] == pytest.approx(expected.item(), rel=1e-5)
    assert_close_gradients({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, gradients)


def check_curve(pool: RankPools, folder: Path, checkpoint: Path, case: str, mode: Mode) -> None:
    """Losses of 20 SGD steps, and the parameters after them, equal those of one process."""
    path = write_config(folder, checkpoint, case, mode)
    losses, _, parameters = pool(mode.world).run(train_ranks, path, case, mode.num_micro, STEPS, timeout=900)[0]
    model = reference_model(checkpoint)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    expected = []
    for step in range(STEPS):
        loss = reference_loss(model, global_batch(case, seed=step))
        expected.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses == pytest.approx(expected, rel=1e-5)
    for name, param in model.named_parameters():
        torch.testing.assert_close(parameters[name], param.detach(), rtol=1e-4, atol=1e-6)


def write_config(folder: Path, checkpoint: Path, case: str, mode: Mode) -> Path:
    path = folder / "train.yaml"
    base = {
        "model": {"pretrained_model_name_or_path": str(checkpoint), "torch_dtype": "float32"},
        "training": {
            "backend": "gloo",
            "global_batch_size": ROWS,
            "micro_batch_size": ROWS // mode.data_size // mode.num_micro,
            "train_iters": STEPS,
        },
    }
    if case in UNPACKED:
        base["dataset"] = {"packing": False}
    OmegaConf.save(OmegaConf.merge(base, mode.config), path)
    return path


def train_ranks(
    path: Path, case: str, num_micro: int, steps: int
) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """On every rank: the losses of `steps` SGD steps, the gathered gradients of the first, the final parameters."""
    session = pipeline.prepare(pipeline.load(path), select_device("gloo"))
    rows = ROWS // session.mesh.data_size // num_micro
    first = session.mesh.data_rank * rows * num_micro
    optimizer = torch.optim.SGD(session.model.parameters(), lr=LR)
    parameters = dict(session.model.named_parameters())
    losses, gradients = [], {}
    for step in range(steps):
        batch = global_batch(case, seed=step)
        micro = [slice_rows(batch, slice(first + i * rows, first + (i + 1) * rows)) for i in range(num_micro)]
        losses.append(accumulate_gradients(session.model, micro, session.mesh, session.plan, session.calls).loss)
        if step == 0:
            gradients = {n: whole(session, n, p.grad) for n, p in parameters.items() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients, {n: whole(session, n, p.detach()) for n, p in parameters.items()}

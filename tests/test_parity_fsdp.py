"""Loss, every gradient and a 20-step curve of split models against one process of plain HF, in fp32."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from parity_cases import (
    CASES,
    ROWS,
    UNPACKED,
    global_batch,
    make_checkpoint,
    reference_loss,
    reference_model,
    slice_rows,
)

from hp_core import pipeline
from hp_core.pipeline import Session
from hp_core.runtime import whole_tensor
from hp_core.testing import RankPools, assert_close_gradients
from hp_core.training.device import select_device
from hp_core.training.step import accumulate_gradients

STEPS, LR = 20, 0.05
FIRST_BLOCK = "*.0.*"

# name: (world size, micro-batches per step, configuration)
MODES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "fsdp1": (1, 1, {"fsdp_config": {}}),
    "fsdp1_accumulate4": (1, 4, {"fsdp_config": {}, "activation_checkpoint": {"mode": "full"}}),
    "fsdp2": (2, 1, {"fsdp_config": {"dp_shard_size": 2}}),
    "fsdp2_accumulate4": (2, 4, {"fsdp_config": {"requires_grad_sync": False}}),
    "fsdp4": (4, 1, {"fsdp_config": {"reshard_after_forward": False, "reshard_after_backward": False}}),
    "fsdp4_checkpoint": (4, 4, {"fsdp_config": {}, "activation_checkpoint": {"mode": "full"}}),
    "fsdp4_selective": (4, 1, {"fsdp_config": {}, "activation_checkpoint": {"mode": "selective"}}),
    "hsdp2x2": (4, 4, {"fsdp_config": {"dp_shard_size": 2}}),
    "offload2": (2, 1, {"fsdp_config": {"enable_offload": True}}),
    "replicate2": (2, 4, {"fsdp_config": {"replicate_params": [FIRST_BLOCK]}}),
    "replicate2x2": (4, 1, {"fsdp_config": {"dp_shard_size": 2, "replicate_params": [FIRST_BLOCK]}}),
    "replicated_by_core": (2, 4, {}),
}


# Every mode for a dense and a sparse model; for the others one of each kind.
MAIN_MODES = ("fsdp1_accumulate4", "fsdp2", "fsdp4_checkpoint", "hsdp2x2", "replicated_by_core")
RUNS = [(case, mode) for case in CASES for mode in MODES if case in ("llama", "qwen3_moe") or mode in MAIN_MODES]
CURVES = [
    *((case, "fsdp2" if case == "kimi_linear" else "hsdp2x2") for case in CASES),
    ("llama", "fsdp2_accumulate4"),
    ("qwen3_moe", "replicated_by_core"),
]


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


@pytest.mark.parametrize(("case", "mode"), RUNS)
def test_loss_and_every_gradient_equal_one_process(
    pool: RankPools, checkpoints: Mapping[str, Path], tmp_path: Path, case: str, mode: str
) -> None:
    world, num_micro, config = MODES[mode]
    path = write_config(tmp_path, checkpoints[case], case, world, num_micro, config)
    loss, gradients, _ = pool(world).run(train_ranks, path, case, num_micro, 1)[0]

    model = reference_model(checkpoints[case])
    expected = reference_loss(model, global_batch(case))
    expected.backward()
    assert loss[0] == pytest.approx(expected.item(), rel=1e-5)
    assert_close_gradients({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, gradients)


@pytest.mark.parametrize(("case", "mode"), CURVES)
def test_twenty_sgd_steps_give_the_curve_of_one_process(
    pool: RankPools, checkpoints: Mapping[str, Path], tmp_path: Path, case: str, mode: str
) -> None:
    world, num_micro, config = MODES[mode]
    path = write_config(tmp_path, checkpoints[case], case, world, num_micro, config)
    losses, _, parameters = pool(world).run(train_ranks, path, case, num_micro, STEPS, timeout=900)[0]

    model = reference_model(checkpoints[case])
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


def write_config(folder: Path, checkpoint: Path, case: str, world: int, num_micro: int, config: dict[str, Any]) -> Path:
    path = folder / "train.yaml"
    base = {
        "model": {"pretrained_model_name_or_path": str(checkpoint), "torch_dtype": "float32"},
        "training": {
            "backend": "gloo",
            "global_batch_size": ROWS,
            "micro_batch_size": ROWS // world // num_micro,
            "train_iters": STEPS,
        },
    }
    if case in UNPACKED:
        base["dataset"] = {"packing": False}
    OmegaConf.save(OmegaConf.create({**base, **config}), path)
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


def whole(session: Session, fqn: str, stored: torch.Tensor) -> torch.Tensor:
    return whole_tensor(stored, session.plan, fqn).clone()

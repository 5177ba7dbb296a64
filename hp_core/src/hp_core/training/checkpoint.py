"""Training checkpoints: saved by all ranks, complete or invisible, resumed bit by bit.

    <checkpoint_dir>/step-00000010/
        .metadata, *.distcp    torch.distributed.checkpoint: `model.<fqn>` and `optimizer.<fqn>.<state>`
        trainer.json           step, tokens, schedule, data position, world size, versions
        rng-00000.json         random states of one rank
        hf/                    what an exported model needs besides weights

A shared weight is stored once, under its first name. Hyperparameters are not stored: a resumed run takes them from
its own configuration.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from hp_core.errors import CheckpointError
from hp_core.models.assets import ASSETS_FOLDER, MODEL_PREFIX
from hp_core.plan import ShardingPlan, local_part
from hp_core.training.checkpoint_tensor import CheckpointTensor
from hp_core.training.determinism import rng_state, set_rng_state

TRAINER_FILE = "trainer.json"
LATEST = "LATEST"
_COMPLETE = re.compile(r"step-\d+")


@dataclass(frozen=True)
class Resumed:
    """Where a resumed run continues: optimizer steps and tokens done so far, and the data loader's state."""

    step: int
    tokens: int
    loader_state: dict[str, Any]


def save_checkpoint(
    checkpoint_dir: Path,
    *,
    step: int,
    tokens: int,
    model: nn.Module,
    plan: ShardingPlan,
    optimizer: torch.optim.Optimizer,
    schedule: LRScheduler,
    loader_state: Mapping[str, Any],
    device: torch.device,
    versions: Mapping[str, str],
    save_assets: Callable[[Path], None],
) -> Path:
    """Write the state after `step` into `<checkpoint_dir>/step-<step>`; returns that folder. Collective.

    All is written and synced under a temporary name, which rank 0 changes last; what an interrupted save of the same
    step has left is overwritten. `save_assets` fills the folder `hf` on rank 0. `loader_state` is plain JSON data,
    the same on all ranks. Raises CheckpointError, on every rank, when any rank cannot write.
    """
    final = checkpoint_dir / f"step-{step:08d}"
    aside = checkpoint_dir / f".{final.name}.tmp"
    is_first = dist.get_rank() == 0
    trainer = {
        "step": step,
        "tokens": tokens,
        "world_size": dist.get_world_size(),
        "schedule": schedule.state_dict(),
        "loader": dict(loader_state),
        "parameters_without_optimizer_state": [
            fqn for fqn, param in _trainable(model).items() if not optimizer.state.get(param)
        ],
        "versions": dict(versions),
    }

    def make_folder() -> None:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)

    def write_rest() -> None:
        _write_json(_rng_file(aside), rng_state(device))
        if is_first:
            _write_json(aside / TRAINER_FILE, trainer)
            (aside / ASSETS_FOLDER).mkdir()
            save_assets(aside / ASSETS_FOLDER)
            for path in (aside / ASSETS_FOLDER).rglob("*"):
                _sync(path)
            _sync(aside / ASSETS_FOLDER)

    def publish() -> None:
        _sync(aside)
        replaced = checkpoint_dir / f".{final.name}.old"
        shutil.rmtree(replaced, ignore_errors=True)
        if final.exists():
            final.rename(replaced)
        aside.rename(final)
        _sync(checkpoint_dir)
        shutil.rmtree(replaced, ignore_errors=True)

    failure = f"cannot save checkpoint {final}"
    loader_states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(loader_states, trainer["loader"])
    if any(state != loader_states[0] for state in loader_states):
        raise CheckpointError(
            f"{failure}: the state of the data loader differs between ranks, expected one and the same"
        )
    _together(failure, make_folder if is_first else None)
    try:
        save({**_model_state(model, plan), **_optimizer_state(model, optimizer, plan)}, checkpoint_id=aside)
    except CheckpointException as error:
        raise CheckpointError(f"{failure}: {_reason(error)}") from error
    _together(failure, write_rest)
    _together(failure, publish if is_first else None)
    return final


def find_checkpoint(checkpoint_dir: Path, restore_from: str) -> Path:
    """The folder to resume from: `restore_from` itself, or for LATEST the newest complete one in `checkpoint_dir`.

    Raises CheckpointError when there is none.
    """
    if restore_from == LATEST:
        complete = [path for path in checkpoint_dir.glob("step-*") if _is_complete(path)]
        if not complete:
            raise CheckpointError(
                f"checkpoint.restore_from: LATEST finds no complete checkpoint in {checkpoint_dir}. "
                "Remove the key to start afresh."
            )
        return max(complete, key=lambda path: int(path.name.removeprefix("step-")))
    folder = Path(restore_from)
    if not (folder / TRAINER_FILE).is_file():
        what = "is not a complete training checkpoint" if folder.exists() else "does not exist"
        raise CheckpointError(
            f"checkpoint.restore_from: {folder} {what} (no {TRAINER_FILE}). Give a step-... folder, or LATEST."
        )
    return folder


def load_checkpoint(
    folder: Path,
    *,
    model: nn.Module,
    plan: ShardingPlan,
    optimizer: torch.optim.Optimizer,
    schedule: LRScheduler,
    device: torch.device,
) -> Resumed:
    """Continue from `folder`: fills the sharded model, optimizer, schedule and random states in place. Collective.

    Raises CheckpointError, before anything but the optimizer's zero state has changed, when the checkpoint and the
    model and optimizer do not have the same tensors with the same shapes and dtypes, or when it was saved by another
    number of ranks.
    """
    try:
        trainer = _read_json(folder / TRAINER_FILE)
        saved = FileSystemReader(folder).read_metadata().state_dict_metadata
    except Exception as error:  # torch's own metadata is pickled: damage can raise anything
        raise CheckpointError(f"cannot read checkpoint {folder}: {_one_line(error)}") from error
    if trainer["world_size"] != dist.get_world_size():
        raise CheckpointError(
            f"{folder}: was saved by {trainer['world_size']} ranks, this run has {dist.get_world_size()}. "
            f"Resume on {trainer['world_size']} ranks: changing their number is not supported."
        )
    get_optimizer_state_dict(model, optimizer)  # makes the state of an optimizer that has not stepped yet
    parameters = _trainable(model)
    for fqn in trainer["parameters_without_optimizer_state"]:
        if fqn in parameters:
            optimizer.state.pop(parameters[fqn], None)
    state = {**_model_state(model, plan), **_optimizer_state(model, optimizer, plan)}
    _check_fit(folder, state, saved)
    try:
        load(state, checkpoint_id=folder)
    except CheckpointException as error:
        raise CheckpointError(f"cannot read checkpoint {folder}: {_reason(error)}") from error
    for fqn, param in parameters.items():
        for name, value in optimizer.state.get(param, {}).items():
            if not isinstance(value, torch.Tensor):  # tensors were filled in place
                optimizer.state[param][name] = state[_optimizer_key(fqn, name)]
    _restore_schedule(schedule, trainer["schedule"])
    _together(f"cannot read checkpoint {folder}", lambda: set_rng_state(_read_json(_rng_file(folder)), device))
    return Resumed(trainer["step"], trainer["tokens"], trainer["loader"])


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {fqn: param for fqn, param in model.named_parameters() if param.requires_grad}


def _model_state(model: nn.Module, plan: ShardingPlan) -> dict[str, Any]:
    """Parameters and persistent buffers; the further names of a shared parameter left out."""
    aliases = dict(model.named_parameters(remove_duplicate=False)).keys() - dict(model.named_parameters()).keys()
    state: dict[str, Any] = {}
    for fqn, value in get_model_state_dict(model).items():
        if fqn in plan.params:
            assert isinstance(value, torch.Tensor)
            state[MODEL_PREFIX + fqn] = _planned(fqn, value, plan)
        elif fqn not in aliases:
            state[MODEL_PREFIX + fqn] = value
    return state


def _optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, plan: ShardingPlan) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for fqn, param in _trainable(model).items():
        for name, value in optimizer.state.get(param, {}).items():
            is_like = isinstance(value, torch.Tensor) and value.shape == param.shape
            state[_optimizer_key(fqn, name)] = _planned(fqn, value, plan) if is_like else value
    return state


def _planned(fqn: str, stored: torch.Tensor, plan: ShardingPlan) -> CheckpointTensor:
    """Parameter `fqn`, or a state of its shape, as the plan says that this rank holds it."""
    return CheckpointTensor.of(local_part(stored), plan.params[fqn].shape, plan.chunks(fqn, dist.get_rank()))


def _optimizer_key(fqn: str, name: str) -> str:
    return f"optimizer.{fqn}.{name}"


def _check_fit(folder: Path, state: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """torch's own loading ignores keys that nobody asks for, and converts dtypes: here both are errors."""
    different = []
    for key, value in state.items():
        entry = saved.get(key)
        if isinstance(value, torch.Tensor) and isinstance(entry, TensorStorageMetadata):
            there, here = (entry.size, entry.properties.dtype), (value.size(), value.dtype)
            if there != here:
                different.append(f"{key} is {list(there[0])} {there[1]}, here {list(here[0])} {here[1]}")
    kinds = {
        "missing in it": [key for key in state if key not in saved],
        "not in this run": [key for key in saved if key not in state],
        "different": different,
    }
    faults = [_describe(kind, found) for kind, found in kinds.items() if found]
    if faults:
        raise CheckpointError(
            f"{folder}: does not fit this run; {'; '.join(faults)}. Resume with the model and optimizer that it was "
            "saved from."
        )


def _describe(what: str, items: list[str]) -> str:
    more = f", ... ({len(items)} in all)" if len(items) > 5 else ""
    return f"{what}: {', '.join(items[:5])}{more}"


def _restore_schedule(schedule: LRScheduler, saved: dict[str, Any]) -> None:
    if type(schedule) is LambdaLR:
        # A pure function of the step. Its base rates come from this run's configuration, not from the saved one's.
        schedule.load_state_dict(schedule.state_dict() | {"last_epoch": saved["last_epoch"] - 1, "_step_count": 2})
        schedule.step()
        return
    schedule.load_state_dict(saved)
    for group, lr in zip(schedule.optimizer.param_groups, schedule.get_last_lr(), strict=True):
        group["lr"] = lr


def _is_complete(folder: Path) -> bool:
    return _COMPLETE.fullmatch(folder.name) is not None and (folder / TRAINER_FILE).is_file()


def _rng_file(folder: Path) -> Path:
    return folder / f"rng-{dist.get_rank():05d}.json"


def _together(failure: str, action: Callable[[], None] | None) -> None:
    """Run `action` (None: nothing to do on this rank); when it fails on any rank, raise on all. Also a barrier."""
    error: Exception | None = None
    if action is not None:
        try:
            action()
        except Exception as caught:
            error = caught
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, None if error is None else _one_line(error))
    for rank, reason in enumerate(reasons):
        if reason is not None:
            raise CheckpointError(f"{failure}: rank {rank}: {reason}") from error


def _reason(error: CheckpointException) -> str:
    """The first rank's failure in one line. The exception is no `Exception`, so it must not get any further."""
    rank, failure = min(error.failures.items())
    return f"rank {rank}: {_one_line(failure[0])}"


def _one_line(error: BaseException) -> str:
    return " ".join([f"{type(error).__name__}:", *str(error).splitlines()[:1]])


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")
    _sync(path)


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _sync(path: Path) -> None:
    """Force a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

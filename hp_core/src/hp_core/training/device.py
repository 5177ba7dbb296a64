"""Backend, device and process group of this rank."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from hp_core.errors import ConfigError

# The one table that decides: communication backend, device type.
DEVICE_TYPES = {"nccl": "cuda", "hccl": "npu", "gloo": "cpu"}


@dataclass(frozen=True)
class RankDevice:
    """The device of this rank, and the backend over which devices of its type talk."""

    backend: str
    device: torch.device

    def peak_memory(self) -> int | None:
        """Most bytes of device memory allocated at once; None on the CPU."""
        if self.device.type == "cpu":
            return None
        return int(torch.get_device_module(self.device).max_memory_allocated(self.device))


def select_device(backend: str | None) -> RankDevice:
    """The device of `training.backend` for this rank (LOCAL_RANK), made the current one.

    None is the accelerator that is there, else the CPU. Raises ConfigError when `backend` is unknown or its device is
    not there.
    """
    if backend is None:
        backend = _available_backend()
    if backend not in DEVICE_TYPES:
        raise ConfigError(f'training.backend: unknown backend "{backend}". Use {", ".join(DEVICE_TYPES)}.')
    device_type = DEVICE_TYPES[backend]
    if device_type == "cpu":
        return RankDevice(backend, torch.device("cpu"))
    if device_type == "npu":
        _import_torch_npu()
    module = torch.get_device_module(device_type)
    count = module.device_count() if module.is_available() else 0
    index = int(os.environ.get("LOCAL_RANK", "0"))
    if index >= count:
        raise ConfigError(
            f"training.backend: {backend} needs one {device_type} device per rank; local rank {index} finds {count} on "
            "this machine. Start fewer ranks, or use gloo to run on the CPU."
        )
    device = torch.device(device_type, index)
    module.set_device(device)
    return RankDevice(backend, device)


def start_process_group(rank_device: RankDevice, timeout: timedelta | None = None) -> None:
    """Join the process group that the environment describes (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).

    A process without them is a world of one and opens no port. Tensors on the CPU (offloaded parameters) always have
    gloo. Raises ConfigError when the environment is only half set.
    """
    backend = rank_device.backend
    if backend != "gloo":
        backend = f"cpu:gloo,{rank_device.device.type}:{backend}"
    device_id = None if rank_device.device.type == "cpu" else rank_device.device
    if "WORLD_SIZE" not in os.environ:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout, device_id=device_id)
        return
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError(
            f"environment: WORLD_SIZE is set but {', '.join(missing)} is not. Start ranks with hp run "
            "--nproc-per-node or torchrun, or unset WORLD_SIZE to run one process."
        )
    dist.init_process_group(backend, timeout=timeout, device_id=device_id)


def _available_backend() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    by_type = {device_type: backend for backend, device_type in DEVICE_TYPES.items()}
    return by_type.get(accelerator.type, "gloo") if accelerator is not None else "gloo"


def _import_torch_npu() -> None:
    """hccl and torch.npu exist only once torch_npu has been imported."""
    try:
        importlib.import_module("torch_npu")
    except (ImportError, OSError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"training.backend: hccl needs torch_npu and CANN, which cannot be imported ({reason}). "
            "pip install hp-kernels-ascend[npu] on a machine with CANN, or use gloo to run on the CPU."
        ) from error

"""Seeds, random states and deterministic kernels."""

from __future__ import annotations

import base64
import os
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int, *, stream: int) -> None:
    """Seed Python, numpy and torch (the CPU and every device) with stream number `stream` of `seed`.

    Ranks with the same stream draw the same numbers, others independent ones: ranks that hold different tokens (data
    and sequence axes) need different streams, so that their dropout differs; ranks that compute the same tokens need
    the same one. Streams of different seeds do not meet.
    """
    python_seed, numpy_seed, torch_seed = np.random.SeedSequence(seed, spawn_key=(stream,)).generate_state(3, np.uint64)
    random.seed(int(python_seed))
    np.random.seed(int(numpy_seed) % 2**32)
    torch.manual_seed(int(torch_seed))


def enable_full_determinism() -> None:
    """Make repeated runs on the same machine bit-equal: only deterministic kernels, no autotuning, no TF32.

    Operations without a deterministic kernel raise. Call it before the first use of a device: the environment
    variables (cuBLAS, flash attention, Ascend's operators and collectives) are read only once.
    """
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    os.environ["FLASH_ATTENTION_DETERMINISTIC"] = "1"
    os.environ["HCCL_DETERMINISTIC"] = "true"
    os.environ["LCCL_DETERMINISTIC"] = "1"
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")


def rng_state(device: torch.device) -> dict[str, Any]:
    """The random states of this process (Python, numpy, torch's CPU and `device`) as JSON data."""
    numpy_state: Any = np.random.get_state(legacy=False)
    numpy_state["state"]["key"] = numpy_state["state"]["key"].tolist()
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": numpy_state,
        "torch": _to_text(torch.get_rng_state()),
    }
    if device.type != "cpu":
        state[device.type] = _to_text(torch.get_device_module(device).get_rng_state(device))
    return state


def set_rng_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Continue every stream of `rng_state` where it was. A device of another type than the saved one keeps its own."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(_from_text(state["torch"]))
    if device.type in state:
        torch.get_device_module(device).set_rng_state(_from_text(state[device.type]), device)


def _plain(numpy_state: Any) -> list[Any]:
    return [part.tolist() if isinstance(part, np.ndarray) else part for part in numpy_state]


def _to_text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _from_text(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)

"""Seeds, random states, deterministic kernels."""

from __future__ import annotations

import json
import os
import random

import numpy as np
import torch

from hp_core.testing import RankPools
from hp_core.training.determinism import enable_full_determinism, rng_state, seed_everything, set_rng_state

CPU = torch.device("cpu")


def draw() -> tuple[float, float, float, float]:
    """One number of each kind; a normal one leaves a spare value behind in Python's and numpy's generators."""
    return random.random(), random.gauss(0, 1), float(np.random.standard_normal()), float(torch.rand(()))


def draws_after_seed(seed: int, stream: int) -> tuple[float, ...]:
    seed_everything(seed, stream=stream)
    return draw()


def test_streams_are_repeatable_and_independent() -> None:
    assert draws_after_seed(1, 0) == draws_after_seed(1, 0)
    points = [draws_after_seed(seed, stream) for seed in range(3) for stream in range(3)]
    for kind in zip(*points, strict=True):
        assert len(set(kind)) == len(points)


def test_random_states_survive_json_bit_by_bit() -> None:
    seed_everything(5, stream=2)
    draw()
    state = json.dumps(rng_state(CPU))
    expected = [draw() for _ in range(3)]
    seed_everything(9, stream=0)
    set_rng_state(json.loads(state), CPU)
    assert [draw() for _ in range(3)] == expected


def use_a_kernel_that_is_not_deterministic() -> str:
    enable_full_determinism()
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.benchmark
    assert not torch.backends.cudnn.allow_tf32
    assert torch.get_float32_matmul_precision() == "highest"
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    try:
        torch.nn.functional.max_unpool1d(torch.ones(1, 1, 1), torch.zeros(1, 1, 1, dtype=torch.int64), 2)
    except RuntimeError as error:
        return str(error)
    return ""


def test_full_determinism_refuses_kernels_that_are_not(pool: RankPools) -> None:
    [message] = pool(1).run(use_a_kernel_that_is_not_deterministic)
    assert "does not have a deterministic implementation" in message

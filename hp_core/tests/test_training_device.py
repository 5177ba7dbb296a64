"""Backend and device selection, the process group of one rank."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hp_core.errors import ConfigError
from hp_core.testing import RankPools
from hp_core.training.device import RankDevice, select_device, start_process_group

NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has a CUDA device")


def test_gloo_is_the_cpu_and_has_no_device_memory() -> None:
    assert select_device("gloo") == RankDevice("gloo", torch.device("cpu"))
    assert select_device("gloo").peak_memory() is None


@NO_CUDA
def test_without_an_accelerator_the_default_is_the_cpu() -> None:
    assert select_device(None) == RankDevice("gloo", torch.device("cpu"))


@NO_CUDA
def test_backend_without_its_device_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    with pytest.raises(ConfigError, match="nccl needs one cuda device per rank; local rank 3 finds 0 on this machine"):
        select_device("nccl")


def test_hccl_without_cann_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What the wheel does on a machine without CANN.
    (tmp_path / "torch_npu.py").write_text('raise OSError("libhccl.so: cannot open shared object file\\nmore")')
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ConfigError, match=r"torch_npu and CANN.*\(libhccl\.so: cannot open.*\)\. pip install"
    ) as caught:
        select_device("hccl")
    assert "\n" not in str(caught.value)


def test_unknown_backend() -> None:
    with pytest.raises(ConfigError, match=r'unknown backend "mpi"\. Use nccl, hccl, gloo'):
        select_device("mpi")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nccl_takes_the_device_of_the_local_rank() -> None:
    chosen = select_device("nccl")
    assert chosen.device.index == torch.cuda.current_device()
    torch.ones(1024, device=chosen.device)
    assert (chosen.peak_memory() or 0) >= 4096


def sum_of_ranks(environment: dict[str, str]) -> tuple[int, int]:
    """Start a group the way a run does, in a rank of the pool; gives the world size and a sum over ranks."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(key, None)
    os.environ.update({key: value.format(rank=rank) for key, value in environment.items()})
    start_process_group(select_device("gloo"))
    total = torch.ones(())
    dist.all_reduce(total)
    return dist.get_world_size(), int(total)


def test_process_without_an_environment_is_a_world_of_one(pool: RankPools) -> None:
    assert pool(1).run(sum_of_ranks, {}) == [(1, 1)]


def test_environment_describes_the_world(pool: RankPools) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {"RANK": "{rank}", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    assert pool(2).run(sum_of_ranks, environment) == [(2, 2), (2, 2)]


def test_half_set_environment_is_an_error(pool: RankPools) -> None:
    with pytest.raises(ConfigError, match="WORLD_SIZE is set but MASTER_ADDR, MASTER_PORT is not"):
        pool(1).run(sum_of_ranks, {"WORLD_SIZE": "2", "RANK": "0"})

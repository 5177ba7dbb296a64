"""What loading costs: bytes from a cold cache, and anonymous memory beyond a rank's own shards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from weights_cases import QWEN3_MOE, build_template, load_rank, make_plan, save_checkpoint

from hp_core.testing import RankPools
from hp_core.testing.meters import PeakMemory, bytes_read, drop_from_cache

# One layer whose experts, 64 MB and 32 MB when stacked, outweigh everything else.
BIG_EXPERTS = {
    **QWEN3_MOE,
    "num_hidden_layers": 1,
    "hidden_size": 512,
    "moe_intermediate_size": 512,
    "num_experts": 32,
}


def load_and_measure(folder: Path, dim: int) -> tuple[int, int, int]:
    """Bytes read, peak of anonymous memory, and size of this rank's shards."""
    template = build_template(folder)
    plan = make_plan(template, dist.get_world_size(), dim)
    dist.barrier()
    before = bytes_read()
    with PeakMemory() as memory:
        model, _ = load_rank(template, plan, folder, dist.get_rank())
    return bytes_read() - before, memory.peak, sum(param.nbytes for param in model.parameters())


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_bytes_and_memory_of_two_ranks(dim: int, tmp_path: Path, pool: RankPools) -> None:
    """The file is read once by all ranks together; no rank holds a whole stack of experts beside its shards.

    Converting the larger stack whole would take 128 MB beyond the shards.
    """
    save_checkpoint(tmp_path, "qwen3_moe", BIG_EXPERTS)
    file = tmp_path / "model.safetensors"
    drop_from_cache(file)
    results = pool(2).run(load_and_measure, tmp_path, dim)
    for _, peak, shards in results:
        assert shards > 45e6
        assert peak <= shards + 100e6
    total = sum(read for read, _, _ in results)
    if total == 0:
        pytest.skip("the temporary folder is not on a disk: nothing is ever read from storage")
    assert 0.8 * file.stat().st_size <= total <= 1.1 * file.stat().st_size

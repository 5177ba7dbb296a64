"""Loss, every gradient and a 20-step curve of models split by FSDP against one process of plain HF, in fp32."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from parity_cases import CASES
from parity_runs import Mode, check_curve, check_gradients

from hp_core.testing import RankPools

FIRST_BLOCK = "*.0.*"

MODES = {
    "fsdp1": Mode(1, 1, {"fsdp_config": {}}),
    "fsdp1_accumulate4": Mode(1, 4, {"fsdp_config": {}, "activation_checkpoint": {"mode": "full"}}),
    "fsdp2": Mode(2, 1, {"fsdp_config": {"dp_shard_size": 2}}),
    "fsdp2_accumulate4": Mode(2, 4, {"fsdp_config": {"requires_grad_sync": False}}),
    "fsdp4": Mode(4, 1, {"fsdp_config": {"reshard_after_forward": False, "reshard_after_backward": False}}),
    "fsdp4_checkpoint": Mode(4, 4, {"fsdp_config": {}, "activation_checkpoint": {"mode": "full"}}),
    "fsdp4_selective": Mode(4, 1, {"fsdp_config": {}, "activation_checkpoint": {"mode": "selective"}}),
    "hsdp2x2": Mode(4, 4, {"fsdp_config": {"dp_shard_size": 2}}),
    "offload2": Mode(2, 1, {"fsdp_config": {"enable_offload": True}}),
    "replicate2": Mode(2, 4, {"fsdp_config": {"replicate_params": [FIRST_BLOCK]}}),
    "replicate2x2": Mode(4, 1, {"fsdp_config": {"dp_shard_size": 2, "replicate_params": [FIRST_BLOCK]}}),
    "replicated_by_core": Mode(2, 4, {}),
}


# Every mode for a dense and a sparse model; for the others one of each kind.
MAIN_MODES = ("fsdp1_accumulate4", "fsdp2", "fsdp4_checkpoint", "hsdp2x2", "replicated_by_core")
RUNS = [(case, mode) for case in CASES for mode in MODES if case in ("llama", "qwen3_moe") or mode in MAIN_MODES]
CURVES = [
    *((case, "fsdp2" if case == "kimi_linear" else "hsdp2x2") for case in CASES),
    ("llama", "fsdp2_accumulate4"),
    ("qwen3_moe", "replicated_by_core"),
]


@pytest.mark.parametrize(("case", "mode"), RUNS)
def test_loss_and_every_gradient_equal_one_process(
    pool: RankPools, checkpoints: Mapping[str, Path], tmp_path: Path, case: str, mode: str
) -> None:
    check_gradients(pool, tmp_path, checkpoints[case], case, MODES[mode])


@pytest.mark.parametrize(("case", "mode"), CURVES)
def test_twenty_sgd_steps_give_the_curve_of_one_process(
    pool: RankPools, checkpoints: Mapping[str, Path], tmp_path: Path, case: str, mode: str
) -> None:
    check_curve(pool, tmp_path, checkpoints[case], case, MODES[mode])

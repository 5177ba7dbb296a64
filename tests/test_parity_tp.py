"""Models split by TP, with sequence parallelism and with FSDP, against one process of plain HF, in fp32."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from parity_cases import CASES
from parity_runs import Mode, check_curve, check_gradients

from hp_core.testing import RankPools

TP2 = {"tp_size": 2}
SPLIT_SEQUENCE = {**TP2, "sequence_parallel": True, "loss_parallel": True}
FULL = {"activation_checkpoint": {"mode": "full"}}

MODES = {
    "tp2": Mode(2, 1, {"accelerator": TP2}),
    # GR-08: gradients of q/k norms are summed once, not once per micro-batch.
    "tp2_accumulate4": Mode(2, 4, {"accelerator": TP2, **FULL}),
    "tp2_selective": Mode(2, 1, {"accelerator": TP2, "activation_checkpoint": {"mode": "selective"}}),
    "tp2_loss_parallel": Mode(2, 4, {"accelerator": {**TP2, "loss_parallel": True}}),
    "tp2_sp": Mode(2, 4, {"accelerator": SPLIT_SEQUENCE}),
    "tp2_sp_checkpoint": Mode(2, 1, {"accelerator": SPLIT_SEQUENCE, **FULL}),
    "tp2_dp2": Mode(4, 4, {"accelerator": TP2}),
    "tp2_fsdp2": Mode(4, 4, {"accelerator": TP2, "fsdp_config": {}}),
    "tp2_hsdp2x2": Mode(8, 1, {"accelerator": TP2, "fsdp_config": {"dp_shard_size": 2}}),
    "tp2_sp_fsdp2": Mode(4, 4, {"accelerator": SPLIT_SEQUENCE, "fsdp_config": {}, **FULL}),
    "tp2_replicate": Mode(4, 1, {"accelerator": TP2, "fsdp_config": {"replicate_params": ["*.0.*"]}}),
    # Two key/value heads on four ranks.
    "tp4": Mode(4, 1, {"accelerator": {"tp_size": 4}}),
    "tp4_sp_fsdp2": Mode(8, 1, {"accelerator": {**SPLIT_SEQUENCE, "tp_size": 4}, "fsdp_config": {}}),
}
MAIN_MODES = ("tp2_accumulate4", "tp2_sp", "tp2_fsdp2")
# GPT-2 has no plan of its own; HRM-text has two lists of blocks, which sequence parallelism refuses by name.
NO_SEQUENCE = ("hrm_text",)
RUNS = [
    (case, mode)
    for case in CASES
    for mode in MODES
    if case != "gpt2"
    and (case in ("qwen3_tied", "qwen3_moe") or mode in MAIN_MODES)
    and not (case in NO_SEQUENCE and "sp" in mode.split("_"))
]
CURVES = [("qwen3_tied", "tp2_sp"), ("qwen3_moe", "tp2_fsdp2"), ("deepseek_v3", "tp2_accumulate4")]


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

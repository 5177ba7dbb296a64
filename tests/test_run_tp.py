"""Whole runs with tensor parallelism: clipping, saving, resuming, exporting, dropout, and what a step dispatches."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_cases import VOCAB, global_batch, slice_rows
from parity_runs import Mode, write_config
from run_helpers import column, train_ranks, write_run, write_tokens
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from hp_core import decoder_blocks, pipeline
from hp_core.models.export import export_hf
from hp_core.testing import RankPools
from hp_core.training.device import select_device
from hp_core.training.step import accumulate_gradients

TP2 = {"tp_size": 2}
MODES: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"accelerator": TP2}),
    "tp2_dp2": (4, {"accelerator": TP2}),
    "tp2_fsdp2": (4, {"accelerator": TP2, "fsdp_config": {}}),
    "tp2_sp_fsdp2": (4, {"accelerator": {**TP2, "sequence_parallel": True, "loss_parallel": True}, "fsdp_config": {}}),
}


def write_tp_run(folder: Path, model: Path, /, **sections: Any) -> Path:
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(3, VOCAB - 1, (8,), generator=generator).tolist() for _ in range(32)]
    folder.mkdir(parents=True, exist_ok=True)
    data = write_tokens(folder / "data.jsonl", [{"input_ids": ids} for ids in documents])
    adamw = {"optimizer": {"_target_": "torch.optim.AdamW", "weight_decay": 0.1}, "lr_scheduler": {"lr": 0.01}}
    return write_run(folder, model, data, **{**adamw, **sections})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", ["qwen3_tied", "qwen3_moe"])
def test_tw02_ls04_a_resumed_run_is_the_straight_run_and_its_export_is_the_model(
    pool: RankPools, checkpoints: Mapping[str, Path], tmp_path: Path, case: str, mode: str
) -> None:
    """A vocabulary of 95 (tied) and packed experts: neither lies in storage as DTensor would say."""
    world, config = MODES[mode]
    save = {"checkpoint": {"save_ckpt": True, "save_steps": 2}}
    straight = write_tp_run(tmp_path / "straight", checkpoints[case], **config, **save)
    expected = pool(world).run(train_ranks, straight)[0]
    saved = tmp_path / "straight" / "out" / "checkpoints"
    resumed = write_tp_run(
        tmp_path / "resumed", checkpoints[case], **config, checkpoint={"restore_from": str(saved / "step-00000002")}
    )
    found = pool(world).run(train_ranks, resumed)[0]
    assert column(resumed, "loss") == column(straight, "loss")[2:]
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    export_hf(saved / "step-00000004", tmp_path / "model")
    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).named_parameters())
    assert loaded.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(loaded[name], value), name


def test_gn02_the_norm_and_the_clipped_step_do_not_depend_on_the_split(
    pool: RankPools, checkpoints: Mapping[str, Path], tmp_path: Path
) -> None:
    sgd = {
        "optimizer": {"_target_": "torch.optim.SGD", "weight_decay": 0.0},
        "lr_scheduler": {"lr_decay_style": "constant", "lr": 0.1},
        "training": {"max_grad_norm": 0.1},
    }
    single = write_tp_run(tmp_path / "single", checkpoints["qwen3_moe"], **sgd)
    expected = pool(1).run(train_ranks, single)[0]
    assert min(column(single, "grad_norm")) > 0.2  # every step is clipped
    for mode, (world, config) in MODES.items():
        run = write_tp_run(tmp_path / mode, checkpoints["qwen3_moe"], **sgd, **config)
        found = pool(world).run(train_ranks, run)[0]
        assert column(run, "grad_norm") == pytest.approx(column(single, "grad_norm"), rel=1e-5), mode
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def residual_stream(path: Path) -> list[torch.Tensor]:
    """What goes from block to block in a training forward, as this rank has it."""
    session = pipeline.prepare(pipeline.load(path), select_device("gloo"))
    seen: list[torch.Tensor] = []
    for block in decoder_blocks(session.model).values():
        block.register_forward_hook(lambda _, __, output: seen.append(output.detach().clone()))
    batch = slice_rows(global_batch("llama"), slice(0, 2))
    session.model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False)
    return seen


def test_dropout_is_equal_along_tp_and_different_along_dp(pool: RankPools, tmp_path: Path) -> None:
    """GPT-NeoX has dropout on what attention and MLP give to the residual stream."""
    config = AutoConfig.for_model(
        "gpt_neox",
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        hidden_dropout=0.1,
        attention_dropout=0.1,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    path = write_config(tmp_path, tmp_path / "model", "gpt_neox", Mode(4, 1, {"accelerator": TP2}))
    first, second, third, fourth = pool(4).run(residual_stream, path)
    assert all(map(torch.equal, first, second))
    assert all(map(torch.equal, third, fourth))
    assert not torch.allclose(first[0], third[0])


class DTensorCounter(TorchDispatchMode):
    """Names of the operations that see a DTensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.all = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.all += 1
        if any(issubclass(kind, DTensor) for kind in types):
            self.seen.append(str(func))
            return NotImplemented
        return func(*args, **(kwargs or {}))


def count_dtensor_operations(path: Path) -> tuple[list[str], int, int]:
    session = pipeline.prepare(pipeline.load(path), select_device("gloo"))
    batch = slice_rows(global_batch("llama"), slice(0, 2))
    with DTensorCounter() as counter:
        accumulate_gradients(session.model, [batch], session.mesh, session.plan, session.calls)
    return counter.seen, counter.all, len(list(session.model.parameters()))


@pytest.mark.parametrize("accelerator", [TP2, {**TP2, "sequence_parallel": True, "loss_parallel": True}])
@pytest.mark.parametrize("case", ["qwen3_tied", "qwen3_moe"])
def test_forward_and_backward_see_dtensors_only_where_gradients_are_stored(
    pool: RankPools, checkpoints: Mapping[str, Path], tmp_path: Path, case: str, accelerator: dict[str, Any]
) -> None:
    """Autograd detaches each gradient that it stores; it first adds the two of a weight that two modules share."""
    path = write_config(tmp_path, checkpoints[case], case, Mode(2, 1, {"accelerator": accelerator}))
    shared = ["aten.add.Tensor"] if case == "qwen3_tied" else []
    for seen, total, num_parameters in pool(2).run(count_dtensor_operations, path):
        assert sorted(seen) == sorted(["aten.detach.default"] * num_parameters + shared)
        assert total > 100

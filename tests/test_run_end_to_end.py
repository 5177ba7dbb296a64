"""`hp run` as a user starts it: real processes, real files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from parity_cases import VOCAB, make_checkpoint
from run_helpers import column, metrics, write_run, write_tokens
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM

HP = [sys.executable, "-m", "hp_core.cli"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration with dropout, a schedule and a checkpoint every third step."""
    folder = tmp_path_factory.mktemp("run")
    make_checkpoint("qwen3_tied", folder / "model")
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(3, VOCAB - 1, (n,), generator=generator).tolist() for n in (5, 19, 8, 30, 11) * 6]
    data = write_tokens(folder / "data.jsonl", [{"input_ids": ids} for ids in documents])
    return write_run(
        folder,
        folder / "model",
        data,
        dataset={"shuffle": True},
        training={"train_iters": 7},
        optimizer={"_target_": "torch.optim.AdamW"},
        lr_scheduler={"lr_decay_style": "cosine", "lr": 0.01, "lr_warmup_steps": 2},
        fsdp_config={"dp_shard_size": 2},
        checkpoint={"save_ckpt": True, "save_steps": 3},
    )


@pytest.fixture(scope="module")
def straight(run: Path) -> Path:
    """The configuration, trained without interruption."""
    subprocess.run([*HP, "run", str(run), "--nproc-per-node", "2"], check=True, env=environment())
    return run


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def test_a_run_leaves_metrics_configuration_plan_versions_and_checkpoints(straight: Path) -> None:
    output = straight.parent / "out"
    assert column(straight, "step") == list(range(1, 8))
    for name in ("loss", "grad_norm", "lr", "tokens", "tokens_per_second", "epoch", "tflops"):
        assert len(column(straight, name)) == 7, name
    assert {path.name for path in output.iterdir()} == {
        "checkpoints",
        "config.yaml",
        "metrics.jsonl",
        "plan.json",
        "tensorboard",
        "versions.json",
    }
    assert sorted(path.name for path in (output / "checkpoints").iterdir()) == [
        "step-00000003",
        "step-00000006",
        "step-00000007",
    ]
    events = EventAccumulator(str(output / "tensorboard"))
    events.Reload()
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx(column(straight, "loss"))


def test_rs02_a_run_killed_after_a_save_resumes_with_the_same_losses(straight: Path) -> None:
    expected = [(record["step"], record["loss"], record["lr"], record["grad_norm"]) for record in metrics(straight)]
    output = straight.parent / "killed"
    command = [*HP, "run", str(straight), "--nproc-per-node", "2", f"--output_dir={output}"]
    process = subprocess.Popen(command, env=environment(), start_new_session=True, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 300
        while not (output / "checkpoints" / "step-00000003").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    subprocess.run([*command, "--checkpoint.restore_from=LATEST"], check=True, env=environment())
    lines = (output / "metrics.jsonl").read_text(encoding="utf-8")
    assert '"step": 7' in lines
    resumed = straight.parent / "resumed.yaml"
    resumed.write_text(straight.read_text(encoding="utf-8").replace(str(straight.parent / "out"), str(output)))
    assert [(r["step"], r["loss"], r["lr"], r["grad_norm"]) for r in metrics(resumed)] == expected


def test_export_is_what_plain_transformers_loads(straight: Path) -> None:
    checkpoint, out = straight.parent / "out/checkpoints/step-00000007", straight.parent / "export"
    subprocess.run([*HP, "export", str(checkpoint), str(out)], check=True)
    model = AutoModelForCausalLM.from_pretrained(out)
    before = AutoModelForCausalLM.from_pretrained(straight.parent / "model")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(not torch.equal(new, old) for new, old in zip(model.parameters(), before.parameters(), strict=True))


def test_a_wrong_configuration_is_one_line_and_exit_code_2(run: Path) -> None:
    command = [*HP, "run", str(run), "--fsdp_config.reshard_after_foward=true"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr == (
        "fsdp_config.reshard_after_foward: unknown key. Did you mean reshard_after_forward?  "
        "(--fsdp_config.reshard_after_foward=true)\n"
    )
    assert result.stdout == ""

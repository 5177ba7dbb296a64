"""metrics.jsonl, TensorBoard events and what a person sees."""

from __future__ import annotations

import io
import json
import math
import re
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hp_core.training.metrics import MetricsWriter


def records(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def events(folder: Path, tag: str) -> list[tuple[int, float]]:
    found = EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return [(event.step, event.value) for event in found.Scalars(tag)]


def log_steps(folder: Path, steps: range, offset: float, start_step: int, *, close: bool = True) -> None:
    writer = MetricsWriter(folder, num_steps=10, start_step=start_step)
    for step in steps:
        writer.log(step, {"loss": step + offset, "lr": 0.5})
        if step % 2 == 0:
            writer.log_eval(step, {"loss": step + offset})
    if close:
        writer.close()


def test_lg01_every_step_occurs_once_after_a_resume(tmp_path: Path) -> None:
    log_steps(tmp_path, range(1, 8), 0.0, 0, close=False)  # a crash closes nothing
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')  # half a line
    log_steps(tmp_path, range(5, 11), 100.0, 4)
    expected = [(step, step + (100.0 if step > 4 else 0.0)) for step in range(1, 11)]
    assert [(r["step"], r["loss"]) for r in records(tmp_path) if "loss" in r] == expected
    assert events(tmp_path, "train/loss") == expected
    assert [(r["step"], r["eval_loss"]) for r in records(tmp_path) if "eval_loss" in r] == expected[1::2]
    assert events(tmp_path, "eval/loss") == expected[1::2]


def test_run_from_the_start_replaces_what_is_there(tmp_path: Path) -> None:
    log_steps(tmp_path, range(1, 8), 0.0, 0)
    log_steps(tmp_path, range(1, 4), 100.0, 0)
    assert [r["loss"] for r in records(tmp_path) if "loss" in r] == [101.0, 102.0, 103.0]
    assert events(tmp_path, "train/loss") == [(1, 101.0), (2, 102.0), (3, 103.0)]


def test_lines_are_on_disk_before_close_and_are_strict_json(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, num_steps=None)
    writer.log(1, {"loss": math.nan, "grad_norm": math.inf, "lr": 0.25})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {"step": 1, "loss": None, "grad_norm": None, "lr": 0.25}
    writer.close()


def test_lines_of_text_without_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = MetricsWriter(tmp_path, num_steps=4)
    writer.log(2, {"loss": 2.5, "grad_norm": 0.125, "lr": 3e-4, "tokens_per_second": 12345.6, "epoch": 0.5})
    writer.log_eval(2, {"loss": 2.25})
    writer.close()
    captured = capsys.readouterr()
    first, second = captured.err.splitlines()
    assert first.startswith("step 2/4  loss 2.5000  grad norm 0.125  lr 0.0003  12,346 tokens/s  left 00:0")
    assert second == "step 2/4  eval loss 2.2500"
    assert captured.out == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_with_loss_speed_and_time_left_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "stderr", Terminal())
    writer = MetricsWriter(tmp_path, num_steps=4, start_step=1)
    for step in (2, 3, 4):
        writer.log(step, {"loss": 2.5, "tokens_per_second": 1000})
    writer.close()
    last = sys.stderr.getvalue().rstrip().split("\r")[-1]
    assert re.search(r"100%\|.*\| 4/4 \[\d\d:\d\d<00:00, .*step.*, loss 2\.5000  1,000 tokens/s\]", last), last

"""The profiler's window: exactly the configured steps, one Chrome trace per rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hp_core.config.schema import ProfilingConfig
from hp_core.errors import ConfigError
from hp_core.training.profiling import profile_steps


def traced_steps(folder: Path, config: ProfilingConfig, num_steps: int, start_step: int = 0) -> list[int] | None:
    """Run steps that mark themselves; the marks found in the trace of rank 3, None without a trace."""
    with profile_steps(config, folder, rank=3, start_step=start_step) as end_step:
        for step in range(start_step + 1, num_steps + 1):
            with torch.profiler.record_function(f"mark {step}"):
                torch.ones(4).sum()
            end_step()
    path = folder / "trace" / f"rank3-steps{config.start_step}-{config.end_step}.json"
    if not path.exists():
        return None
    names = {event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]}
    return sorted(int(name.removeprefix("mark ")) for name in names if name.startswith("mark "))


@pytest.mark.parametrize(("first", "last"), [(2, 3), (1, 1), (3, 5)])
def test_window_is_inclusive(tmp_path: Path, first: int, last: int) -> None:
    config = ProfilingConfig(enabled=True, start_step=first, end_step=last)
    assert traced_steps(tmp_path, config, num_steps=6) == list(range(first, last + 1))


def test_steps_are_counted_over_resumes(tmp_path: Path) -> None:
    config = ProfilingConfig(enabled=True, start_step=4, end_step=5)
    assert traced_steps(tmp_path, config, num_steps=7, start_step=3) == [4, 5]
    assert traced_steps(tmp_path / "later", config, num_steps=9, start_step=7) is None


def test_run_that_ends_inside_the_window_keeps_what_it_has(tmp_path: Path) -> None:
    config = ProfilingConfig(enabled=True, start_step=2, end_step=9)
    assert traced_steps(tmp_path, config, num_steps=3) == [2, 3]


def test_disabled_writes_nothing(tmp_path: Path) -> None:
    assert traced_steps(tmp_path, ProfilingConfig(), num_steps=4) is None
    assert not (tmp_path / "trace").exists()


def test_trace_dir_and_impossible_window(tmp_path: Path) -> None:
    config = ProfilingConfig(enabled=True, start_step=1, end_step=1, trace_dir=str(tmp_path / "out" / "trace"))
    assert traced_steps(tmp_path / "out", config, num_steps=2) == [1]
    with pytest.raises(ConfigError, match="steps 3 to 2"):
        traced_steps(tmp_path, ProfilingConfig(enabled=True, start_step=3, end_step=2), num_steps=1)

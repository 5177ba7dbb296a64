"""A profiler trace of a few steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import ProfilerAction, profile

from hp_core.config.schema import ProfilingConfig
from hp_core.errors import ConfigError


@contextmanager
def profile_steps(
    config: ProfilingConfig, output_dir: Path, *, rank: int, start_step: int = 0
) -> Iterator[Callable[[], None]]:
    """Gives a function to call at the end of every optimizer step; `start_step` steps were done before the first.

    When enabled, steps `config.start_step` to `config.end_step` (counted from 1, both inclusive) are recorded into
    `<trace_dir>/rank<rank>-steps<a>-<b>.json`, a Chrome trace; the step before them warms the profiler up. `trace_dir`
    defaults to `<output_dir>/trace`. A run that ends inside the window keeps what was recorded. Raises ConfigError
    for a window that is empty or starts before step 1.
    """
    if not config.enabled:
        yield lambda: None
        return
    first, last = config.start_step, config.end_step
    if not 1 <= first <= last:
        raise ConfigError(f"profiling: steps {first} to {last} are no window. Use 1 <= start_step <= end_step.")
    folder = Path(config.trace_dir) if config.trace_dir is not None else output_dir / "trace"
    folder.mkdir(parents=True, exist_ok=True)

    def action(index: int) -> ProfilerAction:
        step = start_step + 1 + index
        if step == last:
            return ProfilerAction.RECORD_AND_SAVE
        if first <= step < last:
            return ProfilerAction.RECORD
        return ProfilerAction.WARMUP if step == first - 1 else ProfilerAction.NONE

    def export(profiler: profile) -> None:
        profiler.export_chrome_trace(str(folder / f"rank{rank}-steps{first}-{last}.json"))

    with profile(schedule=action, on_trace_ready=export) as profiler:
        yield profiler.step

"""What a run reports: metrics.jsonl, TensorBoard events and a progress bar, all from rank 0."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"


class MetricsWriter:
    """Writes `<output_dir>/metrics.jsonl` and `<output_dir>/tensorboard`, and shows progress on stderr.

    Only rank 0 makes one. After a resume from step `start_step`, what an earlier run has logged beyond that step is
    dropped from both, so that every step occurs once; a run that starts at 0 drops everything.
    """

    def __init__(self, output_dir: Path, *, num_steps: int | None, start_step: int = 0) -> None:
        """`num_steps` is the step at which the run ends, None when that is open."""
        output_dir.mkdir(parents=True, exist_ok=True)
        path = output_dir / METRICS_FILE
        _drop_later_steps(path, start_step)
        self._file = path.open("a", encoding="utf-8", buffering=1)  # a line is on disk as soon as it is logged
        self._events = SummaryWriter(output_dir / TENSORBOARD_FOLDER, purge_step=start_step + 1 if start_step else 0)
        self._progress = _Progress(num_steps, start_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the `values` of optimizer step `step` (counted from 1), and show them."""
        self._write(step, values, "train", values)
        self._progress.show(step, values)

    def log_eval(self, step: int, values: Mapping[str, float]) -> None:
        """Record an evaluation after `step`, as an object of its own with `eval_` before each name."""
        named = {f"eval_{name}": value for name, value in values.items()}
        self._write(step, named, "eval", values)
        self._progress.say(step, named)

    def close(self) -> None:
        """Flush and close everything. Idempotent."""
        self._progress.close()
        self._events.close()
        self._file.close()

    def _write(self, step: int, record: Mapping[str, float], group: str, scalars: Mapping[str, float]) -> None:
        # JSON has no NaN and no infinity.
        finite = {name: value if math.isfinite(value) else None for name, value in record.items()}
        self._file.write(json.dumps({"step": step, **finite}) + "\n")
        for name, value in scalars.items():
            self._events.add_scalar(f"{group}/{name}", value, step)
        self._events.flush()


class _Progress:
    """A bar on a terminal; lines of text elsewhere."""

    def __init__(self, num_steps: int | None, start_step: int) -> None:
        self._num_steps = num_steps
        self._start_step = start_step
        self._start_time = time.monotonic()
        is_terminal = sys.stderr.isatty()
        self._bar = tqdm(total=num_steps, initial=start_step, unit="step", dynamic_ncols=True) if is_terminal else None

    def show(self, step: int, values: Mapping[str, float]) -> None:
        if self._bar is None:
            self.say(step, values, left=self._time_left(step))
            return
        self._bar.set_postfix_str(_format(values), refresh=False)
        self._bar.update(step - self._bar.n)

    def say(self, step: int, values: Mapping[str, float], left: str | None = None) -> None:
        total = "" if self._num_steps is None else f"/{self._num_steps}"
        line = f"step {step}{total}  {_format(values)}" + (f"  left {left}" if left else "")
        tqdm.write(line, file=sys.stderr)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _time_left(self, step: int) -> str | None:
        if self._num_steps is None or step <= self._start_step:
            return None
        seconds_per_step = (time.monotonic() - self._start_time) / (step - self._start_step)
        return str(tqdm.format_interval(seconds_per_step * (self._num_steps - step)))


# What a person watches, in this order, and how it is written; the files have the rest.
_SHOWN = {
    "loss": "loss {:.4f}",
    "eval_loss": "eval loss {:.4f}",
    "grad_norm": "grad norm {:.3g}",
    "lr": "lr {:.3g}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "tflops": "{:.1f} TFLOP/s",
    "mfu": "MFU {:.1%}",
}


def _format(values: Mapping[str, float]) -> str:
    return "  ".join(text.format(values[name]) for name, text in _SHOWN.items() if name in values)


def _drop_later_steps(path: Path, last_step: int) -> None:
    """Keep the lines of steps 1 to `last_step`. A line that a killed run left half written goes too."""
    if not path.exists():
        return
    kept = [line for line in path.read_text(encoding="utf-8").splitlines() if 0 < _step_of(line) <= last_step]
    aside = path.with_suffix(".tmp")
    aside.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    aside.replace(path)


def _step_of(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return -1

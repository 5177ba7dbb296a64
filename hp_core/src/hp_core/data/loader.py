"""The loader of a data rank: per optimizer step, its micro-batches of the global batch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Protocol

from hp_core.data.batch import Batch
from hp_core.data.packing import Row, make_batch, make_row
from hp_core.data.stream import Position, RowStream
from hp_core.errors import ConfigError, DataError


class BatchLoader(Protocol):
    """What training needs of a loader. hp's own is `Loader`; a configured `_target_` may give another."""

    @property
    def epoch(self) -> float:
        """Epochs handed out so far."""

    def next_step(self) -> list[Batch] | None:
        """This data rank's micro-batches of the next optimizer step, as many on every rank; None when data ends."""

    def rewind(self) -> None:
        """Start again from the first step."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on behind the last step handed out. Plain JSON data, equal on all ranks."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the loader that gave `state` stood."""


class Loader:
    """Deals the rows of a `RowStream`, which is the same on all ranks, to `dp_size` data ranks.

    Row g of a step goes to micro-batch `g // (micro_batch_size * dp_size)`, there to rank
    `g // micro_batch_size % dp_size`. A step that the end of the data cuts short is filled with rows without targets.
    """

    def __init__(
        self,
        stream: RowStream,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        fingerprint: Mapping[str, Any],
    ) -> None:
        """`fingerprint` is plain data by the name of the dataset key that it comes from.

        Raises ConfigError when micro-batches over all data ranks do not divide the global batch.
        """
        if global_batch_size < 1 or micro_batch_size < 1 or global_batch_size % (micro_batch_size * dp_size):
            raise ConfigError(
                f"training.global_batch_size: {global_batch_size} is not a multiple of micro_batch_size "
                f"{micro_batch_size} x {dp_size} data ranks = {micro_batch_size * dp_size}"
            )
        self._stream = stream
        self._global_batch_size = global_batch_size
        self._micro_batch_size = micro_batch_size
        self._dp_rank = dp_rank
        self._dp_size = dp_size
        self._fingerprint = fingerprint

    @property
    def accumulation(self) -> int:
        """Micro-batches per optimizer step."""
        return self._global_batch_size // (self._micro_batch_size * self._dp_size)

    @property
    def epoch(self) -> float:
        """Epochs handed out so far, a fraction counted in records."""
        return self._stream.epoch

    @property
    def num_skipped(self) -> int:
        """Bad lines skipped so far."""
        return self._stream.num_skipped

    def next_step(self) -> list[Batch] | None:
        """This rank's `accumulation` micro-batches of the next step, `[micro_batch_size, S]` each; None at the end."""
        options = self._stream.options
        filler = make_row([], options.seq_length, options.pad_id)
        rows: list[Row] = []
        for _ in range(self._global_batch_size):
            row = self._stream.next_row()
            if row is None and not rows:
                return None
            rows.append(filler if row is None else row)
        micro, stride = self._micro_batch_size, self._micro_batch_size * self._dp_size
        first = self._dp_rank * micro
        return [make_batch(rows[g : g + micro]) for g in range(first, self._global_batch_size, stride)]

    def rewind(self) -> None:
        """Start again from the first step."""
        self._stream.seek(Position())
        self._stream.num_skipped = 0

    def state_dict(self) -> dict[str, Any]:
        """The position behind the last step handed out, and what the data was. Plain JSON data, equal on all ranks."""
        return {
            "position": asdict(self._stream.position),
            "num_skipped": self.num_skipped,
            "fingerprint": dict(self._fingerprint),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the loader that gave `state` stood, on any number of ranks.

        Raises DataError, naming the field, when the data is not what it was then.
        """
        saved = state["fingerprint"]
        for field, now in self._fingerprint.items():
            if field == "path":
                _check_files(saved.get(field, []), now)
            elif saved.get(field) != now:
                raise DataError(
                    f"dataset.{field}: the run was saved with {saved.get(field)}, it is {now} now, so its data cannot "
                    "go on where it stopped. Restore the old value or start a new run"
                )
        self._stream.seek(Position(**state["position"]))
        self._stream.num_skipped = state["num_skipped"]


def _check_files(saved: list[dict[str, Any]], now: list[dict[str, Any]]) -> None:
    """Contents count, names do not: a folder may move."""
    for before, after in zip(saved, now, strict=False):
        if (before["size"], before["sha256"]) != (after["size"], after["sha256"]):
            raise DataError(
                f"dataset.path: {after['path']} ({after['size']} bytes) is not the file that the run was saved with "
                f"({before['path']}, {before['size']} bytes). Restore it or start a new run"
            )
    if len(saved) != len(now):
        raise DataError(
            f"dataset.path: the run was saved with {len(saved)} files, there are {len(now)} now. "
            "Restore them or start a new run"
        )


def digest(value: Any) -> str:
    """A short name for plain data, for fingerprints."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]

"""Where records come from: JSON lines (`hp_core.data.jsonl`), or a dataset of the user's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from hp_core.errors import DataError


class Records(Protocol):
    """Numbered records that can be read in any order, also in another process."""

    paths: list[Path]
    fingerprint: list[dict[str, Any]]

    def __len__(self) -> int:
        """How many there are."""

    def where(self, index: int) -> str:
        """The place of a record, for messages."""

    def read(self, index: int) -> Mapping[str, Any] | None:
        """A record; None for one that holds nothing. Raises DataError, without the place."""


class GivenRecords:
    """The records of a dataset that `dataset._target_` made: anything with `len()` and `[index]`.

    Whether it has changed since a checkpoint was saved is seen by its length only.
    """

    def __init__(self, dataset: Sequence[Mapping[str, Any]], target: str) -> None:
        """Raises DataError when `dataset` has no records or cannot be indexed."""
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__") or len(dataset) == 0:
            raise DataError(
                f"dataset._target_ {target}: expected a dataset with len() and [index], and at least one record, "
                f"found {type(dataset).__name__}"
            )
        self._dataset = dataset
        self._target = target
        self.paths = [Path(target)]
        self.fingerprint = [{"path": target, "size": len(dataset), "sha256": ""}]

    def __len__(self) -> int:
        return len(self._dataset)

    def where(self, index: int) -> str:
        return f"{self._target}[{index}]"

    def read(self, index: int) -> Mapping[str, Any] | None:
        record = self._dataset[index]
        if not isinstance(record, Mapping):
            raise DataError(f"expected a mapping with input_ids, found {type(record).__name__}")
        return {
            name: value.tolist() if hasattr(value, "tolist") else value
            for name, value in record.items()
            if name in ("input_ids", "labels")
        }

"""Random access to the lines of JSONL files, without holding them in memory."""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hp_core.errors import DataError

_BLOCK = 1 << 24  # bytes read at a time
_BOM = b"\xef\xbb\xbf"
_NEWLINE, _RETURN = ord("\n"), ord("\r")


@dataclass(frozen=True)
class FileFingerprint:
    """What tells whether a data file is still the one that a run started with."""

    path: str
    size: int
    sha256: str

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for a checkpoint."""
        return asdict(self)


@dataclass(frozen=True)
class _Lines:
    """The lines of a file that are not empty: byte offsets of start and end, and line numbers from 1."""

    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    numbers: npt.NDArray[np.int32]
    fingerprint: FileFingerprint


def find_files(patterns: Any, *, key: str) -> list[Path]:
    """The files that `patterns` (a path, a glob or a list of them; `**` spans folders) match, sorted.

    Raises DataError, naming `key`, for a pattern that matches nothing, a folder, and a file that is matched twice.
    """
    if isinstance(patterns, str | Path):
        patterns = [patterns]
    if not isinstance(patterns, Sequence) or not patterns:
        raise DataError(f"{key}: expected a file, a glob or a list of them, found {patterns!r}")
    found: list[Path] = []
    for pattern in map(str, patterns):
        # A file is taken by its name first: it may contain the special characters of a glob.
        matches = [pattern] if Path(pattern).exists() else glob.glob(pattern, recursive=True)  # noqa: PTH207 (absolute patterns)
        if not matches:
            raise DataError(f'{key}: no file matches "{pattern}" (from {Path.cwd()})')
        found += map(Path, matches)
    found.sort()
    for i, path in enumerate(found):
        if path.is_dir():
            raise DataError(f'{key}: "{path}" is a folder. Use "{path}/*.jsonl"')
        if i and path == found[i - 1]:
            raise DataError(f'{key}: "{path}" is matched twice. List each file once')
    return found


class JsonLines:
    """The non-blank lines of `paths`, in order, found by their byte offsets and read one at a time.

    Opening reads every file once, to find the lines and to take the fingerprints. No file is kept open, so the
    object can be sent to other processes. A byte order mark, CRLF, blank lines and a missing last newline are fine.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = list(paths)
        indexed = [_index_lines(path) for path in self.paths]
        self._starts = np.concatenate([lines.starts for lines in indexed])
        self._ends = np.concatenate([lines.ends for lines in indexed])
        self._numbers = np.concatenate([lines.numbers for lines in indexed])
        # Line i belongs to the first file whose end in this list is beyond i.
        self._file_ends = np.cumsum([len(lines.starts) for lines in indexed])
        self.fingerprint = [lines.fingerprint.as_dict() for lines in indexed]

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def empty_files(self) -> list[Path]:
        """Files without a single line."""
        counts = np.diff(self._file_ends, prepend=0)
        return [path for path, count in zip(self.paths, counts, strict=True) if count == 0]

    def _path(self, index: int) -> Path:
        return self.paths[int(np.searchsorted(self._file_ends, index, side="right"))]

    def where(self, index: int) -> str:
        """`file:line` of a line, for messages."""
        return f"{self._path(index)}:{self._numbers[index]}"

    def read(self, index: int) -> dict[str, Any] | None:
        """The JSON object in a line; None for a line of white space. Raises DataError, without the place."""
        start, end = int(self._starts[index]), int(self._ends[index])
        with self._path(index).open("rb") as file:
            file.seek(start)
            line = file.read(end - start)
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"byte {error.start + 1} of the line is not UTF-8") from error
        if not text.strip():
            return None
        try:
            record = json.loads(text)
        except json.JSONDecodeError as error:
            raise DataError(f"not valid JSON: {error.msg} at column {error.colno}") from error
        except RecursionError as error:
            raise DataError("the JSON is nested too deeply") from error
        if not isinstance(record, dict):
            raise DataError(f"expected a JSON object, found {type(record).__name__}")
        return record


def _index_lines(path: Path) -> _Lines:
    digest = hashlib.sha256()
    breaks, size, start = [], 0, 0
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                if size == 0 and block.startswith(_BOM):
                    start = len(_BOM)
                digest.update(block)
                breaks.append(np.flatnonzero(np.frombuffer(block, np.uint8) == _NEWLINE) + size)
                size += len(block)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    ends = np.concatenate([*breaks, [size]]).astype(np.int64)
    starts = np.concatenate([[start], ends[:-1] + 1]).astype(np.int64)
    keep = ends > starts
    single = np.flatnonzero(ends - starts == 1)
    if len(single):  # what CRLF leaves of a blank line
        keep[single] = np.memmap(path, np.uint8, "r")[starts[single]] != _RETURN
    kept = np.flatnonzero(keep)
    fingerprint = FileFingerprint(str(path), size, digest.hexdigest())
    return _Lines(starts[kept], ends[kept], (kept + 1).astype(np.int32), fingerprint)

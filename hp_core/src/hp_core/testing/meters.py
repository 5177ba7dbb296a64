"""What a process takes from a Linux machine: anonymous memory, and bytes from storage."""

from __future__ import annotations

import os
import threading
from pathlib import Path


class PeakMemory:
    """A context that samples RssAnon every 2 ms; `peak` is its highest value over the one at entry, in bytes.

    Pages of mapped files do not count: they are the page cache, which all processes share.
    """

    def __enter__(self) -> PeakMemory:
        self.peak = 0
        self._start = anonymous_memory()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._done.wait(0.002):
            self.peak = max(self.peak, anonymous_memory() - self._start)


def anonymous_memory() -> int:
    """Bytes of this process in memory that are not pages of mapped files."""
    return 1024 * _field("/proc/self/status", "RssAnon")


def bytes_read() -> int:
    """Bytes that this process has made the kernel fetch from storage so far. What was in the page cache is free."""
    return _field("/proc/self/io", "read_bytes")


def drop_from_cache(path: Path) -> None:
    """Write the file back and take its pages out of the page cache, so that it has to be read from storage again."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _field(file: str, name: str) -> int:
    line = next(line for line in Path(file).read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1])

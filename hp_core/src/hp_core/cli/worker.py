"""One rank, as `hp run` starts it: `python -m hp_core.cli.worker CONFIG [--a.b=c ...]`."""

from __future__ import annotations

import sys
from pathlib import Path

from hp_core.cli.rank_errors import run_rank


def work() -> None:
    """Run the configuration that the command line names."""
    # Imported here so that a failing import is reported like any other failure.
    from hp_core import pipeline

    pipeline.run(Path(sys.argv[1]), sys.argv[2:])


if __name__ == "__main__":
    run_rank(work)

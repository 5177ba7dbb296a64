"""Stands in for the worker of `hp run` in the launcher's tests: rank 1 does what the first argument says.

Only what a case needs is imported, so that most ranks start at once.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path


def main() -> None:
    case, folder = sys.argv[1], Path(sys.argv[2])
    rank = int(os.environ["RANK"])
    facts = {"pid": os.getpid(), "omp": os.environ["OMP_NUM_THREADS"], "arguments": sys.argv[3:]}
    partial = folder / f"{rank}.partial"
    partial.write_text(json.dumps(facts))
    partial.rename(folder / f"{rank}.json")
    if case == "collective":
        fail_in_a_collective(rank)
    elif case == "waits" or (rank == 0 and case != "succeeds"):
        time.sleep(1000)
    elif case == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif case == "exits":
        sys.exit(7)
    elif case == "user_error":
        from hp_core.cli.rank_errors import run_rank
        from hp_core.errors import ConfigError

        def raises() -> None:
            raise ConfigError("training.seed: wrong. Fix it.")

        run_rank(raises)


def fail_in_a_collective(rank: int) -> None:
    import torch.distributed as dist

    from hp_core.cli.rank_errors import run_rank

    def work() -> None:
        dist.init_process_group("gloo")
        dist.barrier()
        if rank == 1:
            raise RuntimeError("the cause")
        dist.barrier()

    run_rank(work)


if __name__ == "__main__":
    main()

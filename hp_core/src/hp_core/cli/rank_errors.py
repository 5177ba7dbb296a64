"""How a failing rank tells the launcher what happened: the worker's side writes, the launcher's side reads.

The report is the file that torch's elastic agent names in `TORCHELASTIC_ERROR_FILE`, in the agent's own format with
two fields of hp beside it. A rank prints nothing itself: the failure of one rank fails all of them, and one message
is enough.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from hp_core.errors import HpError

EXIT_USER_ERROR = 2
EXIT_FAILURE = 1


def run_rank(work: Callable[[], None]) -> None:
    """Run one rank's work. When it raises, report to the launcher and end the process at once."""
    faulthandler.enable()
    try:
        work()
    except Exception as error:
        _write_report(error)
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: threads of a process group or a data loader must not keep a failed rank alive.
        os._exit(EXIT_USER_ERROR if isinstance(error, HpError) else EXIT_FAILURE)


def _write_report(error: Exception) -> None:
    now = time.time()
    details = {"py_callstack": "".join(traceback.format_exception(error)), "timestamp": str(int(now))}
    report = {
        "message": {"message": str(error), "extraInfo": details},
        "time": now,
        "user_error": isinstance(error, HpError),
    }
    target = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
    # The agent may end this rank at any time and must not find half a report.
    partial = target.with_suffix(".partial")
    partial.write_text(json.dumps(report))
    partial.replace(target)


def describe_failure(failures: Mapping[int, ProcessFailure]) -> tuple[str, int]:
    """The message and exit code for a run whose ranks failed: those of the rank that failed first, by global rank."""
    rank = min(failures, key=lambda each: (_precedence(failures[each]), each))
    failure = failures[rank]
    report = failure.error_file_data
    if "time" in report:
        message = report["message"]
        if report["user_error"]:
            return message["message"], EXIT_USER_ERROR
        return f"rank {rank} failed:\n{message['extraInfo']['py_callstack'].rstrip()}", EXIT_FAILURE
    if failure.exitcode < 0:
        name = failure.signal_name()
        hint = ". The system does that when memory runs out" if name == "SIGKILL" else ""
        return f"rank {rank} was killed by {name}{hint}.", EXIT_FAILURE
    return f"rank {rank} ended with exit code {failure.exitcode}; what it said, if anything, is above.", EXIT_FAILURE


def _precedence(failure: ProcessFailure) -> tuple[int, float]:
    """Sorts causes before their consequences.

    A rank that dies breaks the collectives of the others, which then raise, or are aborted by the communication
    library, or are terminated by the agent. An HpError is never such a consequence.
    """
    report = failure.error_file_data
    if "time" in report:
        return (0 if report["user_error"] else 2), report["time"]
    order = {-signal.SIGABRT: 3, -signal.SIGTERM: 4}
    return order.get(failure.exitcode, 1), failure.timestamp

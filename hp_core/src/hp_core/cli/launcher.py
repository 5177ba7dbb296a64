"""Start the ranks of one node through torch's elastic launcher, and tell in one message why they ended."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from hp_core.cli.rank_errors import describe_failure

SECONDS_TO_END = 5


@dataclass(frozen=True)
class Ranks:
    """How many ranks to start and where. `endpoint` (host:port, on node 0) is needed for more than one node."""

    per_node: int
    num_nodes: int = 1
    node_rank: int = 0
    endpoint: str | None = None

    @property
    def world_size(self) -> int:
        return self.per_node * self.num_nodes


def launch(ranks: Ranks, command: Sequence[str]) -> int:
    """Run `python COMMAND` once for every rank of this node, and wait.

    When one rank fails, the others are ended, and its message is printed on stderr. Returns the exit code: 0, 2 for
    an HpError, 1 for any other failure, 128 + the signal when this process gets one.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks.per_node)))
    # The ranks import from where this process does, whichever way it was started.
    os.environ["PYTHONPATH"] = os.pathsep.join(str(Path(path).absolute()) for path in sys.path)
    _silence_elastic_logs()
    with tempfile.TemporaryDirectory(prefix="hp_ranks_") as folder:
        # The elastic agent replaces ${...} in arguments; a doubled $ is one $.
        arguments = ["-P", *(each.replace("$", "$$") for each in command)]
        try:
            elastic_launch(_launch_config(ranks, folder), sys.executable)(*arguments)
        except ChildFailedError as error:
            message, code = describe_failure(error.failures)
            print(message, file=sys.stderr)
            return code
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        except SignalException as error:
            return 128 + error.sigval
    return 0


def _launch_config(ranks: Ranks, folder: str) -> LaunchConfig:
    config = LaunchConfig(
        min_nodes=ranks.num_nodes,
        max_nodes=ranks.num_nodes,
        nproc_per_node=ranks.per_node,
        max_restarts=0,
        # Ctrl-C is left out: the agent would hand it on to the ranks, and each would print where it was. As a plain
        # KeyboardInterrupt it makes the agent terminate them.
        signals_to_handle="SIGTERM,SIGHUP,SIGQUIT",
        shutdown_timeout=SECONDS_TO_END,
        logs_specs=DefaultLogsSpecs(log_dir=folder),
    )
    if ranks.endpoint is None:
        # A store of its own on a free port, so that runs on one machine do not meet.
        return replace(config, rdzv_backend="c10d", rdzv_endpoint="localhost:0", run_id=str(uuid.uuid4()))
    node = {"rank": ranks.node_rank}
    return replace(config, rdzv_backend="static", rdzv_endpoint=ranks.endpoint, rdzv_configs=node, run_id="hp")


def _silence_elastic_logs() -> None:
    """The agent's own account of a failure would bury the one message that matters."""
    logger = logging.getLogger("torch.distributed.elastic")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False

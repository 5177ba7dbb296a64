"""A persistent pool of gloo ranks for tests.

Ranks are forked from a server that has imported torch and transformers, and stay between tests: a call costs some
30 ms instead of the 10 s of a fresh start. Every call gets a new process group and the same initial state.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from hp_core.testing.rank_process import Call, Reply, output_path, serve, stack_path

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["hp_core.testing.preload"])
_OUTPUT_LINES = 30


class RankError(RuntimeError):
    """A rank raised an exception that cannot be sent, died, or did not finish in time."""


class RankPool:
    """`world_size` processes, each a rank of a gloo group with one thread."""

    def __init__(self, world_size: int, timeout: float = 120.0) -> None:
        """Start nothing yet: the first `run` does. `timeout` is the default of `run`, in seconds."""
        self.world_size = world_size
        self.timeout = timeout
        self._processes: list[ForkServerProcess] = []
        self._connections: list[Connection] = []
        self._folder = Path()
        self._calls = itertools.count()

    def run(self, function: Callable[..., Any], *args: Any, timeout: float | None = None, **kwargs: Any) -> list[Any]:
        """Call `function(*args, **kwargs)` on every rank, inside a process group; give the results by rank.

        `function` lives at the top level of a module; arguments and results are pickled. The first exception that
        a rank raises is raised here, with that rank's traceback as its cause; the ranks are then replaced. Raises
        RankError when a rank dies, or when one does not finish in `timeout` seconds, with the stacks of those
        that are stuck.
        """
        payload = pickle.dumps((function, args, kwargs))
        limit = self.timeout if timeout is None else timeout
        self._start()
        # Longer than the parent's limit: a rank that waits for a stuck one is reported by its stack, not by gloo.
        store = self._folder / f"store{next(self._calls)}"
        call = pickle.dumps(Call(payload, tuple(sys.path), store, timeout=2 * limit))
        try:
            for connection in self._connections:
                connection.send_bytes(call)
            replies = self._collect(time.monotonic() + limit, limit)
        except BaseException:
            self.close()
            raise
        return [pickle.loads(reply.value) for reply in replies if reply.value is not None]

    def close(self) -> None:
        """End the ranks. A later `run` starts new ones."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
            process.close()
        if self._processes:
            shutil.rmtree(self._folder)
        self._processes, self._connections = [], []

    def _start(self) -> None:
        if self._processes:
            return
        self._folder = Path(tempfile.mkdtemp(prefix="hp-ranks-"))
        for rank in range(self.world_size):
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(
                target=serve, args=(rank, self.world_size, theirs, self._folder), name=f"rank {rank}", daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def _collect(self, deadline: float, limit: float) -> list[Reply]:
        """All replies, in the order of ranks, or the failure that came first."""
        replies: dict[int, Reply] = {}
        while len(replies) < self.world_size:
            pending = [rank for rank in range(self.world_size) if rank not in replies]
            dead = self._receive(pending, replies, deadline)
            failed = [rank for rank, reply in replies.items() if reply.value is None]
            if failed and not dead:
                # Ranks that worked with a dead or failed one fail too, and may be heard first.
                dead = self._receive([rank for rank in pending if rank not in replies], replies, time.monotonic() + 0.2)
                failed = [rank for rank, reply in replies.items() if reply.value is None]
            if dead:
                raise RankError(self._describe_dead(dead[0]))
            if failed:
                first = min(failed, key=lambda rank: replies[rank].time)
                raise _to_exception(replies[first]) from RankError(self._describe(first, replies[first].traceback))
            if time.monotonic() > deadline:
                raise RankError(self._describe_stuck([rank for rank in pending if rank not in replies], limit))
        return [replies[rank] for rank in range(self.world_size)]

    def _receive(self, pending: list[int], replies: dict[int, Reply], deadline: float) -> list[int]:
        """Take what comes next from the `pending` ranks into `replies`; give those that have died."""
        dead = []
        ranks = {self._connections[rank]: rank for rank in pending}
        for connection in wait(list(ranks), timeout=max(0.0, deadline - time.monotonic())):
            assert isinstance(connection, Connection)
            try:
                replies[ranks[connection]] = pickle.loads(connection.recv_bytes())
            except (EOFError, ConnectionResetError):
                dead.append(ranks[connection])
        return dead

    def _describe_stuck(self, ranks: list[int], limit: float) -> str:
        for rank in ranks:
            pid = self._processes[rank].pid
            assert pid is not None
            os.kill(pid, signal.SIGUSR1)
        time.sleep(0.5)  # the time to write the stacks
        stacks = [self._describe(rank, stack_path(self._folder, rank).read_text()) for rank in ranks]
        return f"no answer in {limit:g} s from rank {', '.join(map(str, ranks))}\n" + "\n".join(stacks)

    def _describe_dead(self, rank: int) -> str:
        process = self._processes[rank]
        process.join(5)
        code = process.exitcode
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        return self._describe(rank, f"died with {how}")

    def _describe(self, rank: int, what: str) -> str:
        lines = output_path(self._folder, rank).read_text(errors="replace").splitlines()[-_OUTPUT_LINES:]
        output = "\n".join(["", "its last output:", *lines]) if lines else ""
        return f"--- rank {rank} of {self.world_size} ---\n{what.rstrip()}{output}"


def _to_exception(reply: Reply) -> BaseException:
    if reply.error is None:
        return RankError(reply.traceback.strip().splitlines()[-1])
    error = pickle.loads(reply.error)
    assert isinstance(error, BaseException)
    return error


class RankPools:
    """One pool per world size, started when first asked for: `pools(4).run(function)`."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def __call__(self, world_size: int) -> RankPool:
        """The pool of `world_size` ranks."""
        return self._pools.setdefault(world_size, RankPool(world_size))

    def close(self) -> None:
        """End all ranks."""
        for pool in self._pools.values():
            pool.close()

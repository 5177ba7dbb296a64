"""The side of the rank pool that runs inside a rank: receive a call, run it in a fresh process group, reply."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache as clear_sharding_cache


@dataclass(frozen=True)
class Call:
    """What the parent sends: a pickled (function, arguments), the parent's `sys.path`, and a name for the store."""

    payload: bytes
    sys_path: tuple[str, ...]
    store: Path
    timeout: float


@dataclass(frozen=True)
class Reply:
    """What a rank answers: a pickled value or a pickled exception with its traceback as text, and when."""

    value: bytes | None
    error: bytes | None
    traceback: str
    time: float


def output_path(folder: Path, rank: int) -> Path:
    """Where standard output and standard error of `rank` go."""
    return folder / f"rank{rank}.out"


def stack_path(folder: Path, rank: int) -> Path:
    """Where `rank` writes its stacks when it gets SIGUSR1."""
    return folder / f"rank{rank}.stack"


def serve(rank: int, world_size: int, connection: Connection, folder: Path) -> None:
    """Answer calls until the parent closes its end of `connection`."""
    output = os.open(output_path(folder, rank), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    stacks = stack_path(folder, rank).open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when ranks end
    environment = dict(os.environ)
    while True:
        try:
            call = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        # Only now: when the parent sends a call, every rank is known to have left the previous one.
        if dist.is_initialized():
            dist.destroy_process_group()
        _reset(environment)
        connection.send_bytes(pickle.dumps(_answer(call, rank, world_size)))


def _answer(call: Call, rank: int, world_size: int) -> Reply:
    try:
        sys.path.extend(path for path in call.sys_path if path not in sys.path)
        dist.init_process_group(
            "gloo",
            init_method=call.store.as_uri(),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=call.timeout),
        )
        function: Callable[..., Any]
        function, args, kwargs = pickle.loads(call.payload)
        return Reply(pickle.dumps(function(*args, **kwargs)), None, "", time.time())
    except BaseException as error:  # a rank hands everything to the test, pytest's own outcomes included
        return Reply(None, _pickle_error(error), traceback.format_exc(), time.time())


def _pickle_error(error: BaseException) -> bytes | None:
    """The exception in a form that is known to unpickle, or None."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        return None
    return data


def _reset(environment: dict[str, str]) -> None:
    """Undo what a previous call may have left in the process: every call starts from the same state."""
    # What DTensor has cached holds meshes of the previous process group, which equal those of the next.
    clear_sharding_cache()  # type: ignore[no-untyped-call]
    gc.collect()
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)

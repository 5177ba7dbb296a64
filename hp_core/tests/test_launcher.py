"""The launcher with real processes: one message for a failed run, and no rank left behind."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from hp_core.cli.launcher import Ranks, launch
from hp_core.cli.rank_errors import describe_failure

STAND_IN = str(Path(__file__).with_name("launcher_stand_in.py"))


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The launcher sets variables and signal handlers of its process, which here is the test's."""
    for name in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", "")
    handled = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    handlers = {each: signal.getsignal(each) for each in handled}
    yield
    for each, handler in handlers.items():
        signal.signal(each, handler)


def rank_facts(folder: Path) -> dict[int, dict[str, object]]:
    return {int(path.stem): json.loads(path.read_text()) for path in folder.glob("*.json")}


def is_alive(pid: object) -> bool:
    try:
        os.kill(int(str(pid)), 0)
    except ProcessLookupError:
        return False
    return True


def test_the_ranks_run_with_the_given_arguments_and_a_share_of_the_cores(tmp_path: Path) -> None:
    arguments = ["--a=${local_rank}", "--b=$$x", "--c=a b"]
    assert launch(Ranks(2), [STAND_IN, "succeeds", str(tmp_path), *arguments]) == 0
    facts = rank_facts(tmp_path)
    assert sorted(facts) == [0, 1]
    share = str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert all(fact["arguments"] == arguments and fact["omp"] == share for fact in facts.values())


def test_a_number_of_threads_that_the_user_set_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert launch(Ranks(1), [STAND_IN, "succeeds", str(tmp_path)]) == 0
    assert rank_facts(tmp_path)[0]["omp"] == "7"


@pytest.mark.parametrize(
    ("case", "code", "message"),
    [
        ("user_error", 2, "training.seed: wrong. Fix it."),
        ("killed", 1, "rank 1 was killed by SIGKILL. The system does that when memory runs out."),
        ("exits", 1, "rank 1 ended with exit code 7; what it said, if anything, is above."),
    ],
)
def test_a_fault_on_one_rank_ends_all_ranks_with_its_message(
    case: str, code: int, message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch(Ranks(2), [STAND_IN, case, str(tmp_path)]) == code
    # Rank 0 would have slept for 1000 seconds.
    assert capfd.readouterr().err == message + "\n"
    assert not any(is_alive(fact["pid"]) for fact in rank_facts(tmp_path).values())


def test_a_defect_is_shown_with_the_traceback_of_the_rank_that_caused_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch(Ranks(2), [STAND_IN, "collective", str(tmp_path)]) == 1
    lines = capfd.readouterr().err.splitlines()
    assert lines[:2] == ["rank 1 failed:", "Traceback (most recent call last):"]
    assert lines[-1] == "RuntimeError: the cause"
    # Rank 0 failed too, in the barrier that rank 1 left; that is a consequence.
    assert sum("Traceback" in line or "Error" in line for line in lines if "raise " not in line) == 2


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_launcher_ends_all_ranks(sent: signal.Signals, code: int, tmp_path: Path) -> None:
    launcher = start_launcher(Ranks(2), "waits", tmp_path, tmp_path / "errors")
    deadline = time.monotonic() + 120
    while len(rank_facts(tmp_path)) < 2:
        assert launcher.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert launcher.pid is not None
    os.kill(launcher.pid, sent)
    launcher.join(60)
    assert launcher.exitcode == code
    assert (tmp_path / "errors").read_text() == ""
    assert not any(is_alive(fact["pid"]) for fact in rank_facts(tmp_path).values())


def test_two_nodes_meet_at_the_endpoint(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        endpoint = f"localhost:{free.getsockname()[1]}"
    launchers = [
        start_launcher(Ranks(1, 2, node, endpoint), "succeeds", tmp_path, tmp_path / f"errors{node}")
        for node in range(2)
    ]
    for launcher in launchers:
        launcher.join(120)
    assert [launcher.exitcode for launcher in launchers] == [0, 0]
    assert [path.read_text() for path in sorted(tmp_path.glob("errors*"))] == ["", ""]
    assert sorted(rank_facts(tmp_path)) == [0, 1]


def start_launcher(ranks: Ranks, case: str, folder: Path, errors: Path) -> BaseProcess:
    """A launcher of its own: a fork, so that it need not import everything again."""
    process = multiprocessing.get_context("fork").Process(target=run_launcher, args=(ranks, case, folder, errors))
    process.start()
    return process


def run_launcher(ranks: Ranks, case: str, folder: Path, errors: Path) -> None:
    with errors.open("w") as file:
        os.dup2(file.fileno(), 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with it ignored
    sys.exit(launch(ranks, [STAND_IN, case, str(folder)]))


def failure(
    folder: Path, rank: int, exit_code: int, at: float | None = None, user_error: bool = False
) -> ProcessFailure:
    path = folder / f"{rank}.json"
    if at is not None:
        details = {"py_callstack": f"traceback of {rank}", "timestamp": str(int(at))}
        message = {"message": f"message of {rank}", "extraInfo": details}
        path.write_text(json.dumps({"message": message, "time": at, "user_error": user_error}))
    return ProcessFailure(local_rank=rank, pid=1000 + rank, exitcode=exit_code, error_file=str(path))


def test_the_cause_is_told_and_not_its_consequences(tmp_path: Path) -> None:
    ended = failure(tmp_path, 0, -signal.SIGTERM)
    aborted = failure(tmp_path, 1, -signal.SIGABRT)
    later = failure(tmp_path, 2, 1, at=5.7)
    earlier = failure(tmp_path, 3, 1, at=5.2)
    crashed = failure(tmp_path, 4, -signal.SIGSEGV)
    user = failure(tmp_path, 5, 2, at=6.0, user_error=True)
    ranks = [ended, aborted, later, earlier, crashed, user]
    told = [describe_failure(dict(enumerate(ranks[: count + 1]))) for count in range(len(ranks))]
    assert told == [
        ("rank 0 was killed by SIGTERM.", 1),
        ("rank 1 was killed by SIGABRT.", 1),
        ("rank 2 failed:\ntraceback of 2", 1),
        ("rank 3 failed:\ntraceback of 3", 1),
        ("rank 4 was killed by SIGSEGV.", 1),
        ("message of 5", 2),
    ]


def test_the_worker_reports_to_the_launcher_and_prints_nothing(tmp_path: Path) -> None:
    report = tmp_path / "error.json"
    command = [sys.executable, "-m", "hp_core.cli.worker", str(tmp_path / "none.yaml")]
    result = subprocess.run(
        command, env={**os.environ, "TORCHELASTIC_ERROR_FILE": str(report)}, capture_output=True, text=True
    )
    assert (result.returncode, result.stdout, result.stderr) == (2, "", "")
    written = json.loads(report.read_text())
    assert written["user_error"]
    assert written["message"]["message"] == f"{tmp_path / 'none.yaml'}: no such file."

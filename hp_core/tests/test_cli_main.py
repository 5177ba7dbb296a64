"""The command line itself: overrides, exit codes, how many ranks `hp run` starts and what they are told."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hp_core import pipeline
from hp_core.cli import main, run
from hp_core.cli.launcher import Ranks
from hp_core.errors import ConfigError, PlanError
from hp_core.mesh import MeshAxis, plan_mesh


class Recorder:
    """Stands in for the pipeline and the launcher, and remembers what they were asked for."""

    def __init__(self, requests: list[tuple[MeshAxis, int | None]], backend: str | None) -> None:
        self.loaded = SimpleNamespace(
            config=SimpleNamespace(training=SimpleNamespace(backend=backend)),
            plugins=SimpleNamespace(axis_requests=lambda: requests),
        )
        self.runs: list[Any] = []
        self.launches: list[tuple[Ranks, list[str]]] = []


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    result = Recorder([(MeshAxis("tp", "model", "tp_size"), 2)], "gloo")
    monkeypatch.setattr(pipeline, "load", lambda *_: result.loaded)
    monkeypatch.setattr(pipeline, "run", lambda *arguments: result.runs.append(arguments))
    monkeypatch.setattr(run, "launch", lambda ranks, command: result.launches.append((ranks, command)) or 0)
    return result


def test_options_with_equals_are_overrides(recorder: Recorder) -> None:
    overrides = ["--training.seed=3", "--output_dir=a b", "--a.b[1]=[1, 2]"]
    assert main(["run", *overrides[:2], "train.yaml", "--nproc-per-node", "4", *overrides[2:]]) == 0
    assert recorder.launches == [(Ranks(4), ["-m", "hp_core.cli.worker", "train.yaml", *overrides])]
    assert recorder.runs == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["run"],
        ["run", "train.yaml", "--training.seed", "3"],
        ["run", "train.yaml", "--nproc-per-nod=2"],
        ["run", "train.yaml", "--nproc-per-node=0"],
        ["plugins", "--training.seed=3"],
        ["export", "checkpoint", "out", "--training.seed=3"],
        ["train", "train.yaml"],
    ],
)
def test_a_wrong_command_line_is_refused(
    arguments: list[str], recorder: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "error: " in capsys.readouterr().err
    assert recorder.launches == recorder.runs == []


@pytest.mark.parametrize(
    ("error", "code", "printed"),
    [(ConfigError("a.b: wrong. Fix it."), 2, "a.b: wrong. Fix it.\n"), (KeyboardInterrupt(), 130, "")],
)
def test_exit_codes(
    error: BaseException,
    code: int,
    printed: str,
    recorder: Recorder,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(pipeline, "load", fail)
    assert main(["run", "train.yaml"]) == code
    assert capsys.readouterr() == ("", printed)


def test_a_defect_passes_through_with_its_traceback(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "load", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["run", "train.yaml"])


def test_one_process_runs_without_a_launcher(recorder: Recorder) -> None:
    recorder.loaded.plugins.axis_requests = list
    assert main(["run", "train.yaml", "--a.b=1"]) == 0
    assert recorder.runs == [(Path("train.yaml"), ["--a.b=1"])]
    assert recorder.launches == []


def test_under_another_launcher_it_is_one_rank(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert main(["run", "train.yaml"]) == 0
    assert recorder.runs == [(Path("train.yaml"), [])]
    assert main(["run", "train.yaml", "--nproc-per-node=2"]) == 2
    assert capsys.readouterr().err == (
        "--nproc-per-node asks for ranks to be started, but RANK and WORLD_SIZE say that this is one. "
        "Drop the option or unset them.\n"
    )


def test_on_cpu_the_smallest_world_is_started(recorder: Recorder) -> None:
    assert main(["run", "train.yaml"]) == 0
    assert recorder.launches[0][0] == Ranks(2)


@pytest.mark.parametrize(("backend", "per_node"), [(None, 6), ("nccl", 6), ("gloo", 2)])
def test_otherwise_all_accelerators(
    backend: str | None, per_node: int, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 6)
    recorder.loaded.config.training.backend = backend
    assert main(["run", "train.yaml"]) == 0
    assert recorder.launches[0][0] == Ranks(per_node)


def test_a_world_that_the_mesh_cannot_be_laid_over_starts_nothing(
    recorder: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "train.yaml", "--nproc-per-node", "3"]) == 2
    assert capsys.readouterr().err.startswith("3 ranks cannot be divided into tp 2")
    assert recorder.launches == []


def test_several_nodes(recorder: Recorder) -> None:
    options = ["--nnodes=2", "--node-rank=1", "--rdzv-endpoint=host:1234", "--nproc-per-node=1"]
    assert main(["run", "train.yaml", *options]) == 0
    assert recorder.launches[0][0] == Ranks(1, 2, 1, "host:1234")
    assert recorder.launches[0][0].world_size == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nnodes=2"], "--nnodes: more than one node needs --rdzv-endpoint HOST:PORT, where node 0 listens."),
        (["--nnodes=2", "--rdzv-endpoint=h:1", "--node-rank=2"], "--node-rank: expected 0 to 1, found 2."),
        (
            ["--nnodes=2", "--rdzv-endpoint=h:1"],
            "--nnodes: more than one node without accelerators needs --nproc-per-node.",
        ),
    ],
)
def test_wrong_options_for_several_nodes(
    options: list[str], message: str, recorder: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "train.yaml", *options]) == 2
    assert capsys.readouterr().err == message + "\n"


@pytest.mark.parametrize("sizes", [{}, {"tp": 2}, {"cp": 2}, {"fsdp": 4}, {"cp": 2, "fsdp": 4, "tp": 3}, {"fsdp": -1}])
def test_the_smallest_world_is_the_first_that_the_mesh_accepts(sizes: dict[str, int]) -> None:
    roles = {"tp": "model", "cp": "sequence", "fsdp": "data"}
    requests: Any = [(MeshAxis(name, roles[name], "size"), size) for name, size in sizes.items()]

    def fits(world: int) -> bool:
        try:
            plan_mesh(world, requests)
        except PlanError:
            return False
        return True

    assert run.smallest_world(requests) == next(world for world in range(1, 100) if fits(world))


def test_export_hands_over_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    from hp_core.models import export

    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(export, "export_hf", lambda *arguments: calls.append(arguments))
    assert main(["export", "checkpoint", "out", "--dtype", "bfloat16"]) == 0
    assert main(["export", "checkpoint", "out"]) == 0
    assert calls == [(Path("checkpoint"), Path("out"), "bfloat16"), (Path("checkpoint"), Path("out"), None)]

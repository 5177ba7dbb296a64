"""Checkpoints: the resumed run is the straight run, and an incomplete or foreign checkpoint is never used."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LRScheduler
from training_helpers import loss_of, tiny_batch, tiny_model

from hp_core.config.schema import LrSchedulerConfig, OptimizerConfig
from hp_core.errors import CheckpointError
from hp_core.mesh import MeshAxis, plan_mesh
from hp_core.plan import ParamFragment, PlanFragment, Precision, Shard, ShardingPlan, merge_fragments
from hp_core.testing import RankPools
from hp_core.training.checkpoint import Resumed, find_checkpoint, load_checkpoint, save_checkpoint
from hp_core.training.determinism import rng_state, seed_everything
from hp_core.training.optimizer import build_optimizer
from hp_core.training.schedule import build_schedule

CPU = torch.device("cpu")
ADAMW = OptimizerConfig()


@dataclass(frozen=True)
class Run:
    """What a checkpoint is made of, sharded over all ranks."""

    model: nn.Module
    plan: ShardingPlan
    optimizer: torch.optim.Optimizer
    schedule: LRScheduler

    def step(self) -> tuple[float, float]:
        """One optimizer step with dropout; the loss of this rank's own batch, and the learning rate."""
        rate = self.optimizer.param_groups[0]["lr"]
        batch = tiny_batch(4)[2 * dist.get_rank() :][:2]
        loss = loss_of(self.model, batch)
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return loss.item(), rate

    def save(self, folder: Path, step: int, **changes: Any) -> Path:
        arguments: dict[str, Any] = {
            "tokens": 100 * step,
            "loader_state": {"position": [1, step]},
            "device": CPU,
            "versions": {"hp-core": "0.1.0"},
            "save_assets": save_assets,
        }
        return save_checkpoint(
            folder,
            step=step,
            model=self.model,
            plan=self.plan,
            optimizer=self.optimizer,
            schedule=self.schedule,
            **(arguments | changes),
        )

    def load(self, folder: Path) -> Resumed:
        return load_checkpoint(
            folder,
            model=self.model,
            plan=self.plan,
            optimizer=self.optimizer,
            schedule=self.schedule,
            device=CPU,
        )


def save_assets(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


def make_run(
    optimizer: OptimizerConfig = ADAMW,
    *,
    frozen: str = "",
    lr: float = 1e-2,
    schedule: LrSchedulerConfig | None = None,
    **changes: Any,
) -> Run:
    seed_everything(1, stream=dist.get_rank())
    model = tiny_model("llama", **({"tie_word_embeddings": True, "attention_dropout": 0.2} | changes))
    for fqn, param in model.named_parameters():
        param.requires_grad_(not frozen or frozen not in fqn)
    precision = Precision(torch.float32, torch.float32, torch.float32)
    mesh = plan_mesh(dist.get_world_size(), [(MeshAxis("dp_shard", "data", "dp_shard_size"), None)])
    sharded = ParamFragment(layout={"dp_shard": Shard(0)})
    fragment = PlanFragment(params={fqn: sharded for fqn, _ in model.named_parameters()})
    plan = merge_fragments(model, mesh, precision, [("fsdp", fragment)])
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    model.train()
    seed_everything(1, stream=dist.get_rank())
    built = build_optimizer(model, optimizer, lr)
    return Run(model, plan, built, build_schedule(built, schedule or LrSchedulerConfig(lr=lr, lr_warmup_steps=2), 10))


def moments(run: Run) -> dict[str, torch.Tensor]:
    return {
        f"{fqn}.{name}": (value.to_local() if hasattr(value, "to_local") else value).clone()
        for fqn, param in run.model.named_parameters()
        for name, value in run.optimizer.state[param].items()
    }


def straight_and_resumed(folder: Path) -> dict[str, Any]:
    straight = make_run()
    expected = [straight.step() for _ in range(4)]
    path = straight.save(folder, 4)
    state, saved_moments = json.dumps(rng_state(CPU)), moments(straight)
    expected += [straight.step() for _ in range(6)]

    resumed = make_run(lr=1e-2)
    seed_everything(99, stream=0)  # every random state is another one until the checkpoint brings them back
    position = resumed.load(find_checkpoint(folder, "LATEST"))
    loaded_moments = moments(resumed)
    same_rng = json.dumps(rng_state(CPU)) == state
    found = expected[:4] + [resumed.step() for _ in range(6)]
    return {
        "path": path,
        "position": position,
        "expected": expected,
        "found": found,
        "rng": state,
        "same_rng": same_rng,
        "same_moments": saved_moments.keys() == loaded_moments.keys()
        and all(torch.equal(loaded_moments[key], value) for key, value in saved_moments.items()),
        "tied": resumed.model.lm_head.weight is resumed.model.model.embed_tokens.weight,
    }


def test_rs01_rs02_rs05_tw06_resumed_run_is_the_straight_run(pool: RankPools, tmp_path: Path) -> None:
    results = pool(2).run(straight_and_resumed, tmp_path)
    for result in results:
        assert result["position"] == Resumed(step=4, tokens=400, loader_state={"position": [1, 4]})
        assert result["found"] == result["expected"]
        assert len({rate for _, rate in result["found"]}) > 6
        assert result["same_rng"]
        assert result["same_moments"]
        assert result["tied"]
    assert results[0]["rng"] != results[1]["rng"]
    folder = tmp_path / "step-00000004"
    assert results[0]["path"] == folder
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004"]
    assert (folder / "hf" / "config.json").read_text() == "{}"
    trainer = json.loads((folder / "trainer.json").read_text())
    assert trainer["versions"] == {"hp-core": "0.1.0"}
    assert trainer["world_size"] == 2
    keys = FileSystemReader(folder).read_metadata().state_dict_metadata
    assert "model.model.embed_tokens.weight" in keys
    assert "model.lm_head.weight" not in keys  # the shared weight is stored once
    assert "optimizer.model.layers.0.mlp.up_proj.weight.exp_avg" in keys


def save_one(folder: Path, optimizer: OptimizerConfig = ADAMW, **changes: Any) -> None:
    run = make_run(optimizer, **changes)
    run.step()
    run.save(folder, 1)


def load_one(folder: Path, optimizer: OptimizerConfig = ADAMW, **changes: Any) -> None:
    make_run(optimizer, **changes).load(find_checkpoint(folder, "LATEST"))


SGD = OptimizerConfig(target="torch.optim.SGD", weight_decay=0.0, args={"momentum": 0.9})


@pytest.mark.parametrize(
    ("optimizer", "changes", "message"),
    [
        (
            ADAMW,
            {"frozen": "embed_tokens"},
            r"not in this run: optimizer\.model\.embed_tokens\.weight\.exp_avg, .*exp_avg_sq, .*step\. Resume",
        ),
        (
            ADAMW,
            {"num_hidden_layers": 3},
            r"missing in it: model\.model\.layers\.2\.self_attn\.q_proj\.weight, .*\.\.\. \(36 in all\)\. Resume",
        ),
        (
            ADAMW,
            {"num_hidden_layers": 1},
            r"not in this run: model\.model\.layers\.1\.self_attn\.q_proj\.weight, .*\.\.\. \(36 in all\)\. Resume",
        ),
        (
            ADAMW,
            {"vocab_size": 65},
            r"different: model\.model\.embed_tokens\.weight is \[64, 32\] torch\.float32, here \[65, 32\] torch",
        ),
        (SGD, {}, r"missing in it: optimizer\.model\.embed_tokens\.weight\.momentum_buffer, .*; not in this run: opt"),
    ],
    ids=["frozen-since", "layer-more", "layer-less", "other-shape", "other-optimizer"],
)
def test_rs01_what_does_not_fit_is_named(
    pool: RankPools, tmp_path: Path, optimizer: OptimizerConfig, changes: dict[str, Any], message: str
) -> None:
    pool(2).run(save_one, tmp_path)
    with pytest.raises(CheckpointError, match=message) as caught:
        pool(2).run(load_one, tmp_path, optimizer, **changes)
    assert "\n" not in str(caught.value)


def load_other_dtype(folder: Path) -> None:
    run = make_run()
    run.model.register_buffer("extra", torch.ones(3, dtype=torch.float64))
    run.step()
    run.save(folder, 1)
    run.model.extra = torch.ones(3)
    run.load(folder / "step-00000001")


def test_rs01_other_dtype_is_not_converted(pool: RankPools, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"different: model\.extra is \[3\] torch\.float64, here \[3\] torch\.fl"):
        pool(1).run(load_other_dtype, tmp_path)


def resume_without_states(folder: Path, optimizer: OptimizerConfig, unused: str) -> bool:
    """Whether a run in which some parameters have no optimizer state resumes as it was."""
    run = make_run(optimizer)
    for _ in range(2):
        batch_loss = loss_of(run.model, tiny_batch())
        batch_loss.backward()
        for fqn, param in run.model.named_parameters():
            if unused in fqn:
                param.grad = None
        run.optimizer.step()
        run.schedule.step()
    path = run.save(folder, 2)
    resumed = make_run(optimizer)
    resumed.load(path)
    return moments(resumed).keys() == moments(run).keys() and all(
        torch.equal(value, moments(run)[key]) for key, value in moments(resumed).items()
    )


@pytest.mark.parametrize(
    ("optimizer", "unused"),
    [(ADAMW, "layers.1.mlp"), (OptimizerConfig(target="torch.optim.SGD", weight_decay=0.0), "layers.1.mlp")],
    ids=["parameters-without-gradient", "optimizer-without-state"],
)
def test_rs01_state_that_was_never_created(
    pool: RankPools, tmp_path: Path, optimizer: OptimizerConfig, unused: str
) -> None:
    assert pool(1).run(resume_without_states, tmp_path, optimizer, unused) == [True]


def test_rs07_another_number_of_ranks_is_refused(pool: RankPools, tmp_path: Path) -> None:
    pool(2).run(save_one, tmp_path)
    with pytest.raises(CheckpointError, match=r"was saved by 2 ranks, this run has 1\. Resume on 2 ranks"):
        pool(1).run(load_one, tmp_path)


def changed_rate(folder: Path) -> float:
    make_one = make_run()
    make_one.step()
    path = make_one.save(folder, 1)
    resumed = make_run(lr=2e-2)
    resumed.load(path)
    return resumed.optimizer.param_groups[0]["lr"]


def test_changed_learning_rate_is_honoured(pool: RankPools, tmp_path: Path) -> None:
    assert pool(1).run(changed_rate, tmp_path) == [pytest.approx(1e-2)]  # the first of two warm-up steps


def rates_of_the_users_own_schedule(folder: Path) -> tuple[list[float], list[float]]:
    target = LrSchedulerConfig(target="torch.optim.lr_scheduler.ExponentialLR", args={"gamma": 0.5})
    first, second = make_run(schedule=target), make_run(schedule=target)
    straight = [first.step()[1] for _ in range(2)]
    path = first.save(folder, 2)
    straight += [first.step()[1] for _ in range(2)]
    second.load(path)
    return straight, straight[:2] + [second.step()[1] for _ in range(2)]


def test_rs02_schedule_of_the_users_own_continues(pool: RankPools, tmp_path: Path) -> None:
    [(straight, resumed)] = pool(1).run(rates_of_the_users_own_schedule, tmp_path)
    assert resumed == straight
    assert straight == [1e-2, 5e-3, 2.5e-3, 1.25e-3]


def test_rs09_left_overs_are_ignored_and_overwritten(pool: RankPools, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="LATEST finds no complete checkpoint"):
        find_checkpoint(tmp_path, "LATEST")
    pool(2).run(save_one, tmp_path)
    complete = tmp_path / "step-00000001"
    for left_over in (".step-00000001.tmp", ".step-00000009.tmp", "step-00000009"):
        (tmp_path / left_over).mkdir()
        (tmp_path / left_over / "__0_0.distcp").write_text("half")
    assert find_checkpoint(tmp_path, "LATEST") == complete
    with pytest.raises(CheckpointError, match="step-00000009 is not a complete training checkpoint"):
        find_checkpoint(tmp_path, str(tmp_path / "step-00000009"))
    with pytest.raises(CheckpointError, match="step-00000007 does not exist"):
        find_checkpoint(tmp_path, str(tmp_path / "step-00000007"))
    (complete / "hf" / "stale").touch()
    pool(2).run(save_one, tmp_path)
    assert not (tmp_path / ".step-00000001.tmp").exists()
    assert not (complete / "hf" / "stale").exists()
    pool(2).run(load_one, tmp_path)
    shutil.copytree(complete, tmp_path / "step-00000010")
    assert find_checkpoint(tmp_path, "LATEST").name == "step-00000010"
    assert find_checkpoint(tmp_path, str(complete)) == complete


def fail_on_purpose(folder: Path) -> None:
    raise OSError(28, "No space left on device")


def save_badly(folder: Path, kind: str) -> str:
    run = make_run()
    try:
        if kind == "assets":
            run.save(folder, 3, save_assets=fail_on_purpose)
        elif kind == "folder":
            (folder / "file").touch()
            run.save(folder / "file", 3)
        else:
            run.save(folder, 3, loader_state={"position": dist.get_rank()})
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("assets", "rank 0: OSError: [Errno 28] No space left on device"),
        ("folder", "rank 0: NotADirectoryError"),
        ("loader", "the state of the data loader differs between ranks"),
    ],
)
def test_failed_save_is_an_error_on_every_rank_and_stays_invisible(
    pool: RankPools, tmp_path: Path, kind: str, message: str
) -> None:
    for found in pool(2).run(save_badly, tmp_path, kind):
        assert "cannot save checkpoint" in found
        assert message in found
    assert not list(tmp_path.glob("step-*"))


def test_damaged_files_are_one_line(pool: RankPools, tmp_path: Path) -> None:
    pool(2).run(save_one, tmp_path)
    folder = tmp_path / "step-00000001"
    for name in ("__1_0.distcp", ".metadata", "rng-00001.json", "trainer.json"):
        text = (folder / name).read_bytes()
        (folder / name).write_bytes(text[: len(text) // 2])
        with pytest.raises(CheckpointError, match="cannot") as caught:
            pool(2).run(load_one, tmp_path)
        assert "\n" not in str(caught.value)
        (folder / name).write_bytes(text)
    pool(2).run(load_one, tmp_path)

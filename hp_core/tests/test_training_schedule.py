"""Learning rates: transformers' schedules, their ends, and what cannot be."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import optimization

from hp_core.config.schema import LrSchedulerConfig
from hp_core.errors import ConfigError
from hp_core.training.schedule import build_schedule


def optimizer_at(lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=lr)


def rates(schedule: torch.optim.lr_scheduler.LRScheduler, num_steps: int) -> list[float]:
    found = []
    for _ in range(num_steps):
        found.append(schedule.optimizer.param_groups[0]["lr"])
        schedule.optimizer.step()
        schedule.step()
    return found


def configured(num_steps: int | None, count: int, lr: float = 1e-2, **keys: object) -> list[float]:
    config = LrSchedulerConfig(lr=lr, **keys)
    return rates(build_schedule(optimizer_at(config.lr), config, num_steps), count)


def test_ac03_one_schedule_step_per_optimizer_step_warms_up_and_decays() -> None:
    found = configured(8, 9, lr_decay_style="linear", lr_warmup_steps=2)
    assert found == pytest.approx([1e-2 * f for f in (0, 1 / 2, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0)])


def test_styles_are_those_of_transformers() -> None:
    def of(make: str, **arguments: object) -> list[float]:
        return rates(getattr(optimization, make)(optimizer_at(1e-2), **arguments), 20)

    assert configured(20, 20, lr_decay_style="constant", lr_warmup_steps=4) == of(
        "get_constant_schedule_with_warmup", num_warmup_steps=4
    )
    assert configured(20, 20, lr_decay_style="linear", lr_warmup_steps=4) == pytest.approx(
        of("get_linear_schedule_with_warmup", num_warmup_steps=4, num_training_steps=20)
    )
    assert configured(20, 20, lr_decay_style="cosine", lr_warmup_steps=4, min_lr=1e-3) == pytest.approx(
        of("get_cosine_with_min_lr_schedule_with_warmup", num_warmup_steps=4, num_training_steps=20, min_lr=1e-3)
    )
    assert configured(20, 20, lr_decay_style="wsd", lr_warmup_steps=4, lr_decay_steps=6) == pytest.approx(
        of("get_wsd_schedule", num_warmup_steps=4, num_decay_steps=6, num_training_steps=20)
    )


@pytest.mark.parametrize("style", ["linear", "cosine"])
def test_rate_stays_at_min_lr_after_the_decay(style: str) -> None:
    found = configured(20, 20, lr_decay_style=style, min_lr=1e-3, lr_decay_steps=5)
    assert found[:5] == sorted(found[:5], reverse=True)
    assert min(found[:5]) > 1e-3
    assert found[5:] == pytest.approx([1e-3] * 15)


def test_wsd_decays_over_the_last_tenth_by_default() -> None:
    found = configured(20, 21, lr_decay_style="wsd", lr_warmup_steps=2, min_lr=1e-3)
    assert found[2:19] == [1e-2] * 17
    assert 1e-3 < found[19] < 1e-2
    assert found[20] == pytest.approx(1e-3)


@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "wsd"])
def test_zero_rate_is_possible(style: str) -> None:
    assert configured(10, 10, lr=0.0, lr_decay_style=style) == [0.0] * 10


def test_min_lr_equal_to_lr_is_constant() -> None:
    assert configured(10, 10, lr_decay_style="linear", min_lr=1e-2) == [1e-2] * 10


def test_open_end_needs_a_style_that_does_not_depend_on_it() -> None:
    assert configured(None, 3, lr_decay_style="constant", lr_warmup_steps=1) == [0, 1e-2, 1e-2]
    assert configured(None, 8, lr_decay_style="linear", lr_decay_steps=4)[4:] == pytest.approx([0] * 4)


@pytest.mark.parametrize(
    ("num_steps", "keys", "message"),
    [
        (10, {"min_lr": 1.0}, r"min_lr: 1 is above lr = 0\.01"),
        (10, {"lr_warmup_steps": 10}, "lr_warmup_steps: 10 steps leave nothing of a run of 10"),
        (10, {"lr_warmup_steps": 5, "lr_decay_steps": 5}, "cannot end at step 5, before the 5 warm-up steps do"),
        (10, {"lr_decay_style": "wsd", "lr_warmup_steps": 5, "lr_decay_steps": 6}, "6 steps after 5 of warm-up"),
        (None, {"lr_decay_style": "cosine"}, "cosine needs the length of the run"),
        (None, {"lr_decay_style": "wsd", "lr_decay_steps": 2}, "wsd needs the length of the run"),
        (10, {"lr_decay_style": "constant", "min_lr": 1e-4}, "min_lr: 0.0001 has no effect"),
        (10, {"lr_decay_style": "constant", "lr_decay_steps": 3}, "lr_decay_steps: 3 has no effect"),
    ],
)
def test_impossible_combinations(num_steps: int | None, keys: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configured(num_steps, 1, **keys)


def test_factory_of_the_users_own() -> None:
    config = LrSchedulerConfig(lr=1.0, target="torch.optim.lr_scheduler.StepLR", args={"step_size": 1, "gamma": 0.5})
    assert rates(build_schedule(optimizer_at(1.0), config, None), 3) == [1.0, 0.5, 0.25]
    with pytest.raises(ConfigError, match="gives a SimpleNamespace, not an LRScheduler"):
        build_schedule(optimizer_at(1.0), LrSchedulerConfig(target="test_training_schedule.no_schedule"), None)


def no_schedule(optimizer: torch.optim.Optimizer) -> SimpleNamespace:
    return SimpleNamespace(optimizer=optimizer)

"""Learning-rate schedules."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from transformers.optimization import (
    get_constant_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
    get_polynomial_decay_schedule_with_warmup,
    get_wsd_schedule,
)

from hp_core.config.schema import LrSchedulerConfig
from hp_core.config.targets import instantiate
from hp_core.errors import ConfigError

WSD_DECAY_SHARE = 0.1


def build_schedule(optimizer: torch.optim.Optimizer, config: LrSchedulerConfig, num_steps: int | None) -> LRScheduler:
    """The learning rate of `optimizer`, to be stepped once per optimizer step.

    The styles are transformers' schedules. The rate rises from 0 (wsd: from `min_lr`) over `lr_warmup_steps`; then it
    stays (constant), or falls to `min_lr` at step `lr_decay_steps` (linear, cosine; by default the last step) and
    stays there, or stays until it falls over the last `lr_decay_steps` of the run (wsd; by default a tenth of it).
    `num_steps` is the length of the run, None when the end of the data decides. Raises ConfigError for values that
    contradict each other.
    """
    schedule: Any
    if config.target is not None:
        schedule = instantiate(config.target, config.args, optimizer)
        if not isinstance(schedule, LRScheduler):
            kind = type(schedule).__name__
            raise ConfigError(f"lr_scheduler._target_: {config.target} gives a {kind}, not an LRScheduler")
        return schedule
    warmup, decay = config.lr_warmup_steps, _decay_steps(config, num_steps)
    if decay is None or config.min_lr == config.lr:
        schedule = get_constant_schedule_with_warmup(optimizer, warmup)
    elif config.lr_decay_style == "linear":
        schedule = get_polynomial_decay_schedule_with_warmup(optimizer, warmup, decay, lr_end=config.min_lr)
    elif config.lr_decay_style == "cosine":
        schedule = get_cosine_with_min_lr_schedule_with_warmup(optimizer, warmup, decay, min_lr=config.min_lr)
        # transformers' cosine would rise again after its end.
        schedule.lr_lambdas = [partial(_hold_after, decay, factor) for factor in schedule.lr_lambdas]
    else:
        schedule = get_wsd_schedule(optimizer, warmup, decay, num_steps, min_lr_ratio=config.min_lr / config.lr)
    assert isinstance(schedule, LRScheduler)
    return schedule


def _hold_after(end: int, factor: Callable[[int], float], step: int) -> float:
    return factor(min(step, end))


def _decay_steps(config: LrSchedulerConfig, num_steps: int | None) -> int | None:
    """The step at which the decay ends, for wsd its length, None for constant. Checks what belongs together."""
    style, warmup, decay = config.lr_decay_style, config.lr_warmup_steps, config.lr_decay_steps
    if config.min_lr > config.lr:
        raise ConfigError(f"lr_scheduler.min_lr: {config.min_lr:g} is above lr = {config.lr:g}")
    if num_steps is not None and warmup >= num_steps:
        raise ConfigError(
            f"lr_scheduler.lr_warmup_steps: {warmup} steps leave nothing of a run of {num_steps}. Use fewer."
        )
    if style == "constant":
        for key, value in (("min_lr", config.min_lr), ("lr_decay_steps", decay)):
            if value:
                raise ConfigError(
                    f"lr_scheduler.{key}: {value} has no effect when lr_decay_style is constant. Remove it."
                )
        return None
    if num_steps is None and (decay is None or style == "wsd"):
        raise ConfigError(
            f"lr_scheduler.lr_decay_style: {style} needs the length of the run. Set training.train_iters or "
            "training.train_samples, or use constant."
        )
    if style != "wsd":
        end = num_steps if decay is None else decay
        assert end is not None
        if end <= warmup:
            raise ConfigError(
                f"lr_scheduler.lr_decay_steps: the decay cannot end at step {end}, before the {warmup} warm-up steps do"
            )
        return end
    assert num_steps is not None
    length = max(1, round(num_steps * WSD_DECAY_SHARE)) if decay is None else decay
    if warmup + length > num_steps:
        raise ConfigError(
            f"lr_scheduler.lr_decay_steps: {length} steps after {warmup} of warm-up do not fit into {num_steps}"
        )
    return length

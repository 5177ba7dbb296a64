"""Rules between keys. Rules of one key are in the schema."""

from __future__ import annotations

from collections.abc import Collection

from hp_core.config.schema import FROM_CONFIG, FROM_PRETRAINED, RunConfig
from hp_core.config.targeted import located
from hp_core.config.targets import resolve_target
from hp_core.config.unknown_keys import KeyChecker
from hp_core.errors import ConfigError

LENGTHS = ("train_iters", "train_samples", "num_epochs")
SOURCES = {FROM_PRETRAINED: "pretrained_model_name_or_path", FROM_CONFIG: "config_path"}


def check_run(config: RunConfig, keys: KeyChecker, trusted: Collection[str]) -> None:
    """Raise ConfigError for values that contradict each other."""
    training = config.training
    lengths = [name for name in LENGTHS if getattr(training, name) is not None]
    if len(lengths) > 1:
        raise keys.fail(f"training.{lengths[1]}", f"training.{lengths[0]} already says when to stop. Keep one of them.")
    if training.global_batch_size % training.micro_batch_size:
        raise keys.fail(
            "training.global_batch_size",
            f"{training.global_batch_size} is no multiple of micro_batch_size = {training.micro_batch_size}.",
        )
    profiling = config.profiling
    if profiling.end_step < profiling.start_step:
        raise keys.fail(
            "profiling.end_step", f"{profiling.end_step} is before profiling.start_step = {profiling.start_step}."
        )
    _check_model(config, keys, trusted)


def _check_model(config: RunConfig, keys: KeyChecker, trusted: Collection[str]) -> None:
    """hp's factories need their source, and only theirs."""
    model = config.model
    for factory, source in SOURCES.items():
        if model.target not in SOURCES:
            continue
        is_given = getattr(model, source) is not None
        if factory == model.target and not is_given:
            raise keys.fail(f"model.{source}", f"has to be set, because model._target_ is {model.target}")
        if factory != model.target and is_given:
            raise keys.fail(f"model.{source}", f"is not read, because model._target_ is {model.target}")
    if model.model_class is not None:
        with located("model.model_class", keys):
            found = resolve_target(model.model_class, trusted)
            if not isinstance(found, type):
                raise ConfigError(f"{model.model_class} is not a class")

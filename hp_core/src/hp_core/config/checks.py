"""Rules between keys. Rules of one key are in the schema."""

from __future__ import annotations

from collections.abc import Collection

from hp_core.config.schema import FROM_CONFIG, FROM_PRETRAINED, RunConfig
from hp_core.config.targeted import located
from hp_core.config.targets import resolve_target
from hp_core.config.unknown_keys import KeyChecker

LENGTHS = ("train_iters", "train_samples", "num_epochs")
SOURCES = {FROM_PRETRAINED: "pretrained_model_name_or_path", FROM_CONFIG: "config_path"}


def check_run(config: RunConfig, keys: KeyChecker, trusted: Collection[str]) -> None:
    """Raise ConfigError for values that contradict each other."""
    _check_model(config, keys, trusted)
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


def _check_model(config: RunConfig, keys: KeyChecker, trusted: Collection[str]) -> None:
    """hp's factories need their source, and only theirs."""
    model = config.model
    for factory, source in SOURCES.items():
        if model.target not in SOURCES:
            continue
        value = getattr(model, source)
        name = factory.rpartition(".")[2]
        if factory == model.target and value is None:
            raise keys.fail(f"model.{source}", f"has to be set for model._target_ ...{name}, which is in use")
        if factory != model.target and value is not None:
            raise keys.fail(f"model.{source}", f"goes with model._target_ ...{name}, which is not in use")
    if model.model_class is not None:
        with located("model.model_class", keys):
            resolve_target(model.model_class, trusted)

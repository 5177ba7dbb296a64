"""Giving the parameters of a sharded model their values, from where the model says that they are."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from hp_core.models.auto import weight_source
from hp_core.models.init import init_shards
from hp_core.models.source import CheckpointSource
from hp_core.models.weight_checks import LoadReport
from hp_core.models.weights import load_checkpoint
from hp_core.plan import ShardingPlan, local_part

log = logging.getLogger(__name__)


def load_weights(model: nn.Module, plan: ShardingPlan, template: PreTrainedModel, rank: int, *, seed: int) -> None:
    """Fill this rank's part of `model`, which is sharded and materialized, as `template.hp_weight_source` says.

    `template` is the model as it was built, on the meta device. `seed` is for random values. No collectives. Raises
    WeightsError for what is wrong with the checkpoint, ModelError for a parameter without random init.
    """
    source = weight_source(template)
    names: frozenset[str] | None = None
    if isinstance(source, CheckpointSource):
        report = load_checkpoint(model, plan, template, source.path, rank, init_missing=source.init_missing)
        names = frozenset(report.missing)
        if rank == 0:
            _log_left_out(source, report)
        if not names:
            return
    params = dict(model.named_parameters())

    def write(fqn: str, value: torch.Tensor) -> None:
        local_part(params[fqn].detach()).copy_(value)

    init_shards(template, plan, rank, seed, write, names)


def _log_left_out(source: CheckpointSource, report: LoadReport) -> None:
    if report.missing:
        log.warning("%s lacks %s: initialised at random", source.path, _count(report.missing))
    if report.ignored:
        log.warning(
            "%s has %s that the HuggingFace class does not use; an export will not have them",
            source.path,
            _count(report.ignored),
        )
    if report.cropped:
        log.info("%s: %s of the layers cut off are not loaded", source.path, _count(report.cropped))


def _count(names: Sequence[str]) -> str:
    return f"{len(names)} tensors ({', '.join(names[:3])}{' …' if len(names) > 3 else ''})"

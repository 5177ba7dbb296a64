"""A plugin that implements every hook of the contract, does something visible in each, and notes when it is called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hp_core import (
    IGNORE_INDEX,
    Batch,
    Mesh,
    MeshSpec,
    ParamFragment,
    Partial,
    PlanFragment,
    Replicate,
    ShardingPlan,
    Term,
    hookimpl,
)
from hp_core.models import build_from_config

WEIGHT = 0.5
NORM = "model.norm"


@dataclass(frozen=True)
class Options:
    extra_loss: float = 0.0


class OtherNorm(LlamaRMSNorm):
    """A replacement with the same parameters and call."""


class AllHooks:
    name = "all_hooks"
    Options = Options
    axes = ()
    must_follow = ()

    def __init__(self) -> None:
        self.fired: list[str] = []
        self.micro_batches: list[tuple[int, int]] = []

    @hookimpl
    def hp_load_model(self, config: Any) -> nn.Module:
        self.fired.append("hp_load_model")
        model = build_from_config(replace(config, num_hidden_layers=1))
        model.built_by = self.name
        return model

    @hookimpl
    def hp_replace_modules(self, model: nn.Module, mesh: MeshSpec, options: Options) -> Mapping[str, nn.Module]:
        self.fired.append("hp_replace_modules")
        with torch.device("meta"):
            return {NORM: OtherNorm(model.get_submodule(NORM).weight.shape[0])}

    @hookimpl
    def hp_plan_sharding(
        self, model: nn.Module, mesh: MeshSpec, plan_so_far: Mapping[str, PlanFragment]
    ) -> PlanFragment:
        self.fired.append("hp_plan_sharding")
        assert not plan_so_far
        axis = mesh.storage_batch_axes[0]
        return PlanFragment({f"{NORM}.weight": ParamFragment({axis: Replicate()}, grad={axis: Partial()})})

    @hookimpl
    def hp_apply_plan(self, model: nn.Module, mesh: Mesh, plan: ShardingPlan) -> None:
        self.fired.append("hp_apply_plan")
        assert set(plan.params[f"{NORM}.weight"].sources.values()) == {self.name}

    @hookimpl
    def hp_load_weights(self, model: nn.Module) -> bool:
        self.fired.append("hp_load_weights")
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(WEIGHT)
        return True

    @hookimpl
    def hp_shard_batch(self, batch: Batch) -> Batch:
        self.fired.append("hp_shard_batch")
        labels = batch.labels.clone()
        labels[:, 0] = IGNORE_INDEX
        return replace(batch, labels=labels)

    @hookimpl
    def hp_begin_micro_batch(self, index: int, count: int) -> None:
        self.fired.append("hp_begin_micro_batch")
        self.micro_batches.append((index, count))

    @hookimpl
    def hp_compute_loss(self, outputs: Any, batch: Batch, mesh: Mesh, options: Options) -> dict[str, Term]:
        self.fired.append("hp_compute_loss")
        share = options.extra_loss / mesh.data_size
        return {"extra": Term(outputs.logits.sum() * 0 + share, per="micro_batches")}


plugin = AllHooks()

"""Tiny models of many families, and small modules of a user's own, for the tests of building and initialising."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hp_core.mesh import MeshAxis, plan_mesh
from hp_core.models import init_shards
from hp_core.plan import ParamFragment, PlanFragment, Precision, Shard, ShardingPlan, merge_fragments

FAMILIES: Mapping[str, dict[str, Any]] = json.loads((Path(__file__).parent / "data/models_families.json").read_text())


def make_config(model_type: str, **changes: Any) -> Any:
    return AutoConfig.for_model(model_type, **{**FAMILIES[model_type], **changes})


def plain_model(model_type: str, **changes: Any) -> PreTrainedModel:
    """The model as plain transformers builds it, on the CPU."""
    return AutoModelForCausalLM.from_config(make_config(model_type, **changes), dtype=torch.float32)


def make_plan(model: nn.Module, world_size: int = 1) -> ShardingPlan:
    """Every parameter sharded on dim 0."""
    mesh = plan_mesh(world_size, [(MeshAxis("dp_shard", "data", "dp_shard_size"), world_size)])
    params = {fqn: ParamFragment({"dp_shard": Shard(0)}) for fqn, param in model.named_parameters() if param.ndim}
    precision = Precision(torch.float32, torch.float32, torch.float32)
    return merge_fragments(model, mesh, precision, [("test", PlanFragment(params))])


def draw(template: PreTrainedModel, world_size: int = 1, seed: int = 1, **kwargs: Any) -> dict[str, torch.Tensor]:
    """All parameters as random init draws them on `world_size` ranks, put together again."""
    plan = make_plan(template, world_size)
    parts: dict[str, list[torch.Tensor]] = {}
    for rank in range(world_size):
        init_shards(template, plan, rank, seed, lambda fqn, value: parts.setdefault(fqn, []).append(value), **kwargs)
    return {fqn: torch.cat(each) if each[0].ndim else each[0] for fqn, each in parts.items()}


class WithModule(LlamaForCausalLM):
    """A tiny Llama with one more module, made by `make`."""

    make: type[nn.Module]

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.extra = self.make()
        self.post_init()


def llama_with(module: type[nn.Module]) -> type[LlamaForCausalLM]:
    return type("WithModule", (WithModule,), {"make": module, "__module__": __name__})

"""Tiny checkpoints, and one rank's load of them, for the tests of streaming weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import swap_tensors
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hp_core.mesh import MeshAxis, plan_mesh
from hp_core.models.build import build_on_meta
from hp_core.models.materialize import materialize
from hp_core.models.weight_checks import LoadReport
from hp_core.models.weights import load_checkpoint
from hp_core.plan import ParamFragment, PlanFragment, Precision, Shard, ShardingPlan, merge_fragments

CONFIGS: Mapping[str, dict[str, Any]] = json.loads((Path(__file__).parent / "data/weights_models.json").read_text())
LLAMA: Mapping[str, Any] = {**CONFIGS["llama"], "num_hidden_layers": 2, "tie_word_embeddings": False}
QWEN3_MOE: Mapping[str, Any] = {**CONFIGS["qwen3_moe"], "num_hidden_layers": 2}


def save_checkpoint(folder: Path, model_type: str, config: Mapping[str, Any], shard_size: str = "1GB") -> None:
    """A checkpoint as it is published for `model_type`, every parameter and persistent buffer random."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **config))
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.normal_(std=0.1)
    model.save_pretrained(folder, max_shard_size=shard_size)


def build_template(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """The model of `folder` on the meta device, with `changes` to its config."""
    config = AutoConfig.from_pretrained(folder, **changes)
    return build_on_meta(lambda: AutoModelForCausalLM.from_config(config, dtype=dtype))


def make_plan(template: nn.Module, world_size: int = 1, dim: int = 0) -> ShardingPlan:
    """Every parameter sharded on `dim`, or on its last dim if it has fewer."""
    mesh = plan_mesh(world_size, [(MeshAxis("dp_shard", "data", "dp_shard_size"), world_size)])
    params = {
        fqn: ParamFragment({"dp_shard": Shard(min(dim, param.ndim - 1))})
        for fqn, param in template.named_parameters()
        if param.ndim
    }
    precision = Precision(torch.float32, torch.float32, torch.float32)
    return merge_fragments(template, mesh, precision, [("test", PlanFragment(params))])


def load_rank(
    template: PreTrainedModel, plan: ShardingPlan, folder: Path, rank: int = 0, *, init_missing: bool = False
) -> tuple[PreTrainedModel, LoadReport]:
    """What `rank` holds after loading: a model of plain tensors, each as large as its part. No process group."""
    model = make_local_model(template, plan, rank)
    return model, load_checkpoint(model, plan, template, folder, rank, init_missing=init_missing)


def make_local_model(template: PreTrainedModel, plan: ShardingPlan, rank: int) -> PreTrainedModel:
    """`template` with parameters of the size of this rank's parts, allocated and full of sevens."""
    model = deepcopy(template)
    for fqn, param in model.named_parameters():
        size = plan.local_shape(fqn, rank)
        swap_tensors(param, nn.Parameter(torch.empty(size, dtype=param.dtype, device="meta"), param.requires_grad))
    materialize(model, plan, "cpu")
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(7.0)
    return model


def assert_is_part(plan: ShardingPlan, rank: int, model: nn.Module, whole: nn.Module) -> None:
    """`model` has this rank's part of every tensor of `whole`, bit for bit, in the same dtype and in own memory."""
    canonical = {name: fqn for fqn, param in plan.params.items() for name in (fqn, *param.tied_names)}
    mine, reference = model.state_dict(), whole.state_dict()
    assert mine.keys() == reference.keys()
    for name, value in reference.items():
        expected = plan.part(canonical[name], rank, value) if name in canonical else value
        assert mine[name].dtype == expected.dtype, name
        assert torch.equal(mine[name], expected), name
        assert mine[name].untyped_storage().nbytes() == expected.numel() * expected.itemsize, name

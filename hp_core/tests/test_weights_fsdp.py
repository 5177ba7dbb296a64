"""Materializing and loading under FSDP2 on real ranks: ties, uneven and empty shards, replicas, a training step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from weights_cases import CONFIGS, LLAMA, QWEN3_MOE, build_template, save_checkpoint

from hp_core import Mesh, MeshAxis, ParamFragment, PlanFragment, Precision, Shard
from hp_core.errors import WeightsError
from hp_core.mesh import plan_mesh
from hp_core.models.blocks import decoder_blocks
from hp_core.models.materialize import materialize
from hp_core.models.weights import load_checkpoint
from hp_core.plan import merge_fragments
from hp_core.testing import RankPools

TIED_FIVE = {**LLAMA, "vocab_size": 5, "tie_word_embeddings": True, "pad_token_id": None}
TOKENS = torch.tensor([[0, 1, 2, 3, 4, 0]])


def load_sharded(folder: Path, shard_size: int, offload: bool = False) -> PreTrainedModel:
    template = build_template(folder)
    model = build_template(folder)
    spec = plan_mesh(dist.get_world_size(), [(MeshAxis("dp_shard", "data", "dp_shard_size"), shard_size)])
    params = {fqn: ParamFragment({"dp_shard": Shard(0)}, offload=offload) for fqn, _ in model.named_parameters()}
    precision = Precision(torch.float32, torch.float32, torch.float32)
    plan = merge_fragments(template, spec, precision, [("test", PlanFragment(params))])
    mesh = Mesh(spec, "cpu").storage
    data_mesh = mesh["dp_shard"] if shard_size == dist.get_world_size() else mesh
    for module in (*decoder_blocks(model).values(), model):
        policy = CPUOffloadPolicy(pin_memory=False) if offload else OffloadPolicy()
        fully_shard(module, mesh=data_mesh, offload_policy=policy)
    materialize(model, plan, "cpu")
    load_checkpoint(model, plan, template, folder, dist.get_rank())
    return model


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    full = {}
    for name, value in model.state_dict().items():
        full[name] = value.full_tensor() if isinstance(value, DTensor) else value
    return full


def train_step(model: nn.Module) -> None:
    """One step of plain SGD on the same tokens on every rank: FSDP's average is then the gradient of one rank."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss.backward()
    optimizer.step()


def load_and_step(folder: Path) -> dict[str, Any]:
    model = load_sharded(folder, dist.get_world_size())
    embedding = model.get_input_embeddings().weight
    assert isinstance(embedding, DTensor)
    tied = [embedding is model.get_output_embeddings().weight]
    before = whole(model)
    train_step(model)
    tied.append(model.get_input_embeddings().weight is model.get_output_embeddings().weight)
    return {"tied": tied, "before": before, "after": whole(model)}


@pytest.mark.parametrize("world_size", [2, 4])
def test_tw01_tied_vocabulary_that_the_ranks_do_not_divide(world_size: int, tmp_path: Path, pool: RankPools) -> None:
    """vocab 5: 3 and 2 rows on 2 ranks; 2, 2, 1 and none on 4."""
    save_checkpoint(tmp_path, "llama", TIED_FIVE)
    results = pool(world_size).run(load_and_step, tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path)
    before = {name: value.clone() for name, value in reference.state_dict().items()}
    train_step(reference)
    after = reference.state_dict()
    for result in results:
        assert result["tied"] == [True, True]
        for name in before:
            assert torch.equal(result["before"][name], before[name]), name
            torch.testing.assert_close(result["after"][name], after[name], rtol=1e-5, atol=1e-6)
        changed = (result["after"]["lm_head.weight"] != before["lm_head.weight"]).any(dim=1)
        assert changed.tolist() == [True] * 5


def load_and_gather(folder: Path, shard_size: int, offload: bool) -> dict[str, torch.Tensor]:
    model = load_sharded(folder, shard_size, offload)
    model(input_ids=TOKENS, use_cache=False)  # FSDP pads its shards on the first forward
    return whole(model)


@pytest.mark.parametrize(("world_size", "shard_size", "offload"), [(2, 2, False), (2, 2, True), (4, 2, False)])
def test_sharded_and_hybrid_hold_what_transformers_loads(
    world_size: int, shard_size: int, offload: bool, tmp_path: Path, pool: RankPools
) -> None:
    save_checkpoint(tmp_path, "qwen3_moe", {**QWEN3_MOE, "num_experts": 3, "num_experts_per_tok": 2})
    reference = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    for result in pool(world_size).run(load_and_gather, tmp_path, shard_size, offload):
        assert result.keys() == reference.keys()
        assert all(torch.equal(result[name], reference[name]) for name in reference)


@pytest.mark.parametrize("model_type", ["gemma3_text", "deepseek_v3", "kimi_linear"])
def test_other_families_sharded(model_type: str, tmp_path: Path, pool: RankPools) -> None:
    save_checkpoint(tmp_path, model_type, CONFIGS[model_type])
    reference = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    for result in pool(2).run(load_and_gather, tmp_path, 2, False):
        assert all(torch.equal(result[name], reference[name]) for name in reference)


def load_and_catch(folder: Path) -> str:
    try:
        load_sharded(folder, dist.get_world_size())
    except WeightsError as error:
        return str(error)
    return "loaded"


def test_ls02_absent_shard_stops_every_rank(tmp_path: Path, pool: RankPools) -> None:
    save_checkpoint(tmp_path, "llama", LLAMA, shard_size="160KB")
    absent = sorted(tmp_path.glob("*.safetensors"))[1]
    absent.unlink()
    messages = pool(2).run(load_and_catch, tmp_path, timeout=60)
    assert messages[0] == messages[1]
    assert absent.name in messages[0]

"""What `fully_shard` is told to do, and what its gradients and parameters then are."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from hp_core import Mesh, MeshAxis, Precision, ShardingPlan
from hp_core.mesh import plan_mesh
from hp_core.models.materialize import materialize
from hp_core.plan import merge_fragments
from hp_core.testing import RankPools
from hp_strategies_fsdp import plugin
from hp_strategies_fsdp.options import Options

FP32 = Precision(torch.float32, torch.float32, torch.float32)
BF16 = Precision(torch.float32, torch.bfloat16, torch.float32)
DEPTH = 4


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x))


class Model(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(DEPTH))
        self.head = nn.Linear(width, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def shard(model: nn.Module, precision: Precision = FP32, **options: Any) -> tuple[nn.Module, ShardingPlan]:
    """The model of every rank, sharded, with ones everywhere."""
    chosen = Options(**options)
    spec = plan_mesh(dist.get_world_size(), [(MeshAxis("dp_shard", "data", "dp_shard_size"), chosen.dp_shard_size)])
    model = model.to("meta")
    fragment = plugin.hp_plan_sharding(model, spec, chosen, precision)
    plan = merge_fragments(model, spec, precision, [("fsdp", fragment)])
    model = plugin.hp_apply_plan(model, Mesh(spec, "cpu"), plan, chosen)
    materialize(model, plan, "cpu")
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(1.0)
    return model, plan


def linear_gradient(world: int, options: dict[str, Any]) -> float:
    model, _ = shard(nn.Linear(1, 1, bias=False), **options)
    model(torch.full((1, 1), dist.get_rank() + 1.0)).sum().backward()
    (param,) = model.parameters()
    assert isinstance(param.grad, DTensor)
    return param.grad.full_tensor().item()


@pytest.mark.parametrize(
    ("world", "options"),
    [(1, {}), (2, {}), (3, {}), (4, {"dp_shard_size": 2}), (4, {"dp_shard_size": 1}), (2, {"replicate_params": ["*"]})],
)
def test_gr02_gr03_gradients_are_sums_over_ranks_never_averages(
    pool: RankPools, world: int, options: dict[str, Any]
) -> None:
    """Rank r feeds r + 1, so the gradient of a sum is world (world + 1) / 2."""
    assert pool(world).run(linear_gradient, world, options) == [world * (world + 1) / 2] * world


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_prefetch_depths_are_the_number_of_blocks_gathered_ahead(pool: RankPools, depth: int) -> None:
    forward, backward = pool(1).run(prefetched, depth)[0]
    blocks = [f"layers.{i}" for i in range(DEPTH)]
    assert forward["root"] == blocks[:depth]
    for i, block in enumerate(blocks):
        assert forward[block] == blocks[i + 1 : i + 1 + depth]
        # Asking for itself, which is gathered already, is how a block gathers nothing ahead.
        assert backward[block] == (blocks[max(0, i - depth) : i][::-1] or [block])


def prefetched(depth: int) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    calls: dict[str, dict[FSDPModule, list[FSDPModule]]] = {"forward": {}, "backward": {}}
    with (
        mock.patch.object(
            FSDPModule, "set_modules_to_forward_prefetch", lambda m, to: calls["forward"].update({m: to})
        ),
        mock.patch.object(
            FSDPModule, "set_modules_to_backward_prefetch", lambda m, to: calls["backward"].update({m: to})
        ),
    ):
        model, _ = shard(Model(), forward_prefetch_depth=depth, backward_prefetch_depth=depth)
    names: dict[Any, str] = {module: fqn or "root" for fqn, module in model.named_modules()}
    forward, backward = (
        {names[module]: [names[to] for to in targets] for module, targets in calls[kind].items()}
        for kind in ("forward", "backward")
    )
    return forward, backward


def test_prefetch_and_offload_change_no_value(pool: RankPools) -> None:
    expected = pool(2).run(gradients, {})
    for options in (
        {"forward_prefetch_depth": 0, "backward_prefetch_depth": 0},
        {"forward_prefetch_depth": 3, "backward_prefetch_depth": 3},
        {"enable_offload": True},
        {"reshard_after_forward": False},
        {"reshard_after_backward": False},
    ):
        assert pool(2).run(gradients, options) == expected, options


def gradients(options: dict[str, Any]) -> list[list[float]]:
    """Of the second of two optimizer steps, each of two micro-batches."""
    model, _ = shard(Model(), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    torch.manual_seed(dist.get_rank())
    for _ in range(2):
        optimizer.step()
        optimizer.zero_grad()
        for index in range(2):
            plugin.hp_begin_micro_batch(model, index, 2, Options(**options))
            model(torch.randn(5, 6)).square().sum().backward()
    return [param.grad.full_tensor().flatten().tolist() for param in model.parameters()]


def test_after_a_forward_without_gradients_nothing_stays_gathered(pool: RankPools) -> None:
    assert pool(2).run(gathered_parameters, True) == [["head.weight"]] * 2  # kept for backward
    assert pool(2).run(gathered_parameters, False) == [[]] * 2


def gathered_parameters(grad: bool) -> list[str]:
    model, _ = shard(Model())
    with torch.set_grad_enabled(grad):
        model(torch.ones(2, 6))
    return [fqn for fqn, param in model.named_parameters() if not isinstance(param, DTensor)]


def test_requires_grad_sync_false_reduces_only_at_the_last_micro_batch(pool: RankPools) -> None:
    assert pool(2).run(reductions, False) == [[0, 0, DEPTH + 1]] * 2
    assert pool(2).run(reductions, True) == [[DEPTH + 1] * 3] * 2


def reductions(sync: bool) -> list[int]:
    """Reduce-scatters per micro-batch: one per group."""
    options = Options(requires_grad_sync=sync)
    model, _ = shard(Model(), requires_grad_sync=sync)
    counts = []
    for index in range(3):
        with CommDebugMode() as communication:
            plugin.hp_begin_micro_batch(model, index, 3, options)
            model(torch.ones(2, 6)).sum().backward()
        counts.append(communication.comm_counts[torch.ops.c10d._reduce_scatter_base_])
    return counts


def test_pr01_mixed_precision_keeps_fp32_masters(pool: RankPools) -> None:
    """Ten SGD steps of 1e-4 from 1.0 with gradient 1: bf16 parameters would still be 1.0."""
    for value, dtype, moment, compute in pool(2).run(ten_steps):
        assert value == pytest.approx(0.999, abs=1e-6)
        assert (dtype, moment, compute) == (torch.float32, torch.float32, torch.bfloat16)


def ten_steps() -> tuple[float, torch.dtype, torch.dtype, torch.dtype]:
    model, _ = shard(nn.Linear(1, 2, bias=False), precision=BF16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=1e-9)
    for _ in range(10):
        output = model(torch.full((1, 1), 0.5))
        output.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    (param,) = model.parameters()
    moment = optimizer.state[param]["momentum_buffer"].dtype
    assert isinstance(param, DTensor)
    return param.full_tensor()[0].item(), param.dtype, moment, output.dtype


def test_tw01_every_row_of_an_uneven_tied_embedding_is_updated(pool: RankPools) -> None:
    for changed, is_tied in pool(2).run(tied_step):
        assert changed == [True] * 5
        assert is_tied


class TiedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.layers = nn.ModuleList([Block(4)])
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers[0](self.embed(ids)))


def tied_step() -> tuple[list[bool], bool]:
    meta = TiedModel().to("meta")
    meta.head.weight = meta.embed.weight
    model, _ = shard(meta)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.arange(5)).logsumexp(-1).sum().backward()
    optimizer.step()
    assert isinstance(model, TiedModel)
    weight = model.embed.weight
    assert isinstance(weight, DTensor)
    return (weight.full_tensor() != 1.0).any(dim=1).tolist(), model.head.weight is weight

"""What FSDP contributes to the plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hp_core import ConfigError, MeshAxis, ParamPlan, PlanError, Precision, Replicate, Shard
from hp_core.mesh import plan_mesh
from hp_core.plan import merge_fragments
from hp_strategies_fsdp import plugin
from hp_strategies_fsdp.options import MixPrecision, Options

FP32 = Precision(torch.float32, torch.float32, torch.float32)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.scale = nn.Parameter(torch.ones(()))
        self.gate = nn.Parameter(torch.ones(4, dtype=torch.float64))


def plan(world: int = 4, precision: Precision = FP32, **options: Any) -> dict[str, ParamPlan]:
    chosen = Options(**options)
    mesh = plan_mesh(world, [(MeshAxis("dp_shard", "data", "dp_shard_size"), chosen.dp_shard_size)])
    model = Model()
    fragment = plugin.hp_plan_sharding(model, mesh, chosen, precision)
    return dict(merge_fragments(model, mesh, precision, [("fsdp", fragment)]).params)


def test_dim_0_is_sharded_and_fsdp_reduces_over_all_data_axes() -> None:
    param = plan(dp_shard_size=2)["linear.weight"]
    assert param.layout == {"dp_replicate": Replicate(), "dp_shard": Shard(0)}
    assert param.grad == {"dp_replicate": Replicate(), "dp_shard": Shard(0)}
    assert param.partial_axes == ()


def test_replicate_params_stay_whole_and_are_still_reduced_by_fsdp() -> None:
    params = plan(dp_shard_size=2, replicate_params=["norm.*"])
    assert params["norm.weight"].layout["dp_shard"] == Replicate()
    assert params["norm.weight"].partial_axes == ()
    assert params["linear.weight"].layout["dp_shard"] == Shard(0)


@pytest.mark.parametrize("name", ["scale", "gate"])
def test_scalars_and_odd_dtypes_are_left_to_core(name: str) -> None:
    param = plan(dp_shard_size=2)[name]
    assert param.layout["dp_shard"] == Replicate()
    assert param.partial_axes == ("dp_replicate", "dp_shard")


def test_offload_is_in_the_plan() -> None:
    assert plan(enable_offload=True)["linear.weight"].offload
    assert not plan()["linear.weight"].offload


def test_pl02_a_glob_that_matches_nothing_is_an_error_with_the_closest_name() -> None:
    with pytest.raises(PlanError) as error:
        plan(replicate_params=["nrm.weight"])
    assert str(error.value) == (
        'fsdp_config.replicate_params "nrm.weight": matches no parameter. Closest: "norm.weight".'
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"edp_shard_size": 2}, "fsdp_config.edp_shard_size: 2, but no strategy asks for an expert axis"),
        ({"forward_prefetch_depth": -1}, "fsdp_config.forward_prefetch_depth: expected 0 or more, found -1"),
        ({"mix_precision": MixPrecision(param_dtype="int8")}, 'fsdp_config.mix_precision.param_dtype: "int8" is no'),
        ({"mix_precision": MixPrecision(reduce_dtype="half8")}, 'fsdp_config.mix_precision.reduce_dtype: "half8" is'),
    ],
)
def test_wrong_options_are_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, PlanError), match=message.replace(".", r"\.")):
        plan(**options)


def test_own_dtypes_override_those_of_the_run() -> None:
    mesh = plan_mesh(1, [])
    bf16 = Precision(torch.float32, torch.bfloat16, torch.float32)
    options = Options(mix_precision=MixPrecision(param_dtype="float16", reduce_dtype="bfloat16"))
    assert plugin.hp_plan_sharding(Model(), mesh, Options(), bf16).precision == bf16
    assert plugin.hp_plan_sharding(Model(), mesh, options, bf16).precision == Precision(
        torch.float32, torch.float16, torch.bfloat16
    )

"""The optimizer: groups, arguments, exactly the model's parameters, several meshes."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from training_helpers import loss_of, tiny_batch, tiny_model

from hp_core.config.schema import OptimizerConfig
from hp_core.errors import ConfigError, TrainingError
from hp_core.testing import RankPools
from hp_core.training.optimizer import build_optimizer, check_optimizer


def names_of(optimizer: torch.optim.Optimizer, model: nn.Module, decay: float) -> set[str]:
    ids = {id(p) for group in optimizer.param_groups if group["weight_decay"] == decay for p in group["params"]}
    return {fqn for fqn, param in model.named_parameters() if id(param) in ids}


def test_default_is_adamw_with_decay_on_matrices_only() -> None:
    model = tiny_model("llama", attention_bias=True)
    optimizer = build_optimizer(model, OptimizerConfig(weight_decay=0.1, betas=(0.8, 0.9)), lr=1e-3)
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.defaults["lr"] == 1e-3
    assert optimizer.defaults["betas"] == (0.8, 0.9)
    assert len(optimizer.param_groups) == 2
    exempt = names_of(optimizer, model, 0.0)
    assert exempt == {name for name, _ in model.named_parameters() if "norm" in name or name.endswith("bias")}
    assert names_of(optimizer, model, 0.1) == {name for name, _ in model.named_parameters()} - exempt
    check_optimizer(optimizer, model)


def test_globs_choose_what_is_not_decayed_by_any_name_of_a_shared_weight() -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    config = OptimizerConfig(weight_decay=0.1, no_decay_params=["lm_head.weight", "*.q_proj.*"])
    optimizer = build_optimizer(model, config, lr=1.0)
    exempt = {"model.embed_tokens.weight", *(f"model.layers.{i}.self_attn.q_proj.weight" for i in range(2))}
    assert names_of(optimizer, model, 0.0) == exempt
    check_optimizer(optimizer, model)


def test_pl02_glob_that_matches_nothing_is_an_error_with_close_names() -> None:
    with pytest.raises(ConfigError, match=r'no_decay_params "model\.nrom\.weight": matches no .*model\.norm\.weight'):
        build_optimizer(tiny_model("llama"), OptimizerConfig(no_decay_params=["model.nrom.weight"]), lr=1.0)


def test_frozen_parameters_are_left_out() -> None:
    model = tiny_model("llama")
    model.model.embed_tokens.requires_grad_(False)
    optimizer = build_optimizer(model, OptimizerConfig(), lr=1.0)
    check_optimizer(optimizer, model)
    assert all(param.requires_grad for group in optimizer.param_groups for param in group["params"])
    model.requires_grad_(False)
    with pytest.raises(TrainingError, match="no trainable parameter"):
        build_optimizer(model, OptimizerConfig(), lr=1.0)


def test_plain_sgd_with_further_arguments() -> None:
    config = OptimizerConfig(target="torch.optim.SGD", weight_decay=0.0, args={"momentum": 0.5})
    optimizer = build_optimizer(tiny_model("llama"), config, lr=0.1)
    assert type(optimizer) is torch.optim.SGD
    assert optimizer.defaults["momentum"] == 0.5


def no_optimizer(params: list[object], **arguments: object) -> list[object]:
    return params


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (OptimizerConfig(target="torch.optim.SGD", betas=(0.5, 0.5)), "optimizer.betas: torch.optim.SGD takes no such"),
        (OptimizerConfig(args={"momentun": 1}), "optimizer.momentun: torch.optim.AdamW takes no such"),
        (OptimizerConfig(target="torch.optim.NoSuch"), "NoSuch"),
        (OptimizerConfig(target="test_training_optimizer.no_optimizer"), "no_optimizer gives a list, not an Optimizer"),
    ],
)
def test_wrong_optimizers_are_one_line(config: OptimizerConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        build_optimizer(tiny_model("llama"), config, lr=0.1)
    assert "\n" not in str(caught.value)


def optimizers_before_and_after_sharding() -> tuple[str, bool]:
    model = tiny_model("llama")
    early = build_optimizer(model, OptimizerConfig(), lr=1.0)
    fully_shard(model)
    try:
        check_optimizer(early, model)
        message = ""
    except TrainingError as error:
        message = str(error)
    optimizer = build_optimizer(model, OptimizerConfig(target="torch.optim.SGD", weight_decay=0.0), lr=1.0)
    check_optimizer(optimizer, model)
    before = [param.full_tensor().clone() for param in model.parameters()]
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    changed = [torch.allclose(now.full_tensor(), was - 1) for now, was in zip(model.parameters(), before, strict=True)]
    return message, all(changed)


def test_ob01_optimizer_built_before_sharding_is_refused_and_after_it_changes_every_parameter(pool: RankPools) -> None:
    for message, every_parameter_changed in pool(2).run(optimizers_before_and_after_sharding):
        assert "21 missing" in message
        assert "21 not the model's" in message
        assert every_parameter_changed


def test_check_finds_extra_and_repeated_parameters() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(TrainingError, match="0 missing, 1 not the model's, 0 twice"):
        check_optimizer(torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(1))], lr=1.0), model)
    with pytest.raises(TrainingError, match=r"1 missing \(bias\), 0 not"):
        check_optimizer(torch.optim.SGD([model.weight], lr=1.0), model)


def step_on_two_meshes() -> list[float]:
    rows, grid = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2))
    model, plain = tiny_model("llama"), tiny_model("llama")
    for index, module in enumerate(model.modules()):
        for name, param in list(module.named_parameters(recurse=False)):
            if index % 3 == 0:
                continue  # a third stays on no mesh at all
            mesh, layout = (rows, [Shard(0)]) if index % 3 == 1 else (grid, [Replicate(), Shard(0)])
            setattr(module, name, nn.Parameter(distribute_tensor(param.detach(), mesh, layout)))
    # foreach is what torch chooses by itself on accelerators.
    optimizer = build_optimizer(model, OptimizerConfig(weight_decay=0.1, args={"foreach": True}), lr=0.1)
    check_optimizer(optimizer, model)
    single = build_optimizer(plain, OptimizerConfig(weight_decay=0.1, args={"foreach": False}), lr=0.1)
    loss_of(plain, tiny_batch()).backward()
    for param, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        grad = wanted.grad
        param.grad = (
            distribute_tensor(grad, param.device_mesh, param.placements) if isinstance(param, DTensor) else grad
        )
    optimizer.step()
    single.step()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return [((p.full_tensor() if isinstance(p, DTensor) else p) - q).abs().max().item() for p, q in pairs]


def test_one_optimizer_over_parameters_of_several_meshes(pool: RankPools) -> None:
    for errors in pool(2).run(step_on_two_meshes):
        assert max(errors) < 1e-6

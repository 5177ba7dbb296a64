"""Activation checkpointing: bit-equal gradients, fewer saved bytes, inside of FSDP's hooks."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from training_helpers import loss_of, tiny_batch, tiny_model

from hp_core.errors import ConfigError
from hp_core.testing import RankPools
from hp_core.training.activation_checkpoint import apply_activation_checkpoint

MODES = ["full", "selective"]


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    return {f"model.layers.{index}": layer for index, layer in enumerate(model.model.layers)}


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    loss_of(model, tiny_batch()).backward()
    return {fqn: param.grad for fqn, param in model.named_parameters()}


def saved_bytes(model: nn.Module) -> int:
    """Bytes of distinct storages that autograd keeps between forward and backward, parameters left out."""
    kept: dict[int, int] = {}
    parameters = {param.untyped_storage().data_ptr() for param in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_of(model, tiny_batch())
    loss.backward()
    return sum(kept.values())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe", "gemma3_text"])
def test_gradients_are_bit_equal(model_type: str, mode: str) -> None:
    # Dropout: the recomputation has to draw the same numbers.
    expected = gradients(tiny_model(model_type, attention_dropout=0.2))
    model = tiny_model(model_type, attention_dropout=0.2)
    model.train()
    apply_activation_checkpoint(blocks_of(model), mode)
    found = gradients(model)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[fqn], grad) for fqn, grad in expected.items())


def test_full_keeps_less() -> None:
    model = tiny_model("llama", num_hidden_layers=4)
    off = saved_bytes(model)
    apply_activation_checkpoint(blocks_of(model), "full")
    assert saved_bytes(model) < 0.3 * off


class CountedCalls(TorchDispatchMode):
    """Counts the calls of every operator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def calls_in_backward(mode: str) -> Counter[str]:
    model = tiny_model("llama", attn_implementation="sdpa")
    apply_activation_checkpoint(blocks_of(model), mode)
    loss = loss_of(model, tiny_batch())
    with CountedCalls() as counted:
        loss.backward()
    return counted.calls


def test_selective_computes_norms_again_but_no_product_and_no_attention() -> None:
    off, full, selective = calls_in_backward("off"), calls_in_backward("full"), calls_in_backward("selective")
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    # Per block: 7 products, of which the last one's result nobody needs again; one attention; two norms.
    assert full["mm"] - off["mm"] == 2 * 6
    assert full[attention] - off[attention] == 2
    assert selective["mm"] == off["mm"]
    assert selective[attention] == off[attention]
    assert selective["rsqrt"] - off["rsqrt"] == 2 * 2


@pytest.mark.parametrize("mode", MODES)
def test_ls08_names_and_classes_stay(mode: str) -> None:
    model = tiny_model("llama")
    names, classes = list(model.state_dict()), [type(module) for module in model.modules()]
    apply_activation_checkpoint(blocks_of(model), mode)
    assert list(model.state_dict()) == names
    assert [type(module) for module in model.modules()] == classes


def test_unknown_mode() -> None:
    with pytest.raises(ConfigError, match=r'unknown mode "ful"\. Use off, full, selective\.'):
        apply_activation_checkpoint({}, "ful")


def fsdp_gradients(mode: str) -> dict[str, torch.Tensor]:
    model = tiny_model("qwen3_moe")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    apply_activation_checkpoint(blocks_of(model), mode)
    for block in blocks_of(model).values():
        fully_shard(block, mp_policy=policy)
    # The root computes in fp32, so that it is the blocks' own hooks that have to cast their inputs.
    fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    return {fqn: grad.full_tensor() for fqn, grad in gradients(model).items()}


def check_fsdp_gradients(mode: str) -> list[str]:
    expected, found = fsdp_gradients("off"), fsdp_gradients(mode)
    return [fqn for fqn, grad in expected.items() if not torch.equal(found[fqn], grad)]


@pytest.mark.parametrize("mode", MODES)
def test_pr03_recomputation_under_fsdp_mixed_precision_is_bit_equal(pool: RankPools, mode: str) -> None:
    assert pool(1).run(check_fsdp_gradients, mode) == [[]]

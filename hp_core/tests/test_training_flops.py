"""FLOPs per token against torch's own counter on real forwards and backwards."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from training_helpers import tiny_batch, tiny_model
from transformers import AutoModelForCausalLM

from hp_core.training.flops import flops_per_token, peak_flops

LENGTH = 16


def counted(model: torch.nn.Module) -> float:
    batch = tiny_batch(2, LENGTH)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=batch, use_cache=False).logits.sum().backward()
    return counter.get_total_flops() / batch.numel()


# Eager attention computes all scores, as the formula counts them; eager experts compute the visited ones only.
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_formula_agrees_with_torchs_counter_to_a_thousandth(model_type: str, tied: bool) -> None:
    model = tiny_model(
        model_type, attn_implementation="eager", experts_implementation="eager", tie_word_embeddings=tied
    )
    found = flops_per_token(model, LENGTH)
    assert found == pytest.approx(counted(model), rel=1e-3)
    with torch.device("meta"):
        assert flops_per_token(AutoModelForCausalLM.from_config(model.config), LENGTH) == found


def test_window_limits_the_context() -> None:
    kinds = ["sliding_attention", "full_attention"]
    windowed = flops_per_token(tiny_model("gemma3_text", layer_types=kinds, sliding_window=4), LENGTH)
    full = flops_per_token(tiny_model("gemma3_text", layer_types=["full_attention"] * 2), LENGTH)
    assert full - windowed == 12 * 4 * 8 * (LENGTH - 4)


def test_experts_without_a_known_share_give_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hp_core.training.flops._EXPERTS_PER_TOKEN", ("called_otherwise",))
    assert flops_per_token(tiny_model("qwen3_moe"), LENGTH) is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA B200", 2250e12),
        ("Ascend910B3", 313e12),
        ("Some Other Device", None),
    ],
)
def test_peak_by_device_name(monkeypatch: pytest.MonkeyPatch, name: str, expected: float | None) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda", 0)) == expected


def test_cpu_has_no_peak() -> None:
    assert peak_flops(torch.device("cpu")) is None

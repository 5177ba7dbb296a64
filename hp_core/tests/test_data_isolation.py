"""Documents of a packed row do not see each other: what models really do, and what `packing_fault` says of them.

`packing_models.json` holds small configurations of models that keep packed documents `apart` and of models in which
they are `joined`.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from data_helpers import load, steps, write_jsonl
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.models.llama import modeling_llama

from hp_core.data import Batch
from hp_core.models.packing import packing_fault

MODELS = json.loads((Path(__file__).parent / "packing_models.json").read_text())
CASES = [(kind, model_type) for kind, models in MODELS.items() for model_type in models]


def _build(kind: str, model_type: str, attention: str | None = None) -> PreTrainedModel:
    config = AutoConfig.for_model(model_type, **MODELS[kind][model_type])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)  # from nearly uniform attention to one that shows what it sees
    return model


def _logits(model: PreTrainedModel, *documents: torch.Tensor) -> torch.Tensor:
    """Logits `[S, V]` of a row of documents, called as hp calls a model."""
    positions = torch.cat([torch.arange(len(document)) for document in documents])
    with torch.no_grad():
        return model(input_ids=torch.cat(documents)[None], position_ids=positions[None], use_cache=False).logits[0]


@pytest.mark.parametrize(("kind", "model_type"), CASES)
def test_packing_fault_says_what_the_model_does(kind: str, model_type: str) -> None:
    generator = torch.Generator().manual_seed(1)
    first, other, second = (torch.randint(3, 128, (n,), generator=generator) for n in (21, 21, 27))
    model = _build(kind, model_type)
    # The second document's logits, behind two first documents that differ.
    behind = [_logits(model, document, second)[len(document) :] for document in (first, other)]
    leaks = not torch.allclose(*behind, rtol=0, atol=1e-4 * float(behind[0].abs().max()))
    fault = packing_fault(model.to("meta"), micro_batch_size=1)
    assert leaks == (fault is not None) == (kind == "joined"), fault
    assert fault is None or fault.startswith(type(model).__name__)


def _packed(tmp_path: Path, *documents: list[int]) -> Batch:
    path = write_jsonl(tmp_path / "a.jsonl", ({"input_ids": ids} for ids in documents))
    ((batch,),) = steps(load(path=path, shuffle=False, seq_length=sum(map(len, documents)), vocab_size=128))
    return batch


def _loss(model: PreTrainedModel, batch: Batch, **options: Any) -> torch.Tensor:
    logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, **options).logits
    return torch.nn.functional.cross_entropy(logits[0].float(), batch.labels[0], reduction="sum")


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("training", [False, True])
def test_pk01_pk03_packed_documents_equal_separate_runs(tmp_path: Path, attention: str, training: bool) -> None:
    first, second = [5, 9, 11, 2], [7, 3, 8, 2]
    model = _build("apart", "qwen3", attention).train(training)
    batch = _packed(tmp_path, first, second)
    together = _logits(model, torch.tensor(first), torch.tensor(second))
    separate = torch.cat([_logits(model, torch.tensor(ids)) for ids in (first, second)])
    assert (together - separate).abs().max() <= 1e-5

    own = sum(model(input_ids=torch.tensor([ids]), labels=torch.tensor([ids])).loss * 3 for ids in (first, second))
    assert batch.num_valid_tokens == 6
    torch.testing.assert_close(_loss(model, batch), own, rtol=1e-5, atol=1e-5)
    joined = _loss(model, batch, attention_mask=torch.ones_like(batch.input_ids))
    assert (joined - own).abs() > 0.1  # what a mask of ones does to it


def test_pk10_padding_does_not_change_the_loss(tmp_path: Path) -> None:
    model = _build("apart", "qwen3", "sdpa")
    path = write_jsonl(tmp_path / "a.jsonl", [{"input_ids": [5, 9, 11, 2, 7]}])
    losses = [_loss(model, steps(load(path=path, seq_length=length))[0][0]) for length in (5, 8, 13)]
    for loss in losses[1:]:
        torch.testing.assert_close(loss, losses[0], rtol=1e-6, atol=1e-6)


def test_flash_attention_keeps_documents_apart_in_single_rows_only() -> None:
    model = _build("apart", "llama", "sdpa")
    model.config._attn_implementation = "flash_attention_2"
    fault = packing_fault(model, micro_batch_size=2)
    assert fault is not None
    assert "training.micro_batch_size: 1, found 2" in fault
    assert packing_fault(model, micro_batch_size=1) is None


def test_a_model_that_transformers_knows_nothing_of_is_judged_by_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _build("apart", "llama", "eager")
    monkeypatch.setattr(type(model), "_is_stateful", True)
    assert packing_fault(model, micro_batch_size=1) == (
        "LlamaForCausalLM: carries state over the borders of packed documents"
    )
    monkeypatch.undo()
    monkeypatch.setattr(modeling_llama, "create_causal_mask", lambda **_: None)
    assert packing_fault(model, micro_batch_size=1) == (
        "LlamaForCausalLM: makes its attention masks itself, without regard to packed documents"
    )
    monkeypatch.undo()
    assert packing_fault(model, micro_batch_size=1) is None
    model.model.layers[1].mixer = torch.nn.Conv1d(64, 64, 4)
    assert packing_fault(model, micro_batch_size=1) == (
        "LlamaForCausalLM: the convolution model.layers.1.mixer mixes tokens over the borders of packed documents"
    )


def test_a_model_that_cannot_be_called_is_a_fault() -> None:
    model = _build("apart", "llama", "eager")
    model.model.embed_tokens.weight = torch.nn.Parameter(torch.zeros(0, 64))
    fault = packing_fault(model, micro_batch_size=1)
    assert fault is not None
    assert fault.startswith("LlamaForCausalLM: cannot be called with two packed documents: ")


def test_asking_leaves_nothing_behind() -> None:
    model = _build("apart", "llama", "eager")
    before = _logits(model, torch.tensor([5, 6]))
    packing_fault(model, micro_batch_size=1)
    assert ALL_MASK_ATTENTION_FUNCTIONS["eager"] is eager_mask
    assert torch.equal(_logits(model, torch.tensor([5, 6])), before)

"""Small corpora and tokenizers for the tests of hp_core.data."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from hp_core.config import RunConfig
from hp_core.config.schema import DataloaderConfig, DatasetConfig, TrainingConfig
from hp_core.data import Batch, Loader, build_loader

SPECIALS = ["<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"]
BOS, EOS, PAD, IM_START, IM_END = range(5)
VOCAB_SIZE = len(SPECIALS) + 256


def save_tokenizer(
    folder: Path,
    *,
    pad_token: str | None = "<pad>",
    eos_token: str = "</s>",
    processor: str | None = None,
    chat_template: str | None = None,
) -> str:
    """A tokenizer with one token per byte. `processor` is what it adds to a text, such as `<s> $A`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIALS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if processor:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=processor, special_tokens=list(zip(SPECIALS, range(len(SPECIALS)), strict=True))
        )
    special: dict[str, Any] = {"bos_token": "<s>", "eos_token": eos_token, "additional_special_tokens": SPECIALS[3:]}
    if pad_token:
        special["pad_token"] = pad_token
    saved = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    saved.chat_template = chat_template
    saved.save_pretrained(folder)
    return str(folder)


def write_jsonl(path: Path, records: Iterable[Any]) -> str:
    """One record per line."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def numbered(path: Path, lengths: Iterable[int]) -> str:
    """Token records of the given lengths; document d holds d + 1 only, so a row shows what it came from."""
    return write_jsonl(path, ({"input_ids": [d + 1] * length} for d, length in enumerate(lengths)))


def load(
    *,
    dp_rank: int = 0,
    dp_size: int = 1,
    vocab_size: int = 300,
    seed: int = 7,
    for_eval: bool = False,
    global_batch_size: int = 1,
    micro_batch_size: int = 1,
    num_epochs: int | None = 1,
    num_workers: int = 0,
    **dataset: Any,
) -> Loader:
    """A loader of token records, unless `dataset` says otherwise."""
    config = RunConfig(
        training=TrainingConfig(
            global_batch_size=global_batch_size, micro_batch_size=micro_batch_size, num_epochs=num_epochs
        ),
        dataset=DatasetConfig(**{"format": "tokens", "seq_length": 8, **dataset}),
        dataloader=DataloaderConfig(num_workers=num_workers),
    )
    return build_loader(config, dp_rank=dp_rank, dp_size=dp_size, vocab_size=vocab_size, seed=seed, for_eval=for_eval)


def steps(loader: Loader, count: int | None = None) -> list[list[Batch]]:
    """The next `count` steps, or all that are left."""
    found: list[list[Batch]] = []
    while len(found) != count and (step := loader.next_step()) is not None:
        found.append(step)
    return found


def rows(batches: Iterable[Iterable[Batch]]) -> list[tuple[list[int], ...]]:
    """All rows of some steps, each as four plain lists."""
    found = []
    for step in batches:
        for batch in step:
            fields = (batch.input_ids, batch.labels, batch.position_ids, batch.document_ids)
            found += [tuple(field[i].tolist() for field in fields) for i in range(len(batch.input_ids))]
    return found


def num_targets(batches: Iterable[Iterable[Batch]]) -> int:
    """Supervised tokens of some steps."""
    return sum(batch.num_valid_tokens for step in batches for batch in step)


def documents(batches: Iterable[Iterable[Batch]]) -> list[int]:
    """The numbers of the documents (see `numbered`) in the order they come, padding left out."""
    found: list[int] = []
    for step in batches:
        for batch in step:
            tokens = batch.input_ids[batch.input_ids > 0]
            found += torch.unique_consecutive(tokens).tolist()
    return found

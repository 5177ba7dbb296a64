"""From the configuration to a loader."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hp_core.config import RunConfig, instantiate
from hp_core.config.schema import DatasetConfig
from hp_core.data.chat import ChatEncoder
from hp_core.data.documents import Encode, TextEncoder, TokensEncoder
from hp_core.data.jsonl import JsonLines, find_files
from hp_core.data.loader import BatchLoader, Loader, digest
from hp_core.data.records import GivenRecords, Records
from hp_core.data.stream import RowStream, StreamOptions
from hp_core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

# Two tokenizers with one vocabulary may still split it differently or add other markers.
_SAMPLE = "A sample, 0123456789:\n\tÄrger \u4f60\u597d."


def build_loader(
    config: RunConfig, *, dp_rank: int, dp_size: int, vocab_size: int, seed: int, for_eval: bool = False
) -> BatchLoader:
    """The loader of data rank `dp_rank`.

    `vocab_size` is the number of rows of the model's embedding. With `for_eval`, one pass over `dataset.eval_path`
    in the order of its files; `rewind` starts the next pass.

    `dataset._target_` makes the records itself: a map-style dataset of mappings with `input_ids` and, optionally,
    `labels`, as in format tokens. `dataloader._target_` takes hp's loader's place: it is called with its own arguments
    and `dataset` (from `dataset._target_`, or None), `dp_rank`, `dp_size`, `global_batch_size`, `micro_batch_size`,
    `seed` and `for_eval`, and returns a `BatchLoader`. Raises ConfigError and DataError.
    """
    dataset, training = config.dataset, config.training
    own: Any = instantiate(dataset.target, dataset.args) if dataset.target is not None else None
    if config.dataloader.target is not None:
        loader: BatchLoader = instantiate(
            config.dataloader.target,
            config.dataloader.args,
            dataset=own,
            dp_rank=dp_rank,
            dp_size=dp_size,
            global_batch_size=training.global_batch_size,
            micro_batch_size=training.micro_batch_size,
            seed=seed,
            for_eval=for_eval,
        )
        return loader
    lines = _open(dataset, for_eval=for_eval) if dataset.target is None else GivenRecords(own, dataset.target)
    tokenizer = _tokenizer(config)
    if dataset.packing and dataset.format == "text" and dataset.target is None and not dataset.append_eos:
        logger.warning(
            "dataset.append_eos is false: packed texts have no end token between them. They stay isolated, "
            "by their positions, but the model cannot learn where a text ends"
        )
    options = StreamOptions(
        seq_length=dataset.seq_length,
        pad_id=_pad_id(tokenizer, vocab_size, lines),
        vocab_size=vocab_size,
        seed=seed,
        shuffle=dataset.shuffle and not for_eval,
        packing=dataset.packing,
        skip_bad_lines=dataset.on_bad_line == "skip",
        num_epochs=1 if for_eval else training.num_epochs,
        # Starting processes for every evaluation costs more than they save.
        num_workers=0 if for_eval else config.dataloader.num_workers,
    )
    return Loader(
        RowStream(lines, _encoder(dataset, tokenizer), options),
        global_batch_size=training.global_batch_size,
        micro_batch_size=training.micro_batch_size,
        dp_rank=dp_rank,
        dp_size=dp_size,
        fingerprint={
            "path": lines.fingerprint,
            "format": dataset.format,
            "text_key": dataset.text_key,
            "tokenizer": None if tokenizer is None else _fingerprint(tokenizer),
            "append_eos": dataset.append_eos,
            "seq_length": dataset.seq_length,
            "packing": dataset.packing,
            "shuffle": options.shuffle,
            "seed": seed,
        },
    )


def load_tokenizer(
    path: str, *, local_files_only: bool = True, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer in the folder `path`. Raises DataError when there is none."""
    from transformers import AutoTokenizer  # heavy: whoever needs no tokenizer does without

    try:
        return AutoTokenizer.from_pretrained(
            path, local_files_only=local_files_only, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split()) if Path(path).is_dir() else "there is no such folder"
        raise DataError(f'dataset.tokenizer: no tokenizer can be loaded from "{path}": {reason}') from error


def _tokenizer(config: RunConfig) -> PreTrainedTokenizerBase | None:
    """The configured tokenizer, else the model's. Token records need none."""
    path = config.dataset.tokenizer
    if path is None and (config.dataset.format == "tokens" or config.dataset.target is not None):
        return None
    path = path or config.model.pretrained_model_name_or_path or config.model.config_path
    if path is None:
        raise ConfigError(f"dataset.tokenizer: format {config.dataset.format} needs the folder of a tokenizer")
    model = config.model
    return load_tokenizer(path, local_files_only=model.local_files_only, trust_remote_code=model.trust_remote_code)


def _open(dataset: DatasetConfig, *, for_eval: bool) -> JsonLines:
    key, patterns = ("eval_path", dataset.eval_path) if for_eval else ("path", dataset.path)
    lines = JsonLines(find_files(patterns, key=f"dataset.{key}"))
    if lines.empty_files and not (dataset.on_bad_line == "skip" and len(lines)):
        raise DataError(f"{lines.empty_files[0]}: the file is empty. Remove it from dataset.{key}")
    for path in lines.empty_files:
        logger.warning("%s: the file is empty (skipped)", path)
    return lines


def _encoder(dataset: DatasetConfig, tokenizer: PreTrainedTokenizerBase | None) -> Encode:
    if dataset.format == "tokens" or dataset.target is not None:
        return TokensEncoder()
    assert tokenizer is not None
    if dataset.format == "text":
        if dataset.append_eos and tokenizer.eos_token_id is None:
            raise DataError(
                f"dataset.tokenizer: {tokenizer.name_or_path} has no EOS token. Set dataset.append_eos: false"
            )
        return TextEncoder(tokenizer, dataset.text_key, dataset.append_eos)
    if not tokenizer.chat_template:
        raise DataError(f"dataset.tokenizer: {tokenizer.name_or_path} has no chat template, which format chat needs")
    return ChatEncoder(tokenizer)


def _pad_id(tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, lines: Records) -> int:
    """What fills a row that documents do not: no label and no document sees it, but it has to have an embedding."""
    found = (tokenizer.pad_token_id, tokenizer.eos_token_id) if tokenizer is not None else ()
    pad_id = next((i for i in found if i is not None), 0)
    if pad_id >= vocab_size:
        assert tokenizer is not None
        raise DataError(
            f"dataset.tokenizer: {tokenizer.name_or_path} pads with token id {pad_id}, outside the model's vocabulary "
            f"of {vocab_size} (data: {lines.paths[0]}). Use the model's own tokenizer, or one with another pad token"
        )
    return int(pad_id)


def _fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    sample = tokenizer(_SAMPLE)["input_ids"]
    return digest(
        [sorted(tokenizer.get_vocab().items()), tokenizer.special_tokens_map, tokenizer.chat_template, sample]
    )

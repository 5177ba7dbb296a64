"""Records to documents: token ids with the target of every token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hp_core.data.batch import IGNORE_INDEX
from hp_core.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Document:
    """Token ids and labels, both `[length]`. `labels[i]` is already the target of token i: token i + 1, or -100.

    The shift is made here, on the whole document, so that cutting it into rows loses no target and joining it
    with others adds none.
    """

    tokens: Tokens
    labels: Tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def part(self, start: int, stop: int) -> Document:
        """Tokens `start` to `stop` (exclusive), with their targets."""
        return Document(self.tokens[start:stop], self.labels[start:stop])


Encode = Callable[[Mapping[str, Any]], Document | None]
"""A record to its document; None when there is nothing in it. Raises DataError, without the place."""


def make_document(tokens: Tokens, labels: Tokens) -> Document | None:
    """A document of `tokens`, where `labels[i]` is the label OF token i, -100 if it is not a target."""
    if not len(tokens):
        return None
    targets = np.full_like(labels, IGNORE_INDEX)
    targets[:-1] = labels[1:]
    return Document(tokens, targets)


@dataclass(frozen=True)
class TextEncoder:
    """Plain text under `key`: at most one BOS, as the tokenizer adds it, and one EOS with `append_eos`, else none."""

    tokenizer: PreTrainedTokenizerBase
    key: str
    append_eos: bool

    def __call__(self, record: Mapping[str, Any]) -> Document | None:
        text = record.get(self.key)
        if not isinstance(text, str):
            raise DataError(_unexpected(record, self.key, "a text"))
        ids = list(self.tokenizer(text, verbose=False)["input_ids"])
        # Text and post-processor may each bring their own markers.
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        while bos is not None and ids[:2] == [bos, bos]:
            del ids[0]
        while ids and ids[-1] == eos:
            del ids[-1]
        if not text or not ids:
            return None
        if self.append_eos:
            ids.append(eos)
        tokens = np.array(ids, np.int64)
        return make_document(tokens, tokens)


@dataclass(frozen=True)
class TokensEncoder:
    """Ready `input_ids` and, optionally, `labels`: the label of each token itself (as in HF), -100 for no target."""

    def __call__(self, record: Mapping[str, Any]) -> Document | None:
        tokens = _integers(record, "input_ids")
        labels = _integers(record, "labels") if record.get("labels") is not None else tokens
        if len(labels) != len(tokens):
            raise DataError(f'"labels" has {len(labels)} entries, "input_ids" has {len(tokens)}')
        if len(tokens) and tokens.min() < 0:
            raise DataError(f'"input_ids" holds the negative id {tokens.min()}')
        if np.any((labels < 0) & (labels != IGNORE_INDEX)):
            raise DataError(f'"labels" may hold token ids and {IGNORE_INDEX}, found {labels.min()}')
        return make_document(tokens, labels)


def _integers(record: Mapping[str, Any], key: str) -> Tokens:
    value = record.get(key)
    try:
        array = np.asarray(value if isinstance(value, list) else None)
    except (ValueError, OverflowError):  # lists of different lengths in the list
        array = np.asarray(None)
    if array.ndim != 1 or (array.size and array.dtype.kind != "i"):
        raise DataError(_unexpected(record, key, "a list of integers"))
    return array.astype(np.int64)


def _unexpected(record: Mapping[str, Any], key: str, expected: str) -> str:
    if key not in record:
        return f'no field "{key}" (found {", ".join(record) or "none"})'
    found = type(record[key]).__name__
    return f'field "{key}": expected {expected}, found {"other elements" if found == "list" else found}'

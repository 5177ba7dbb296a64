"""Documents to rows of a fixed length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hp_core.data.batch import IGNORE_INDEX, Batch
from hp_core.data.documents import Document, Tokens

Row = tuple[Tokens, ...]
"""The fields of a `Batch` for one row, each `[seq_length]`."""


def make_row(pieces: Sequence[Document], seq_length: int, pad_id: int) -> Row:
    """Join `pieces` into a row; positions restart in each. What is left of the row is padding, its own document."""
    lengths = [len(piece) for piece in pieces]
    padding = seq_length - sum(lengths)
    if padding:
        lengths.append(padding)
    return (
        np.concatenate([*(piece.tokens for piece in pieces), np.full(padding, pad_id, np.int64)]),
        np.concatenate([*(piece.labels for piece in pieces), np.full(padding, IGNORE_INDEX, np.int64)]),
        np.concatenate([np.arange(length, dtype=np.int64) for length in lengths]),
        np.repeat(np.arange(len(lengths), dtype=np.int64), lengths),
    )


def make_batch(rows: Sequence[Row]) -> Batch:
    """Stack rows into a batch."""
    return Batch(*(torch.from_numpy(np.stack(field)) for field in zip(*rows, strict=True)))

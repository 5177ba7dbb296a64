"""The batch: what the loader gives, what `hp_shard_batch` splits and what the loss counts."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

IGNORE_INDEX = -100


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one data rank. All fields are int64 of shape `[B, S]`.

    `labels[b, i]` is already the target of token i (no further shift), -100 where there is none. `position_ids`
    restart at 0 in every document. `document_ids` differ between the documents of a row; padding is a document
    of its own.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor
    document_ids: torch.Tensor

    def to(self, device: torch.device | str) -> Batch:
        """A copy of the batch on `device`."""
        return Batch(**{f.name: getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)})

    @property
    def num_valid_tokens(self) -> int:
        """How many tokens carry loss."""
        return int((self.labels != IGNORE_INDEX).sum())

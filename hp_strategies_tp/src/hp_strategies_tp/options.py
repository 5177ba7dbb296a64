"""The keys of `accelerator` that belong to tensor parallelism."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """How many ranks share every layer, and what they share besides.

    `tp_size` ranks hold a part of each layer's weights. `sequence_parallel` also splits the hidden states between
    attention and MLP along the sequence, which saves activations; `dataset.seq_length` is then a multiple of `tp_size`.
    `loss_parallel` computes the loss on logits that stay split over the vocabulary.
    """

    tp_size: int = 1
    sequence_parallel: bool = False
    loss_parallel: bool = False

"""Loss terms and what they are divided by: the whole optimizer step, never a micro-batch or a rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.nn import functional

from hp_core.data import IGNORE_INDEX, Batch

Unit = Literal["tokens", "micro_batches"]


@dataclass(frozen=True)
class Term:
    """One named part of the loss: `total` is this rank's sum (a scalar that carries gradients).

    `per` names the denominator, counted by core over the whole optimizer step: the tokens that carry loss on all
    ranks and in all micro-batches, or the number of micro-batches.
    """

    total: torch.Tensor
    per: Unit = "tokens"


def cross_entropy(outputs: Any, batch: Batch) -> Term:
    """Sum of token losses: fp32 cross-entropy of `outputs.logits` `[B, S, V]` with `batch.labels` `[B, S]`.

    A batch whose labels are all ignored gives 0 with zero gradients.
    """
    logits = outputs.logits
    total = functional.cross_entropy(
        logits.float().flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )
    return Term(total)


def step_denominators(micro_batches: list[Batch], group: dist.ProcessGroup, device: torch.device) -> Mapping[Unit, int]:
    """What the terms of one optimizer step are divided by. Collective over the ranks that hold different tokens."""
    tokens = torch.tensor(sum(batch.num_valid_tokens for batch in micro_batches), dtype=torch.int64, device=device)
    dist.all_reduce(tokens, group=group)
    return {"tokens": int(tokens), "micro_batches": len(micro_batches)}

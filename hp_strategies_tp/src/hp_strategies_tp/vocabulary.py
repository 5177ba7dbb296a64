"""The vocabulary split over ranks: looking up rows that other ranks hold, and the loss on logits that stay split."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hp_core import IGNORE_INDEX, Batch, Mesh, PlacementError, Term, axis_group, inject
from hp_strategies_tp.styles import AXIS

CHUNK_ROWS = 1024
"""Tokens whose logits are in fp32 at one time."""


def split_embedding(embedding: nn.Module, num_rows: int, mesh: Mesh) -> None:
    """Let `embedding`, of which this rank holds a chunk of its `num_rows` rows, give zeros for the rows of others."""
    axis = axis_group(mesh, AXIS)
    chunk = -(-num_rows // axis.size)
    start = min(chunk * axis.rank, num_rows)
    stop = min(start + chunk, num_rows)
    padding = getattr(embedding, "padding_idx", None)
    if isinstance(padding, int):
        # Its row has no gradient; on ranks that do not hold it every row has one.
        here = padding - start if start <= padding < stop else None
        setattr(embedding, "padding_idx", here)  # noqa: B010  (nn.Module declares no such attribute)

    def around(forward: Any) -> Any:
        def lookup(ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            elsewhere = (ids < start) | (ids >= stop)
            found: torch.Tensor = forward((ids - start).masked_fill(elsewhere, 0), *args, **kwargs)
            return found.masked_fill(elsewhere.unsqueeze(-1), 0)

        return lookup

    inject(embedding, around)


def vocabulary_parallel_cross_entropy(logits: torch.Tensor, batch: Batch, mesh: Mesh, vocab_size: int) -> Term:
    """Sum of token losses of logits `[B, S, V / tp]` that are split over the vocabulary.

    Neither the gathered logits nor an fp32 copy of this rank's share ever exist: both directions go through the
    tokens in chunks. One collective, of two numbers per token and rank.
    """
    axis = axis_group(mesh, AXIS)
    chunk = -(-vocab_size // axis.size)
    start = min(chunk * axis.rank, vocab_size)
    width = max(min(chunk, vocab_size - start), 0)
    if logits.shape[-1] != width:
        raise PlacementError(
            f"accelerator.loss_parallel: the model gives {logits.shape[-1]} logits per token, its head {width} on this "
            "rank: it does more than elementwise work on them"
        )
    total = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits.flatten(0, 1), batch.labels.flatten(), start, axis.group
    )
    return Term(total)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, start: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        tokens, width = logits.shape
        local = labels - start
        is_here = (local >= 0) & (local < width) & (labels != IGNORE_INDEX)
        columns = local.masked_fill(~is_here, 0)
        mine = torch.full((2, tokens), -torch.inf, dtype=torch.float32, device=logits.device)
        mine[1] = 0
        if width:
            for rows in _chunks(tokens):
                part = logits[rows].float()
                mine[0, rows] = part.logsumexp(-1)
                target = part.gather(-1, columns[rows, None]).squeeze(-1)
                mine[1, rows] = target.masked_fill(~is_here[rows], 0)
        everyone = mine.new_empty(dist.get_world_size(group) * 2, tokens)
        dist.all_gather_into_tensor(everyone, mine, group=group)
        log_sum = everyone[::2].logsumexp(0)
        losses = (log_sum - everyone[1::2].sum(0)).masked_fill(labels == IGNORE_INDEX, 0)
        ctx.save_for_backward(logits, columns, is_here, labels != IGNORE_INDEX, log_sum)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits, columns, is_here, is_valid, log_sum = ctx.saved_tensors
        result = torch.empty_like(logits)
        if logits.shape[1]:
            for rows in _chunks(logits.shape[0]):
                part = (logits[rows].float() - log_sum[rows, None]).exp_()
                part.scatter_add_(-1, columns[rows, None], -is_here[rows, None].float())
                result[rows] = part * (gradient * is_valid[rows, None])
        return result, None, None, None


def _chunks(tokens: int) -> list[slice]:
    return [slice(first, first + CHUNK_ROWS) for first in range(0, tokens, CHUNK_ROWS)]

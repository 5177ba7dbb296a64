"""The vocabulary split over ranks: the loss on split logits, and lookups of rows that other ranks hold."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hp_core import IGNORE_INDEX, Batch, MeshAxis
from hp_core.mesh import Mesh, plan_mesh
from hp_core.testing import RankPools, assert_close_gradients
from hp_strategies_tp import vocabulary

ROWS, LENGTH, WIDTH = 2, 6, 8


def tp_mesh() -> Mesh:
    size = dist.get_world_size()
    return Mesh(plan_mesh(size, [(MeshAxis("tp", "model", "tp_size"), size)]), "cpu")


def share(mesh: Mesh, num: int) -> slice:
    chunk = -(-num // mesh.spec.size("tp"))
    return slice(chunk * mesh.rank, min(chunk * (mesh.rank + 1), num))


def inputs(vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.randn(ROWS, LENGTH, vocab_size, generator=torch.Generator().manual_seed(0)) * 5
    labels = torch.randint(vocab_size, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    labels[0, 2:] = IGNORE_INDEX
    labels[1, 0] = vocab_size - 1
    return logits, labels


def split_loss(vocab_size: int, chunk_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    vocabulary.CHUNK_ROWS = chunk_rows
    mesh = tp_mesh()
    logits, labels = inputs(vocab_size)
    mine = logits[..., share(mesh, vocab_size)].clone().requires_grad_()
    batch = Batch(labels, labels, labels, labels)
    term = vocabulary.vocabulary_parallel_cross_entropy(mine, batch, mesh, vocab_size)
    (term.total * 0.5).backward()
    assert mine.grad is not None
    return term.total.detach(), mine.grad


@pytest.mark.parametrize(("world", "vocab_size"), [(2, 10), (2, 11), (4, 9), (4, 5)])
def test_loss_and_gradient_equal_those_of_whole_logits(pool: RankPools, world: int, vocab_size: int) -> None:
    logits, labels = inputs(vocab_size)
    logits.requires_grad_()
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    (expected * 0.5).backward()
    results = pool(world).run(split_loss, vocab_size, 5)
    for loss, _ in results:
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0)
    gradient = torch.cat([gradient for _, gradient in results], -1)
    assert logits.grad is not None
    assert_close_gradients({"logits": logits.grad}, {"logits": gradient})


def split_lookup(num_rows: int, padding: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    mesh = tp_mesh()
    weight = torch.arange(num_rows * WIDTH, dtype=torch.float32).view(num_rows, WIDTH)
    embedding = nn.Embedding(num_rows, WIDTH, padding_idx=padding)
    embedding.weight = nn.Parameter(weight[share(mesh, num_rows)].clone())
    vocabulary.split_embedding(embedding, num_rows, mesh)
    found = embedding(torch.arange(num_rows)[None])
    found.sum().backward()
    assert embedding.weight.grad is not None
    return found.detach(), embedding.weight.grad


@pytest.mark.parametrize("padding", [None, 0, 6])
def test_lookups_of_all_ranks_add_up_to_the_embedding(pool: RankPools, padding: int | None) -> None:
    results = pool(2).run(split_lookup, 7, padding)
    expected = torch.arange(7 * WIDTH, dtype=torch.float32).view(1, 7, WIDTH)
    assert torch.equal(sum(found for found, _ in results), expected)
    gradient = torch.ones(7, WIDTH)
    if padding is not None:
        gradient[padding] = 0
    assert torch.equal(torch.cat([gradient for _, gradient in results]), gradient)

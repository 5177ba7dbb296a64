"""Streaming weights: every rank fills its own part of the sharded model straight from the safetensors files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from hp_core.models.checkpoint_files import FileTensor, open_checkpoint
from hp_core.models.conversion import ALL, Recipe, resolve
from hp_core.models.weight_checks import LoadReport, check_match, drop_equal_ties
from hp_core.plan import ShardingPlan, local_part

NUM_READERS = 4
"""Threads of a rank that read and convert: while one waits for storage, others compute."""

BLOCK_BYTES = 2 * 2**20
"""How much a conversion that can be done in blocks of rows makes at once, but one row at least.

Small: the allocator keeps several times this per reader. Larger blocks are not faster.
"""


def load_checkpoint(
    model: nn.Module,
    plan: ShardingPlan,
    template: PreTrainedModel,
    source: str | Path,
    rank: int,
    *,
    init_missing: bool = False,
) -> LoadReport:
    """Fill the parameters and persistent buffers of `model` from the checkpoint folder `source`.

    `model` is sharded and materialized; `template` is the model as it was built, on the meta device. `rank` writes
    the parts that `plan` gives it, cast to each parameter's dtype, and reads only what they are made of. There are
    no collectives: what can be wrong is found on every rank alike, before any value is written.

    Raises WeightsError for files that are absent or corrupt, tensors that are missing (unless `init_missing`),
    unexpected or mis-shaped, and tied weights whose values differ.
    """
    folder = Path(source)
    files = open_checkpoint(folder)
    resolution = resolve(template, {name: tensor.shape for name, tensor in files.items()})
    report = check_match(template, plan, folder, files, resolution, init_missing)
    parts = _find_parts(model, plan, template, rank)
    recipes = drop_equal_ties(template, plan, folder, files, resolution.recipes)
    with ThreadPoolExecutor(NUM_READERS) as readers:
        for filled in [readers.submit(_fill, recipe, template, files, parts) for recipe in recipes]:
            filled.result()
    return report


@dataclass(frozen=True)
class _Part:
    """A block that this rank holds of a parameter or buffer: where to write it, and where it is in the whole."""

    local: torch.Tensor
    slices: tuple[slice, ...]


def _find_parts(model: nn.Module, plan: ShardingPlan, template: PreTrainedModel, rank: int) -> dict[str, list[_Part]]:
    """The parts under every name that the state dict of `template` has for them; those with elements."""
    parts: dict[str, list[_Part]] = {}
    params = dict(model.named_parameters())
    for fqn, param_plan in plan.params.items():
        local = local_part(params[fqn].detach())
        assert local.shape == plan.local_shape(fqn, rank), (fqn, local.shape, plan.local_shape(fqn, rank))
        blocks = [_Part(local[chunk.local], chunk.whole) for chunk in plan.chunks(fqn, rank)]
        mine = [part for part in blocks if part.local.numel()]
        parts.update(dict.fromkeys((fqn, *param_plan.tied_names), mine))
    buffers = dict(model.named_buffers())
    for fqn in template.state_dict().keys() - parts.keys():
        parts[fqn] = [_Part(buffers[fqn], tuple(slice(0, size) for size in buffers[fqn].shape))]
    return parts


def _fill(
    recipe: Recipe, template: PreTrainedModel, files: Mapping[str, FileTensor], parts: Mapping[str, list[_Part]]
) -> None:
    """Write this rank's parts of everything that `recipe` makes."""
    wanted = [(fqn, part) for fqn in recipe.shapes for part in parts[fqn]]
    if not wanted:
        return
    if recipe.converter is None:
        for _, part in wanted:
            part.local.copy_(files[recipe.source_names[0]].data[part.slices])
        return
    # transformers casts before it converts; a dequantisation would differ the other way round.
    dtype = wanted[0][1].local.dtype
    for rows in _blocks(recipe, [part for _, part in wanted], dtype):
        made = recipe.make(template, lambda name, rows: files[name].rows(rows).to(dtype), rows)
        for fqn, part in wanted:
            _write_rows(part, made[fqn], rows.start or 0)


def _blocks(recipe: Recipe, wanted: list[_Part], dtype: torch.dtype) -> Iterator[slice]:
    """The rows to convert at a time: those that are wanted, block by block, or all where rows cannot be told apart."""
    if not recipe.splits_by_rows:
        yield ALL
        return
    row_bytes = sum(math.prod(shape[1:]) for shape in recipe.shapes.values()) * dtype.itemsize
    step = max(1, BLOCK_BYTES // max(1, row_bytes))
    last = max(part.slices[0].stop for part in wanted)
    for first in range(min(part.slices[0].start for part in wanted), last, step):
        yield slice(first, min(first + step, last))


def _write_rows(part: _Part, value: torch.Tensor, offset: int) -> None:
    """Write what `part` wants of `value`, which has the rows of the whole tensor from `offset` on."""
    rows = part.slices[0]
    start, stop = max(rows.start, offset), min(rows.stop, offset + value.shape[0])
    if start < stop:
        chosen = value[(slice(start - offset, stop - offset), *part.slices[1:])]
        part.local[start - rows.start : stop - rows.start].copy_(chosen)

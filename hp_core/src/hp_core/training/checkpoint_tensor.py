"""A tensor as torch.distributed.checkpoint sees it: the chunks of the whole that the plan says this rank holds.

DTensor could say the same of itself only where it can express the layout: not of packed sections, and not of uneven
chunks of uneven chunks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from hp_core.plan import Chunk


class CheckpointTensor(torch.Tensor):
    """Has the shape and dtype of the whole, and no values; those of this rank are in `local`, which is read and
    written in place. Every holder of a chunk offers it; torch picks who writes."""

    local: torch.Tensor
    chunks: dict[torch.Size, Chunk]

    @staticmethod
    def of(local: torch.Tensor, shape: tuple[int, ...], chunks: tuple[Chunk, ...]) -> CheckpointTensor:
        """What this rank holds of a tensor of `shape`: `local`, whose parts are `chunks`."""
        whole = torch.empty((), dtype=local.dtype).expand(shape)  # one element; torch would fill a meta tensor
        made: CheckpointTensor = torch.Tensor._make_subclass(CheckpointTensor, whole)
        made.local = local.detach()
        made.chunks = {_offset(chunk): chunk for chunk in chunks if all(s.stop > s.start for s in chunk.local)}
        return made

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offset, torch.Size(s.stop - s.start for s in chunk.local))
            for offset, chunk in self.chunks.items()
        ]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return self.local[self.chunks[index.offset].local]


def _offset(chunk: Chunk) -> torch.Size:
    return torch.Size(s.start for s in chunk.whole)

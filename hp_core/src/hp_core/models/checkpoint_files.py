"""The files of a HuggingFace checkpoint: found, opened and checked by their headers, without reading any data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from hp_core.errors import WeightsError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class LazyTensor(Protocol):
    """A tensor in a file. Indexing gives a view of the mapped file: what is never touched is never read."""

    def __getitem__(self, index: object) -> torch.Tensor: ...


@dataclass(frozen=True)
class FileTensor:
    """Where a tensor of the checkpoint lies, and its shape as the file's header gives it."""

    path: Path
    shape: tuple[int, ...]
    data: LazyTensor

    def rows(self, rows: slice) -> torch.Tensor:
        """A view of some rows (dim 0), or of all of it, which may be a scalar."""
        return self.data[... if rows == slice(None) else rows]


def open_checkpoint(folder: Path) -> dict[str, FileTensor]:
    """Every tensor of the checkpoint in `folder`, by name.

    Either one `model.safetensors` or the files that `model.safetensors.index.json` lists. Raises WeightsError for
    a folder without either, an index that is not what it should be, an absent, truncated or corrupt file, a tensor
    that two files hold, or that is not in the file where the index places it.
    """
    if (folder / SINGLE_FILE).is_file():
        return _open_file(folder / SINGLE_FILE)
    if not (folder / INDEX_FILE).is_file():
        raise WeightsError(_describe_absence(folder))
    weight_map = _read_index(folder / INDEX_FILE)
    tensors: dict[str, FileTensor] = {}
    for file_name in sorted(set(weight_map.values())):
        if not (folder / file_name).is_file():
            raise WeightsError(
                f"{folder / INDEX_FILE}: lists {file_name}, which is not in the folder. Copy or download it again."
            )
        for name, tensor in _open_file(folder / file_name).items():
            if name in tensors:
                raise WeightsError(f"{folder}: {name} is both in {tensors[name].path.name} and in {file_name}")
            tensors[name] = tensor
    for name, file_name in weight_map.items():
        if name not in tensors or tensors[name].path.name != file_name:
            raise WeightsError(f"{folder / INDEX_FILE}: places {name} in {file_name}, which does not hold it")
    return tensors


def _open_file(path: Path) -> dict[str, FileTensor]:
    try:
        file: Any = safe_open(path, framework="pt")  # its stubs are untyped
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError) as error:
        raise WeightsError(
            f"{path}: not a whole safetensors file ({path.stat().st_size} bytes; {error}). Copy or download it again."
        ) from error
    return {name: FileTensor(path, tuple(data.get_shape()), data) for name, data in slices.items()}


def _read_index(path: Path) -> Mapping[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise WeightsError(f'{path}: expected JSON with a "weight_map" ({error!r})') from error
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise WeightsError(f'{path}: expected "weight_map" to map tensor names to file names')
    return weight_map


def _describe_absence(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder}: expected a folder with {SINGLE_FILE} or {INDEX_FILE}; there is no such folder"
    others = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".safetensors"))
    found = ", ".join(others[:3]) if others else "no weight files"
    fix = " Save the model again with save_pretrained, which writes safetensors." if others else ""
    return f"{folder}: expected {SINGLE_FILE} or {INDEX_FILE}, found {found}.{fix}"

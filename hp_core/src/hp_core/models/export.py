"""From a training checkpoint to a HuggingFace folder: the names, layouts, dtypes and ties that transformers expects."""

from __future__ import annotations

import json
import shutil
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from hp_core.errors import CheckpointError
from hp_core.models.assets import ASSETS_FOLDER, MODEL_PREFIX, WEIGHTS_FILE, ExportFacts
from hp_core.models.auto import HyperAutoModelForCausalLM
from hp_core.models.blocks import decoder_blocks
from hp_core.models.checkpoint_files import INDEX_FILE
from hp_core.models.conversion import resolve
from hp_core.models.dtypes import dtype_name, most_common_dtype, parse_dtype
from hp_core.models.source import CONFIG_FILE, one_line


def export_hf(checkpoint: Path, out: Path, dtype: str | None = None, max_shard_size: str = "5GB") -> None:
    """Write the model of a training checkpoint as a HuggingFace folder `out`, in files of up to `max_shard_size`.

    Tensor names and layouts are those of the source checkpoint; tied weights are stored once. Floating-point tensors
    get the dtype that the tensor of that name had in the source (after random init: the one that it was trained in),
    or `dtype`; others stay as they are. The code of a custom model, which the checkpoint holds, is run.

    The folder appears complete or not at all. Needs memory for the tensors of one file and of one decoder block; for
    the whole model where a conversion reaches across blocks. Raises CheckpointError for a checkpoint that is not one
    and for an `out` that is not empty, ConfigError for a wrong `dtype`.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"export: {out} exists and is not empty. Give a new folder.")
    wanted = parse_dtype(dtype, "export --dtype") if dtype is not None else None
    exporter = _open(checkpoint, wanted)
    aside = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    shutil.copytree(checkpoint / ASSETS_FOLDER, aside, ignore=shutil.ignore_patterns(WEIGHTS_FILE))
    _write_weights(exporter, aside, max_shard_size)
    _write_config(exporter, aside)
    aside.rename(out)


@dataclass(frozen=True)
class _Exporter:
    """A checkpoint that is ready to be converted.

    `stored`: exported parameters and buffers, by FQN, as they are in the checkpoint (on the meta device). `groups`
    are FQNs that can be converted together, apart from the others. `result`: what comes out, on the meta device.
    """

    reader: FileSystemReader
    model: PreTrainedModel
    entries: Mapping[str, str]
    stored: Mapping[str, torch.Tensor]
    groups: list[list[str]]
    result: Mapping[str, torch.Tensor]

    def convert(self) -> Iterator[dict[str, torch.Tensor]]:
        """The exported tensors, group by group, read from the checkpoint."""
        for group in self.groups:
            values = {self.entries[fqn]: torch.empty_like(self.stored[fqn], device="cpu") for fqn in group}
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                    load(values, storage_reader=self.reader, no_dist=True)
            except CheckpointException as error:
                cause, _ = next(iter(error.failures.values()))
                raise CheckpointError(f"export: {self.reader.path} cannot be read: {one_line(cause)}") from error
            named = revert_weight_conversion(self.model, {fqn: values[self.entries[fqn]] for fqn in group})
            yield {name: value.to(self.result[name].dtype).contiguous() for name, value in named.items()}


def _open(checkpoint: Path, dtype: torch.dtype | None) -> _Exporter:
    assets = checkpoint / ASSETS_FOLDER
    if not (assets / WEIGHTS_FILE).is_file():
        raise CheckpointError(
            f"export: {checkpoint} is not a training checkpoint of hp (no {ASSETS_FOLDER}/{WEIGHTS_FILE})"
        )
    facts = ExportFacts.read(assets)
    template = HyperAutoModelForCausalLM.from_config(assets, model_class=facts.model_class, trust_remote_code=True)
    reader = FileSystemReader(checkpoint)
    saved = reader.read_metadata().state_dict_metadata
    entries = _exported_entries(template)
    stored = {}
    for fqn, entry in entries.items():
        found = saved.get(entry)
        if not isinstance(found, TensorStorageMetadata):
            raise CheckpointError(f"export: {checkpoint} has no {entry}, which {type(template).__name__} needs")
        stored[fqn] = torch.empty(found.size, dtype=found.properties.dtype, device="meta")
    # A shallow copy: the attribute that tells transformers what to revert belongs to this export.
    model = copy(template)
    if facts.tensors:
        shapes = {name: tensor.shape for name, tensor in facts.tensors.items()}
        model._weight_conversions = list(resolve(template, shapes).transforms)
    groups, converted = _group(model, stored)
    result = {
        name: torch.empty(value.shape, dtype=_exported_dtype(name, value.dtype, dtype, facts), device="meta")
        for name, value in converted.items()
    }
    return _Exporter(reader, model, entries, stored, groups, result)


def _exported_entries(template: PreTrainedModel) -> dict[str, str]:
    """FQN of every exported tensor to its entry in the checkpoint.

    A shared parameter is stored under its first name, and exported under the name that HF ties the others to.
    """
    tied, ignored = template.all_tied_weights_keys, template._keys_to_ignore_on_save or ()
    first_names = {id(param): fqn for fqn, param in template.named_parameters()}
    state = template.state_dict(keep_vars=True)
    entries: dict[str, str] = {}
    for fqn, tensor in state.items():
        entry = MODEL_PREFIX + first_names.get(id(tensor), fqn)
        is_alias = fqn in tied and state[tied[fqn]] is tensor
        if not is_alias and fqn not in ignored and entry not in entries.values():
            entries[fqn] = entry
    return entries


def _group(
    model: PreTrainedModel, stored: Mapping[str, torch.Tensor]
) -> tuple[list[list[str]], dict[str, torch.Tensor]]:
    """FQNs per decoder block and those outside of all, if each can be converted by itself; and what comes of them."""
    by_block: dict[str, list[str]] = {}
    blocks = list(decoder_blocks(model))
    for fqn in stored:
        by_block.setdefault(next((name for name in blocks if fqn.startswith(f"{name}.")), ""), []).append(fqn)
    whole = revert_weight_conversion(model, dict(stored))
    apart: dict[str, torch.Tensor] = {}
    for group in by_block.values():
        apart.update(revert_weight_conversion(model, {fqn: stored[fqn] for fqn in group}))
    if {name: value.shape for name, value in apart.items()} == {name: value.shape for name, value in whole.items()}:
        return list(by_block.values()), apart
    return [list(stored)], whole


def _exported_dtype(name: str, stored: torch.dtype, requested: torch.dtype | None, facts: ExportFacts) -> torch.dtype:
    if not stored.is_floating_point:
        return stored
    if requested is not None or not facts.tensors:
        return requested or stored
    if name in facts.tensors:
        return parse_dtype(facts.tensors[name].dtype, name)
    # A tensor that the source lacked.
    common = Counter(tensor.dtype for tensor in facts.tensors.values()).most_common(1)
    return parse_dtype(common[0][0], name)


def _write_weights(exporter: _Exporter, folder: Path, max_shard_size: str) -> None:
    split = split_torch_state_dict_into_shards(dict(exporter.result), max_shard_size=max_shard_size)
    waiting = dict(split.filename_to_tensors)
    ready: dict[str, torch.Tensor] = {}
    for tensors in exporter.convert():
        ready.update(tensors)
        for file_name in [name for name, names in waiting.items() if ready.keys() >= set(names)]:
            names = waiting.pop(file_name)
            save_file({name: ready.pop(name) for name in names}, folder / file_name, metadata={"format": "pt"})
    assert not waiting, waiting
    assert not ready, ready.keys()
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _write_config(exporter: _Exporter, folder: Path) -> None:
    """Let the config, and those of sub-models, name the dtype that most of the weights have."""
    path = folder / CONFIG_FILE
    config = json.loads(path.read_text(encoding="utf-8"))
    dtype = dtype_name(most_common_dtype(exporter.result.values()))
    for part in (config, *(config.get(key) or {} for key in exporter.model.config.sub_configs)):
        if part is config or "dtype" in part:
            part["dtype"] = dtype
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")

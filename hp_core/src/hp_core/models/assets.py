"""What a HuggingFace folder has besides weights, kept with every training checkpoint so that it can be exported."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from transformers import PreTrainedModel

from hp_core.models.auto import weight_source
from hp_core.models.checkpoint_files import open_checkpoint
from hp_core.models.dtypes import dtype_name
from hp_core.models.source import CheckpointSource

ASSETS_FOLDER = "hf"
"""The folder of a training checkpoint that holds them."""

MODEL_PREFIX = "model."
"""What stands before the FQN of a parameter or buffer in a training checkpoint."""

WEIGHTS_FILE = "weights.json"
_GENERATION_FILE = "generation_config.json"
_COPIED = (
    _GENERATION_FILE,
    "*.py",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
)


@dataclass(frozen=True)
class SourceTensor:
    """A tensor of the source checkpoint: its dtype by torch's name, and its shape."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ExportFacts:
    """What an export has to know and a config does not say.

    `tensors`: those of the source checkpoint, by name; none after random init. `model_class`: the dotted path of
    a user's own class; None when transformers finds the class by the config.
    """

    tensors: dict[str, SourceTensor]
    model_class: str | None

    def write(self, folder: Path) -> None:
        """Write `weights.json` into `folder`."""
        (folder / WEIGHTS_FILE).write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> ExportFacts:
        """What `write` has written into `folder`."""
        data = json.loads((folder / WEIGHTS_FILE).read_text(encoding="utf-8"))
        tensors = {name: SourceTensor(each["dtype"], tuple(each["shape"])) for name, each in data["tensors"].items()}
        return cls(tensors, data["model_class"])


def save_assets(model: PreTrainedModel, folder: Path) -> None:
    """Write config, generation config, custom code and tokenizer of `model` into `folder`, with `weights.json`.

    `model` may be on the meta device. Files that a training run does not change come from the folder that it was
    built from, as they are.
    """
    source = weight_source(model)
    if source is not None and source.path is not None:
        for pattern in _COPIED:
            for path in source.path.glob(pattern):
                if path.is_file():
                    shutil.copyfile(path, folder / path.name)
    config = copy.deepcopy(model.config)
    config.architectures = config.architectures or [type(model).__name__]
    config.save_pretrained(folder)
    if model.can_generate() and not (folder / _GENERATION_FILE).exists():
        model.generation_config.save_pretrained(folder)
    _export_facts(model).write(folder)


def _export_facts(model: PreTrainedModel) -> ExportFacts:
    source = weight_source(model)
    tensors = {}
    if isinstance(source, CheckpointSource):
        for name, tensor in open_checkpoint(source.path).items():
            tensors[name] = SourceTensor(dtype_name(tensor.rows(slice(None)).dtype), tensor.shape)
    own = type(model)
    is_own = own.is_custom_code() and not own.is_remote_code()
    return ExportFacts(tensors, f"{own.__module__}.{own.__qualname__}" if is_own else None)

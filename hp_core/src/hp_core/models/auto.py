"""`HyperAutoModelForCausalLM`: the plain HuggingFace model on the meta device, and where its weights are."""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from hp_core.config import ModelConfig, instantiate, load_target
from hp_core.errors import ModelError
from hp_core.models.build import build_on_meta
from hp_core.models.checkpoint_files import open_checkpoint
from hp_core.models.crop import check_cropped, crop_config
from hp_core.models.dtypes import most_common_dtype, parse_dtype
from hp_core.models.source import (
    CheckpointSource,
    RandomInit,
    WeightSource,
    check_has_weights,
    find_folder,
    one_line,
    read_config,
)

WEIGHT_SOURCE = "hp_weight_source"


@dataclass(frozen=True)
class _Request:
    """What the user asks for besides config and weights."""

    own_class: type[PreTrainedModel] | None
    num_hidden_layers: int | None
    torch_dtype: str | torch.dtype | None
    attn_implementation: str | None
    trust_remote_code: bool

    def read_config(self, path: Path) -> PretrainedConfig:
        return read_config(path, self.trust_remote_code, self.own_class.config_class if self.own_class else None)


class HyperAutoModelForCausalLM:
    """Builds HF causal language models for hp: an instance of the plain HF class (or of a user's own).

    Parameters are on the meta device and buffers are real. `model.hp_weight_source`, a `CheckpointSource` or a
    `RandomInit`, says what the parameters are to be filled with once they are sharded.
    """

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        num_hidden_layers: int | None = None,
        torch_dtype: str | torch.dtype | None = None,
        attn_implementation: str | None = None,
        model_class: str | type[PreTrainedModel] | None = None,
        force_hf: bool = True,
        local_files_only: bool = True,
        trust_remote_code: bool = False,
        init_missing_weights: bool = False,
    ) -> PreTrainedModel:
        """The model of a folder with config and weights, or of a name in the local HF cache.

        `num_hidden_layers` keeps the first layers only. `torch_dtype` is the dtype of the parameters; None and `auto`
        take the config's, or else the checkpoint's. `model_class` is a user's own modified class, or its dotted path;
        who calls has to trust it. Raises ModelError.
        """
        _check_force_hf(force_hf)
        own_class = _own_class(model_class)
        request = _Request(own_class, num_hidden_layers, torch_dtype, attn_implementation, trust_remote_code)
        folder = find_folder(pretrained_model_name_or_path, local_files_only)
        config = request.read_config(folder)
        check_has_weights(folder)
        if getattr(config, "quantization_config", None) is not None:
            raise ModelError(f"model {folder}: its weights are quantised (quantization_config); hp trains plain ones")
        dtype = _dtype(torch_dtype, config) or _main_dtype_of_files(folder)
        return _build(config, dtype, request, CheckpointSource(folder, init_missing_weights))

    @classmethod
    def from_config(
        cls,
        config_path: str | Path | PretrainedConfig,
        *,
        num_hidden_layers: int | None = None,
        torch_dtype: str | torch.dtype | None = None,
        attn_implementation: str | None = None,
        model_class: str | type[PreTrainedModel] | None = None,
        force_hf: bool = True,
        local_files_only: bool = True,
        trust_remote_code: bool = False,
    ) -> PreTrainedModel:
        """The model of a config (a folder, a config.json, a name in the HF cache or a config object), to be filled
        with random weights. Arguments as in `from_pretrained`; the dtype of a config without one is float32."""
        _check_force_hf(force_hf)
        own_class = _own_class(model_class)
        request = _Request(own_class, num_hidden_layers, torch_dtype, attn_implementation, trust_remote_code)
        folder: Path | None = None
        if isinstance(config_path, PretrainedConfig):
            config = copy.deepcopy(config_path)
        else:
            path = Path(config_path).expanduser()
            path = path if path.is_file() else find_folder(config_path, local_files_only)
            config = request.read_config(path)
            folder = path.parent if path.is_file() else path
        if hasattr(config, "quantization_config"):
            # It describes the weights of the checkpoint that the config came with.
            del config.quantization_config
        return _build(config, _dtype(torch_dtype, config) or torch.float32, request, RandomInit(folder))


def build_from_config(config: ModelConfig) -> PreTrainedModel:
    """The model that the `model` section of a run configuration describes: what its `_target_` makes.

    A factory of the user's gets the keys that are set, and has to return a model that says where its weights are, as
    those of `HyperAutoModelForCausalLM` do.
    """
    arguments = {
        field.name: value
        for field in fields(config)
        if field.name not in ("target", "args") and (value := getattr(config, field.name)) != field.default
    }
    arguments |= config.args
    model: Any = instantiate(config.target, arguments)
    if not isinstance(model, PreTrainedModel) or not isinstance(weight_source(model), WeightSource):
        raise ModelError(
            f"model._target_ {config.target}: expected a model from HyperAutoModelForCausalLM, found "
            f"{type(model).__name__} without {WEIGHT_SOURCE}. Make it there (model_class is for a class of your own)."
        )
    return model


def weight_source(model: nn.Module) -> WeightSource | None:
    """What the parameters of `model` are to be filled with, if it was built by hp."""
    return getattr(model, WEIGHT_SOURCE, None)


def vocabulary_size(model: PreTrainedModel) -> int:
    """How many token ids the model has embeddings for."""
    return int(model.get_input_embeddings().weight.shape[0])


def _build(config: PretrainedConfig, dtype: torch.dtype, request: _Request, source: WeightSource) -> PreTrainedModel:
    _check_causal(config)
    layers = request.num_hidden_layers
    if layers is None:
        model = _construct(config, dtype, request)
    else:
        model = _construct(crop_config(config, layers), dtype, request)
        total = config.get_text_config().num_hidden_layers
        if layers < total:
            check_cropped(model, _construct(config, dtype, request), layers, total)
    setattr(model, WEIGHT_SOURCE, source)
    return model


def _construct(config: PretrainedConfig, dtype: torch.dtype, request: _Request) -> PreTrainedModel:
    # The constructor may write into its config.
    arguments: dict[str, Any] = {"config": copy.deepcopy(config), "dtype": dtype}
    if request.attn_implementation is not None:
        arguments["attn_implementation"] = request.attn_implementation
    if request.own_class is not None:
        factory = request.own_class._from_config
    else:
        factory = AutoModelForCausalLM.from_config
        arguments["trust_remote_code"] = request.trust_remote_code
    try:
        return build_on_meta(lambda: factory(**arguments))
    except ModelError:
        raise
    except Exception as error:  # Constructors are code of transformers, the user or a repository.
        raise ModelError(f"model {config.name_or_path or config.model_type}: {one_line(error)}") from error


def _check_force_hf(force_hf: bool) -> None:
    if not force_hf:
        raise ModelError("model.force_hf: false is not supported: hp always builds the HuggingFace class")


def _own_class(model_class: str | type[PreTrainedModel] | None) -> type[PreTrainedModel] | None:
    found: Any = load_target(model_class) if isinstance(model_class, str) else model_class
    if found is not None and not (isinstance(found, type) and issubclass(found, PreTrainedModel)):
        raise ModelError(f"model.model_class: expected a subclass of transformers.PreTrainedModel, found {found!r}")
    return found


def _check_causal(config: PretrainedConfig) -> None:
    """Raises ModelError for encoders: transformers has causal language models for some, with two-way attention."""
    text = config.get_text_config()
    is_masked = text.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and getattr(text, "is_decoder", None) is False
    if config.is_encoder_decoder or is_masked:
        kind = "encoder-decoder" if config.is_encoder_decoder else "encoder"
        raise ModelError(
            f"model {config.name_or_path or config.model_type}: {config.model_type} is an {kind} model, not a causal "
            "language model"
        )


def _dtype(requested: str | torch.dtype | None, config: PretrainedConfig) -> torch.dtype | None:
    """The requested dtype, or the config's, which may have none."""
    found: Any = requested
    if requested in (None, "auto"):
        found = config.dtype if config.dtype is not None else config.get_text_config().dtype
    return parse_dtype(found, "model.torch_dtype") if isinstance(found, str) else found


def _main_dtype_of_files(folder: Path) -> torch.dtype:
    return most_common_dtype(tensor.rows(slice(None)) for tensor in open_checkpoint(folder).values())

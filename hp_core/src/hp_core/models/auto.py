"""`HyperAutoModelForCausalLM`: the plain HuggingFace model on the meta device, and where its weights are."""

from __future__ import annotations

import copy
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from hp_core.config import ModelConfig, instantiate, load_target
from hp_core.errors import ConfigError, ModelError
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
        take the config's, or else the checkpoint's. `model_class` is a user's own modified class. Raises ModelError.
        """
        folder = find_folder(pretrained_model_name_or_path, local_files_only)
        own_class = _own_class(model_class)
        config = read_config(folder, trust_remote_code, own_class and own_class.config_class)
        check_has_weights(folder)
        if getattr(config, "quantization_config", None) is not None:
            raise ModelError(
                f"model {folder}: its weights are quantised (quantization_config); hp trains unquantised ones"
            )
        source = CheckpointSource(folder, init_missing_weights, _layers_before_crop(config, num_hidden_layers))
        dtype = _dtype(torch_dtype, config) or _main_dtype_of_files(folder)
        return _build(
            config, own_class, source, num_hidden_layers, dtype, attn_implementation, force_hf, trust_remote_code
        )

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
        own_class = _own_class(model_class)
        folder: Path | None = None
        if isinstance(config_path, PretrainedConfig):
            config = copy.deepcopy(config_path)
        else:
            path = Path(config_path).expanduser()
            path = path if path.is_file() else find_folder(config_path, local_files_only)
            config = read_config(path, trust_remote_code, own_class and own_class.config_class)
            folder = path.parent if path.is_file() else path
        if hasattr(config, "quantization_config"):
            # It describes the weights of the checkpoint that the config came with.
            del config.quantization_config
        dtype = _dtype(torch_dtype, config) or torch.float32
        return _build(
            config,
            own_class,
            RandomInit(folder),
            num_hidden_layers,
            dtype,
            attn_implementation,
            force_hf,
            trust_remote_code,
        )


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


def _build(
    config: PretrainedConfig,
    own_class: type[PreTrainedModel] | None,
    source: WeightSource,
    num_hidden_layers: int | None,
    dtype: torch.dtype,
    attn_implementation: str | None,
    force_hf: bool,
    trust_remote_code: bool,
) -> PreTrainedModel:
    if not force_hf:
        raise ConfigError("model.force_hf: false is not supported: hp always builds the HuggingFace class")
    _check_causal(config)

    def build(config: PretrainedConfig) -> PreTrainedModel:
        # The constructor may write into its config.
        arguments: dict[str, Any] = {"config": copy.deepcopy(config), "dtype": dtype}
        if attn_implementation is not None:
            arguments["attn_implementation"] = attn_implementation
        factory = own_class._from_config if own_class is not None else AutoModelForCausalLM.from_config
        if own_class is None:
            arguments["trust_remote_code"] = trust_remote_code
        try:
            return build_on_meta(lambda: factory(**arguments))
        except ModelError:
            raise
        except (ValueError, KeyError, TypeError, OSError, ImportError, AttributeError, RuntimeError) as error:
            raise ModelError(f"model {config.name_or_path or config.model_type}: {one_line(error)}") from error

    if num_hidden_layers is None:
        model = build(config)
    else:
        model = build(crop_config(config, num_hidden_layers))
        total = config.get_text_config().num_hidden_layers
        if num_hidden_layers < total:
            check_cropped(model, build(config), num_hidden_layers, total)
    setattr(model, WEIGHT_SOURCE, source)
    return model


def _own_class(model_class: str | type[PreTrainedModel] | None) -> type[PreTrainedModel] | None:
    found: Any = load_target(model_class) if isinstance(model_class, str) else model_class
    if found is not None and not (isinstance(found, type) and issubclass(found, PreTrainedModel)):
        raise ModelError(f"model.model_class: expected a subclass of transformers.PreTrainedModel, found {found!r}")
    return found


def _check_causal(config: PretrainedConfig) -> None:
    text = config.get_text_config()
    if getattr(config, "is_encoder_decoder", False) or getattr(text, "is_decoder", None) is False:
        kind = "encoder-decoder" if getattr(config, "is_encoder_decoder", False) else "encoder"
        raise ModelError(
            f"model {config.name_or_path or config.model_type}: {config.model_type} is an {kind} model, not a causal "
            "language model"
        )


def _layers_before_crop(config: PretrainedConfig, num_hidden_layers: int | None) -> int | None:
    total = getattr(config.get_text_config(), "num_hidden_layers", None)
    return total if num_hidden_layers is not None and num_hidden_layers != total else None


def _dtype(requested: str | torch.dtype | None, config: PretrainedConfig) -> torch.dtype | None:
    """The requested dtype, or the config's, which may have none."""
    found: Any = requested
    if requested in (None, "auto"):
        found = config.dtype if config.dtype is not None else config.get_text_config().dtype
    return parse_dtype(found, "model.torch_dtype") if isinstance(found, str) else found


def _main_dtype_of_files(folder: Path) -> torch.dtype:
    return most_common_dtype(tensor.rows(slice(None)) for tensor in open_checkpoint(folder).values())

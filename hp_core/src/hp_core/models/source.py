"""Where a model's config and weights come from: folders found and read, and what is wrong with them in one line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled
from transformers import AutoConfig, PretrainedConfig

from hp_core.errors import ModelError

CONFIG_FILE = "config.json"
_WANTED_FILES = ["*.json", "*.safetensors", "*.py", "*.model", "*.txt", "*.tiktoken", "*.jinja"]


@dataclass(frozen=True)
class CheckpointSource:
    """The weights are in the HF folder `path`.

    `init_missing` allows tensors that the folder lacks, which then get random values.
    """

    path: Path
    init_missing: bool = False


@dataclass(frozen=True)
class RandomInit:
    """The weights are random. `path` is the folder that the config came from, if any."""

    path: Path | None = None


WeightSource = CheckpointSource | RandomInit


def find_folder(name_or_path: str | Path, local_files_only: bool) -> Path:
    """The local folder of a model: a path, or a name on the HF hub, from the local cache or (if allowed) downloaded.

    Raises ModelError when it is neither.
    """
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        return folder
    where = "no such folder, and not in the local HF cache. Correct the path, download the model"
    where += " or set model.local_files_only: false" if local_files_only else ""
    try:
        return Path(
            snapshot_download(str(name_or_path), local_files_only=local_files_only, allow_patterns=_WANTED_FILES)
        )
    except HFValidationError as error:
        raise ModelError(f"model {name_or_path}: no such folder (and not a name on the HF hub)") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise ModelError(f"model {name_or_path}: {where}") from error
    except (HfHubHTTPError, OSError) as error:
        raise ModelError(f"model {name_or_path}: not a folder, and not on the HF hub: {one_line(error)}") from error


def check_has_weights(folder: Path) -> None:
    """Raises ModelError for a folder without safetensors files (case IN-06); what is in them is checked on loading."""
    if any(folder.glob("*.safetensors")):
        return
    others = sorted(path.name for path in folder.glob("*.bin"))
    if others:
        raise ModelError(
            f"model {folder}: expected safetensors files, found {others[0]}. Save it again with save_pretrained."
        )
    raise ModelError(
        f"model {folder}: has a {CONFIG_FILE} but no weights (*.safetensors). Add them, or ask for random weights: "
        "model._target_ ….from_config with model.config_path."
    )


def read_config(path: Path, trust_remote_code: bool, config_class: type[PretrainedConfig] | None) -> PretrainedConfig:
    """The config in a folder or a config.json, read by `config_class` or else by the class of its `model_type`.

    Raises ModelError when there is none, when it is not valid, or when its `model_type` is not known.
    """
    file = path / CONFIG_FILE if path.is_dir() else path
    if not file.is_file():
        raise ModelError(f"model {path}: there is no {CONFIG_FILE}. Give a folder that has one.")
    # A folder is what transformers finds the code of `auto_map` by; a config of another name can have none.
    location = file.parent if file.name == CONFIG_FILE else file
    try:
        if config_class is not None:
            return config_class.from_pretrained(location)
        return AutoConfig.from_pretrained(location, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # Config classes are code of transformers, the user or a repository.
        if "trust_remote_code" in str(error):
            raise ModelError(
                f"{file}: the model needs the code in its folder (auto_map). Read it, then set "
                "model.trust_remote_code: true."
            ) from error
        raise ModelError(f"{file}: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """The first sentences of what a library says, in one line."""
    text = " ".join((str(error) or type(error).__name__).split())
    return text if len(text) <= 300 else f"{text[:300]}…"

"""The typed run configuration. A key that is not here, and that no selected plugin owns, is an error.

Sections with `target` can be handed to a factory of the user's: `_target_` in YAML. The keys of the section are then
the factory's arguments, collected in `args`; only the keys that core itself reads keep their types.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hp_core.config.keys import key

HYPER_AUTO = "hp_core.models.HyperAutoModelForCausalLM"
FROM_PRETRAINED = f"{HYPER_AUTO}.from_pretrained"
FROM_CONFIG = f"{HYPER_AUTO}.from_config"


@dataclass(frozen=True)
class ModelConfig:
    """The HuggingFace model. It is built without weights, which are loaded after it has been split."""

    target: str = key(
        FROM_PRETRAINED, f"`{FROM_PRETRAINED}`, `{FROM_CONFIG}` or another factory of a model", role="target"
    )
    pretrained_model_name_or_path: str | None = key(None, "config and weights; goes with `from_pretrained`")
    config_path: str | None = key(None, "a folder or config.json, for random weights; goes with `from_config`")
    model_class: str | None = key(None, "dotted name of your own model class, instead of the one HF chooses")
    num_hidden_layers: int | None = key(None, "keep only so many layers; null keeps all", minimum=1)
    torch_dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] | None = key(
        None, "dtype that parameters are stored in; null: the checkpoint's, or float32 with `mixed_precision`"
    )
    attn_implementation: str | None = key(None, "HF attention (`eager`, `sdpa`, ...); null: HF's choice")
    force_hf: Literal[True] = key(True, "always true: the model is HF's own")
    local_files_only: bool = key(True, "never fetch from the hub")
    trust_remote_code: bool = key(False, "run modelling code that comes with the checkpoint")
    init_missing_weights: bool = key(False, "initialise tensors that the checkpoint lacks, instead of failing")
    args: Mapping[str, Any] = key({}, "arguments of another factory", role="collected")


@dataclass(frozen=True)
class TrainingConfig:
    """The length of the run and its batches. At most one of train_iters, train_samples and num_epochs."""

    train_iters: int | None = key(None, "stop after so many optimizer steps", minimum=1)
    train_samples: int | None = key(None, "stop after so many sequences", minimum=1)
    num_epochs: int | None = key(None, "stop after so many passes over the data", minimum=1)
    global_batch_size: int = key(8, "sequences per optimizer step, over all ranks", minimum=1)
    micro_batch_size: int = key(1, "sequences per forward of one data rank", minimum=1)
    backend: Literal["gloo", "nccl", "hccl"] | None = key(
        None, "decides the device: gloo CPU, nccl CUDA, hccl Ascend; null: the accelerator that is there, else the CPU"
    )
    init_device: Literal["meta"] = key("meta", "where the model is built, before weights are loaded")
    loss_aggregation: Literal["token_weighted"] = key(
        "token_weighted", "the loss is the mean over all valid tokens of an optimizer step"
    )
    max_grad_norm: float | None = key(1.0, "clip the global gradient norm; null does not clip", above=0)
    seed: int = key(1234, "of initialisation, data order and dropout", minimum=0)
    enable_full_determinism: bool = key(False, "deterministic kernels only, bit-equal runs; slower")
    eval_iters: int = key(0, "optimizer-step batches per evaluation; 0: the whole evaluation data", minimum=0)
    eval_interval: int = key(0, "evaluate every so many steps; 0: at the end only", minimum=0)
    logging_steps: int = key(1, "log every so many steps", minimum=1)


@dataclass(frozen=True)
class AcceleratorConfig:
    """Sizes of parallel degrees. All but `pp_size` belong to strategies."""

    pp_size: Literal[1] = key(1, "there is no pipeline parallelism")


@dataclass(frozen=True)
class DatasetConfig:
    """Training text, as JSON lines."""

    path: str | list[str] | None = key(None, "a file, a glob or a list of them")
    eval_path: str | list[str] | None = key(None, "the same, for evaluation")
    format: Literal["text", "chat", "tokens"] = key(
        "text", "of a record: `text`, `messages` (loss on the assistant's turns), or `input_ids` and optional `labels`"
    )
    tokenizer: str | None = key(None, "folder of the tokenizer; null: the model's")
    seq_length: int = key(1024, "tokens per sequence", minimum=1, shared=True)
    shuffle: bool = key(True, "another order of documents in every epoch", shared=True)
    packing: bool = key(
        True, "join documents, isolated from each other, into full sequences; else pad each", shared=True
    )
    append_eos: bool = key(True, "end every text document with the tokenizer's end token")
    text_key: str = key("text", "field of a text record")
    on_bad_line: Literal["error", "skip"] = key(
        "error", "skip counts and reports the lines that it leaves out", shared=True
    )
    target: str | None = key(None, "a factory of your own: a dataset of mappings with `input_ids`", role="target")
    args: Mapping[str, Any] = key({}, "its arguments", role="collected")


@dataclass(frozen=True)
class DataloaderConfig:
    """How data is read."""

    num_workers: int = key(0, "background processes that read and pack; 0: the training process itself", minimum=0)
    target: str | None = key(None, "a factory of your own, in place of hp's loader (see `build_loader`)", role="target")
    args: Mapping[str, Any] = key({}, "its arguments", role="collected")


@dataclass(frozen=True)
class OptimizerConfig:
    """Any torch optimizer. Further keys are its arguments (`momentum`, `fused`, ...); the learning rate is not here."""

    target: str = key("torch.optim.AdamW", "the optimizer's class", role="target")
    weight_decay: float = key(0.01, "of the parameters that are decayed", minimum=0, argument=True)
    betas: tuple[float, float] = key((0.9, 0.95), "decay rates of the moments", minimum=0, argument=True)
    eps: float = key(1e-8, "added to the denominator", minimum=0, argument=True)
    no_decay_params: list[str] | None = key(
        None,
        "globs of parameters without weight decay; null: those with fewer than two dims (norms, biases)",
        shared=True,
    )
    args: Mapping[str, Any] = key({}, "its further arguments", role="collected")


@dataclass(frozen=True)
class LrSchedulerConfig:
    """The learning rate over optimizer steps."""

    lr_decay_style: Literal["constant", "linear", "cosine", "wsd"] = key(
        "cosine", "shape after the warm-up; wsd stays constant, then decays"
    )
    lr: float = key(1e-4, "the highest learning rate", minimum=0, shared=True)
    min_lr: float = key(0.0, "where the decay ends", minimum=0)
    lr_warmup_steps: int = key(0, "steps that rise to `lr`", minimum=0)
    lr_decay_steps: int | None = key(
        None, "step at which the decay ends, null: the last; for wsd its length, null: a tenth of the run", minimum=1
    )
    target: str | None = key(None, "a factory of your own that takes the optimizer", role="target")
    args: Mapping[str, Any] = key({}, "its arguments", role="collected")


@dataclass(frozen=True)
class ActivationCheckpointConfig:
    """What is recomputed in backward instead of kept."""

    mode: Literal["off", "full", "selective"] = key(
        "off", "full recomputes every block; selective keeps matrix products and attention"
    )


@dataclass(frozen=True)
class MixedPrecisionConfig:
    """Precision of the computation."""

    enabled: bool = key(False, "keep float32 parameters, compute in bfloat16, reduce gradients in float32")


@dataclass(frozen=True)
class CheckpointConfig:
    """Training checkpoints, to resume from and to export."""

    save_ckpt: bool = key(False, "save at all")
    checkpoint_dir: str | None = key(None, "where; null: `<output_dir>/checkpoints`")
    save_steps: int = key(0, "save every so many steps; 0: at the end only", minimum=0)
    restore_from: str | None = key(None, "a checkpoint folder, or LATEST; null starts afresh")


@dataclass(frozen=True)
class DebugConfig:
    """Checks that cost time."""

    check_nan_inf: bool = key(False, "stop at the first loss or gradient that is not finite, and name the parameter")


@dataclass(frozen=True)
class ProfilingConfig:
    """A torch profiler trace per rank."""

    enabled: bool = key(False, "write traces")
    start_step: int = key(2, "first step of the trace; the run's first step is 1", minimum=1)
    end_step: int = key(3, "its last step, inclusive", minimum=1)
    trace_dir: str | None = key(None, "where; null: `<output_dir>/trace`")


@dataclass(frozen=True)
class RunConfig:
    """One run. `options` holds the `Options` instance of every selected plugin, in the configured order."""

    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    accelerator: AcceleratorConfig = field(default_factory=AcceleratorConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    dataloader: DataloaderConfig = field(default_factory=DataloaderConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_scheduler: LrSchedulerConfig = field(default_factory=LrSchedulerConfig)
    activation_checkpoint: ActivationCheckpointConfig = field(default_factory=ActivationCheckpointConfig)
    mixed_precision: MixedPrecisionConfig = field(default_factory=MixedPrecisionConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)
    output_dir: str = key("outputs", "folder of everything that the run writes")
    trusted_targets: list[str] = key([], "further import roots that a `_target_` may name")
    options: Mapping[str, Any] = key({}, "filled from the keys of the selected plugins", role="collected")

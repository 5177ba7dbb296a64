"""The typed run configuration. A key that is not here, and that no selected plugin owns, is an error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

HYPER_AUTO = "hp_core.models.HyperAutoModelForCausalLM"


@dataclass
class ModelConfig:
    """`target` (`_target_` in YAML) is a factory; the other fields are its arguments.

    `pretrained_model_name_or_path` (weights and config) goes with `from_pretrained`, `config_path` (a folder or a
    config.json; random weights) with `from_config`. `torch_dtype` is the dtype that parameters are stored in;
    without it the checkpoint's, or float32 with mixed precision. `model_class` is a user's own class, dotted.
    """

    target: str = f"{HYPER_AUTO}.from_pretrained"
    pretrained_model_name_or_path: str | None = None
    config_path: str | None = None
    model_class: str | None = None
    num_hidden_layers: int | None = None
    torch_dtype: str | None = None
    attn_implementation: str | None = None
    force_hf: bool = True
    local_files_only: bool = True
    trust_remote_code: bool = False
    init_missing_weights: bool = False


@dataclass
class TrainingConfig:
    """Batch sizes count sequences: `micro_batch_size` per data rank, `global_batch_size` per optimizer step.

    One of `train_iters`, `train_samples` and `num_epochs` says when to stop. `backend` decides the device:
    gloo cpu, nccl cuda, hccl npu; without it the accelerator that is there, else the CPU.
    """

    train_iters: int | None = None
    train_samples: int | None = None
    num_epochs: int | None = None
    global_batch_size: int = 8
    micro_batch_size: int = 1
    backend: str | None = None
    init_device: str = "meta"
    loss_aggregation: str = "token_weighted"
    max_grad_norm: float | None = 1.0
    seed: int = 1234
    enable_full_determinism: bool = False
    eval_iters: int = 0
    eval_interval: int = 0
    logging_steps: int = 1


@dataclass
class AcceleratorConfig:
    """Only `pp_size: 1`; the other keys of this section belong to strategies."""

    pp_size: int = 1


@dataclass
class DatasetConfig:
    """hp's plain form. `path` is a file, a glob or a list of them; `format` is text, chat or tokens.

    `append_eos` ends every text document with the tokenizer's end token. `packing` joins documents into rows of
    `seq_length` tokens; without it every document is a padded row of its own. `on_bad_line` is error or skip.
    `eval_path` is read the same way for evaluation.
    """

    path: Any = None
    eval_path: Any = None
    format: str = "text"
    tokenizer: str | None = None
    seq_length: int = 1024
    shuffle: bool = True
    packing: bool = True
    append_eos: bool = True
    text_key: str = "text"
    on_bad_line: str = "error"


@dataclass
class DataloaderConfig:
    """`num_workers` background processes read, tokenise and pack; 0 does it in the training process."""

    num_workers: int = 0


@dataclass
class OptimizerConfig:
    """`target` (`_target_`) is any `torch.optim` class; `args` are its further arguments.

    Parameters that match a glob of `no_decay_params` get no weight decay; without it those with fewer than two
    dims (norms, biases).
    """

    target: str = "torch.optim.AdamW"
    weight_decay: float = 0.01
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    no_decay_params: list[str] | None = None
    args: dict[str, Any] = field(default_factory=dict)


@dataclass
class LrSchedulerConfig:
    """`lr_decay_style` is constant, linear, cosine or wsd; steps are optimizer steps."""

    lr_decay_style: str = "cosine"
    lr: float = 1e-4
    min_lr: float = 0.0
    lr_warmup_steps: int = 0
    lr_decay_steps: int | None = None


@dataclass
class ActivationCheckpointConfig:
    """`mode` is off, full (recompute every block) or selective (keep matrix products and attention)."""

    mode: str = "off"


@dataclass
class MixedPrecisionConfig:
    """`enabled` keeps fp32 parameters, computes in bf16 and reduces gradients in fp32."""

    enabled: bool = False


@dataclass
class CheckpointConfig:
    """`save_steps: 0` saves at the end only. `restore_from` is a checkpoint folder or LATEST."""

    save_ckpt: bool = False
    checkpoint_dir: str | None = None
    save_steps: int = 0
    restore_from: str | None = None


@dataclass
class DebugConfig:
    """`check_nan_inf` stops at the first loss or gradient that is not finite and names the parameter."""

    check_nan_inf: bool = False


@dataclass
class ProfilingConfig:
    """A torch profiler trace of steps `start_step` to `end_step` (inclusive) per rank in `trace_dir`."""

    enabled: bool = False
    start_step: int = 2
    end_step: int = 3
    trace_dir: str | None = None


@dataclass
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
    output_dir: str = "outputs"
    trusted_targets: list[str] = field(default_factory=list)
    options: Mapping[str, Any] = field(default_factory=dict)

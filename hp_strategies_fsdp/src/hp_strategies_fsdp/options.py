"""The keys of `fsdp_config`."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class MixPrecision:
    """Dtype names for FSDP's own casts. What is not given follows the run: `model.torch_dtype` and `mixed_precision`.

    `output_dtype` casts the model's outputs; `cast_forward_inputs` casts floating-point inputs of every block to
    the compute dtype.
    """

    param_dtype: str | None = None
    reduce_dtype: str | None = None
    output_dtype: str | None = None
    cast_forward_inputs: bool = True


@dataclass(frozen=True)
class Options:
    """How dense parameters are stored and gathered.

    `dp_shard_size` ranks share one copy of the parameters, the rest replicate (HSDP); absent or -1: all data and
    sequence ranks. `edp_shard_size` is the same for experts and needs expert parallelism. Parameters that match a
    glob of `replicate_params` stay whole on every rank.

    `reshard_after_forward` frees a block's gathered parameters until its backward (the root keeps its own: backward
    needs them at once), `reshard_after_backward` until the next micro-batch; after the last one they are always
    freed, since the optimizer changes them. `requires_grad_sync: false` reduces gradients only at the last
    micro-batch of a step. The prefetch depths say how many blocks are gathered ahead. `enable_offload` keeps
    parameters, gradients and optimizer state on the CPU.
    """

    dp_shard_size: int | None = None
    edp_shard_size: int | None = None
    replicate_params: list[str] = field(default_factory=list)
    reshard_after_forward: bool = True
    reshard_after_backward: bool = True
    requires_grad_sync: bool = True
    forward_prefetch_depth: int = 1
    backward_prefetch_depth: int = 1
    mix_precision: MixPrecision = field(default_factory=MixPrecision)
    enable_offload: bool = False

"""Sequence parallelism: between regions, hidden states are split along the sequence.

They are split at the first decoder block, so that HF's own mask and rotary code sees the full sequence, and joined
after the last. In a block only what is known to work token by token (norms, routers, linear modules) sees a part of the
sequence; regions gather it where they are entered and scatter their sums; every other module gets the whole sequence
and gives back its part. Parameters that see a part have partial gradients.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from hp_core import Boundary, ModelError, Partial, Replicate, Shard, decoder_blocks, enter, leave, outside
from hp_strategies_tp.hf_plan import Style, Styled
from hp_strategies_tp.regions import Region, is_norm
from hp_strategies_tp.styles import AXIS

SEQUENCE = Shard(-2)
"""Of `[B, S, H]`, and of the `[N, H]` that it is flattened to."""

_SOURCE = "sequence_parallel"
# Arguments that are the same for the whole sequence, or that only attention reads, which gets the whole sequence.
_WHOLE = frozenset(
    (
        *("attention_mask", "causal_mask", "padding_mask", "conv_mask", "mamba_mask", "linear_attn_mask", "seq_idx"),
        *("position_ids", "position_embeddings", "position_bias", "sliding_window", "layer_idx"),
        *("past_key_values", "past_key_value", "layer_past", "cache", "cache_params", "cache_position", "use_cache"),
        *("output_attentions", "output_router_logits"),
    )
)


@dataclass
class Split:
    """What splitting the sequence adds to the plan: boundaries to put over those of modules, and parameters whose
    gradients become partial."""

    boundaries: dict[str, Boundary] = field(default_factory=dict)
    partial: list[str] = field(default_factory=list)


def split_sequence(model: nn.Module, styled: Mapping[str, Styled], regions: Mapping[str, Region]) -> Split:
    """Split the hidden states of `model`. Raises ModelError, by name, for a model that is not understood."""
    blocks = decoder_blocks(model)
    name = type(model).__name__
    if not blocks:
        raise ModelError(f"accelerator.sequence_parallel: {name} has no repeated blocks")
    if len({fqn.rpartition(".")[0] for fqn in blocks}) > 1:
        raise ModelError(f"accelerator.sequence_parallel: {name} has blocks in several lists, whose order is unknown")
    split = Split()
    for fqn, block in blocks.items():
        _check_arguments(block, fqn)
        _visit(fqn, block, styled, regions, split)
    first, last = next(iter(blocks)), list(blocks)[-1]
    inputs = {_parameters(blocks[first])[0]: outside(Replicate(), SEQUENCE)}
    split.boundaries[first] = Boundary(AXIS, inputs, {}, _SOURCE)
    into = split.boundaries.get(last, Boundary(AXIS)).inputs
    split.boundaries[last] = Boundary(AXIS, into, {"0": outside(SEQUENCE, Replicate())}, _SOURCE)
    return split


def _visit(
    fqn: str, module: nn.Module, styled: Mapping[str, Styled], regions: Mapping[str, Region], split: Split
) -> None:
    """Lay out what is in `module`, which itself sees a part of the sequence."""
    split.partial += [f"{fqn}.{name}" for name, _ in module.named_parameters(recurse=False)]
    for name, child in module.named_children():
        path = f"{fqn}.{name}"
        if path in regions and regions[path].is_whole:
            _gather_region(path, child, regions[path], split)
        elif path in styled and styled[path].style is Style.EXPERTS:
            inputs = dict.fromkeys(_parameters(child), enter(SEQUENCE, Replicate()))
            split.boundaries[path] = Boundary(AXIS, inputs, {"0": leave(Partial(), SEQUENCE)}, _SOURCE)
        elif _is_token_wise(path, child, styled):
            split.partial += [f"{path}.{parameter}" for parameter, _ in child.named_parameters()]
        elif isinstance(child, nn.ModuleList) or _holds_experts(path, child, styled):
            _visit(path, child, styled, regions, split)
        else:
            _check_arguments(child, path)
            inputs = {_parameters(child)[0]: outside(SEQUENCE, Replicate())}
            split.boundaries[path] = Boundary(AXIS, inputs, {"0": outside(Replicate(), SEQUENCE)}, _SOURCE)


def _gather_region(fqn: str, module: nn.Module, region: Region, split: Split) -> None:
    inputs = {_parameters(module)[0]: enter(SEQUENCE, Replicate())}
    split.boundaries[fqn] = Boundary(AXIS, inputs, {}, _SOURCE)
    for row in region.rows:
        split.boundaries[row] = Boundary(AXIS, {}, {"0": leave(Partial(), SEQUENCE)}, _SOURCE)


def _is_token_wise(fqn: str, module: nn.Module, styled: Mapping[str, Styled]) -> bool:
    """Whether `module` treats every token on its own, and is not split itself."""
    if any(name == fqn or name.startswith(f"{fqn}.") for name in styled):
        return False
    kind = type(module)
    return (
        isinstance(module, nn.Linear | nn.Dropout | nn.Identity)
        or is_norm(module)
        or kind.__name__.lower().endswith(("router", "gate"))
        or kind.__module__ in ("torch.nn.modules.activation", "transformers.activations")
    )


def _holds_experts(fqn: str, module: nn.Module, styled: Mapping[str, Styled]) -> bool:
    """Whether `module` is a mixture of experts: a router, experts, and perhaps a shared expert.

    Experts have to take every token once, and which ones it is for. Raises ModelError for others: tokens that are
    sorted by expert (Llama 4) are no longer split along the sequence.
    """
    experts = [
        child
        for name, child in module.named_children()
        if f"{fqn}.{name}" in styled and styled[f"{fqn}.{name}"].style is Style.EXPERTS
    ]
    if any(len(_parameters(child)) == 1 for child in experts):
        raise ModelError(
            f"accelerator.sequence_parallel: {fqn} ({type(module).__name__}) sorts tokens by expert before its experts "
            "see them"
        )
    return bool(experts)


def _check_arguments(module: nn.Module, fqn: str) -> None:
    unknown = [name for name in _parameters(module)[1:] if name not in _WHOLE]
    if unknown:
        raise ModelError(
            f"accelerator.sequence_parallel: {fqn} ({type(module).__name__}) takes {', '.join(unknown)}: it is not "
            "known whether that lies along the sequence"
        )


def _parameters(module: nn.Module) -> list[str]:
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    return [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]

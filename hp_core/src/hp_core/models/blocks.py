"""The repeated blocks of a model: the units that are sharded, prefetched and checkpointed one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer


def decoder_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The model's repeated blocks, FQN to module, in the order in which the model lists them (its forward order).

    A block is an element of an `nn.ModuleList` that HF calls a unit: its class is in `_no_split_modules` or is a
    `GradientCheckpointingLayer`. In a model that marks none, it is any element that has submodules. What lies inside
    a block is not a block, and a block used in several places counts once, under its first name. Empty when there is
    none.
    """
    names = frozenset(getattr(model, "_no_split_modules", None) or ())

    def is_marked(module: nn.Module) -> bool:
        return isinstance(module, GradientCheckpointingLayer) or type(module).__name__ in names

    def is_composite(module: nn.Module) -> bool:
        return next(module.children(), None) is not None

    return _elements(model, is_marked) or _elements(model, is_composite)


def _elements(model: nn.Module, is_block: Callable[[nn.Module], bool]) -> dict[str, nn.Module]:
    seen: set[nn.Module] = set()

    def walk(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        for name, child in module.named_children():
            if child in seen:
                continue
            seen.add(child)
            fqn = f"{prefix}{name}"
            if isinstance(module, nn.ModuleList) and is_block(child):
                yield fqn, child
            else:
                yield from walk(f"{fqn}.", child)

    return dict(walk("", model))

"""How many heads an attention module has, from the module itself: configs may differ from layer to layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from hp_core import PlanError
from hp_strategies_tp.styles import num_outputs


@dataclass(frozen=True)
class Heads:
    """Numbers of query heads and of key/value heads."""

    num: int
    num_kv: int

    def check(self, size: int, fqn: str) -> None:
        """Raise PlanError unless `size` ranks can share the heads."""
        if self.num % size:
            divisors = [str(n) for n in range(1, self.num + 1) if self.num % n == 0]
            raise PlanError(
                f"accelerator.tp_size: {size} does not divide num_attention_heads = {self.num} ({fqn}). "
                f"Use {', '.join(divisors[:-1])}{' or ' if divisors[:-1] else ''}{divisors[-1]}."
            )
        if self.num_kv % size and size % self.num_kv:
            raise PlanError(
                f"accelerator.tp_size: {size} neither divides num_key_value_heads = {self.num_kv} nor is a multiple "
                f"of it ({fqn})"
            )


def find_heads(module: nn.Module) -> Heads | None:
    """The heads of an attention module; None for a module that has none."""
    head_dim = getattr(module, "head_dim", None)
    key, groups = getattr(module, "k_proj", None), getattr(module, "num_key_value_groups", None)
    if isinstance(key, nn.Linear) and isinstance(head_dim, int) and isinstance(groups, int):
        num_kv = num_outputs(key) // head_dim
        return Heads(num_kv * groups, num_kv)
    num = next((getattr(module, name) for name in ("num_heads", "num_attention_heads") if hasattr(module, name)), None)
    if num is None and hasattr(module, "config") and (head_dim is not None or groups is not None):
        num = getattr(module.config, "num_attention_heads", None)
    return Heads(num, num) if isinstance(num, int) else None

"""Dtypes by name, and the dtype that stands for a whole model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import nn

from hp_core.errors import ConfigError


def parse_dtype(name: str, key: str) -> torch.dtype:
    """A floating-point dtype by its name in torch. Raises ConfigError that starts with `key`."""
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(f"{key}: {name} is not a floating-point dtype. Use bfloat16, float16 or float32.")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """The name of `dtype` as configs write it: `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def most_common_dtype(tensors: Iterable[torch.Tensor]) -> torch.dtype:
    """The floating-point dtype of most elements; float32 when there are none."""
    counts: Counter[torch.dtype] = Counter()
    for tensor in tensors:
        if tensor.is_floating_point():
            counts[tensor.dtype] += tensor.numel()
    return max(counts, key=counts.__getitem__, default=torch.float32)


def main_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of most parameter elements."""
    return most_common_dtype(model.parameters())

"""Which tensors are written to: seen at the level of single tensor operations, whatever code runs above them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

_ALLOCATIONS = frozenset({"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"})


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of the memory of `tensor`: views and `.data` share it, on the meta device too."""
    return int(tensor.untyped_storage()._cdata)


class TensorWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, notes what is allocated without values and what is written in place, by `storage_key`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: set[int] = set()
        # Weak references free the memory but keep its key from being used again.
        self._unwritten: dict[int, StorageWeakRef] = {}

    def is_unwritten(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` was allocated without values (`torch.empty`) and nothing has been written to it since."""
        return storage_key(tensor) in self._unwritten

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.overloadpacket.__name__ in _ALLOCATIONS:
            storage = result.untyped_storage()
            self._unwritten[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        elif func._schema.is_mutable:
            for tensor in _mutated(func, args, kwargs):
                key = storage_key(tensor)
                self.written.add(key)
                self._unwritten.pop(key, None)
        return result


def _mutated(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, torch.Tensor):
                yield tensor

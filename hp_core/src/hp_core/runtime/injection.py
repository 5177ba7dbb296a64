"""Code that a strategy puts inside of a region: around a module's own forward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

Forward = Callable[..., Any]


def inject(module: nn.Module, around: Callable[[Forward], Forward]) -> None:
    """Put `around(forward)` in the place of the forward of this one instance.

    Class, name, parameters and hooks stay; boundaries, which are hooks, lie outside of it.
    """
    forward = module.forward
    # An instance attribute shadows the class's method; Module.__call__ finds it inside of the hooks.
    module.forward = functools.wraps(forward)(around(forward))

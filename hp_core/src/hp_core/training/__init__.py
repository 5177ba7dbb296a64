"""The training loop and its parts."""

from hp_core.training.loss import Term

__all__ = ["Term"]

"""Training data: records to tokens, tokens to packed rows, rows to the batches of a rank."""

from hp_core.data.batch import IGNORE_INDEX, Batch

__all__ = ["IGNORE_INDEX", "Batch"]

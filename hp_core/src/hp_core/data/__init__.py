"""Training data: records to tokens, tokens to packed rows, rows to the batches of a rank."""

from hp_core.data.batch import IGNORE_INDEX, Batch
from hp_core.data.build import build_loader, load_tokenizer
from hp_core.data.loader import BatchLoader, Loader

__all__ = ["IGNORE_INDEX", "Batch", "BatchLoader", "Loader", "build_loader", "load_tokenizer"]

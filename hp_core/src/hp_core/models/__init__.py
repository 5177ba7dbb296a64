"""Models: the plain HuggingFace class built on the meta device, filled with weights, and exported again."""

from hp_core.models.assets import save_assets
from hp_core.models.auto import HyperAutoModelForCausalLM, build_from_config, vocabulary_size, weight_source
from hp_core.models.blocks import decoder_blocks
from hp_core.models.build import build_on_meta
from hp_core.models.dtypes import main_dtype
from hp_core.models.export import export_hf
from hp_core.models.fill import load_weights
from hp_core.models.init import init_shards
from hp_core.models.loss_terms import loss_fault
from hp_core.models.materialize import materialize
from hp_core.models.packing import packing_fault
from hp_core.models.source import CheckpointSource, RandomInit
from hp_core.models.weights import load_checkpoint

__all__ = [
    "CheckpointSource",
    "HyperAutoModelForCausalLM",
    "RandomInit",
    "build_from_config",
    "build_on_meta",
    "decoder_blocks",
    "export_hf",
    "init_shards",
    "load_checkpoint",
    "load_weights",
    "loss_fault",
    "main_dtype",
    "materialize",
    "packing_fault",
    "save_assets",
    "vocabulary_size",
    "weight_source",
]

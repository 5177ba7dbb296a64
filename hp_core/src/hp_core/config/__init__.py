"""The run configuration: typed sections, loading, overriding, validating."""

from hp_core.config.schema import ModelConfig, RunConfig

__all__ = ["ModelConfig", "RunConfig"]

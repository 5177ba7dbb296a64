"""The errors that a user can act on. Each message is one line: who, expected, found, fix."""

from __future__ import annotations


class HpError(ValueError):
    """Base of everything that the user can fix. The command line prints its text and exits with 2."""


class ConfigError(HpError):
    """A key or value in the configuration is wrong."""


class PluginError(HpError):
    """A plugin is absent, broken, incompatible, duplicated or in the wrong place."""


class ModelError(HpError):
    """The model cannot be built, or cannot be trained as configured."""


class WeightsError(HpError):
    """A checkpoint file or tensor is missing, unexpected, mis-shaped or corrupt."""


class PlanError(HpError):
    """The sharding plan is contradictory or incomplete."""


class PlacementError(HpError):
    """A tensor is not where the plan says it is."""


class DataError(HpError):
    """A data file or record cannot be used."""


class CheckpointError(HpError):
    """A training checkpoint cannot be written, found or resumed."""


class TrainingError(HpError):
    """Training cannot go on: a loss or gradient is not finite, for example."""

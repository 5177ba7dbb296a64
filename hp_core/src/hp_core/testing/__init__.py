"""Tools for tests of hp and of its plugins: a pool of ranks and the parity bound."""

from hp_core.testing.parity import assert_close_gradients, gradient_differences
from hp_core.testing.ranks import RankError, RankPool, RankPools

__all__ = ["RankError", "RankPool", "RankPools", "assert_close_gradients", "gradient_differences"]

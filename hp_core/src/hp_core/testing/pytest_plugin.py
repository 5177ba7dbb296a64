"""The pytest fixtures of hp's own tests and of plugin authors': load it with `-p hp_core.testing.pytest_plugin`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hp_core.testing.ranks import RankPools


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPools]:
    """Ranks for tests: `pool(4).run(function, *args)` gives one result per rank."""
    pools = RankPools()
    yield pools
    pools.close()

"""Living ranks that meet in shared memory, whatever the other tests' ranks do."""

import pytest

from distlab.comm import Ranks


@pytest.fixture(scope="package")
def shared_ranks(no_process_left):
    """Make `shared_ranks(n).run(fn)` call fn on n living ranks of backend "shared"."""
    pools = {}

    def of_size(world_size):
        if world_size not in pools:
            pools[world_size] = Ranks(world_size, timeout_s=60, backend="shared")
        return pools[world_size]

    yield of_size
    for pool in pools.values():
        pool.close()

"""Living ranks in two nodes, whatever the other tests' ranks do."""

import pytest

from distlab.comm import Ranks


@pytest.fixture(scope="package")
def node_ranks(no_process_left):
    """Make `node_ranks(n, nodes).run(fn)` call fn on n living ranks in so many nodes."""
    pools = {}

    def of(world_size, nodes=2):
        if (world_size, nodes) not in pools:
            pools[world_size, nodes] = Ranks(world_size, timeout_s=60, nodes=nodes)
        return pools[world_size, nodes]

    yield of
    for pool in pools.values():
        pool.close()

"""Living ranks in nodes, and some that meet in shared memory, whatever the other tests' ranks do."""

import pytest

from distlab.comm import Ranks


def living(**options):
    """Yield what returns that many living ranks; all are ended at the end."""
    pools = {}
    yield lambda size: pools.setdefault(size, Ranks(size, timeout_s=200, **options))  # they start at their first run
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="package")
def shared_ranks(no_process_left):
    """Make `shared_ranks(n).run(fn)` call fn on n living ranks of backend "shared"."""
    yield from living(backend="shared")


@pytest.fixture(scope="package")
def node_ranks(no_process_left):
    """Make `node_ranks(n).run(fn)` call fn on n living ranks in two nodes."""
    yield from living(nodes=2)

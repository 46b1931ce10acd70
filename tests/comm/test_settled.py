"""Which failures of executed text leave ranks that can go on together, and which end them."""

import pytest

from distlab.comm import RankError, Ranks

KEPT = {
    "before any call": "undefined_name",
    "on one rank, nothing said": "if rank == 1:\n    raise ValueError",
    "after a collective of all": "dist.all_reduce(torch.ones(1))\n1 / 0",
    "after a message that was received": "t = torch.ones(1)\ndist.send(t, 1) if rank == 0 else dist.recv(t, 0)\n1 / 0",
}
ENDED = {
    "a message that nobody received": "if rank == 0:\n    dist.send(torch.ones(1), 1)\n1 / 0",
    "a broadcast that one did not make": "if rank == 0:\n    dist.broadcast(torch.ones(1), 0)\n1 / 0",
    "a collective that nobody waited for": "work = dist.all_reduce(torch.ones(1), async_op=True)\n1 / 0",
    "one waits": "if rank == 0:\n    dist.barrier()\n1 / 0",
    "one has gone": "import os\nif rank == 0:\n    os._exit(3)\n1 / 0",
    "no group": "dist.destroy_process_group()\ndist.barrier()",
}


@pytest.fixture(scope="module")
def pair():
    with Ranks(2, timeout_s=60, echo=False) as ranks:
        yield ranks


@pytest.mark.parametrize("what", KEPT)
def test_ranks_are_kept(pair, what):
    pair.execute("kept = rank + 5")
    before = pair.pids
    with pytest.raises(RankError):
        pair.execute(KEPT[what])
    assert pair.pids == before
    assert len(pair.records().by_rank) == 2
    assert pair.execute("t = torch.tensor([kept])\ndist.all_reduce(t)\nt.item()") == ["11", "11"]


@pytest.mark.parametrize("what", ENDED)
def test_ranks_are_ended(pair, what):
    pair.execute("kept = rank + 5")
    with pytest.raises(RankError):
        pair.execute(ENDED[what])
    assert pair.pids == ()
    assert pair.execute("'kept' in globals()") == ["False", "False"]


def test_a_failed_function_always_ends_them(pair):
    pair.execute("1")
    with pytest.raises(RankError):
        pair.run(lambda: 1 / 0)
    assert pair.pids == ()


def test_a_message_to_a_rank_without_a_part_ends_them(pair):
    pair.execute("1")
    with pytest.raises(RankError):
        pair.execute("dist.isend(torch.ones(1), 1)\n1 / 0", ranks=[0])
    assert pair.pids == ()

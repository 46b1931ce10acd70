"""Ranks kept alive between calls, and which failures of executed text they outlive."""

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from distlab.comm import RankError, Ranks


def total(start: float) -> float:
    tensor = torch.tensor([start + dist.get_rank()])
    dist.all_reduce(tensor)
    return tensor.item()


def test_after_a_failure_the_next_call_has_fresh_ranks_and_the_records_stay():
    def fail() -> None:
        dist.barrier()
        raise KeyError("gone")

    with Ranks(2, echo=False) as pool:
        with pytest.raises(RuntimeError, match="no records: run something first"):
            pool.records()
        before = pool.run(os.getpid)
        with pytest.raises(RankError, match=r"rank [01] of 2 raised KeyError: 'gone'"):
            pool.run(fail)
        assert (pool.pids, pool.records().ops(0)) == ((), ("barrier",))
        assert not set(before) & set(pool.run(os.getpid))
        os.kill(pool.pids[1], signal.SIGKILL)
        time.sleep(0.2)
        with pytest.raises(RankError, match="rank 1 of 2 was killed by SIGKILL"):
            pool.run(total, 1.0)


def test_every_rank_takes_part_and_records_are_those_of_the_last_run(ranks):
    pool = ranks(3)
    pool.run(lambda: dist.barrier())
    assert pool.records().ops(0) == ("barrier",)
    assert pool.run(total, 10.0) == [33.0] * 3
    assert pool.records().ops(1) == ("all_reduce",)


def test_a_second_call_meanwhile_is_refused_and_an_interrupt_ends_the_first(tmp_path):
    said = []

    def sleep():
        (tmp_path / str(dist.get_rank())).touch()
        time.sleep(60)

    def meanwhile():
        while len(list(tmp_path.iterdir())) < 2:  # both ranks are in the call
            time.sleep(0.02)
        with pytest.raises(RuntimeError, match="busy with a different call"):
            pool.run(os.getpid)
        said.append("refused")
        pool.interrupt()

    with Ranks(2) as pool:
        other = threading.Thread(target=meanwhile, daemon=True)
        other.start()
        with pytest.raises(RankError, match="the call was interrupted") as caught:
            pool.run(sleep)
        other.join()
        assert said == ["refused"]
        assert "rank 1 stands here" in str(caught.value)
        assert pool.run(dist.get_rank) == [0, 1]


@pytest.fixture(scope="module")
def pair():
    with Ranks(2, timeout_s=200, echo=False) as ranks:
        yield ranks


def test_text_is_executed_in_a_namespace_that_stays(pair):
    assert (pair.execute("import math\nx = rank + 1"), pair.execute("x * 10")) == ([None, None], ["10", "20"])
    assert pair.execute("x = 100\nx", ranks=[1]) == ["100"]
    assert pair.execute("dist.barrier()\n(x, world_size)") == ["(1, 2)", "(100, 2)"]
    with pytest.raises(ValueError, match="there is no rank 2: ranks are 0 to 1"):
        pair.execute("1", ranks=[2])
    with pytest.raises(RankError, match="rank [01] of 2 raised ZeroDivisionError") as caught:
        pair.execute("a = 0\nb = 1 / a")
    assert 'File "<ranks 5>", line 2' in str(caught.value)
    assert "    b = 1 / a" in str(caught.value)


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
    "no group": "dist.destroy_process_group()\ndist.barrier()",
}


def test_ranks_are_kept_where_nothing_is_half_said(pair):
    pair.execute("kept = rank + 5")
    before = pair.pids
    for text in KEPT.values():
        with pytest.raises(RankError):
            pair.execute(text)
        assert pair.pids == before, text
        assert len(pair.records().by_rank) == 2
        assert pair.execute("t = torch.tensor([kept])\ndist.all_reduce(t)\nt.item()") == ["11", "11"]


def test_ranks_are_ended_where_something_is(pair):
    for what, text in ENDED.items():
        pair.execute("kept = rank + 5")
        with pytest.raises(RankError):
            pair.execute(text)
        assert pair.pids == (), what
        assert pair.execute("'kept' in globals()") == ["False", "False"]
    with pytest.raises(RankError):
        pair.execute("dist.isend(torch.ones(1), 1)\n1 / 0", ranks=[0])
    assert pair.pids == (), "a message to a rank without a part"

"""What goes wrong: calls that do not agree, ranks that end, leave or stand still, places where it cannot work."""

import datetime
import json
import os
import re
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from refused import message

from distlab.comm import RankError, run
from distlab.comm.shared_memory import futex
from distlab.comm.shared_memory.arena import join


def disagreements():
    """Make wrong calls, each in a group of its own; return what each rank is told."""
    me, found = dist.get_rank(), {}
    calls = {
        "shape": lambda g: dist.all_reduce(torch.ones(2 + me), group=g),
        "large": lambda g: dist.all_reduce(torch.ones(3_000_000 + me), group=g),
        "type": lambda g: dist.all_reduce(torch.ones(2, dtype=(torch.float32, torch.int32)[me]), group=g),
        "reduction": lambda g: dist.all_reduce(torch.ones(2), (dist.ReduceOp.SUM, dist.ReduceOp.MAX)[me], group=g),
        "order": lambda g: dist.barrier(group=g) if me else dist.all_reduce(torch.ones(2), group=g),
        "root": lambda g: dist.reduce(torch.ones(20_000), me, group=g),
        "split": lambda g: dist.all_to_all_single(torch.empty(4), torch.ones(4), [2, 2], [2 + me, 2 - me], group=g),
        "message": lambda g: dist.send(torch.ones(3), 1, group=g) if me == 0 else dist.recv(torch.ones(4), 0, group=g),
    }
    for name, call in calls.items():
        group = dist.new_group()
        found[name] = message(call, group), message(dist.barrier, group=group)
    return found


def test_calls_that_do_not_agree_are_named_on_every_rank():
    for found in run(disagreements, 2, backend="shared", record=False):
        for name, (first, second) in found.items():
            assert first != "no error", name
            assert "cannot be used any more" in second, name
        for name, of_rank_0, of_rank_1 in (
            ("shape", r"all_reduce float32\[2\]", r"all_reduce float32\[3\]"),
            ("large", r"all_reduce float32\[3000000\]", r"all_reduce float32\[3000001\]"),
            ("type", r"all_reduce float32\[2\]", r"all_reduce int32\[2\]"),
            ("reduction", r"all_reduce float32\[2\]", r"all_reduce float32\[2\], max"),
            ("order", r"all_reduce float32\[2\]", "barrier"),
            ("root", r"reduce float32\[20000\], root 0", r"reduce float32\[20000\], root 1"),
        ):
            assert re.search(rf"rank 0: {of_rank_0}\n  rank 1: {of_rank_1}\n", found[name][0]), found[name][0]
        assert "rank 0 gives 8 bytes to rank 0" not in found["split"][0]
        assert re.search(r"rank \d gives \d+ bytes to rank \d, which expects \d+", found["split"][0])
        assert re.search(r"send float32\[3\], receive recv float32\[4\]", found["message"][0])


def one_is_killed():
    me = dist.get_rank()
    dist.barrier()
    if me == 2:
        time.sleep(0.2)
        os.kill(os.getpid(), 9)
    raise RuntimeError(message(dist.all_reduce, torch.ones(5)) if me == 0 else message(dist.recv, torch.ones(5), 2))


def test_a_rank_that_ends_ends_the_calls_that_wait_for_it(monkeypatch):
    monkeypatch.setattr("distlab.comm.launch.ranks.GRACE_S", 60.0)  # the launcher waits until the others have told
    with pytest.raises(RankError) as error:
        run(one_is_killed, 3, backend="shared", record=False)
    assert str(error.value).startswith("rank 2 of 3 was killed by SIGKILL")
    others = [failure.summary for failure in error.value.failures if failure.rank != 2]
    assert len(others) == 2
    for text in others:
        assert "connection closed by peer: rank 2" in text


def hangs():
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(3))


def alone():
    """Make calls that no other rank has a part in, or that wait for one who does not come; return what is told."""
    me, x, found = dist.get_rank(), torch.ones(4), {}
    late, left = [dist.new_group(timeout=datetime.timedelta(seconds=1)) for _ in range(2)], dist.new_group()
    found |= {
        "meta": message(dist.all_reduce, torch.ones(2, device="meta")),
        "sparse": message(dist.broadcast, torch.ones(2, 2).to_sparse(), 0),
        "bits": message(dist.all_reduce, x, dist.ReduceOp.BAND),
        "room": message(dist.all_gather_into_tensor, torch.empty(3), x),
        "list": message(dist.all_gather, [torch.empty(5)] * 2, x),
        "rows": message(dist.all_to_all_single, torch.empty(3), torch.ones(3)),
        "itself": message(dist.isend, x, me) + message(dist.irecv, x, me),
        "again": message(dist.init_process_group, "shared"),
    }
    read, write = os.pipe()
    if os.fork() == 0:
        os.write(write, (message(dist.all_reduce, x) + message(dist.all_reduce, x, async_op=True)).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        found["forked"] = pipe.read()
    dist.all_reduce(x)  # nothing of all this has disturbed the group
    assert x.tolist() == [2.0] * 4
    dist.all_reduce(x, group=left, async_op=True).wait()
    if me == 0:
        found["receive"] = message(dist.recv, x, 1, group=late[0])
        found["collective"] = message(dist.all_reduce, x, group=late[1])
        found["left by a different one"] = message(dist.all_reduce, x, group=left)
        store = dist.distributed_c10d._get_default_store()
        store.set_timeout(datetime.timedelta(seconds=1))
        found["a group"] = message(dist.new_group, [0, 1], timeout=datetime.timedelta(seconds=0.5))
        store.set("given up", "yes")
    else:
        left.shutdown()
        found["left"] = message(left.allreduce, [torch.ones(2)], dist.AllreduceOptions())
        dist.distributed_c10d._get_default_store().wait(["given up"])
    return found


ALONE = {
    "meta": "all_reduce: got a Tensor of layout strided on meta; backend 'shared'",
    "sparse": "broadcast: got a Tensor of layout sparse_coo on cpu",
    "bits": "torch has no ReduceOp.BAND of torch.float32 on the CPU",
    "room": "must have 8 elements",
    "list": "must have 4 elements",
    "rows": "cannot share evenly",
    "itself": "recv from this rank itself: a message needs two ranks",
    "again": "twice",
    "forked": "in a process that was forked from the rank",
    "receive": "rank 0: recv float32[4]: Timed out waiting 1000 ms for rank 1",
    "collective": "rank 0: all_reduce float32[4]: Timed out waiting 1000 ms for rank 1",
    "left by a different one": "connection closed by peer: rank 1 has left the group",
    "left": "this rank has left it",
    "a group": "rank 0: timed out waiting 500 ms for rank 1 to make the group of ranks [0, 1]; every rank must",
}


def test_what_cannot_be_is_refused_and_who_waits_in_vain_is_told():
    of_ranks = run(alone, 2, backend="shared", record=False)
    assert set().union(*of_ranks) == set(ALONE)
    for rank, found in enumerate(of_ranks):
        for name, text in found.items():
            assert ALONE[name] in text, name
            assert name == "again" or f"rank {rank}: " in text, name
        assert found["itself"].count("itself") == found["forked"].count("was forked") == 2


def test_elsewhere_there_is_one_clear_line(monkeypatch):
    monkeypatch.setattr(futex.sys, "platform", "darwin")
    with pytest.raises(RuntimeError, match=r"it needs Linux .* and this is darwin; pass backend='gloo'"):
        join(dist.HashStore(), 0, [0], 1.0)
    with pytest.raises(ValueError, match="backend shared does not work here: it needs Linux"):
        run(hangs, 2, backend="shared")


def test_ranks_of_two_hosts_or_containers_are_told_which():
    store = dist.HashStore()
    store.set("place1", json.dumps(["", "other", 1, ""]))
    words = "backend 'shared' does not work for rank 1: it runs on other, and rank 0 on .*; pass backend='gloo'"
    with pytest.raises(RuntimeError, match=words):
        join(store, 0, [0, 1], 1.0)
    assert "it runs on other" in json.loads(store.get("arena")), "the others get the same line"


SCRIPT = """
import os, sys, torch, torch.distributed as dist
from distlab.comm import shared_memory
shared_memory.register()
ranks = []
for rank in range(2):
    ranks.append(os.fork())
    if not ranks[-1]:
        break
else:
    sys.exit(any([os.waitpid(pid, 0)[1] for pid in ranks]))
dist.init_process_group("shared", store=dist.FileStore(sys.argv[1], 2), rank=rank, world_size=2)
works = [dist.all_reduce(torch.ones(50_000), async_op=True) for _ in range(20)]
works += [dist.isend(torch.ones(9), 1 - rank), dist.irecv(torch.ones(9), 1 - rank)]
for work in works:
    work.wait()
assert not dist.irecv(torch.ones(9), 1 - rank).is_completed()
"""


def test_a_program_that_ends_without_leaving_its_group_ends_well(tmp_path):
    """A receive is open and the group's threads run, as in a script that calls no destroy_process_group."""
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr

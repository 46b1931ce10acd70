"""What goes wrong: calls that do not agree, ranks that end, leave or stand still, places where it cannot work."""

import datetime
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distlab.comm import RankError, run
from distlab.comm.shared_memory import futex, join


def raised(call, *args, **named):
    """Return the text that a call raises."""
    try:
        call(*args, **named)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


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
        found[name] = raised(call, group), raised(dist.barrier, group=group)
    return found


def test_calls_that_do_not_agree_are_named_on_every_rank():
    for found in run(disagreements, 2, backend="shared", record=False):
        for name, (first, second) in found.items():
            assert first != "nothing", name
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


def one_ends(how):
    me = dist.get_rank()
    dist.barrier()
    if me == 2:
        time.sleep(0.2)
        os.kill(os.getpid(), 9) if how == "killed" else os._exit(3)
    raise RuntimeError(raised(dist.all_reduce, torch.ones(5)) if me == 0 else raised(dist.recv, torch.ones(5), 2))


@pytest.mark.parametrize(("how", "cause"), [("killed", "was killed by SIGKILL"), ("exits", "exited with status 3")])
def test_a_rank_that_ends_ends_the_calls_that_wait_for_it(how, cause, monkeypatch):
    monkeypatch.setattr("distlab.comm.launch.ranks.GRACE_S", 60.0)  # the launcher waits until the others have told
    with pytest.raises(RankError) as error:
        run(one_ends, 3, args=(how,), backend="shared", record=False)
    assert str(error.value).startswith(f"rank 2 of 3 {cause}")
    others = [failure.summary for failure in error.value.failures if failure.rank != 2]
    assert len(others) == 2
    for text in others:
        assert "connection closed by peer: rank 2" in text


def one_leaves():
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        return ""
    return raised(dist.all_reduce, torch.ones(5)) + raised(dist.barrier)


def test_a_rank_that_leaves_ends_the_calls_that_wait_for_it():
    text = run(one_leaves, 2, backend="shared", record=False)[0]
    assert "RuntimeError: rank 0: all_reduce float32[5]: connection closed by peer: rank 1 has left the group" in text


def one_is_late():
    """Rank 1 stays until rank 0 has given up both calls."""
    groups = [dist.new_group(timeout=datetime.timedelta(seconds=2)) for _ in range(2)]
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["given up"])
        return "", "", 4.0
    start = time.monotonic()
    told = raised(dist.recv, torch.ones(5), 1, group=groups[0]), raised(dist.all_reduce, torch.ones(5), group=groups[1])
    seconds = time.monotonic() - start
    store.set("given up", "yes")
    return *told, seconds


def test_calls_give_up_after_the_groups_timeout():
    receive, collective, seconds = run(one_is_late, 2, backend="shared", record=False)[0]
    assert "recv float32[5]: timed out waiting 2000 ms for rank 1" in receive
    assert "all_reduce float32[5]: timed out waiting 2000 ms for rank 1" in collective
    assert seconds >= 4


def hangs():
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(3))


def test_a_deadlock_is_explained_in_the_words_of_gloo():
    texts = []
    for backend in ("gloo", "shared"):
        with pytest.raises(RankError) as error:
            run(hangs, 2, backend=backend)
        texts.append(str(error.value).split("\n\n")[0])
    assert texts[1].startswith("deadlock: every rank that has not finished waits")
    assert [re.sub(r"\d+\.\d s", "T s", text) for text in texts][0] == re.sub(r"\d+\.\d s", "T s", texts[1])


def forked():
    read, write = os.pipe()
    if os.fork() == 0:
        told = raised(dist.all_reduce, torch.ones(2)) + raised(dist.all_reduce, torch.ones(2), async_op=True)
        os.write(write, told.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        told = pipe.read()
    x = torch.ones(2)
    dist.all_reduce(x)
    return told, x.tolist()


def test_a_process_forked_from_a_rank_may_not_call_and_disturbs_nothing():
    for told, total in run(forked, 2, backend="shared"):
        assert told.count("in a process that was forked from the rank") == 2
        assert total == [2.0, 2.0]


def calls_after_leaving():
    group = dist.new_group()
    pg = dist.distributed_c10d._get_default_group() if group is None else group
    dist.all_reduce(torch.ones(1), group=pg, async_op=True).wait()
    pg.shutdown()
    return raised(pg.allreduce, [torch.ones(2)], dist.AllreduceOptions())


def test_a_call_that_is_not_waited_for_is_refused_after_leaving():
    for told in run(calls_after_leaving, 2, backend="shared"):
        assert "this rank has left it" in told


def refusals():
    x, n = torch.ones(4), dist.get_world_size()
    return {
        "meta": raised(dist.all_reduce, torch.ones(2, device="meta")),
        "sparse": raised(dist.broadcast, torch.ones(2, 2).to_sparse(), 0),
        "bits": raised(dist.all_reduce, x, dist.ReduceOp.BAND),
        "room": raised(dist.all_gather_into_tensor, torch.empty(3), x),
        "list": raised(dist.all_gather, [torch.empty(5)] * n, x),
        "rows": raised(dist.all_to_all_single, torch.empty(3), torch.ones(3)),
        "again": raised(dist.init_process_group, "shared"),
    }


def test_what_cannot_be_is_refused_on_each_rank_without_a_message():
    for rank, found in enumerate(run(refusals, 2, backend="shared")):
        assert f"rank {rank}: all_reduce: got a Tensor of layout strided on meta; backend 'shared'" in found["meta"]
        assert f"rank {rank}: broadcast: got a Tensor of layout sparse_coo on cpu" in found["sparse"]
        assert "is for whole numbers and bool, got torch.float32" in found["bits"]
        assert "must have 8 elements" in found["room"]
        assert "must be of the size" in found["list"]
        assert "cannot share evenly" in found["rows"]
        assert "twice" in found["again"]


def names_of_memory():
    """Return how this process's map and its open files name the arena, and what /dev/shm holds of it.

    A rank's stack, for `distlab where`, goes to memory of its own: "distlab-rank0.stack".
    """
    dist.new_group()
    maps = [
        line.split(maxsplit=5)[5].strip()
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "memfd" in line
    ]
    files = [
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{fd}")
    ]
    arenas = [name for name in files if "memfd" in name and ".stack" not in name]
    return maps, arenas, [p.name for p in Path("/dev/shm").glob("*distlab*")]


def test_the_memory_has_no_name_and_nobody_holds_it_open():
    for maps, files, named in run(names_of_memory, 2, backend="shared"):
        assert len(maps) == 2, "one for each group"
        assert set(maps) == {"/memfd:distlab (deleted)"}
        assert files == named == []


def test_elsewhere_there_is_one_clear_line(monkeypatch):
    monkeypatch.setattr(futex.sys, "platform", "darwin")
    with pytest.raises(RuntimeError, match=r"it needs Linux .* and this is darwin; pass backend='gloo'"):
        join.join(dist.HashStore(), 0, [0], 1.0)
    with pytest.raises(ValueError, match="backend shared does not work here: it needs Linux"):
        run(hangs, 2, backend="shared")


@pytest.mark.parametrize(
    ("difference", "what"),
    [
        ({"boot": "other"}, "kernel"),
        ({"user": 12345}, "user"),
        ({"processes": "pid:[1]"}, r"container \(process namespace\)"),
        ({"boot": "other", "user": 12345}, "kernel and user"),
    ],
)
def test_ranks_of_two_hosts_users_or_containers_are_told_which(difference, what):
    store, here = dist.HashStore(), join._own_place("")
    store.set("place1", json.dumps(here | {"host": "other", "place": here["place"] | difference}))
    with pytest.raises(RuntimeError, match=f"rank 1 runs on other and rank 0 on .*, which differ in {what}; pass"):
        join.join(store, 0, [0, 1], 1.0)
    assert "needs all ranks on one host" in json.loads(store.get("arena")), "the others get the same line"


def some_make_a_group():
    """Rank 1 does not make the group that rank 0 makes."""
    dist.distributed_c10d._get_default_store().set_timeout(datetime.timedelta(seconds=1))
    if dist.get_rank() == 0:
        return raised(dist.new_group, [0, 1], timeout=datetime.timedelta(seconds=0.5))
    time.sleep(2)
    return ""


def test_a_group_that_some_ranks_do_not_make_is_named_after_its_timeout():
    text = run(some_make_a_group, 2, backend="shared", record=False)[0]
    assert "rank 0: timed out waiting 500 ms for rank 1 to make the group of ranks [0, 1]" in text
    assert "every rank must make all groups, in the same order" in text


def some_make_a_group_and_others_call():
    dist.new_group([0, 1]) if dist.get_rank() == 0 else dist.all_reduce(torch.ones(3))


def test_a_group_that_some_ranks_do_not_make_is_explained_before():
    with pytest.raises(RankError, match="rank 0 .*new_group") as error:
        run(some_make_a_group_and_others_call, 2, backend="shared", timeout_s=30)
    assert "all_reduce" in str(error.value)


SCRIPT = """
import sys, torch, torch.distributed as dist
from distlab.comm import shared_memory
shared_memory.register()
rank = int(sys.argv[1])
dist.init_process_group("shared", store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2)
works = [dist.all_reduce(torch.ones(50_000), async_op=True) for _ in range(20)]
works += [dist.isend(torch.ones(9), 1 - rank), dist.irecv(torch.ones(9), 1 - rank)]
for work in works:
    work.wait()
assert not dist.irecv(torch.ones(9), 1 - rank).is_completed()
"""


@pytest.mark.timeout(300)
def test_a_program_that_ends_without_leaving_its_group_ends_well(tmp_path):
    """A receive is open and the group's threads run, as in a script that calls no destroy_process_group."""
    commands = [[sys.executable, "-c", SCRIPT, str(rank), str(tmp_path / "store")] for rank in range(2)]
    programs = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    for program in programs:
        _, said = program.communicate(timeout=120)
        assert program.returncode == 0, said

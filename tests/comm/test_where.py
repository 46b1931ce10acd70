"""`distlab where` from outside: jobs of run and ranks started by hand, and nothing is disturbed."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from subprocess import PIPE

import psutil
import pytest
from waiting import wait_for

import distlab
from distlab.cli import main
from distlab.comm import Ranks, Records
from distlab.comm.where import stacks
from distlab.comm.where.say import WhereItStands, place_of, report, sentence
from distlab.comm.where.stacks import JobRank, RunningJob, find_jobs
from distlab.measure.machine import fit

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="where reads /proc")
SPY = stacks.find_py_spy()
BY_HAND = """
import os, pathlib, sys, time
import torch, torch.distributed as dist
folder = pathlib.Path(sys.argv[1])

def load(name):
    (folder / f"{name}-late").touch()
    while not (folder / f"{name}-go").exists():
        time.sleep(0.05)

def train(name):
    x = torch.ones(4)
    dist.all_reduce(x); (folder / f"{name}{dist.get_rank()}").write_text(str(os.getpid()))
    if dist.get_rank() == 1:
        load(name)
    dist.all_reduce(x)

dist.init_process_group("gloo")
train("foreign")
dist.destroy_process_group()
from distlab.comm import process_group
os.environ["MASTER_PORT"] = sys.argv[2]
with process_group("gloo"):
    train("ours")
print("the end")
"""


@pytest.fixture
def busy(tmp_path):
    """Ranks of which one sleeps until told, while the others wait for it; yields (ranks, results)."""
    go, here = tmp_path / "go", tmp_path / "here"

    def program(go, here):
        import time

        import torch
        import torch.distributed as dist

        def sleeping():
            here.touch()
            while not go.exists():
                time.sleep(0.05)

        x = torch.ones(4)
        if dist.get_rank() == 1:
            sleeping()
        dist.all_reduce(x)
        return x[0].item()

    results = []
    with Ranks(3, timeout_s=200) as ranks:
        thread = threading.Thread(target=lambda: results.append(ranks.run(program, go, here)))
        thread.start()
        wait_for(here.exists)
        wait_for(lambda: sum(call.wait_ns > 0 for call in ranks.records()) == 2)
        yield ranks, results
        go.touch()
        thread.join()
        assert results == [[3.0] * 3], "nobody was disturbed"


def said(pid, **named):
    (job,) = find_jobs(pid)
    return "\n".join(report(job, **named))


def test_ranks_of_run_are_read_with_who_waits_for_whom(busy, monkeypatch):
    for finds_py_spy in (stacks.find_py_spy, lambda: None) if SPY else (lambda: None,):
        monkeypatch.setattr(stacks, "find_py_spy", finds_py_spy)
        text = said(busy[0].pids[0])
        assert "3 of 3 ranks are here; calls from distlab's recorder" in text
        verdict = next(line for line in text.splitlines() if line.startswith("=> "))
        assert verdict.startswith("=> ranks 0, 2 wait for rank 1 in all_reduce #1 (float32[4], group [0, 1, 2]) at ")
        assert "test_where.py:" in verdict
        assert verdict.endswith(" in sleeping")
        assert "--- rank 1 stands here (innermost call last) ---" in text
        assert ", in sleeping" in text
        assert "--- ranks 0, 2 stand here" in text
        assert "---" not in said(busy[0].pids[2], with_stacks=False)
    pid = busy[0].pids[1]
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_for(lambda: psutil.Process(pid).status() == "stopped")
        text = said(pid)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert "=> stopped by a signal, until SIGCONT comes: rank 1; ranks 0, 2 wait for rank 1 in all_reduce #1" in text


def test_a_launcher_is_as_good_as_a_rank_and_ranks_that_wait_for_nothing_are_well(ranks):
    ranks(2).run(os.getpid)
    assert any(len(job.ranks) == 2 for job in find_jobs(os.getpid()))
    text = said(ranks(2).pids[0])
    assert "=> nothing is wrong" in text
    assert "it has finished its function" in text
    assert ranks(2).run(os.getpid) == list(ranks(2).pids), "they live on"


@pytest.fixture
def by_hand(tmp_path):
    """Two ranks that know nothing of distlab at first, and are in its process group then; yields their folder."""
    (tmp_path / "train.py").write_text(BY_HAND)
    with socket.socket() as one, socket.socket() as other:
        for probe in (one, other):
            probe.bind(("127.0.0.1", 0))
        ports = [str(probe.getsockname()[1]) for probe in (one, other)]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": ports[0], "OMP_NUM_THREADS": "1"}
    shared["PYTHONPATH"] = str(Path(distlab.__file__).parents[1])
    command = [sys.executable, str(tmp_path / "train.py"), str(tmp_path), ports[1]]
    started = [subprocess.Popen(command, env=os.environ | shared | {"RANK": rank}, stdout=PIPE) for rank in "01"]
    try:
        yield tmp_path
        for process in started:
            assert (process.communicate(timeout=250)[0], process.returncode) == (b"the end\n", 0)
    finally:
        for process in started:
            process.kill()
            process.wait()


def come(folder, name):
    """Wait until one rank waits for the other; return their process numbers."""
    files = [folder / f"{name}{rank}" for rank in range(2)]
    wait_for(lambda: all(path.exists() for path in (*files, folder / f"{name}-late")))
    time.sleep(0.5)  # rank 0 reaches its next call
    return [int(path.read_text()) for path in files]


@pytest.mark.skipif(SPY is None, reason="py-spy is not installed (pip install 'distlab[labs]')")
def test_ranks_started_by_hand_of_no_distlab_and_then_in_process_group(by_hand, capsys, monkeypatch):
    """Those of process_group answer without py-spy; the files of their records have no names any more."""
    pids = come(by_hand, "foreign")
    assert main(["where", str(pids[1])]) == 0
    text = capsys.readouterr().out
    assert "2 of 2 ranks are here; calls are not recorded" in text
    verdict = next(line for line in text.splitlines() if line.startswith("=> "))
    assert re.search(r"rank 0 waits for rank 1 in all_reduce at \S*train.py:16; .* in load$", verdict), text
    monkeypatch.setattr(stacks, "find_py_spy", lambda: None)
    assert "py-spy is not installed: pip install 'distlab[labs]'" in said(pids[0]), "and it gets no signal"
    (by_hand / "foreign-go").touch()
    pids = come(by_hand, "ours")
    (job,) = find_jobs(pids[0])
    assert f"(process {os.getpid()})" in job.launcher
    assert [rank.pid for rank in job.ranks] == pids
    text = said(pids[0])
    assert "2 of 2 ranks are here; calls from distlab's recorder" in text
    assert "--- rank 1 stands here (innermost call last) ---" in text
    call = r"all_reduce #2 \(float32\[4\], group \[0, 1\]\) at \S*train.py:16"
    assert re.search(
        rf"^rank 0 .*: waits in {call} for .*; rank 1 has not called it: its last call was all_reduce #1", text, re.M
    ), text
    assert re.search(r"^rank 1 .*: waits in no call; its last was all_reduce #1 ", text, re.M), text
    verdict = next(line for line in text.splitlines() if line.startswith("=> "))
    assert re.search(rf"rank 0 waits for rank 1 in {call}; rank 1 has not called it: .* in load$", verdict), text
    (by_hand / "ours-go").touch()


SITE, NO_SPY = "a.py:3", "py-spy is not installed: pip install 'distlab[labs]'"
OUTSIDE = "it runs no code of the program: it starts, or it ends"
WELL, UNTOLD = "no rank waits for one that does not come", "and no record tells whether that can end"
TOLD = {  # of each rank: its call, and why what it does is not known
    "well": ([("", ""), ("", "")], f"nothing is wrong: {WELL}"),
    "a message": ([("recv", ""), ("", "")], f"rank 0 waits in recv, {UNTOLD}"),
    "all in one call": ([("all_reduce", ""), ("all_reduce", "")], f"ranks 0, 1 wait in all_reduce, {UNTOLD}"),
    "nothing was read": ([("", NO_SPY)] * 3, f"what ranks 0, 1, 2 do is not known: {NO_SPY}"),
    "one was not read": (
        [("barrier", ""), ("barrier", ""), ("", NO_SPY)],
        f"ranks 0, 1 wait in barrier, {UNTOLD}; what rank 2 does is not known: {NO_SPY}",
    ),
    "one of four": (
        [("barrier", ""), ("", ""), ("", NO_SPY), ("", OUTSIDE)],
        "rank 0 waits for rank 1 in barrier at a.py:3; rank 1 has not called it: it is at a.py:3 in f; what rank 2 "
        f"does is not known: {NO_SPY}",
    ),
    "one ends": (
        [("barrier", ""), ("", OUTSIDE)],
        f"rank 0 waits for rank 1 in barrier at a.py:3; rank 1 has not called it: it is at a.py:3 in f; {OUTSIDE}",
    ),
    "all end": ([("", OUTSIDE)] * 2, f"what ranks 0, 1 do is not known: {OUTSIDE}"),
}


def test_of_what_no_stack_and_no_record_tells_nothing_is_claimed():
    def verdict(places, world_size=None, **where):
        ranks = tuple(JobRank(rank, rank, False, None, None, where) for rank in range(len(places)))
        stand = {
            rank: WhereItStands("" if why == NO_SPY else SITE, "f", *rest, why)
            for rank, (*rest, why) in enumerate(places)
        }
        return sentence(RunningJob("", world_size or len(places), ranks, frozenset()), Records({}), stand)

    for name, (places, words) in TOLD.items():
        assert verdict(places) == words, name
    well = TOLD["well"][0]
    assert verdict(well, 3) == f"rank 2 of 3 has no process: ended, or not begun; {WELL}"
    elsewhere = f"nothing is wrong: {WELL}; ranks 2, 3 run on other machines and are not seen from here"
    assert verdict(well, 4, LOCAL_WORLD_SIZE="2") == elsewhere


def test_a_process_that_starts_or_ends_or_may_not_be_read_is_told_in_words(tmp_path, monkeypatch):
    spy = tmp_path / "py-spy"
    monkeypatch.setattr(stacks, "find_py_spy", lambda: str(spy))
    main, shutdown = os.getpid(), {"filename": threading.__file__, "line": 1590, "name": "_shutdown"}
    ours = {"filename": fit.__file__, "line": 9, "name": "interleave"}
    no_python = "no thread of it runs Python: it starts, or it ends"
    for said_by_spy, words in (
        ("echo '[]'", no_python),
        (f"""echo '[{{"os_thread_id": {main}, "frames": []}}]'""", no_python),
        (f"echo '{json.dumps([{'os_thread_id': main, 'frames': [shutdown]}])}'", f" in _shutdown; {OUTSIDE}"),
        (f"echo '{json.dumps([{'os_thread_id': main, 'frames': [shutdown, ours]}])}'", "fit.py:9 in interleave"),
        ("echo 'Error: Permission denied' >&2; exit 1", "py-spy cannot read it (Error: Permission denied)"),
        ("echo soon", "py-spy cannot read it (its frames change too fast)"),
    ):
        spy.write_text(f"#!/bin/sh\n{said_by_spy}\n")
        spy.chmod(0o700)
        place = str(place_of(stacks.stacks_of([JobRank(0, main, False, None, None, {})])[0]))
        assert place.endswith(words), place


def test_mistakes_are_one_line(capsys):
    idle = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert main(["where", str(idle.pid)]) == 2
        assert f"process {idle.pid} is not a rank of yours and has started none" in capsys.readouterr().err
    finally:
        idle.communicate()
    assert main(["where", str(idle.pid)]) == 2
    assert f"there is no process {idle.pid}" in capsys.readouterr().err

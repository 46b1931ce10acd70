"""`distlab where` from outside: jobs of run and of a plain torchrun, and nothing is disturbed."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

import distlab
from distlab.cli import main
from distlab.comm import Ranks, Records
from distlab.comm.where import stacks
from distlab.comm.where.find import JobRank, RunningJob, find_jobs, status
from distlab.comm.where.say import WhereItStands, by_stacks, report, sentence

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="where reads /proc")
SPY = stacks.find_py_spy()
FOREIGN = """
import os, pathlib, sys, time
import torch, torch.distributed as dist
go = pathlib.Path(sys.argv[1])

def load():
    (go.parent / "late").touch()
    while not go.exists():
        time.sleep(0.05)

def train():
    x = torch.ones(4)
    dist.all_reduce(x); (go.parent / f"here{dist.get_rank()}").write_text(str(os.getpid()))
    if dist.get_rank() == 1:
        load()
    dist.all_reduce(x)
    if dist.get_rank() == 0:
        dist.recv(x, src=1)
    else:
        load()
        dist.send(x, dst=0)

dist.init_process_group("gloo")
try:
    train()
finally:
    dist.destroy_process_group()
print("the end")
"""

# The same as a script of distlab: its process_group answers.
OURS = FOREIGN.replace(
    'dist.init_process_group("gloo")\ntry:\n', 'from distlab.comm import process_group\nwith process_group("gloo"):\n'
)
OURS = OURS.replace("finally:\n    dist.destroy_process_group()\n", "")


def wait_for(what, limit_s=100):
    deadline = time.monotonic() + limit_s
    while not (found := what()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


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
    with Ranks(3, timeout_s=60) as ranks:
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
        assert verdict.startswith("=> ranks 0, 2 wait for rank 1 in all_reduce #1 (float32[4], group [0, 1, 2]) at "), (
            text
        )
        assert "test_where.py:" in verdict
        assert verdict.endswith(" in sleeping")
        assert "--- rank 1 stands here (innermost call last) ---" in text
        assert ", in sleeping" in text
        assert "--- ranks 0, 2 stand here" in text
        assert "---" not in said(busy[0].pids[2], with_stacks=False)
    pid = busy[0].pids[1]
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_for(lambda: status(pid)[0] == "T")
        text = said(pid)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert "=> rank 1 is stopped by a signal, until it gets SIGCONT; ranks 0, 2 wait, rank 0 in all_reduce #1" in text


def test_a_launcher_is_as_good_as_a_rank_and_ranks_that_wait_for_nothing_are_well(ranks):
    ranks(2).run(os.getpid)
    jobs = find_jobs(os.getpid())
    assert any(len(job.ranks) == 2 for job in jobs)
    pid = ranks(2).pids[0]
    assert "=> nothing is wrong" in said(pid)
    assert "it has finished its function" in said(pid)
    assert ranks(2).run(os.getpid) == list(ranks(2).pids), "they live on"


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """A job of torchrun that knows nothing of distlab: (process, folder)."""
    with job_of_torchrun(tmp_path_factory.mktemp("foreign"), FOREIGN) as found:
        yield found


@pytest.fixture
def with_process_group(tmp_path):
    """A job of torchrun whose script uses distlab's process group, on ranks that are forked."""
    with job_of_torchrun(tmp_path, OURS, "-m", "distlab.comm.standby") as found:
        yield found


@contextmanager
def job_of_torchrun(tmp_path, text, *flags):
    """Yield (process, folder) while one rank waits for the other, and end the job well."""
    script = tmp_path / "train.py"
    script.write_text(text)
    where = ["--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    where += ["--local-addr", "127.0.0.1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *where, *flags, str(script), str(tmp_path / "go")],
        env=os.environ | {"PYTHONPATH": str(Path(distlab.__file__).parents[1])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        wait_for(lambda: all((tmp_path / name).exists() for name in ("late", "here0")))
        time.sleep(0.5)  # rank 0 reaches its next call
        yield process, tmp_path
        (tmp_path / "go").touch()
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0, out
        assert out.count("the end") == 2
    finally:
        process.kill()
        process.wait()


def test_a_torchrun_job_that_distlab_did_not_start(foreign, capsys):
    if SPY is None:
        pytest.skip("py-spy is not installed (pip install 'distlab[labs]')")
    process, folder = foreign
    assert main(["where", str(process.pid)]) == 0
    text = capsys.readouterr().out
    assert "2 of 2 ranks are here" in text
    verdict = next(line for line in text.splitlines() if line.startswith("=> "))
    assert "rank 0 waits for rank 1 in all_reduce at " in verdict, text
    assert "train.py:16" in verdict
    assert verdict.endswith(" in load")


def test_without_py_spy_a_foreign_rank_gets_no_signal_and_the_reader_is_told(foreign, monkeypatch):
    monkeypatch.setattr(stacks, "find_py_spy", lambda: None)
    text = said(foreign[0].pid)
    assert "py-spy is not installed: pip install 'distlab[labs]'" in text


def test_without_py_spy_ranks_of_process_group_answer_and_live_on(with_process_group, monkeypatch):
    """The files of their records have no names any more: who waits in which call is read all the same."""
    monkeypatch.setattr(stacks, "find_py_spy", lambda: None)
    process, folder = with_process_group
    (job,) = find_jobs(process.pid)
    assert f"(process {process.pid})" in job.launcher
    assert [rank.pid for rank in job.ranks] == [int((folder / f"here{rank}").read_text()) for rank in range(2)]
    text = said(process.pid)
    assert "2 of 2 ranks are here; calls from distlab's recorder" in text
    assert "--- rank 1 stands here (innermost call last) ---" in text
    lines = text.splitlines()
    call = r"all_reduce #2 \(float32\[4\], group \[0, 1\]\) at \S*train.py:16"
    assert re.search(
        rf"^rank 0 .*: waits in {call} for .*; rank 1 has not called it: its last call was all_reduce #1", text, re.M
    ), text
    assert re.search(r"^rank 1 .*: waits in no call; its last was all_reduce #1 ", text, re.M), text
    verdict = next(line for line in lines if line.startswith("=> "))
    assert re.search(rf"rank 0 waits for rank 1 in {call}; rank 1 has not called it: ", verdict), text
    assert verdict.endswith(" in load")


def test_of_a_message_that_no_record_tells_of_nothing_is_claimed():
    places = {0: WhereItStands("a.py:3", "f", "recv"), 1: WhereItStands("a.py:9", "g", "")}
    ranks = tuple(JobRank(rank, rank, 0, "S", None, None, {}) for rank in places)
    said = sentence(RunningJob((), "", 2, ranks, frozenset()), Records({}), places, by_stacks(places))
    assert said == "rank 0 waits in a message, and no record tells whether its other end comes"


def test_mistakes_are_one_line(capsys):
    idle = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert main(["where", str(idle.pid)]) == 2
        assert f"process {idle.pid} is not a rank of yours and has started none" in capsys.readouterr().err
    finally:
        idle.communicate()
    assert main(["where", str(idle.pid)]) == 2
    assert f"there is no process {idle.pid}" in capsys.readouterr().err

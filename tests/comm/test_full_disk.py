"""Where the disk is full, the record stops with one line, and the rank and its calls go on."""

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distlab.comm import Ranks, read_records
from distlab.comm.record import file
from distlab.comm.record.file import DONE, WAITING, RecordWriter
from distlab.comm.record.matching import known_call
from distlab.comm.watch.waits import describe
from distlab.comm.watch.watchdog import Watchdog


def known(writer, op="all_reduce", line=3):
    texts = (writer.text(f"train.py:{line}"), 0, writer.text("float32[2]"), writer.text("0 [0, 1]"))
    return known_call(1, 5, op=op, num_bytes=(8, 6), texts=texts, peer=-1, parties=2)


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("what", ["rows", "names"])
def test_a_record_stops_once_and_for_all_with_one_line(tmp_path, monkeypatch, capsys, what):
    writer = RecordWriter(tmp_path, 0, 4096)
    writer.end(writer.begin(known(writer), False), DONE)
    if what == "rows":
        monkeypatch.setattr(file.os, "posix_fallocate", full)
    else:
        writer._names = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115
    for line in range(1000):
        number = writer.begin(known(writer, line=line), False)
        writer.wait(number, WAITING)
        writer.end(number, DONE)
    writer.reset()
    writer.group("begun", "[0, 1] at train.py:3")
    writer.begin(known(writer, line=5), True)
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "rank 0 goes on, but its calls are recorded no more (No space left on device in " in told
    record = read_records(tmp_path).by_rank[0]
    assert record.header.is_stopped
    assert len(record.rows) == 0, "a new job has begun"


def test_nothing_at_all_can_be_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(file.os, "posix_fallocate", full)
    writer = RecordWriter(tmp_path, 0, 64)
    writer.reset()
    writer.wait(writer.begin(known(writer), False), WAITING)
    assert not writer.has_rows
    writer.group("begun", "[0, 1] at train.py:3")
    assert read_records(tmp_path).by_rank == {}
    assert "recorded no more" in capsys.readouterr().err


def test_a_rank_that_records_no_more_is_not_taken_for_one_that_does_not_come(tmp_path, monkeypatch):
    monkeypatch.setattr("distlab.comm.watch.watchdog.STABLE_S", 0.0)
    writers = [RecordWriter(tmp_path, rank, 64) for rank in range(2)]
    for writer in writers:
        writer.end(writer.begin(known(writer), False), DONE)
    writers[0].wait(writers[0].begin(known(writers[0]), False), WAITING)
    watchdog = Watchdog(tmp_path, 2, since_ns=0)
    told = [watchdog.check({1}) for _ in range(4)]
    assert "deadlock" in (told[-1] or ""), "it could be told without the fault"
    writers[1]._stop(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert all(Watchdog(tmp_path, 2, since_ns=0).check(set()) is None for _ in range(3))
    watchdog = Watchdog(tmp_path, 2, since_ns=0)
    assert [watchdog.check() for _ in range(3)] == [None] * 3
    assert "all that it needs have called it" in describe(read_records(tmp_path), 2)[0]


def test_training_goes_on_while_one_ranks_disk_is_full(capfd, record_property):
    def train():
        from distlab.comm.record.intercept import FrontEnd

        x = torch.ones(2)
        dist.all_reduce(x)
        if dist.get_rank() == 1:
            FrontEnd._active.sinks[0]._writer._names = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115
        for size in range(1, 100):
            dist.all_reduce(torch.ones(size % 7 + 1))
        dist.all_reduce(x)
        return x[0].item()

    with Ranks(2, timeout_s=60) as ranks:
        ranks.run(int)  # they stand: what is timed is no start
        for job in ("the first job", "the next one too"):
            begin = time.monotonic()
            assert ranks.run(train) == [4.0, 4.0], job
            record_property("seconds", time.monotonic() - begin)
    assert capfd.readouterr().out.count("recorded no more") == 1


PRINTS = """
import sys
from distlab.comm import Ranks

def loud(turn):
    print("x" * 3000)
    return turn

with Ranks(2) as ranks:
    sys.stderr.write(repr([ranks.run(loud, turn) for turn in range(1, 4)]))
"""


def test_a_job_goes_on_where_what_its_ranks_print_finds_no_room(tmp_path):
    """The launcher's own output, such as a file on a full disk."""
    (tmp_path / "script.py").write_text(PRINTS)
    with Path("/dev/full").open("w") as full_disk:
        done = subprocess.run(
            [sys.executable, tmp_path / "script.py"], stdout=full_disk, stderr=subprocess.PIPE, text=True, timeout=100
        )
    assert "[[1, 1], [2, 2], [3, 3]]" in done.stderr
    assert done.stderr.count("the ranks go on, but what they print is shown no more (No space left on device") == 1
    assert "Traceback" not in done.stderr.partition("Exception ignored")[0]

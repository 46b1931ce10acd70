"""Where the disk is full, ranks are refused before they begin, with what to do; a record never ends the process."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from distlab.comm.record import file
from distlab.comm.record.file import RecordWriter


def test_a_record_has_its_room_before_the_first_call(tmp_path, monkeypatch):
    """To write into a mapped file where the disk has no room would end the rank with SIGBUS."""
    writer = RecordWriter(tmp_path, 0, 64)
    assert os.stat(writer._file.fileno()).st_blocks * 512 >= len(writer._map)
    writer._names = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115
    with pytest.raises(OSError, match="No space left on device"):
        writer.text("train.py:3")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(file.os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left on device"):
        RecordWriter(tmp_path, 1, 64)


FULL = """
import os, subprocess, sys, tempfile
from distlab.comm import run

subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1M", "none", sys.argv[1]], check=True)
tempfile.tempdir = sys.argv[1]
run(int, 2)
"""


def test_ranks_without_room_for_their_records_are_refused(tmp_path):
    apart = ["unshare", "--mount", *(["--map-root-user"] if os.geteuid() else [])]
    if shutil.which("unshare") is None or subprocess.run([*apart, "true"], capture_output=True).returncode:
        pytest.skip("this system lets no program mount a disk that others do not see")
    (tmp_path / "script.py").write_text(FULL)
    (tmp_path / "small").mkdir()
    command = [*apart, sys.executable, str(tmp_path / "script.py"), str(tmp_path / "small")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert "could not join the group in " in done.stderr
    assert "make room there, or set TMPDIR to another folder): OSError: [Errno 28] No space left" in done.stderr

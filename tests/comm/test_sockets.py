"""What is started here listens on loopback alone: ranks, their stores, labs, the server of the lessons.

A torchrun that the user starts has two sockets of its own, on every interface; there the ranks are looked at alone.
"""

import contextlib
import os
import subprocess
import sys
import textwrap
import time
import uuid
from pathlib import Path

import psutil
import pytest
from lab_on_ranks import QUICK
from waiting import processes_with

from distlab.comm.rendezvous import is_loopback

ROOT = Path(__file__).resolve().parents[2]
MARK = "DISTLAB_TEST_SOCKETS"
WAIT_S = 2.0  # for which ranks stay, so that their sockets are seen

RANKS = f"""
    import time
    import torch, torch.distributed as dist
    from distlab.comm import run

    def stay():
        dist.all_reduce(torch.ones(1))
        time.sleep({WAIT_S})

    run(stay, 2, echo=False, OPTIONS)
"""
SCRIPT = f"""
    import time
    import torch, torch.distributed as dist
    from distlab.comm import entry, process_group

    @entry
    def main():
        with process_group(OPTIONS):
            dist.all_reduce(torch.ones(1))
            time.sleep({WAIT_S})

    main()
"""
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
TORCHRUN += ["--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
WAYS = {  # a script, and how Python is started with it
    "run": (RANKS.replace("OPTIONS", ""), ["SCRIPT"]),
    "run on two nodes": (RANKS.replace("OPTIONS", "nodes=2"), ["SCRIPT"]),
    "run over gloo": (RANKS.replace("OPTIONS", 'backend="gloo"'), ["SCRIPT"]),
    "torchrun over gloo": (SCRIPT.replace("OPTIONS", '"gloo"'), [*TORCHRUN, "SCRIPT"]),
    "torchrun with standby": (SCRIPT.replace("OPTIONS", ""), [*TORCHRUN, "-m", "distlab.comm.standby", "SCRIPT"]),
    "a lab": ("", ["-m", "distlab", "lab", "01", "--ranks", "2", *QUICK["01"].split()]),
    "lessons": ("", ["-m", "distlab", "lesson", "start", "--no-browser"]),
}
# Ranks that meet there have no socket.
IN_SHARED_MEMORY = ("run", "run on two nodes", "torchrun with standby", "a lab")


def listening(mark, *, ranks_alone):
    """Return (address, port) of whatever the marked processes listen on, or those alone that are ranks."""
    found = set()
    for process in processes_with(f"{MARK}={mark}", *["RANK="] * ranks_alone):
        with contextlib.suppress(psutil.Error):
            every = process.net_connections("inet")
            found |= {(one.laddr.ip, one.laddr.port) for one in every if one.status == psutil.CONN_LISTEN}
    return found


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", WAYS)
def test_whatever_listens_listens_on_loopback(way, tmp_path, record_property):
    source, words = WAYS[way]
    (tmp_path / "script.py").write_text(textwrap.dedent(source))
    command = [sys.executable, *(str(tmp_path / "script.py") if word == "SCRIPT" else word for word in words)]
    mark, found = uuid.uuid4().hex, set()
    environment = os.environ | {MARK: mark, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with open(tmp_path / "output.txt", "w") as output:
        job = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=output, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 400
        try:
            while job.poll() is None and time.monotonic() < deadline and not (way == "lessons" and found):
                found |= listening(mark, ranks_alone=way.startswith("torchrun"))
                time.sleep(0.1)
        finally:
            status = job.poll()
            job.terminate()
            job.wait(30)
    assert status == (None if way == "lessons" else 0), (tmp_path / "output.txt").read_text()
    record_property("figure", f"{way}: {len(found)} ports")
    assert bool(found) == (way not in IN_SHARED_MEMORY), found
    assert all(is_loopback(address) for address, _ in found), found

"""Under torchrun, with nothing but `entry` and `process_group`: what cannot go on is told on every rank with its lines.

One job tries one fault after the other: torchrun starts the ranks anew after each, and leaves traces of the last.
"""

import json
import os
import re
import subprocess
import sys

import pytest

from distlab.comm.rendezvous import is_loopback
from distlab.trace import load_folder

pytestmark = pytest.mark.gloo("the faults are those that leave gloo's ranks waiting")

SCRIPT = """
import os, signal, sys, time
import psutil, torch, torch.distributed as dist
from distlab.comm import entry, process_group

def mismatch(rank, x):
    dist.broadcast(x, 0) if rank == 1 else dist.all_reduce(x)

def skipped(rank, x):
    if rank != 1:
        dist.all_reduce(x)

def killed(rank, x):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(x)

def right(rank, x):
    dist.all_reduce(x)
    ips = {c.laddr.ip for c in psutil.Process().net_connections("inet")}
    print(f"rank {rank}:", x[0].item(), "on", *sorted(ips), flush=True)

@entry
def main():
    programs = [mismatch, skipped, killed, right]
    program = programs[int(os.environ["TORCHELASTIC_RESTART_COUNT"])]
    with process_group(timeout_s=100, trace_dir=sys.argv[1]) as member:
        with member.spans.span("work", kind="F"):
            dist.barrier()
        if member.rank == 0:
            print(f"\\nnow: {program.__name__}", flush=True)
        program(member.rank, torch.ones(4))
    if program is skipped and member.rank == 1:
        time.sleep(30)  # the others end the job

main()
"""


def test_torchrun_restarts_after_a_kill_stays_on_loopback_and_leaves_traces(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    flags = ["--nproc-per-node", "3", "--max-restarts", "3", "--rdzv-backend", "c10d"]
    flags += ["--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1", "-m", "distlab.comm.standby"]
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *flags, str(script), str(tmp_path / "trace")],
        env=kept | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout
    parts = re.split(r"^now: (\w+)$", done.stdout, flags=re.M)
    told = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert not [*tmp_path.glob("distlab-watch-*")]
    for program, on_ranks, words in (
        ("mismatch", 3, r"rank 1: broadcast #2 \(.*root 0\) at .*train\.py:7$"),
        ("skipped", 2, r"all_reduce #2 \(.*\) at .*train\.py:11.*: rank 1 has returned without it"),
    ):
        assert len(re.findall(words, told[program], re.M)) >= on_ranks, told[program]
    for rank in range(3):
        (ips,) = re.findall(rf"^rank {rank}: 3.0 on (.*)$", told["right"], re.M)
        assert all(map(is_loopback, ips.split())), ips
    assert json.loads((tmp_path / "trace" / "clocks.json").read_text()) == [0, 0, 0]
    trace = load_folder(tmp_path / "trace")
    assert trace.ranks == (0, 1, 2)
    names = [(span.rank, span.lane) for span in trace]
    assert all(names.count((rank, "compute")) == 1 for rank in range(3))
    assert all(names.count((rank, "communication")) >= 2 for rank in range(3))

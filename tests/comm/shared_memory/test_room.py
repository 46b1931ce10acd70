"""Little room: limits of a process, and memory that is written while others may still read."""

import re
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from distlab.comm import run


def write_at_once():
    """Write what a call was given and what it returned as soon as it is over, while the others may still read."""
    me, n, wrong = dist.get_rank(), dist.get_world_size(), 0
    for turn in range(40):
        numel = (3, 5_000, 300_000)[turn % 3]
        x, parts = torch.full((numel,), float(me + turn)), [torch.empty(numel) for _ in range(n)]
        dist.all_gather(parts, x)
        x.fill_(-1.0)
        wrong += sum(not bool((part == rank + turn).all()) for rank, part in enumerate(parts))
        for part in parts:
            part.fill_(-2.0)
        y = torch.full((numel,), float(me + turn))
        dist.all_reduce(y)
        wrong += not bool((y == sum(rank + turn for rank in range(n))).all())
        y.fill_(-3.0)
        z = torch.full((numel,), float(turn if me == 0 else -4))
        dist.broadcast(z, 0)
        wrong += not bool((z == turn).all())
        z.fill_(-5.0)
    return wrong


def test_what_a_call_was_given_or_returned_may_be_written_at_once():
    assert run(write_at_once, 3, backend="shared", record=False) == [0, 0, 0]


LIMITED = """
import resource, sys, torch, torch.distributed as dist
from distlab.comm import shared_memory
shared_memory.register()
rank, limited, kind = int(sys.argv[1]), int(sys.argv[3]), getattr(resource, sys.argv[4])
store = dist.FileStore(sys.argv[2], 2)
if rank == limited:
    now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() if kind == resource.RLIMIT_AS else 0
    resource.setrlimit(kind, (now + (20 << 20),) * 2)
try:
    dist.init_process_group("shared", store=store, rank=rank, world_size=2)
except RuntimeError as error:
    print(error)
"""


@pytest.mark.timeout(300)
@pytest.mark.soak_where(limited=[0])  # test_choice.py has a limit of files
@pytest.mark.parametrize(("limited", "kind"), [(0, "RLIMIT_AS"), (1, "RLIMIT_AS"), (0, "RLIMIT_FSIZE")])
def test_a_rank_with_too_little_room_is_named_on_all(tmp_path, limited, kind):
    commands = [
        [sys.executable, "-c", LIMITED, str(rank), str(tmp_path / "store"), str(limited), kind] for rank in range(2)
    ]
    programs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    for program in programs:
        said, _ = program.communicate(timeout=120)
        assert len(said.splitlines()) == 1, said
        assert re.match(
            rf"backend 'shared': rank {limited} cannot map \d+ MiB of addresses, of which 2 ranks use", said
        )
        assert "pass backend='gloo'" in said

"""Ranks for which nobody names a backend: shared memory where all can have it, else gloo, and all go the same way."""

import os
import textwrap

import pytest
import torch.distributed as dist

from distlab.comm import run
from distlab.comm.launch.ranks import run_script
from distlab.comm.shared_memory import futex
from distlab.comm.shared_memory.arena import CannotShare
from distlab.comm.shared_memory.meeting import Meeting


def raises(*_, **__):
    raise PermissionError(1, "Operation not permitted")


# what is wrong: the rank on which it is so, and what is replaced there
HINDRANCES = {
    "no Linux": (1, lambda patch: patch.setattr(futex.sys, "platform", "darwin")),
    "a different processor": (0, lambda patch: patch.setattr(futex.platform, "machine", lambda: "riscv64")),
    "a kernel without futex": (0, lambda patch: patch.setattr(futex, "add", lambda address: None)),
    "no nameless files": (0, lambda patch: patch.setattr(os, "memfd_create", raises)),
    "a file that may not be opened": (1, lambda patch: patch.setattr(os, "open", raises)),
    "a different container": (1, lambda patch: patch.setattr(os, "readlink", lambda path: "pid:[1]")),
}


def met(folder):
    """Return, for each hindrance, whether this rank met the others in shared memory; last: without any."""
    found = []
    for number, (where, hinder) in enumerate([*HINDRANCES.values(), (-1, None)]):
        store = dist.FileStore(f"{folder}/{number}", 2)
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == where:
                hinder(patch)
            try:
                found.append(bool(Meeting(store, dist.get_rank(), [0, 1], 10.0)))
            except CannotShare:
                found.append(False)
    return found


def test_whatever_hinders_one_rank_lets_all_take_gloo(tmp_path):
    for found in run(met, 2, args=(str(tmp_path),), record=False):
        assert found == [False] * len(HINDRANCES) + [True]


SCRIPT = """
    import os, resource, sys
    import torch, torch.distributed as dist
    from distlab.comm import process_group

    def meet():
        with process_group(device="cpu", timeout_s=200, watch=False) as member:
            total = torch.ones(2)
            dist.all_reduce(total)
            print(dist.get_backend(), total.tolist())

    meet()  # one host
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    if os.environ["RANK"] == "0":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, most))
    meet()  # one rank may not write large files
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    os.environ |= {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    meet()  # several agents
"""


def test_ranks_of_a_job_choose_the_same(tmp_path, monkeypatch):
    monkeypatch.delenv("DISTLAB_BACKEND", raising=False)
    (tmp_path / "job.py").write_text(textwrap.dedent(SCRIPT))
    said = []
    assert run_script(tmp_path / "job.py", 2, echo=lambda rank, line: said.append((rank, line)), limit_s=60) == 0
    chosen = [f"{backend} [2.0, 2.0]" for backend in ("shared", "gloo", "gloo")]
    assert sorted(said, key=lambda one: one[0]) == [(rank, line) for rank in range(2) for line in chosen]

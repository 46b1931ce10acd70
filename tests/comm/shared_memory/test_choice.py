"""Ranks for which nobody names a backend: shared memory where all can have it, else gloo, and all go the same way."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distlab.comm import run
from distlab.comm.shared_memory import futex, join
from distlab.comm.shared_memory.meeting import meet_if_possible


@pytest.fixture(autouse=True)
def nobody_names_one(monkeypatch):
    monkeypatch.delenv("DISTLAB_BACKEND", raising=False)


def test_ranks_of_one_host_meet_in_shared_memory_unless_somebody_names_gloo(monkeypatch):
    assert run(dist.get_backend, 2, backend="cpu", record=False) == ["shared"] * 2
    if not torch.cuda.is_available():
        assert run(dist.get_backend, 2, record=False) == ["shared"] * 2
    assert run(dist.get_backend, 2, backend="gloo", record=False) == ["gloo"] * 2
    monkeypatch.setenv("DISTLAB_BACKEND", "gloo")
    assert run(dist.get_backend, 2, backend="cpu", record=False) == ["gloo"] * 2


def raises(*_, **__):
    raise PermissionError(1, "Operation not permitted")


def place_with(**changes):
    real = join._own_place

    def own_place(reason):
        found = real(reason)
        return found | changes | {"place": found["place"] | changes.get("place", {})}

    return own_place


# what is wrong: the rank on which it is so, and what is replaced there
HINDRANCES = {
    "no Linux": (1, lambda patch: patch.setattr(futex.sys, "platform", "darwin")),
    "rank 0 is no Linux": (0, lambda patch: patch.setattr(futex.sys, "platform", "darwin")),
    "a different processor": (1, lambda patch: patch.setattr(futex.platform, "machine", lambda: "riscv64")),
    "a kernel without futex": (0, lambda patch: patch.setattr(futex, "add", lambda address: None)),
    "no nameless files": (0, lambda patch: patch.setattr(os, "memfd_create", raises)),
    "a file that may not be opened": (1, lambda patch: patch.setattr(os, "open", raises)),
    "no /proc": (1, lambda patch: patch.setattr(os, "readlink", raises)),
    "a different host": (1, lambda patch: patch.setattr(join, "_own_place", place_with(place={"boot": "other"}))),
    "a different user": (1, lambda patch: patch.setattr(join, "_own_place", place_with(place={"user": 12345}))),
}


def met(folder):
    """Return, for each hindrance, whether this rank met the others in shared memory; last: without any."""
    found = []
    for number, (where, hinder) in enumerate([*HINDRANCES.values(), (-1, None)]):
        store = dist.FileStore(f"{folder}/{number}", 2)
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == where:
                hinder(patch)
            meeting = meet_if_possible(store, dist.get_rank(), 2, 10.0)
        found.append(meeting is not None)
    return found


def test_whatever_hinders_one_rank_lets_all_take_gloo(tmp_path):
    for found in run(met, 2, args=(str(tmp_path),), record=False):
        assert found == [False] * len(HINDRANCES) + [True]


SCRIPT = """
    import os, resource, sys
    import torch, torch.distributed as dist
    from distlab.comm import process_group

    def meet():
        with process_group(device="cpu", timeout_s=60, watch=False) as member:
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


@pytest.mark.timeout(300)
def test_ranks_of_a_job_choose_the_same(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(textwrap.dedent(SCRIPT))
    shared = os.environ | {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "OMP_NUM_THREADS": "1",
    }
    shared |= {"DISTLAB_STORE_FILE": str(tmp_path / "store"), "PYTHONPATH": str(Path(__file__).parents[3])}
    programs = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for program in programs:
        said, errors = program.communicate(timeout=120)
        assert [line.split()[0] for line in said.splitlines()] == ["shared", "gloo", "gloo"], errors
        assert said.count("[2.0, 2.0]") == 3

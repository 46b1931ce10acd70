"""torch's own tests of a process group, those that it ships: what passes on gloo passes on this backend.

`distributed_test.py` is run as it is, once on each backend, each test on the same living ranks. The table of its
results stands in docs/platforms.md and is written here. torch's other files of tests are not in its packages.
"""

import os
import sys
import tempfile
import types
import unittest
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distlab.comm import RankError, Ranks

WORLD_SIZE = 4
PAGE, HEADING = Path(__file__).resolve().parents[3] / "docs" / "platforms.md", "## torch's own tests on `shared`\n"
NOT_HERE = {  # begins a test's name: why it does not pass
    "test_monitored_barrier_gloo": "torch has `monitored_barrier` for gloo alone, and says so",
    "test_sparse_all_reduce": "sparse tensors are refused in words",
}


def load():
    """Load the file as for gloo: it decides by its backend's name which of its tests there are."""
    folder = tempfile.gettempdir()
    os.environ |= {"BACKEND": "gloo", "WORLD_SIZE": str(WORLD_SIZE), "TEMP_DIR": folder, "INIT_METHOD": "file:///none"}
    if "expecttest" not in sys.modules:  # its base class compares texts that are written into tests
        sys.modules["expecttest"] = types.ModuleType("expecttest")
        sys.modules["expecttest"].TestCase = unittest.TestCase
    from torch.testing._internal.distributed import distributed_test

    return distributed_test


def outcome_of(name, folder):
    """Run one of the tests on this rank."""
    suite = load()
    os.environ |= {"TEMP_DIR": folder, "BACKEND": "mpi"}  # of any other it skips groups of fewer than eight ranks
    suite.BACKEND = dist.get_backend() if name == "test_get_backend" else "gloo"
    for part in ("barrier", "test_dir"):
        os.makedirs(f"{folder}/{part}", exist_ok=True)
    case = type("Case", (suite.TestDistBackend, suite.DistributedTest._DistTestBase), {})(name)
    case.rank, case.file_name = dist.get_rank(), f"{folder}/file"
    suite.Barrier.init()
    dist.barrier()
    try:
        getattr(case, name)()
    except (unittest.SkipTest, SystemExit):  # so it ends a test that needs GPUs
        return "skipped"
    dist.barrier()
    for group in [one for one in dist.distributed_c10d._world.pg_map if one is not dist.group.WORLD]:
        dist.destroy_process_group(group)
    return "passed"


def outcomes(backend, names, folder):
    """Return what became of each test, and the first line of what it said."""
    found = {}
    with Ranks(WORLD_SIZE, backend=backend, record=False, echo=False, timeout_s=200) as ranks:
        for name in names:
            try:
                (found[name],) = set(ranks.run(outcome_of, name, f"{folder}/{backend}-{name}"))
            except RankError as error:
                found[name] = str(error).partition("\n")[0]
    return found


def table(gloo, shared):
    """Return the page's part on these results, and the tests that pass on gloo alone for no known reason."""
    passed = [name for name, outcome in gloo.items() if outcome == "passed"]
    lacking = [name for name in passed if shared[name] != "passed"]
    reasons = {why: [name for name in lacking if name.startswith(start)] for start, why in NOT_HERE.items()}
    skipped = sum(outcome == "skipped" for outcome in gloo.values())
    more = [name for name, outcome in shared.items() if outcome == "passed" and name not in passed]
    neither = [name for name, outcome in gloo.items() if outcome not in ("passed", "skipped") and name not in more]
    rows = [
        ("pass on gloo and on `shared`", len(passed) - len(lacking), ""),
        *(("pass on gloo alone", len(names), f"{why}: {', '.join(names)}") for why, names in reasons.items() if names),
        ("pass on `shared` alone", len(more), ", ".join(more)),
        ("skipped by themselves", skipped, "they need GPUs, or more ranks"),
        ("fail on both", len(neither), f"for want of a GPU, nccl, torchvision or new processes: {', '.join(neither)}"),
    ]
    version = torch.__version__.partition("+")[0]
    text = f"`distributed_test.py` of torch {version}, {len(gloo)} tests on {WORLD_SIZE} ranks of a CPU. `make soak`\n"
    text += (
        "runs it and writes this. torch's packages have no other: the tests of ZeRO, functional collectives, device\n"
    )
    text += "meshes, DTensor, DCP, DDP and FSDP2 are in its repository alone.\n\n| | tests | why |\n|---|---|---|\n"
    text += "".join(f"| {what} | {count} | {why} |\n" for what, count, why in rows)
    return text, [name for name in lacking if not name.startswith(tuple(NOT_HERE))]


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_what_passes_on_gloo_passes_here(tmp_path, record_property):
    names = [name for name in dir(load().DistributedTest._DistTestBase) if name.startswith("test_")]
    gloo, shared = (outcomes(backend, names, tmp_path) for backend in ("gloo", "shared"))
    text, lacking = table(gloo, shared)
    before, _, rest = PAGE.read_text().partition(HEADING)
    PAGE.write_text(f"{before}{HEADING}\n{text}\n## {rest.partition(chr(10) + '## ')[2]}")
    record_property("tried", len(names))
    assert {name: shared[name] for name in lacking} == {}

"""A lab on ranks that are forked with torch loaded: what it computes and says, without the start of torchrun."""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import sys
from pathlib import Path
from typing import NamedTuple

QUICK = {
    "01": "--sizes 8,4096,262144 --rounds 2 --repeats 1 --laps 3",
    "02": "--sizes 4096,65536 --blocks 1",
    "03": "--steps 1 --hidden 16 --layers 1 --bucket-bytes 4000",
    "04": "--batch 64 --epochs 1",
    "05": "--updates 5 --hidden 8 --samples 2",
    "06": "--updates 5 --hidden 8 --samples 4 --layers 2 --context 16",
    "14": "--updates 6 --away-s 0",
}
LIMIT_S = 110
KERNEL_S, FLOPS_PER_S = 20e-6, 1e10  # of a machine that no time is taken of


class Ended(NamedTuple):
    """How a lab ended: rank 0's exit status, what it printed, and what failed on any rank."""

    status: int
    stdout: str
    failures: str


def facts(done: Ended) -> dict[str, object]:
    """Return the facts that the lab states, after seeing that it passed."""
    assert done.status == 0, done.stdout + done.failures
    found = json.loads(done.stdout)
    assert found["passed"]
    return {row["what"]: row["value"] for row in found["rows"] if row["expected"] is not None}


def run_as_torchrun_does(
    script: str, arguments: list[str], port: int, folder: str, *, hidden: tuple[str, ...], calibrated: bool
) -> Ended:
    """Run a script on this rank: its variables, its arguments, its own process group and `__main__`."""
    import torch.distributed as dist

    dist.barrier()  # all have joined it
    dist.destroy_process_group()  # the script makes its own
    own = Path(folder) / os.environ["RANK"]
    own.mkdir()
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": str(own / "error.json"),
    }
    sys.argv = [script, *arguments]
    hide(hidden)
    if not calibrated:
        calibrate_in_no_time()
    status, said = 0, io.StringIO()
    with contextlib.redirect_stdout(said):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as left:
            status = left.code
    failures = "\n".join(path.read_text() for path in own.glob("error.json"))
    return Ended(status, said.getvalue(), failures)


def calibrate_in_no_time() -> None:
    """Make a calibration say how fast this machine computes without a step; messages are timed as ever."""
    from distlab.measure.machine import speed

    def time_reference(reference, device, works):
        return [
            speed.Observation(name, work, work.num_kernels * KERNEL_S + work.matmul_flops / FLOPS_PER_S)
            for name, work in ((name, works[name]) for name in reference.phases)
        ]

    speed._time_reference = time_reference
    speed._time_contention = lambda device: (0.9, 0.9)


def hide(packages: tuple[str, ...]) -> None:
    """Make packages as if they were not installed."""
    import importlib.abc

    class Missing(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] in packages:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name.split(".")[0])

    assert not set(packages) & {name.split(".")[0] for name in sys.modules}
    sys.meta_path.insert(0, Missing())

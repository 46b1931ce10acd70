"""A lab on ranks that are forked with torch loaded: what it computes and says, without the start of torchrun."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
import runpy
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from distlab.comm import RankError, run
from distlab.comm.launch import torchrun
from distlab.comm.launch.fork_client import preload
from distlab.comm.rendezvous import STORE_FILE

QUICK = {
    "01": "--sizes 8,4096,262144 --rounds 2 --repeats 1 --laps 3",
    "02": "--sizes 4096,65536 --blocks 1",
    "03": "--steps 1 --hidden 16 --layers 1 --bucket-bytes 4000",
    "04": "--batch 64 --epochs 1",
    "05": "--updates 5 --hidden 8 --samples 2",
    "06": "--updates 5 --hidden 8 --samples 4 --layers 2 --context 16",
    "07": "--updates 3 --hidden 16 --layers 2 --width 24 --units 2",
    "08": "--updates 3 --hidden 24 --heads 12 --layers 4 --context 24",
    "09": "--updates 3 --hidden 16 --layers 6 --microbatches 4",
    "10": "--updates 3",
    "11": "--updates 3 --length 48",
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


def on_forked_ranks(
    folder: Path, script: Path, num_ranks: int, arguments: Sequence[str], *, echo: torchrun.Echo, limit_s: float
) -> int:
    """Stand for `torchrun.run_script`: the same ranks, the same files for what went wrong, the same last words."""
    every = folder / "run" / "attempt_0"
    every.mkdir(parents=True)
    with contextlib.suppress(RankError):  # the files say it
        start(str(script), num_ranks, [*arguments], every)
    exits = {}
    for rank in range(num_ranks):
        status = every / str(rank) / "status"
        if not status.exists():  # it left by itself, or was ended with the others
            exits[rank] = 1 if (every / str(rank) / "error.json").exists() else -signal.SIGTERM
        elif int(status.read_text()):
            exits[rank] = int(status.read_text())
        for line in (every / str(rank) / "said").read_text().splitlines() if status.exists() else ():
            echo(rank, line)
    (folder / torchrun._ENDED).write_text(json.dumps(exits))
    return torchrun._conclude(folder, num_ranks, int(bool(exits)), [])


def start(
    script: str,
    num_ranks: int,
    arguments: list[str],
    folder: Path,
    *,
    hidden: tuple[str, ...] = (),
    calibrated: bool = False,
    updates: Path | None = None,
) -> list[Ended]:
    """Run a script on forked ranks; the folder gets one of each rank."""
    measured = ("distlab.measure", "distlab.measure.machine.speed", "distlab.measure.count.module", "simulator")
    preload("distlab.lab", *measured, "distlab.collectives", "distlab.data_parallel", "lab_on_ranks:load_lessons")
    call = (script, arguments, str(folder))
    started_so = functools.partial(run_as_torchrun_does, hidden=hidden, calibrated=calibrated, updates=updates)
    try:
        return run(started_so, num_ranks, args=call, timeout_s=LIMIT_S, record=False, echo=False)
    except RankError as error:  # it tells the status alone
        for path in sorted(folder.glob(f"*/{torchrun._ERROR}")):
            said = json.loads(path.read_text())["message"]["extraInfo"]["py_callstack"]
            error.add_note(f"--- the lab on rank {path.parent.name} ---\n{said}")
        raise


def load_lessons() -> None:
    """Load in the fork server what each rank of a lab would load alike."""
    from distlab.grading import load_lesson

    for number in QUICK:
        load_lesson(number)


def run_as_torchrun_does(
    script: str,
    arguments: list[str],
    folder: str,
    *,
    hidden: tuple[str, ...],
    calibrated: bool,
    updates: Path | None = None,
) -> Ended:
    """Run a script on this rank: its variables, its arguments, its own process group and `__main__`."""
    import torch.distributed as dist

    dist.barrier()  # all have joined it
    dist.destroy_process_group()  # the script makes its own
    own = Path(folder) / os.environ["RANK"]
    own.mkdir()
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        STORE_FILE: f"{folder}/store",
        "TORCHELASTIC_ERROR_FILE": str(own / "error.json"),
    }
    sys.argv = [script, *arguments]
    if hidden:
        hide(hidden)
    if not calibrated:
        calibrate_in_no_time()
    if updates is not None:
        note_updates(updates / f"updates-{os.environ['RANK']}")
    status, said = 0, io.StringIO()
    with contextlib.redirect_stdout(said):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as left:
            status = left.code
    (own / "said").write_text(said.getvalue())
    (own / "status").write_text(str(status))
    if status not in (0, torchrun.SAID):
        sys.exit(status)  # which ends the others
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


def note_updates(path: Path, first: int = 3) -> None:
    """Write a digest of the parameters after the first updates of each optimizer; later ones depend on the clock."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    counts: dict[int, int] = {}
    kept = []  # or a different optimizer could get a number that was freed

    def note(optimizer, *_) -> None:
        kept.append(optimizer)
        counts[id(optimizer)] = counts.get(id(optimizer), 0) + 1
        if counts[id(optimizer)] <= first:
            every = [p for group in optimizer.param_groups for p in group["params"]]
            tensors = [p.to_local() if hasattr(p, "to_local") else p.detach() for p in every]  # shards refuse much else
            bits = b"".join(one.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for one in tensors)
            with path.open("a") as file:
                file.write(f"{len(counts)} {hashlib.sha256(bits).hexdigest()}\n")

    import torch

    path.touch()
    register_optimizer_step_post_hook(note)


def hide(packages: tuple[str, ...]) -> None:
    """Make packages as if they were not installed."""
    import importlib.abc

    class Missing(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] in packages:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name.split(".")[0])

    assert not set(packages) & {name.split(".")[0] for name in sys.modules}
    sys.meta_path.insert(0, Missing())

"""A lab on ranks of which each tells what it said; `distlab lab` starts them in the same way."""

import contextlib
import hashlib
import io
import json
import os
import tomllib
from pathlib import Path
from typing import NamedTuple

from distlab.comm import Ranks
from distlab.comm.launch.fork_client import preload
from distlab.comm.launch.ranks import _run_here

KEPT = tomllib.loads(Path(__file__).with_name("labs.toml").read_text())
QUICK, FACTS = KEPT["quick"], KEPT["facts"]
LIMIT_S = 110
KERNEL_S, FLOPS_PER_S = 20e-6, 1e10  # of a machine that no time is taken of


class Ended(NamedTuple):
    """How a lab ended on a rank: its exit status, and what it printed."""

    status: int
    stdout: str


def facts(done):
    """Return the facts that the lab states, after seeing that it passed."""
    assert done.status == 0, done.stdout
    found = json.loads(done.stdout)
    assert found["passed"]
    return {row["what"]: row["value"] for row in found["rows"] if row["expected"] is not None}


def start(script, num_ranks, arguments, updates):
    """Run a script on ranks; how each ended."""
    measured = ("distlab.measure", "distlab.measure.machine.speed", "distlab.measure.count.module", "simulator")
    preload(
        "distlab.course.lab", *measured, "distlab.collectives", "distlab.data_parallel", "lab_on_ranks:load_lessons"
    )
    with Ranks(num_ranks, timeout_s=LIMIT_S, record=False, echo=False, joined=False) as ranks:
        return ranks.run(run_and_listen, script, arguments, updates)


def load_lessons():
    """Load in the fork server what each rank of a lab would load alike."""
    from distlab.course.grading import load_lesson

    for number in QUICK:
        load_lesson(number)


def run_and_listen(script, arguments, updates):
    """Run a script on this rank, without the seconds of a calibration (no time is judged); keep what it prints."""
    calibrate_in_no_time()
    if updates is not None:
        note_updates(updates / f"updates-{os.environ['RANK']}")
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        status = _run_here(script, arguments)
    return Ended(status, said.getvalue())


def calibrate_in_no_time():
    """Make a calibration say how fast this machine computes without a step; messages are timed as ever."""
    from distlab.measure.machine import speed

    def time_reference(reference, device, works):
        return [
            speed.Observation(name, work, work.num_kernels * KERNEL_S + work.matmul_flops / FLOPS_PER_S)
            for name, work in ((name, works[name]) for name in reference.phases)
        ]

    speed._time_reference = time_reference
    speed._time_contention = lambda device: (0.9, 0.9)


def note_updates(path, first=3):
    """Write a digest of the parameters after the first updates of each optimizer; later ones depend on the clock."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    counts = {}
    kept = []  # or a different optimizer could get a number that was freed

    def note(optimizer, *_):
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

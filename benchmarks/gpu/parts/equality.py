"""Each technique's own tests of equality, without pytest: it computes what one process does."""

from __future__ import annotations

import importlib
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import chain, zip_longest
from typing import Any

from _rows import absolute

from gpu.job import Finding, Job, Note

BEFORE_END_S = 12.0  # no program begins after that
PROGRAM_S = 30.0  # limit of one call on the ranks
SIZES: dict[str, tuple[tuple[int, ...], ...]] = {"1 rank": ((1,),), "2 ranks": ((2,), ()), "4 ranks": ((3,), (4,))}
MOST_SMALL = 6  # programs on the CPU, where the tests themselves run them all


def findings(job: Job) -> Iterator[Finding]:
    """Run programs of some numbers of ranks; yield a row for each technique, and what differed or could not run.

    One rank and as many ranks as there are GPUs use nccl; others share GPUs with gloo. On the CPU all use gloo.
    """
    sizes = SIZES.get(job.choice, ((job.num_gpus,),))
    if job.choice not in SIZES and job.num_gpus < 2:
        yield Note("no program was run on several GPUs with nccl: there are not two")
        return
    own_gpus = not job.small and sizes in (((1,),), ((job.num_gpus,),))
    if not job.small and not own_gpus and not job.may_share:
        yield Note(f"nothing on {job.choice} was run: ranks would have to share a GPU, which may not be shared")
        return
    backend = "nccl" if own_gpus else "gloo"
    outcomes: dict[str, list[tuple[str, Any]]] = defaultdict(list)
    left = []
    run = importlib.import_module("on_device.run")  # tests/ of the checkout; it brings a stand-in for pytest along
    machine = run.Machine(job.device, backend, PROGRAM_S)
    end = time.monotonic() + job.seconds - BEFORE_END_S
    try:
        for program in _programs(run, sizes, job):
            if time.monotonic() > end:
                left.append(program)
                continue
            outcome = run.run_program(program, machine=machine)
            outcomes[program.technique].append((program.name, outcome))
            if outcome.verdict in ("differs", "failed"):
                print(outcome.traceback)
                yield Note(f"{program.name}: {outcome.verdict}: {outcome.words}")
    finally:
        machine.close()
    for technique, found in outcomes.items():
        yield from _summary(technique, [one for _, one in found], f"{job.choice} ({job.device}, {backend})")
    if left:
        names = ", ".join(sorted({program.technique for program in left}))
        yield Note(
            f"{len(left)} programs were not run, for want of time ({names}); --minutes 30 gives them three times"
        )


def _programs(run: Any, sizes: tuple[tuple[int, ...], ...], job: Job) -> list[Any]:
    """Return the programs of some numbers of ranks, one of each technique after the other."""
    mine = [[one for one in run.programs(name) if one.world_sizes in sizes] for name in run.TECHNIQUES]
    dealt = [one for one in chain.from_iterable(zip_longest(*mine)) if one is not None]
    return dealt[:MOST_SMALL] if job.small else dealt


def _summary(technique: str, found: list[Any], where: str) -> Iterator[Finding]:
    ran = [one for one in found if one.verdict != "not available"]
    wrong = float(sum(one.verdict != "equal" for one in ran))
    claim = f"{technique} on {where}: programs that do not compute what one process computes"
    if ran:
        yield absolute(claim, [wrong], bar=0, unit="programs", note=f"{len(ran)} programs")
    for words, count in Counter(one.words for one in found if one.verdict == "not available").items():
        yield Note(f"{technique} on {where}: {count} programs are not available here: {words}")

"""No hidden wait: how often the host waits for the device in one training step of each technique."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from _rows import Row, single

from distlab.comm import Ranks
from gpu.job import Finding, Job, Note


def findings(job: Job) -> Iterator[Finding]:
    """Yield the waits that torch's profiler counts in a step, the most of all ranks, against what is allowed."""
    waits = importlib.import_module("on_device.waits")  # tests/ of the checkout
    if job.small:
        yield Note("on the CPU nothing can block the host: the steps were run, and reads of values were counted")
    with Ranks(job.num_ranks, timeout_s=job.seconds, backend=job.backend, record=False) as ranks:
        for name, program in waits.STEPS.items():
            try:
                counts = max(ranks.run(waits.count_waits, name, job.device), key=waits.num_waits)
            except (RuntimeError, ValueError) as error:  # one program that fails must not hide the others
                print(error)
                yield Note(f"a step of {name} failed on {job.where}: {' '.join(str(error).split())[:300]}")
            else:
                yield _row(f"waits of the host in a step of {name} on {job.where}", counts, waits.num_waits, program)


def _row(claim: str, counts: dict[str, int], num_waits: Any, program: Any) -> Row:
    total, allowed = float(num_waits(counts)), program.allowed
    seen = ", ".join(f"{number} x {call}" for call, number in counts.items() if number)
    bar = "-" if allowed is None else f"<= {allowed} waits"
    holds = None if allowed is None else total <= allowed
    return single(claim, [total], "waits", bar=bar, holds=holds, note=f"{program.why}; {seen or 'none seen'}")

"""No hidden wait: how often the host waits for the device in one training step of each technique."""

from __future__ import annotations

from collections.abc import Iterator

from _rows import Row

from distlab.comm import Ranks
from gpu.job import Finding, Job, Note
from gpu.timing import device_here

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def findings(job: Job) -> Iterator[Finding]:
    """Yield the waits that torch's profiler counts in a step, the most of all ranks, against what is allowed."""
    from on_device.waits import STEPS  # tests/ of the checkout

    if job.small:
        yield Note("on the CPU there are no streams: the steps were run, and nothing was counted")
    with Ranks(job.num_ranks, timeout_s=job.seconds, backend=job.backend, record=False) as ranks:
        for name, allowed in STEPS.items():
            counts = max(ranks.run(count, job, name), key=_total)
            yield _row(job, name, counts, float(allowed))


def count(job: Job, name: str) -> dict[str, int]:
    """Run on each rank: count the waits of one step, by the name of the call."""
    from on_device.waits import count_waits

    found: dict[str, int] = count_waits(name, device_here(job))
    return found


def _total(counts: dict[str, int]) -> int:
    return sum(number for call, number in counts.items() if call in WAITS)


def _row(job: Job, name: str, counts: dict[str, int], allowed: float) -> Row:
    total = float(_total(counts))
    note = ", ".join(f"{number} x {call}" for call, number in counts.items() if number)
    holds = None if job.small else total <= allowed
    claim = f"waits of the host in a step of {name} on {job.where}"
    return Row(claim, total, None, None, (total, total), "waits", f"<= {allowed:g} waits", holds, note)

"""What a learner runs, on this device, as it is written in the lessons."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

from _rows import absolute, single

from gpu.job import Finding, Job, Picture

BEFORE_END_S = 20.0


def findings(job: Job) -> Iterator[Finding]:
    """Run the tour or one lab as a command; yield what it said."""
    yield from _tour(job) if job.choice == "tour" else _lab(job, job.choice.split()[1])


def _ranks(job: Job) -> int:
    """Two ranks at least, where they may share a GPU: with one there is nothing to see."""
    return max(2, job.num_ranks) if job.may_share else job.num_ranks


def _run(job: Job, *words: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "distlab", *words, "--device", job.device, "--ranks", str(_ranks(job))]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True)
    print(done.stderr, file=sys.stderr)
    return done.returncode, done.stdout, (done.stderr.strip().splitlines() or ["it said nothing"])[-1]


def _tour(job: Job) -> Iterator[Finding]:
    folder = job.folder / "tour"
    status, said, last = _run(job, "tour", "--output", str(folder))
    if status not in (0, 1) or not said.startswith("{"):
        raise RuntimeError(f"distlab tour ended with status {status}: {last}")
    found = json.loads(said)
    where = f"{found['ranks']} ranks on {job.device}"
    apart = float(found["max_difference"])
    claim = f"tour: weights of {where} after 10 updates against one process (largest difference)"
    yield single(claim, [apart], "absolute", bar="<= 1e-05, all ranks equal", holds=bool(found["equal"]))
    claim = f"tour: step of the small GPT on {where}, predicted against measured (median error)"
    yield single(claim, [float(found["step"]["median_error"])], "relative")
    if (folder / "timeline.png").is_file():
        yield Picture("tour/timeline.png", f"One step of the tour on {where}: measured above, predicted below")


def _lab(job: Job, number: str) -> Iterator[Finding]:
    limit_s = max(1.0, job.seconds - BEFORE_END_S)  # then the lab itself says where each rank stands
    status, said, last = _run(job, "lab", number, "--limit-s", f"{limit_s:.0f}")
    line = next((line for line in said.splitlines() if line.startswith('{"schema"')), None)
    if line is None:
        raise RuntimeError(f"distlab lab {number} ended with status {status}: {last}")
    passed = bool(json.loads(line)["passed"]) and status == 0
    claim = f"lab {number} on {_ranks(job)} ranks ({job.device}): runs with wrong facts"
    yield absolute(claim, [float(not passed)], bar=0, unit="runs", note="" if passed else last)

"""Each technique's own tests of equality, without pytest: it computes what one process does."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

from _rows import Row

from gpu.job import Finding, Job, Note
from gpu.run import ROOT

SCRIPT = ROOT / "tests" / "on_device" / "run.py"
BEFORE_END_S = 5.0
SMALL_TECHNIQUES = ("collectives",)


def findings(job: Job) -> Iterator[Finding]:
    """Run the programs of one number of ranks; yield a row for each technique, and what differed or could not run.

    1 rank uses nccl (gloo on the CPU), as many ranks as there are GPUs use nccl, and others share GPUs with gloo.
    """
    num_ranks = job.num_ranks if job.choice == "all GPUs" else int(job.choice.split()[0])
    backend = "nccl" if not job.small and num_ranks in (1, job.num_gpus) else "gloo"
    if job.choice == "all GPUs" and job.num_gpus < 2:
        yield Note("no program was run on several GPUs: there are not two")
        return
    if not job.may_share and num_ranks > job.num_gpus:
        yield Note(f"nothing on {num_ranks} ranks was run: they would have to share a GPU, which may not be shared")
        return
    outcomes: dict[str, list[dict[str, Any]]] = {}
    for one in _programs(job, num_ranks, backend):
        outcomes.setdefault(one["technique"], []).append(one)
        if one["verdict"] in ("differs", "failed"):
            print(one["traceback"])
            yield Note(f"{one['name']}: {one['verdict']}: {one['words']}")
    for technique, found in outcomes.items():
        yield _row(technique, found, f"on {num_ranks} rank{'s' if num_ranks > 1 else ''} ({job.device}, {backend})")
        for words, count in Counter(one["words"] for one in found if one["verdict"] == "not available").items():
            yield Note(f"{technique}: {count} programs were not run: {words}")


def _programs(job: Job, num_ranks: int, backend: str) -> Iterator[dict[str, Any]]:
    """Yield what became of each program as soon as it is known."""
    seconds = max(1.0, job.seconds - BEFORE_END_S)
    words = ["--device", job.device, "--backend", backend, "--world-size", str(num_ranks), "--seconds", str(seconds)]
    for technique in SMALL_TECHNIQUES if job.small else ():
        words += ["--technique", technique]
    with subprocess.Popen([sys.executable, str(SCRIPT), *words], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
    if process.returncode not in (0, 1):
        raise RuntimeError(f"{SCRIPT.name} ended with status {process.returncode}")


def _row(technique: str, found: list[dict[str, Any]], where: str) -> Row:
    run = [one for one in found if one["verdict"] != "not available"]
    wrong = float(sum(one["verdict"] != "equal" for one in run))
    claim = f"{technique} {where}: programs that do not compute what one process computes"
    holds = wrong == 0 if run else None
    return Row(claim, wrong, None, None, (wrong, wrong), "programs", "<= 0 programs", holds, f"{len(run)} programs run")

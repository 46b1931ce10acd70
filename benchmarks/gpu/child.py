"""The process of one part: `python -m gpu.child FILE`, with the part and its job as JSON on standard input.

It appends each finding to FILE as soon as it is made, so that a part which is ended in its middle keeps what it found.
"""

from __future__ import annotations

import faulthandler
import json
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

from _rows import Row

from distlab.comm.launch.forkserver import PR_SET_PDEATHSIG, prctl
from gpu.job import Finding, Job, Note, Part, Picture

OUT_OF_MEMORY = 75  # exit status
STACKS_BEFORE_S = 3.0  # before its end, a part that hangs prints where it stands
WORDS = ("OutOfMemoryError", "CUDA out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def as_entry(finding: Finding) -> dict[str, object]:
    """Return a finding as JSON-ready values."""
    if isinstance(finding, Note):
        return {"note": finding.text}
    if isinstance(finding, Picture):
        return {"picture": finding.name, "shows": finding.shows}
    return {"row": finding.as_dict()}


def write(findings: Iterable[Finding], file: TextIO) -> None:
    """Append each finding as one line; rows are printed too."""
    for finding in findings:
        print(finding if isinstance(finding, Row) else finding[0], flush=True)
        file.write(json.dumps(as_entry(finding)) + "\n")
        file.flush()


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether an error, here or in a rank, is the GPU's memory that was not enough."""
    return any(word in f"{type(error).__name__}: {error}" for word in WORDS)


def main() -> int:
    """Run one part; a traceback on standard error says why it failed."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    told = json.loads(sys.stdin.read())
    job, part = Job(**told["job"] | {"folder": Path(told["job"]["folder"])}), Part(*told["part"])
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(0.5, job.seconds - STACKS_BEFORE_S))
    try:
        with open(sys.argv[1], "a", encoding="utf-8") as file:
            write(part.findings(job), file)
    except Exception as error:
        if not ran_out_of_memory(error):
            raise
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return OUT_OF_MEMORY
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Run one part in a process of its own: within its time, and with nothing left of it afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from distlab.comm.launch.forkserver import kill_group
from gpu.child import OUT_OF_MEMORY
from gpu.job import Job, Part

MARK = "DISTLAB_GPU_PART"  # in the environment of a part's process, and so of all that it starts
ROOT = Path(__file__).resolve().parents[2]
GRACE_S = 10.0  # for the processes of a part to be gone after SIGKILL
KEPT_LINES = 60  # of a part's output where it failed


@dataclass(frozen=True)
class Outcome:
    """What became of a part.

    Attributes:
        status: "done", "failed", "out of time", "killed", or "out of memory" (twice).
        seconds: that it took.
        date: when it ended, in UTC.
        findings: entries as `child.as_entry` writes them.
        shrunk: whether it ran out of memory and was run again with half the sizes.
        reason: why it is not done, in one line.
        output: the end of what it printed, tracebacks included, where it is not done.
    """

    status: str
    seconds: float
    date: str
    findings: list[dict[str, object]] = field(default_factory=list)
    shrunk: bool = False
    reason: str = ""
    output: str = ""


def run_part(part: Part, job: Job) -> Outcome:
    """Run a part within `job.seconds`, once more with half the sizes where it runs out of memory."""
    start = time.monotonic()
    outcome = _run_once(part, job)
    if outcome.status == "out of memory":
        left_s = job.seconds - (time.monotonic() - start)
        again = _run_once(part, replace(job, seconds=max(1.0, left_s), shrunk=True))
        outcome = replace(again, shrunk=True, seconds=time.monotonic() - start)
    return outcome


def _run_once(part: Part, job: Job) -> Outcome:
    folder = job.folder / "parts"
    folder.mkdir(parents=True, exist_ok=True)
    found, log = folder / f"{part.name}.jsonl", folder / f"{part.name}.log"
    found.write_text("")
    mark = uuid.uuid4().hex
    start = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-m", "gpu.child", str(found)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment() | {MARK: mark},
            start_new_session=True,
        )
        try:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
                stdin.write(_told(part, job))
            code = _wait(process, job.seconds)
        finally:
            end_tree(process, mark)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    findings = _read(found)
    status, reason = _status(code, job.seconds)
    said = "" if status == "done" else _end_of(log)
    return Outcome(status, time.monotonic() - start, date, findings, reason=reason, output=said)


def _told(part: Part, job: Job) -> bytes:
    facts = asdict(job) | {"folder": str(job.folder), "choice": part.choice}
    return json.dumps({"part": part, "job": facts}).encode()


def environment() -> dict[str, str]:
    """Return the environment of a part: this checkout comes first, and its benchmarks and tests can be imported."""
    paths = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return dict(os.environ) | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return None


def _status(code: int | None, seconds: float) -> tuple[str, str]:
    if code is None:
        return "out of time", f"it had not ended after {seconds:.0f} s; where it stood is in its output"
    if code == 0:
        return "done", ""
    if code == OUT_OF_MEMORY:
        return "out of memory", "the GPU's memory was not enough, with half the sizes neither"
    if code < 0:
        with contextlib.suppress(ValueError):
            return "killed", f"it was ended by {signal.Signals(-code).name}"
        return "killed", f"it was ended by signal {-code}"
    return "failed", f"it ended with status {code}; its traceback is in its output"


def _read(path: Path) -> list[dict[str, object]]:
    """Return the findings; a last line that was cut off does not count."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def _end_of(path: Path) -> str:
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-KEPT_LINES:])


def end_tree(process: subprocess.Popen[bytes], mark: str) -> None:
    """Kill a part's process and everything that carries its mark, and wait until nothing of it is left."""
    if process.poll() is None or sys.platform != "linux":
        kill_group(process.pid)
    process.wait()
    deadline = time.monotonic() + GRACE_S
    while (left := marked(mark)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def marked(mark: str) -> list[int]:
    """Return the processes that were started with this mark in their environment (Linux; elsewhere none)."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if wanted in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found

"""What `python -m distlab gpu` does, in order: look at the machine, run each part, keep and write what it found."""

from __future__ import annotations

import ast
import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpu.ask import read_facts
from gpu.facts import Facts, Verdict, judge, old_torch
from gpu.job import Job, Part, choose
from gpu.report import headline, write_report
from gpu.results import FILE as FILE, Results, resume
from gpu.run import ROOT, environment, run_part

NEEDED = ("torch", "numpy", "cloudpickle", "matplotlib")
PLANNED_MINUTES = 10.0  # for which the seconds of the parts are meant
LEAST_SHARE = 0.5  # of its seconds: a part that would get less is not begun
IMPORT_LIMIT_S = 120.0


@dataclass(frozen=True)
class Settings:
    """What the user asked for.

    Attributes:
        minutes: after which no part goes on.
        parts: those to run, in the order of their worth.
        only: whether the user named them: then they run again, even if they are done.
        out: folder of the report.
        device: "cuda", "cpu", or "auto": GPUs where there are any.
    """

    minutes: float
    parts: tuple[Part, ...]
    only: bool
    out: Path
    device: str


def settings(*, minutes: float, only: list[str] | None, out: Path, device: str) -> Settings:
    """Check what the user asked for.

    Raises:
        ValueError: a part that does not exist.
        ModuleNotFoundError: a package that every part needs is missing.
    """
    for name in NEEDED:
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return Settings(minutes, choose(only), only is not None, out, device)


def list_parts(parts: Sequence[Part]) -> str:
    """Return one line for each part: its name, how long it takes at most, and what it does."""
    lines = [f"{part.name:<16} {part.seconds:4.0f} s  {part.summary()}" for part in parts]
    whole = sum(part.seconds for part in parts) / 60
    return "\n".join([*lines, f"{len(parts)} parts, {whole:.0f} minutes at most."])


def main(asked: Settings, say: Callable[[str], None]) -> int:
    """Run the command; exit 0 where every part that was begun ended well, and where there is no GPU.

    Args:
        asked: what the user asked for.
        say: prints a line.

    Raises:
        ValueError: the GPUs cannot be used as they are; the text says why and what to do.
    """
    facts = read_facts()
    device = "cpu" if asked.device == "cpu" else "cuda"
    verdict = Verdict() if device == "cpu" else judge(facts)
    if refused := verdict.refused or old_torch(facts):
        raise ValueError(refused)
    if verdict.no_gpu:
        if asked.device == "cuda":
            raise ValueError(f"{verdict.no_gpu}; leave --device out, or pass --device cpu")
        return without_gpu(asked, verdict.no_gpu, say)
    results, resumed = resume(asked.out, facts, device)
    results.notes = list(verdict.notes)
    for line in (*verdict.notes, resumed):
        if line:
            say(line)
    with _ended_by_signals():
        ended_well = run_parts(asked, job_of(facts, device, asked.out), results, say)
    say(f"{headline(results)} See {asked.out / 'GPU.md'}")
    return 0 if ended_well else 1


def job_of(facts: Facts, device: str, folder: Path) -> Job:
    """Return what every part is told; `seconds` and `choice` are each part's own."""
    if device == "cpu":
        return Job("cpu", 0, 0.0, folder.resolve())
    return Job(
        "cuda",
        facts.usable,
        0.0,
        folder.resolve(),
        half="bfloat16" if facts.has_bf16 else "float16",
        free_bytes=min(gpu.free_bytes for gpu in facts.gpus),
        may_share=facts.may_share,
        gpu=facts.gpus[0].name,
        whole=not any(gpu.mig for gpu in facts.gpus),
    )


def run_parts(asked: Settings, job: Job, results: Results, say: Callable[[str], None]) -> bool:
    """Run the parts within the minutes, those first that were never tried; write the report after each."""
    end = time.monotonic() + 60 * asked.minutes
    begun: list[bool] = []
    waiting = [part for part in asked.parts if asked.only or not results.is_done(part)]
    for part in sorted(waiting, key=lambda part: part.name in results.parts):
        limit_s = part.seconds * max(1.0, asked.minutes / PLANNED_MINUTES)
        left_s = end - time.monotonic()
        if left_s < LEAST_SHARE * part.seconds:
            reason = f"no time was left: it takes up to {part.seconds:.0f} s; run the same command again"
            if part.name not in results.parts:
                results.not_run[part.name] = reason
            continue
        say(f"{part.name}: up to {min(limit_s, left_s):.0f} s ...")
        outcome = run_part(part, replace(job, seconds=min(limit_s, left_s)))
        results.add(part, outcome)
        begun.append(outcome.status == "done")
        say(_ended(part, outcome.status, outcome.seconds, outcome.findings, reason=outcome.reason))
        results.save()
        write_report(results)
    results.save()
    write_report(results)
    return all(begun)


def _ended(part: Part, status: str, seconds: float, findings: list[dict[str, Any]], *, reason: str) -> str:
    judged = [entry["row"]["holds"] for entry in findings if entry.get("row", {}).get("holds") is not None]
    bars = f"; {sum(judged)} of {len(judged)} bars hold" if judged else ""
    return f"{part.name}: {status} after {seconds:.0f} s{bars}{f'; {reason}' if reason else ''}"


def without_gpu(asked: Settings, why: str, say: Callable[[str], None]) -> int:
    """Say what would run on a GPU, and check that every part parses and can be imported here."""
    say(list_parts(asked.parts))
    modules = sorted({part.module for part in asked.parts})
    for path in sorted((ROOT / "benchmarks" / "gpu").rglob("*.py")):
        ast.parse(path.read_text(encoding="utf-8"), str(path))
    code = "\n".join(f"import {module}" for module in modules)
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=IMPORT_LIMIT_S)
    if done.returncode:
        say(done.stderr)
        raise RuntimeError("a part cannot be imported here; its traceback is above")
    say(f"no GPU: {why}. All {len(modules)} modules of the parts parse and can be imported.")
    say("To run the parts small on this machine: python -m distlab gpu --device cpu")
    return 0


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Inside the block SIGTERM ends the command as Ctrl-C does, so that the running part is ended too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)

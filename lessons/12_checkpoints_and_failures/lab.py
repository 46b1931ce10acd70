"""Lab 12: kill ranks under torchrun, go on from checkpoints, and compare every bit; then go on with fewer."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distlab.comm.rendezvous import own_environment
from distlab.course.lab import CommonSettings, Lab, flag, main
from distlab.elastic import plan_faults

JOB = Path(__file__).with_name("job.py")
MOST_RESTARTS = 100


@dataclass(frozen=True)
class Settings(CommonSettings):
    """Train a small GPT under a torchrun of its own; kill ranks while it trains and saves; compare with no failure.

    Attributes:
        steps: updates of the run.
        save_every: updates between two checkpoints.
        kills: ranks that are killed, each at some moment of some step.
        seed: of the plan of kills.
        later: ranks of the second half of the last run; 0: one fewer, or two where there is one.
    """

    steps: int = flag(24, least=4)
    save_every: int = flag(5, least=1)
    kills: int = flag(2, least=0, most=20)
    seed: int = 0
    later: int = flag(0, least=0, most=8)


def run(lab: Lab[Settings]) -> None:
    """Train without a failure, with kills, and on two numbers of ranks; rank 0 starts the jobs, the others wait."""
    box: list[Any] = [None]
    if lab.member.rank == 0:
        try:
            box = [compare(lab)]
        except Exception as error:  # told on every rank, or the others would wait
            box = [str(error)]
    dist.broadcast_object_list(box)
    if isinstance(box[0], str):
        raise RuntimeError(f"rank 0: {box[0]}")
    for name, value, wanted in box[0]["facts"]:
        lab.report.fact(name, value, wanted)
    for name, value, unit in box[0]["measured"]:
        lab.report.measured(name, value, unit)
    for name in ("12.resume", "12.shards"):
        if lab.is_mine(name):
            lab.report.note(f"{name}: the one of {lab.settings.impl} ran.")


def compare(lab: Lab[Settings]) -> dict[str, list[Any]]:
    """Start the jobs and return what they show."""
    settings, n = lab.settings, lab.member.world_size
    later = settings.later or (n - 1 if n > 1 else 2)
    kills = plan_faults(
        settings.seed, settings.kills, num_steps=settings.steps, world_size=n, kinds=("kill",), within_s=0.05
    )
    with tempfile.TemporaryDirectory(prefix="lab-12-") as name:
        folders = [Path(name) / one for one in ("undisturbed", "killed", "elastic")]
        times = [lab.now()]
        for folder, faults in zip(folders[:2], ((), kills), strict=True):
            start(lab, folder, n, settings.steps, faults)
            times.append(lab.now())
        start(lab, folders[2], n, settings.steps // 2, ())
        start(lab, folders[2], later, settings.steps, ())
        plain, killed, elastic = (torch.load(folder / "end.pt", weights_only=True) for folder in folders)
        starts = len((folders[1] / "starts-0.txt").read_text().split())
        taken = samples_of(folders[2])
    gap = float((elastic["weights"] - plain["weights"]).norm() / plain["weights"].norm())
    once = taken == Counter(range(24 * settings.steps))
    facts = [
        ("killed and resumed: hash of the weights as without a failure", killed["hash"] == plain["hash"], True),
        (f"{n} ranks, then {later}: each sample once, none left out", once, True),
    ]
    measured = [
        ("hash of the weights without a failure", plain["hash"][:16], ""),
        ("ranks killed", settings.kills, ""),
        ("starts of all ranks", starts, ""),
        ("run without a failure", times[1] - times[0], "s"),
        ("run with kills", times[2] - times[1], "s"),
        (f"{n} ranks, then {later}: weights differ by (dropout draws anew)", gap, ""),
    ]
    return {"facts": facts, "measured": measured}


def start(lab: Lab[Settings], folder: Path, num_ranks: int, steps: int, faults: Any) -> None:
    """Run the job under torchrun until it has made its steps."""
    settings = lab.settings
    (folder / "saved").mkdir(parents=True, exist_ok=True)
    device = "cpu" if lab.member.device.type == "cpu" else None
    options = {
        "impl": settings.impl,
        "steps": steps,
        "save_every": settings.save_every,
        "faults": faults,
        "device": device,
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
    command += ["--max-restarts", str(MOST_RESTARTS), "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    command += ["--local-addr", "127.0.0.1", "--monitor-interval", "0.1", "-m", "distlab.comm.standby"]
    command += [str(JOB), str(folder), json.dumps(options)]
    words = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, env=own_environment(), timeout=settings.limit_s, check=False, **words)
    if done.returncode or not (folder / "end.pt").exists():
        raise RuntimeError(f"the job ended with status {done.returncode}: {done.stdout[-1500:]}")


def samples_of(folder: Path) -> Counter[int]:
    """Count how often each sample was taken; a step that was made again counts once."""
    steps: dict[tuple[str, int], list[int]] = {}
    for path in folder.glob("taken-*.jsonl"):
        for line in path.read_text().splitlines():
            number, samples = json.loads(line)
            steps[path.name, number] = samples
    return Counter(sample for samples in steps.values() for sample in samples)


if __name__ == "__main__":
    main("12", Settings, run)

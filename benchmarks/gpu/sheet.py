"""The data sheet of a GPU by the name that its driver gives it: the presets of the simulator."""

from __future__ import annotations

from distlab.plan import Device
from gpu.job import Job
from simulator import device

NAMES = (("H200", "h200-sxm"), ("H100 80GB HBM3", "h100-sxm"), ("A100-SXM4-80GB", "a100-sxm-80gb"))


def sheet_of(job: Job) -> Device | None:
    """Return what the data sheet says; None where no preset is this GPU, or it is a slice of one."""
    if job.small or not job.whole:
        return None
    return next((device(preset, measured=False) for words, preset in NAMES if words in job.gpu), None)


def no_sheet(job: Job) -> str:
    """Say why nothing is compared with a data sheet."""
    if job.small:
        return "the CPU has no data sheet here: no share of its peak is given"
    if not job.whole:
        return "a slice of a GPU (MIG) has no data sheet: no share of its peak is given"
    return f"no preset of the simulator is a {job.gpu}: no share of its peak is given (simulator/hardware/presets.toml)"

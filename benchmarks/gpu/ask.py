"""Ask what machine this is: torch, the driver and the environment, in one place.

Torch is asked in a process of its own: it would keep a piece of each GPU's memory for as long as the asking process
lives, and a broken driver may crash it. `nvidia-smi` is asked too, since it answers where torch does not.
"""

from __future__ import annotations

import csv
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from importlib import metadata
from pathlib import Path

from gpu.facts import Facts, Gpu

LIMIT_S = 90.0
QUERY = ("name", "memory.total", "memory.free", "compute_mode", "mig.mode.current", "driver_version")


def read_facts() -> Facts:
    """Ask torch (in a different process), the driver and the environment."""
    seen = _ask_torch()
    listed, driver_cuda = _ask_driver()
    version = _driver_version() or (listed[0]["driver_version"] if listed else None)
    gpus = tuple(Gpu(**_gpu(entry)) for entry in seen.pop("gpus", []))
    usable = len(gpus)
    known = [_listed(row) for row in listed]
    if usable and len(known) == usable:  # torch knows capabilities and slices, the driver knows modes
        gpus = tuple(
            Gpu(gpu.name, gpu.memory_bytes, gpu.free_bytes, gpu.capability, row.mode, gpu.mig or row.mig)
            for gpu, row in zip(gpus, known, strict=True)
        )
    names = {field.name for field in fields(Facts)}
    return Facts(
        **{name: value for name, value in seen.items() if name in names},
        driver=version,
        driver_cuda=driver_cuda,
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        gpus=gpus or tuple(known),
        usable=usable,
    )


def _gpu(entry: Mapping[str, object]) -> dict[str, object]:
    capability = entry["capability"]
    assert isinstance(capability, Sequence)
    return dict(entry) | {"capability": tuple(capability)}


def _listed(row: Mapping[str, str]) -> Gpu:
    mode = row["compute_mode"].replace(" ", "_")
    total, free = (int(float(row[name]) * 2**20) for name in ("memory.total", "memory.free"))
    return Gpu(row["name"], total, free, mode=mode, mig=row["mig.mode.current"].startswith("Enabled"))


def _ask_torch() -> dict[str, object]:
    """Run `tell` in a process of its own; where that dies, say how."""
    command = [sys.executable, "-m", "gpu.ask"]
    path = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(__file__).parents[2])])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([path, os.environ.get("PYTHONPATH", "")])}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environment)
    except subprocess.TimeoutExpired:
        return {"error": f"torch did not answer within {LIMIT_S:.0f} s", "torch": metadata.version("torch")}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        said = (done.stderr.strip().splitlines() or ["no message"])[-1]
        error = f"the process that asked torch ended with status {done.returncode}: {said}"
        return {"error": error, "torch": metadata.version("torch")}
    answer: dict[str, object] = json.loads(lines[-1])
    return answer


def _ask_driver() -> tuple[list[dict[str, str]], str | None]:
    """Return what nvidia-smi says of each GPU, and the newest CUDA version of the driver."""
    ask = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(ask, capture_output=True, text=True, timeout=LIMIT_S)
        table = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=LIMIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return [], None
    rows = csv.reader(listed.stdout.splitlines(), skipinitialspace=True) if listed.returncode == 0 else []
    found = re.search(r"CUDA Version:\s*([\d.]+)", table.stdout)
    entries = [dict(zip(QUERY, row, strict=True)) for row in rows if len(row) == len(QUERY)]
    return [entry for entry in entries if entry["memory.total"].isdigit()], found[1] if found else None


def _driver_version() -> str | None:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return found[1] if found else None


def tell() -> dict[str, object]:
    """Return what torch knows of this machine; it uses each GPU for a moment."""
    import numpy
    import torch

    import distlab
    from distlab.comm import device as seam
    from distlab.measure import memory_bytes, num_cores

    gpus, error = [], ""
    try:
        if torch.version.cuda is not None:
            seam.start()
            gpus = [_told(index) for index in range(seam.num_gpus())]
    except (RuntimeError, AssertionError) as failed:
        error = str(failed)
    memory = f"{memory_bytes() / 2**30:.0f} GiB"
    return {
        "machine": f"{platform.system()} {platform.machine()}, {num_cores()} cores, {memory}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "nccl": ".".join(map(str, seam.nccl_version())) if gpus else None,
        "numpy": numpy.__version__,
        "distlab": distlab.__version__,
        "gpus": gpus,
        "error": error,
    }


def _told(index: int) -> dict[str, object]:
    import torch

    from distlab.comm import device as seam

    place = torch.device("cuda", index)
    torch.ones(1, device=place).sum().item()  # an exclusive GPU that is taken refuses here
    name = seam.name(place)
    return asdict(Gpu(name, seam.total_bytes(place), seam.free_bytes(place), seam.capability(place), mig="MIG" in name))


if __name__ == "__main__":
    print(json.dumps(tell()))

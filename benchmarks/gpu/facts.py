"""What machine this is, read in one place, and what of it stands in the way of a run.

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
from dataclasses import asdict, dataclass, fields
from importlib import metadata
from pathlib import Path

MIN_TORCH = (2, 11)
MIN_FREE_BYTES = 4 * 2**30
BF16_CAPABILITY = (8, 0)
IN_USE = 0.1  # of a GPU's memory: held by other processes
LIMIT_S = 90.0
QUERY = ("name", "memory.total", "memory.free", "compute_mode", "mig.mode.current", "driver_version")


@dataclass(frozen=True)
class Gpu:
    """One GPU that torch can see, or that the driver knows where torch sees none.

    Attributes:
        name: as the driver calls it.
        memory_bytes: its memory.
        free_bytes: what no process holds.
        capability: compute capability, such as (9, 0); None where only the driver was asked.
        mode: compute mode: "Default", "Exclusive_Process" or "Prohibited".
        mig: whether it is, or is cut into, slices (Multi-Instance GPU).
    """

    name: str
    memory_bytes: int
    free_bytes: int
    capability: tuple[int, int] | None = None
    mode: str = "Default"
    mig: bool = False


@dataclass(frozen=True)
class Facts:
    """The machine and its software.

    Attributes:
        machine: processor, cores, memory, system.
        python: its version.
        torch: its version, with the build's suffix.
        torch_cuda: the CUDA version that torch was built for; None for a build without CUDA.
        nccl: version of torch's nccl; None where it has none.
        numpy: its version.
        distlab: its version.
        driver: version of NVIDIA's driver; None where no driver is loaded.
        driver_cuda: the newest CUDA version that the driver supports.
        visible: CUDA_VISIBLE_DEVICES; None where it is not set.
        gpus: those that torch can use; without any, those that the driver knows.
        usable: how many torch can use.
        error: what torch said when it tried to use them.
    """

    machine: str = "a machine"
    python: str = "3.11"
    torch: str = "2.11.0"
    torch_cuda: str | None = None
    nccl: str | None = None
    numpy: str = ""
    distlab: str = ""
    driver: str | None = None
    driver_cuda: str | None = None
    visible: str | None = None
    gpus: tuple[Gpu, ...] = ()
    usable: int = 0
    error: str = ""

    def key(self, device: str) -> dict[str, object]:
        """Return what two runs must have in common for one to go on where the other ended."""
        same = ("python", "torch", "torch_cuda", "nccl", "numpy", "distlab")
        gpus = [gpu.name for gpu in self.gpus] if device == "cuda" else []
        driver = self.driver if device == "cuda" else None
        return {"device": device, "machine": self.machine, "gpus": gpus, "driver": driver} | {
            name: getattr(self, name) for name in same
        }

    @property
    def has_bf16(self) -> bool:
        """Whether every GPU multiplies matrices of bfloat16 in hardware."""
        return all(gpu.capability is not None and gpu.capability >= BF16_CAPABILITY for gpu in self.gpus)

    @property
    def may_share(self) -> bool:
        """Whether several processes may use one GPU at once."""
        return all(gpu.mode == "Default" for gpu in self.gpus)


@dataclass(frozen=True)
class Verdict:
    """Whether a run can begin.

    Attributes:
        no_gpu: why this machine has no GPU; empty where it has one.
        refused: why its GPUs cannot be used as they are, and what to do; empty where they can.
        notes: what holds for all that is measured.
    """

    no_gpu: str = ""
    refused: str = ""
    notes: tuple[str, ...] = ()


def judge(facts: Facts) -> Verdict:
    """Say whether GPUs can be used, in one line for each obstacle."""
    if old := old_torch(facts):
        return Verdict(refused=old)
    if facts.usable == 0:
        return _none_usable(facts)
    for place, gpu in enumerate(facts.gpus):
        if gpu.mode == "Prohibited":
            return Verdict(refused=_mode_line(place, gpu))
        if gpu.free_bytes < MIN_FREE_BYTES:
            return Verdict(refused=_full_line(facts, place, gpu))
    return Verdict(notes=tuple(_notes(facts)))


def old_torch(facts: Facts) -> str:
    """Say that torch is too old; empty where it is not."""
    number = re.match(r"(\d+)\.(\d+)", facts.torch)
    if number and (int(number[1]), int(number[2])) >= MIN_TORCH:
        return ""
    return f"torch is {facts.torch}; distlab needs {'.'.join(map(str, MIN_TORCH))} or newer"


def _none_usable(facts: Facts) -> Verdict:
    if facts.driver is None:
        return Verdict(no_gpu="no driver of NVIDIA is loaded on this machine")
    if not facts.gpus and facts.visible is None:
        return Verdict(no_gpu=f"the driver {facts.driver} is loaded, and it knows no GPU")
    if facts.visible is not None and facts.visible.strip() in ("", "-1", "NoDevFiles"):
        return Verdict(refused=f"CUDA_VISIBLE_DEVICES is {facts.visible!r}, which hides every GPU; unset it")
    if facts.torch_cuda is None:
        return Verdict(
            refused=f"torch {facts.torch} is built without CUDA; install a build of torch for CUDA "
            f"{facts.driver_cuda or '(see nvidia-smi)'} or older"
        )
    if _is_too_old(facts):
        return Verdict(
            refused=f"the driver {facts.driver} supports CUDA {facts.driver_cuda or '(unknown)'}, and torch "
            f"{facts.torch} is built for CUDA {facts.torch_cuda}; install a newer driver, or torch for an older CUDA"
        )
    for place, gpu in enumerate(facts.gpus):
        if gpu.mode != "Default":
            return Verdict(refused=_mode_line(place, gpu))
        if gpu.free_bytes < MIN_FREE_BYTES:
            return Verdict(refused=_full_line(facts, place, gpu))
    if facts.visible is not None:
        return Verdict(refused=f"CUDA_VISIBLE_DEVICES is {facts.visible!r}, and torch finds none of these; unset it")
    said = " ".join(facts.error.split()) or "it gave no reason"
    return Verdict(refused=f"the driver {facts.driver} is loaded, and torch sees no GPU: {said}; try nvidia-smi")


def _is_too_old(facts: Facts) -> bool:
    """Compare major versions: a driver runs every minor version of a CUDA that it supports."""
    if "too old" in facts.error:
        return True
    if facts.driver_cuda is None or facts.torch_cuda is None:
        return False
    return int(facts.driver_cuda.split(".")[0]) < int(facts.torch_cuda.split(".")[0])


def _mode_line(place: int, gpu: Gpu) -> str:
    return (
        f"GPU {place} ({gpu.name}) is in compute mode {gpu.mode}, and no process of ours may use it; "
        f"its administrator can allow it: nvidia-smi -i {place} -c DEFAULT"
    )


def _full_line(facts: Facts, place: int, gpu: Gpu) -> str:
    free = [str(index) for index, one in enumerate(facts.gpus) if one.free_bytes >= MIN_FREE_BYTES]
    others = f", or set CUDA_VISIBLE_DEVICES={','.join(free)}" if free and facts.visible is None else ""
    return (
        f"GPU {place} ({gpu.name}) has {_gib(gpu.free_bytes)} of {_gib(gpu.memory_bytes)} free, and the parts need "
        f"{_gib(MIN_FREE_BYTES)}; end the processes that hold it (nvidia-smi lists them){others}"
    )


def _notes(facts: Facts) -> list[str]:
    notes = []
    for place, gpu in enumerate(facts.gpus):
        named = f"GPU {place} ({gpu.name})"
        if gpu.free_bytes < (1 - IN_USE) * gpu.memory_bytes:
            held = _gib(gpu.memory_bytes - gpu.free_bytes)
            notes.append(f"{named} is in use: other processes hold {held} of it, and may disturb every time below")
        if gpu.mode != "Default":
            notes.append(f"{named} is in compute mode {gpu.mode}: nothing with several ranks on one GPU is run")
        if gpu.capability is not None and gpu.capability < BF16_CAPABILITY:
            number = ".".join(map(str, gpu.capability))
            notes.append(f"{named} has no bfloat16 (compute capability {number}): speed is measured in float16")
        if gpu.mig:
            notes.append(f"{named} is a slice (MIG): nothing is compared with the data sheet of the whole GPU")
    return notes


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def read_facts() -> Facts:
    """Ask torch (in another process), the driver and the environment."""
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
    command = [sys.executable, "-m", "gpu.facts"]
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

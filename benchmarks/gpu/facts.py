"""What machine this is, and what of it stands in the way of a run; `ask` reads it."""

from __future__ import annotations

import re
from dataclasses import dataclass

MIN_TORCH = (2, 11)
MIN_FREE_BYTES = 4 * 2**30
BF16_CAPABILITY = (8, 0)
IN_USE = 0.1  # of a GPU's memory: held by other processes


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

"""What machine a figure was measured on: processor, cores, memory, GPUs, versions."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import asdict, dataclass
from datetime import date
from importlib import metadata
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """The facts to state with every measured figure."""

    date: str
    processor: str
    cores: int
    memory_bytes: int
    gpus: tuple[str, ...]
    system: str
    python: str
    torch: str

    def __str__(self) -> str:
        gpus = f", {len(self.gpus)} x {self.gpus[0]}" if self.gpus else ", no GPU"
        memory = f"{self.memory_bytes / 2**30:.0f} GiB"
        return (
            f"{self.date}, {self.processor}, {self.cores} cores, {memory}{gpus}, "
            f"{self.system}, Python {self.python}, torch {self.torch}"
        )

    def as_dict(self) -> dict[str, object]:
        """Return the facts as JSON-ready values."""
        return asdict(self) | {"gpus": list(self.gpus)}


def this_machine() -> Machine:
    """Read the facts of the machine that runs this."""
    path = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", path.read_text() if path.is_file() else "", re.M)
    return Machine(
        date=date.today().isoformat(),
        processor=found[1].strip() if found else platform.processor() or platform.machine(),
        cores=num_cores(),
        memory_bytes=memory_bytes(),
        gpus=gpu_names(),
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        torch=version_of("torch") or "missing",
    )


def num_cores() -> int:
    """Return the cores that this process may use, which in a container are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gpu_names() -> tuple[str, ...]:
    """Return the names of the GPUs that torch sees; none without torch."""
    try:
        from distlab.comm import device
    except ImportError:
        return ()
    return tuple(device.name(index) for index in range(device.num_gpus()))


def version_of(package: str) -> str | None:
    """Return the installed version of a package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def memory_bytes() -> int:
    """Return the memory of this machine, or of the container or job around this process where that has less.

    0: it is not known.
    """
    try:
        least = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0
    for path in _limits():
        if path.is_file() and (text := path.read_text().strip()).isdigit():  # else "max"
            least = min(least, int(text))
    return least


def _limits() -> list[Path]:
    """Return the files in which Linux keeps the limits of this process's group and of those around it."""
    own, root = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
    groups = [line.split(":", 2) for line in own.read_text().splitlines()] if own.is_file() else []
    found = []
    for _, kinds, name in groups:
        if not kinds or "memory" in kinds.split(","):
            top, file = (root / "memory", "memory.limit_in_bytes") if kinds else (root, "memory.max")
            own = top / name.lstrip("/")
            found += [folder / file for folder in (own, *own.parents) if folder.is_relative_to(top)]
    return found

"""How much memory there is."""

from __future__ import annotations

import os
from pathlib import Path


def memory_bytes() -> int:
    """Return the memory of this machine, or of the container or job around this process where that has less.

    0: it is not known.
    """
    try:
        least = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0
    for path in _limits():
        try:
            least = min(least, int(path.read_text()))
        except (OSError, ValueError):  # not there, or "max"
            continue
    return least


def _limits() -> list[Path]:
    """Return the files in which Linux keeps the limits of this process's group and of those around it."""
    root = Path("/sys/fs/cgroup")
    try:
        groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return []
    found = []
    for _, kinds, name in groups:
        if not kinds or "memory" in kinds.split(","):
            top, file = (root / "memory", "memory.limit_in_bytes") if kinds else (root, "memory.max")
            own = top / name.lstrip("/")
            found += [folder / file for folder in (own, *own.parents) if folder.is_relative_to(top)]
    return found

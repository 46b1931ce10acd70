"""Where the time of a training step goes, rank by rank, and what makes it slow.

Start at `sections`: how a step is taken apart. Then read `steps` (where one begins), `calls` (what ranks do together),
`profile` (all of it) and `findings` (what makes steps slow); `words` says it. Traces come from a `live` program
(`recorded` reads its calls) or are `read` from files: `kineto` knows torch.profiler's, `align` brings clocks together.
Names load on first use: files are read without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distlab.profile.findings.finding import Finding
    from distlab.profile.live import Profiler
    from distlab.profile.profile import Profile
    from distlab.profile.read import read_files
    from distlab.profile.sections import SECTIONS
    from distlab.profile.words import find, report

_HOMES = {
    "Finding": "findings.finding",
    "Profile": "profile",
    "Profiler": "live",
    "SECTIONS": "sections",
    "find": "words",
    "read_files": "read",
    "report": "words",
}
__all__ = ["SECTIONS", "Finding", "Profile", "Profiler", "find", "read_files", "report"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"distlab.profile.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'distlab.profile' has no attribute {name!r}")

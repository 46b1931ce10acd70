"""Where the time of a training step goes, rank by rank, and what makes it slow.

Start at `plain`: where the time goes, on one screen. Then `sections`: where a step begins, and how it is taken apart;
`profile` (all of it, with what ranks do together) and `findings` (what makes steps slow, in words, or limits them).
Traces come from a `live` program or are `read` from files, whose clocks it brings together; `kineto` knows
torch.profiler's. `anomalies` stands apart: where NaN began. Names load on first use: files are read without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distlab.faces import lazy

if TYPE_CHECKING:
    from distlab.profile.findings import Finding as Finding, find as find, limit_of as limit_of, report as report
    from distlab.profile.live import Profiler as Profiler
    from distlab.profile.plain import plain_profile as plain_profile
    from distlab.profile.profile import Profile as Profile
    from distlab.profile.read import read_files as read_files
    from distlab.profile.sections import SECTIONS as SECTIONS


__getattr__ = lazy(__name__)

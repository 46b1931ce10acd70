"""What a test of seeded faults counts: faults found, with their ranks, and findings that are no fault's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from distlab.profile import Finding


class Judged(NamedTuple):
    """Of some runs: how many had a fault, which of these were missed, and which runs had a false alarm, in words."""

    num_runs: int
    num_faults: int
    missed: list[str]
    alarms: list[str]

    @property
    def found_share(self) -> float:
        """Faults that were found."""
        return 1 - len(self.missed) / self.num_faults

    @property
    def alarm_share(self) -> float:
        """Runs with a finding of another kind than their fault's."""
        return len(self.alarms) / self.num_runs


def judge(runs: Iterable[tuple[str, str, tuple[int, ...], list[Finding]]]) -> Judged:
    """Judge runs: a name, the fault ("none"), the ranks that have it (() for all), and what was found."""
    total, faults, missed, alarms = 0, 0, [], []
    for name, fault, ranks, findings in runs:
        total += 1
        faults += fault != "none"
        said = {finding.kind: finding for finding in findings}
        told = "; ".join(map(str, findings)) or "nothing"
        if fault != "none" and (fault not in said or said[fault].ranks != ranks):
            missed.append(f"{name}: {fault} of ranks {ranks}: {told}")
        if set(said) - {fault}:
            alarms.append(f"{name}: {fault} of ranks {ranks}: {told}")
    return Judged(total, faults, missed, alarms)

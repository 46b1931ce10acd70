"""Seeded faults are found, with their ranks and their cost, and healthy runs are left in peace."""

import json
from collections.abc import Iterator

import pytest
from gpu_traces import seeded_gpu
from judging import judge
from seeded import seeded

from distlab.profile import Finding, Profile, find, read_files
from distlab.profile.align import align


def engine_runs(numbers) -> Iterator[tuple[str, str, tuple[int, ...], list[Finding]]]:
    for number in numbers:
        trace, fault, ranks, _ = seeded(number)
        yield f"engine {number}", fault, ranks, find(Profile.of(align(trace)[0]))


def gpu_runs(numbers, folder) -> Iterator[tuple[str, str, tuple[int, ...], list[Finding]]]:
    for number in numbers:
        documents, fault, ranks = seeded_gpu(number)
        paths = [folder / f"{number}-{rank}.json" for rank in range(len(documents))]
        for path, document in zip(paths, documents, strict=True):
            path.write_text(json.dumps(document))
        findings = find(read_files(paths).measured)
        if fault == "host-bound":  # all hosts are equally slow
            ranks = tuple(range(len(documents)))
        yield f"gpu {number}", fault, ranks, findings


def test_seeded_faults_are_found_and_nothing_else(tmp_path):
    judged = judge([*engine_runs(range(14)), *gpu_runs(range(6), tmp_path)])
    assert judged.num_runs == 20
    assert not judged.missed
    assert not judged.alarms


@pytest.mark.soak
def test_of_180_made_runs_95_percent_of_faults_are_found_with_2_percent_false_alarms(tmp_path):
    """Runs that the event engine and made-up GPU traces give; `test_live` has the 20 on real ranks."""
    judged = judge([*engine_runs(range(1000, 1147)), *gpu_runs(range(1000, 1033), tmp_path)])
    print(f"{judged.num_runs} runs: {judged.found_share:.1%} found, {judged.alarm_share:.1%} false alarms")
    assert judged.found_share >= 0.95, judged.missed
    assert judged.alarm_share <= 0.02, judged.alarms


@pytest.mark.parametrize("number", [1, 2, 4, 5, 8, 13, 39])
def test_a_finding_costs_what_the_step_saves_without_the_fault(number):
    trace, fault, _, share = seeded(number)
    (finding,) = [one for one in find(Profile.of(align(trace)[0])) if one.kind == fault]
    assert finding.share == pytest.approx(share, rel=0.25)
    assert f"{finding.share * 100:.0f} % of every step" in str(finding)

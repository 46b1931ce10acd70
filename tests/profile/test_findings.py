"""Seeded faults are found, with their ranks and their cost, and healthy runs are left in peace."""

import json
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from gpu_traces import seeded_gpu
from seeded import FAULTS, KIND, draw, seeded, simulate_job
from test_live import profile_fault

from distlab.profile import Finding, Profile, find, limit_of, read_files
from distlab.profile.read import align
from distlab.trace import Span, Trace

Run = tuple[str, str, tuple[int, ...], list[Finding]]  # a name, the fault, the ranks that have it, and what was found


def judge(runs: list[Run]) -> tuple[list[str], list[str]]:
    """Return, in words, the faults that were missed, and the runs with a finding of a different kind."""
    missed, alarms = [], []
    for name, fault, ranks, findings in runs:
        said = {finding.kind: finding for finding in findings}
        told = f"{name}: {fault} of ranks {ranks}: {'; '.join(map(str, findings)) or 'nothing'}"
        missed += [told] if fault != "none" and (fault not in said or said[fault].ranks != ranks) else []
        alarms += [told] if set(said) - {fault} else []
    return missed, alarms


def engine_runs(numbers) -> Iterator[Run]:
    for number in numbers:
        trace, fault, ranks, _ = seeded(number)
        yield f"engine {number}", fault, ranks, find(Profile.of(align(trace)[0]))


def gpu_runs(numbers, folder) -> Iterator[Run]:
    for number in numbers:
        documents, fault, ranks = seeded_gpu(number)
        paths = [folder / f"{number}-{rank}.json" for rank in range(len(documents))]
        for path, document in zip(paths, documents, strict=True):
            path.write_text(json.dumps(document))
        findings = find(read_files(paths).measured)
        if fault == "host-bound":  # all hosts are equally slow
            ranks = tuple(range(len(documents)))
        yield f"gpu {number}", fault, ranks, findings


def real_runs(ranks, numbers) -> Iterator[Run]:
    """Real processes, DataParallel and gloo; the layers sleep and the link is throttled, so that times are known."""
    for number in numbers:
        fault, victim = FAULTS[number % len(FAULTS)], number % 2
        profile = ranks.run(profile_fault, fault, victim)[0]
        named = (victim,) if fault in ("straggler", "imbalance", "slow loader") else ()
        yield f"real {number}", KIND.get(fault, fault), named, find(profile)


def test_seeded_faults_are_found_and_nothing_else(tmp_path):
    assert judge([*engine_runs(range(7)), *gpu_runs(range(3), tmp_path)]) == ([], [])


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_of_200_runs_95_percent_of_the_faults_are_found_with_2_percent_false_alarms(ranks, tmp_path):
    """147 runs of the event engine, 33 made-up runs on GPUs, 20 on real ranks; 1 in 7, of GPUs 1 in 3, is healthy."""
    every = {"event engine": [*engine_runs(range(1000, 1147))], "real ranks": [*real_runs(ranks(2), range(20))]}
    every["GPU traces"] = [*gpu_runs(range(1000, 1033), tmp_path)]
    for name, runs in every.items():
        missed, alarms = judge(runs)
        said = f"{name}: of {len(runs)} runs {len(missed)} missed, {len(alarms)} false alarms"
        print(said, *missed, *alarms, sep="\n")
    runs = [run for some in every.values() for run in some]
    missed, alarms = judge(runs)
    assert len(runs) == 200
    assert len(missed) <= 0.05 * sum(fault != "none" for _, fault, *_ in runs), missed
    assert len(alarms) <= 0.02 * 200, alarms


@pytest.mark.parametrize("number", [1, 2, 4, 5, 13])
def test_a_finding_costs_what_the_step_saves_without_the_fault(number):
    trace, fault, _, share = seeded(number)
    (finding,) = [one for one in find(Profile.of(align(trace)[0])) if one.kind == fault]
    assert finding.share == pytest.approx(share, rel=0.25)
    assert f"{finding.share * 100:.0f} % of every step" in str(finding)


def of_two_ranks(*rows):
    """A profile of two ranks that do the same: lane, kind, start and end in milliseconds, and the stage."""
    spans = [
        Span(rank, lane, kind, kind, start * 1_000_000, end * 1_000_000, 1_000_000, stage if stage < 0 else rank)
        for rank in (0, 1)
        for lane, kind, start, end, stage in rows
    ]
    return Trace.from_spans(spans)


def test_where_chance_decides_who_is_last_no_rank_is_blamed():
    for number in range(6):
        random = np.random.default_rng([21, number])
        for finding in find(Profile.of(simulate_job(replace(draw(random), spread=0.6), random))):
            assert finding.ranks == (), f"{number}: {finding}"


def test_sums_that_the_next_layer_needs_are_no_missing_overlap():
    """Tensor parallelism all-reduces in forward too; data parallelism in backward alone, and could have hidden it."""
    inside = [("communication", "all_reduce", 2, 6, -1), ("wait", "wait", 2, 6, -1)]
    sums = [("communication", "all_reduce", 12, 16, -1), ("wait", "wait", 12, 16, -1)]
    passes = [("compute", "F", 0, 8, -1), ("compute", "B", 8, 20, -1), ("compute", "optimizer", 20, 21, -1)]
    assert find(Profile.of(of_two_ranks(*inside, *sums, *passes))) == []
    (finding,) = find(Profile.of(of_two_ranks(*sums, *passes)))
    assert finding.kind == "missing overlap"


def test_of_a_pipeline_the_rank_with_the_longest_stages_is_named():
    trace = of_two_ranks(("compute", "F", 0, 10, 0), ("compute", "B", 10, 30, 0), ("compute", "optimizer", 30, 31, 0))
    assert find(Profile.of(trace)) == []
    longer = Trace.from_spans(
        span._replace(end_ns=span.end_ns + 10_000_000) if span.rank == 1 and span.kind == "B" else span
        for span in trace
    )
    (finding,) = find(Profile.of(longer))
    assert (finding.kind, finding.ranks) == ("imbalance", (1,))
    assert "the stages of rank 1 take 1.1x the mean" in finding.text


@pytest.mark.parametrize("number", range(0, 70, 7))
def test_the_limit_is_what_made_faster_makes_steps_shorter(number):
    """The engine says what helps: the same healthy run with half the work, or with half the bytes."""
    random = np.random.default_rng(number)
    job = replace(draw(random), noise=0.0, latency_ns=0)
    job = replace(job, ns_per_byte=job.ns_per_byte * (8 if number % 2 else 0.5))
    faster = {"step": {"forward_ns": tuple(each // 2 for each in job.forward_ns), "update_ns": job.update_ns // 2}}
    faster["wire"] = {"ns_per_byte": job.ns_per_byte / 2}
    lasts = {what: simulate_job(replace(job, **change), random).duration_s for what, change in faster.items()}
    limit = limit_of(Profile.of(simulate_job(job, random)))
    assert limit.what == min(lasts, key=lasts.get) == ("wire" if number % 2 else "step")
    assert max(limit.step, limit.wire) > 0.5 > limit.loader
    waits = replace(job, slow_data_ns=sum(job.forward_ns), slow_data_ranks=(0,))
    limit = limit_of(Profile.of(simulate_job(waits, random)))
    assert limit.what == "loader"
    assert limit.loader > 0.05

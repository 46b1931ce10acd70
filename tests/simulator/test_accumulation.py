"""Accumulation in the simulator: several micro-batches, of which only the last one's backward sends."""

import pytest
from step_cases import WORKLOAD, cluster_of, plan_of

from distlab.plan import Contention
from simulator import simulate


@pytest.mark.parametrize("contention", [None, Contention(1.4, 1.9)])
@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b"])
def test_only_the_last_micro_batch_sends(schedule, contention):
    plan = plan_of(None, num_microbatches=3, schedule=schedule)
    step = simulate(WORKLOAD, cluster_of(4, contention=contention), plan)
    spans = [span for span in step.trace if span.rank == 0]
    backward = [span for span in spans if span.kind == "B"]
    sent = [span for span in spans if span.kind == "all_reduce"]
    assert len(backward) == len([span for span in spans if span.kind == "F"]) == 3
    assert sum(span.num_bytes for span in sent) == WORKLOAD.gradient_bytes
    assert backward[-2].end_ns <= backward[-1].start_ns < sent[0].start_ns < backward[-1].end_ns


@pytest.mark.parametrize("contention", [None, Contention(1.4, 1.9)])
def test_accumulation_adds_whole_passes_and_no_communication(contention):
    machine = cluster_of(4, contention=contention)
    one, four = (simulate(WORKLOAD, machine, plan_of(None, num_microbatches=count)) for count in (1, 4))
    stage = one.stages[0]
    passes = 3 * (sum(stage.forward_ns) + sum(stage.backward_ns)) / 1e9
    assert four.duration_s - one.duration_s == pytest.approx(passes, abs=1e-8)
    assert four.exposed_communication_s == pytest.approx(one.exposed_communication_s, abs=1e-8)
    assert four.sent_bytes_per_rank == one.sent_bytes_per_rank
    assert four.samples_per_s > one.samples_per_s  # communication is paid once for four times the samples


def test_accumulation_and_contention_slow_only_what_overlaps():
    quiet, loud = cluster_of(4), cluster_of(4, contention=Contention(1.5, 1.0))
    for count in (1, 3):
        plan = plan_of(None, num_microbatches=count)
        alone, slowed = simulate(WORKLOAD, quiet, plan), simulate(WORKLOAD, loud, plan)
        own = [span for span in slowed.trace if span.rank == 0 and span.kind in ("F", "B")]
        length = [span.end_ns - span.start_ns for span in own]
        expected = [span.end_ns - span.start_ns for span in alone.trace if span.rank == 0 and span.kind in ("F", "B")]
        assert length[:-1] == expected[:-1]
        assert length[-1] > expected[-1]

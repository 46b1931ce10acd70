"""Steps of any program between calibrations: what runs when, which steps count, and when the machine was busy."""

import sys
import time

import pytest

from distlab.comm import run
from distlab.measure import RankReport, Window, overlay_of, time_beside
from distlab.measure.machine.others import busy_s, busy_sentence, taken_cores
from distlab.measure.runs.windows import trouble_of
from distlab.trace import Span, SpanWriter, Trace

MS = 1_000_000


def window(predicted=1.0, taken=0.0):
    return Window(1.0, predicted, predicted, predicted, taken)


def test_cores_that_the_ranks_leave_free_are_not_taken_from_them():
    assert taken_cores(3.0, 2.0, 1.0, cores=2, num_ranks=2) == pytest.approx(1.0)
    assert taken_cores(3.0, 2.0, 1.0, cores=2, num_ranks=4) == pytest.approx(1.0)
    assert taken_cores(3.0, 2.0, 1.0, cores=4, num_ranks=2) == 0.0
    assert taken_cores(5.0, 2.0, 1.0, cores=4, num_ranks=2) == pytest.approx(1.0)
    assert taken_cores(1.9, 2.0, 1.0, cores=2, num_ranks=2) == 0.0


def test_busy_time_is_that_of_own_cores_and_grows_with_work(monkeypatch):
    before = busy_s()
    until = time.process_time() + 0.2
    while time.process_time() < until:
        pass
    assert busy_s() - before > 0.1
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert busy_s() is None, "as on a bare node"


def test_a_busy_machine_is_told_with_how_much_was_taken():
    found = trouble_of([window(taken=0.6), window(taken=0.8), window(taken=0.0)])
    assert found == busy_sentence(0.7)
    assert "took 0.7 of its cores" in found
    assert trouble_of([window(taken=0.6), window(), window()]) == ""
    assert trouble_of([window(taken=0.1)] * 3) == ""


def test_a_machine_that_changes_its_speed_is_told():
    assert "differ by 30%" in trouble_of([window(1.0), window(1.3)])
    assert "differ by 50%" in trouble_of([window(1.0), window(1.0), window(0.5), window(0.5)])
    assert trouble_of([window(1.0), window(1.1)]) == ""
    assert trouble_of([window(1.0), window(1.3), window(1.0)]) == ""  # noise, and no change that stays
    assert trouble_of([window(1.0), window(2.0, taken=1.0), window(1.1)]) == ""  # that one does not count


def report(lengths_ms, taken=(0.0, 0.0, 0.0), rounds=(10, 10, 10), rank=0):
    """A rank's report of two windows of two steps, one step per second; rounds predict milliseconds."""
    made = RankReport(rounds=list(rounds), taken_cores=list(taken))
    made.measured_s = [(lengths_ms[0] + lengths_ms[1]) / 2e3, (lengths_ms[2] + lengths_ms[3]) / 2e3]
    made.step_ns = [(second * 1000 * MS, second * 1000 * MS + ms * MS) for second, ms in enumerate(lengths_ms)]
    made.trace = Trace.from_spans(Span(rank, "compute", "forward", "F", *step) for step in made.step_ns)
    return made


def predicted(rounds):
    return Trace.from_spans([Span(0, "compute", "forward", "F", 0, round(sum(rounds) / len(rounds) * MS))])


def test_a_step_is_as_long_as_on_its_slowest_rank_and_the_one_nearest_the_median_is_drawn():
    reports = [report([10, 11, 12, 13]), report([20, 8, 8, 8], rank=1)]
    overlay = overlay_of(reports, predicted)
    assert overlay.measured_s == [0.020, 0.011, 0.012, 0.013]
    assert overlay.measured.duration_s == pytest.approx(0.012)
    assert overlay.measured.start_ns.min() == 0
    assert list(overlay.measured.ranks) == [0, 1]
    assert overlay.predicted_s == [0.010] * 6
    assert overlay.trouble == ""


def test_steps_beside_a_busy_process_do_not_count_where_others_do():
    overlay = overlay_of([report([10, 11, 90, 91], taken=(0.0, 0.0, 0.9))], predicted)
    assert overlay.measured_s == [0.010, 0.011]
    assert overlay.trouble == ""


def test_where_all_steps_were_beside_a_busy_process_the_overlay_says_so():
    overlay = overlay_of([report([10, 11, 12, 13], taken=(0.5, 0.5, 0.5))], predicted)
    assert len(overlay.measured_s) == 4
    assert overlay.trouble == busy_sentence(0.5)


def test_each_window_is_predicted_from_the_rounds_around_it():
    overlay = overlay_of([report([10, 10, 10, 10], rounds=(9, 10, 14))], predicted)
    assert overlay.predicted_s == pytest.approx([0.011, 0.009, 0.012, 0.011, 0.0095, 0.014])
    assert overlay.predicted.duration_s == pytest.approx(0.011)


def test_calls_of_the_drawn_step_are_drawn_and_no_others():
    calls = [Span(0, "communication", "send", "send", at * MS, (at + 1) * MS) for at in (500, 1001, 1010, 1011, 2001)]
    overlay = overlay_of([report([10, 11, 12, 13])], predicted, calls=Trace.from_spans(calls))
    assert overlay.measured.duration_s == pytest.approx(0.011)
    drawn = overlay.measured.select(overlay.measured.is_word("lane", "communication"))
    assert sorted(drawn.start_ns.tolist()) == [1 * MS, 10 * MS]


def beside_made_up():
    order = []
    spans = SpanWriter(0)

    def step():
        with spans.span("forward", kind="F"):
            order.append("step")

    found = time_beside(step, lambda: order.append("calibrate") or len(order), spans, steps_per_window=2, num_windows=2)
    return order, found


def test_calibrations_stand_before_between_and_after_windows_on_the_same_ranks():
    for order, found in run(beside_made_up, 2):
        window_of_steps = ["step"] * 3  # the first is not timed
        assert order == ["calibrate", *window_of_steps, "calibrate", *window_of_steps, "calibrate"]
        assert found.rounds == [1, 5, 9]
        assert len(found.step_ns) == 4
        assert len(found.measured_s) == 2
        assert len(found.taken_cores) == 3
        assert all(len(found.step_trace(step)) == 1 for step in range(4))


def one_reading():
    import torch.distributed as dist

    from distlab.comm import recorded
    from distlab.measure.machine.others import OtherProcesses

    others = OtherProcesses()
    with recorded() as seen:
        found = others.taken()
    return found, [(call.op, call.num_bytes) for call in seen.records.calls(dist.get_rank())]


def test_a_reading_is_one_small_all_reduce_and_one_broadcast_and_the_same_on_every_rank():
    (first, calls), (second, other_calls) = run(one_reading, 2)
    assert first == second >= 0.0
    assert calls == other_calls == [("all_reduce", 8), ("broadcast", 8)]

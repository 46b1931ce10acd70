"""Windows of steps between calibrations, judged; and what is the same on every rank: results, means, moments."""

import sys
import time

import pytest
import torch
import torch.distributed as dist

from distlab.comm import recorded
from distlab.measure import RankReport, Window, judge, on_first_rank, overlay_of, time_beside
from distlab.measure.machine import ranks as on_ranks
from distlab.measure.runs.windows import time_window, trouble_of
from distlab.trace import Span, SpanWriter, Trace

MS = 1_000_000


def window(predicted=1.0, taken=0.0, drift=0.0, measured=1.0):
    return Window(measured, predicted, predicted, predicted * (1 + drift), taken)


def test_calm_windows_decide():
    verdict = judge([window(1.1)] * 10 + [window(3.0, drift=0.2)] * 5, bar=0.15)
    assert (verdict.num_kept, verdict.num_dropped, verdict.holds) == (10, 5, True)
    assert verdict.median_error == pytest.approx(0.1)
    assert verdict.signed_error == pytest.approx(0.1)
    assert judge([window(0.7)] * 12, bar=0.15).holds is False
    with pytest.raises(ValueError, match="no window"):
        judge([], bar=0.1)


def test_nine_windows_do_not_decide():
    verdict = judge([window()] * 9 + [window(drift=0.2)] * 9, bar=0.15)
    assert verdict.holds is None
    said = str(verdict)
    assert "not judged: of 18 windows (some steps between two calibrations) 9 were calm, and 10 are needed" in said
    assert "Over all 18 the median step took 1e+03 ms" in said
    assert said.endswith("run the same command again.")


def test_noise_excuses_twice_its_size_and_no_more():
    times = (0.8, 1.2, 0.8, 1.2, 1.0, 1.0, 1.3, 0.7, 1.3, 0.7, 1.25, 0.75)
    near, far = (judge([window(predicted, measured=each) for each in times], bar=0.01) for predicted in (1.0, 3.0))
    assert near.repeat_spread == pytest.approx(0.225)
    assert (near.holds, far.holds) == (True, False)


def test_cores_that_the_ranks_leave_free_are_not_taken_from_them(monkeypatch):
    monkeypatch.setattr(on_ranks, "group_device", lambda: None)
    for all_s, cores, num_ranks, taken in ((3.0, 2, 4, 1.0), (3.0, 4, 2, 0.0), (5.0, 4, 2, 1.0), (1.9, 2, 2, 0.0)):
        monkeypatch.setattr(on_ranks, "num_cores", lambda cores=cores: cores)
        monkeypatch.setattr(on_ranks.dist, "get_world_size", lambda num_ranks=num_ranks: num_ranks)
        means = 1.0, 2.0 / num_ranks, all_s
        monkeypatch.setattr(on_ranks, "mean_over_ranks", lambda *_, means=means: means)
        assert on_ranks.OtherProcesses().taken() == pytest.approx(taken)


def test_busy_time_is_that_of_own_cores_and_grows_with_work(monkeypatch):
    before, until = on_ranks.busy_s(), time.process_time() + 0.2
    while time.process_time() < until:
        pass
    assert on_ranks.busy_s() - before > 0.1
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert on_ranks.busy_s() is None, "as on a bare node"


def test_a_machine_that_is_busy_or_changes_its_speed_is_told():
    found = trouble_of([window(taken=0.6), window(taken=0.8), window(taken=0.0)])
    assert found == on_ranks.busy_sentence(0.7)
    assert "took 0.7 of its cores" in found
    assert "differ by 30%" in trouble_of([window(1.0), window(1.3)])
    assert "differ by 50%" in trouble_of([window(1.0), window(1.0), window(0.5), window(0.5)])
    noise = [window(1.0), window(1.3), window(1.0)], [window(1.0), window(2.0, taken=1.0), window(1.1)]
    for calm in ([window(taken=0.6), window(), window()], [window(taken=0.1)] * 3, [window(1.0), window(1.1)], *noise):
        assert trouble_of(calm) == ""


def report(lengths_ms, taken=(0.0, 0.0, 0.0), rounds=(10, 10, 10), rank=0, late_ms=0):
    """A rank's report of two windows of two steps, one step per second; rounds predict milliseconds."""
    made = RankReport(rounds=list(rounds), taken_cores=list(taken))
    made.measured_s = [(lengths_ms[0] + lengths_ms[1]) / 2e3, (lengths_ms[2] + lengths_ms[3]) / 2e3]
    made.step_ns = [(second * 1000 * MS, second * 1000 * MS + ms * MS) for second, ms in enumerate(lengths_ms)]
    marks = ((start + late_ms * MS, end) for start, end in made.step_ns)
    made.trace = Trace.from_spans(Span(rank, "compute", "forward", "F", *mark) for mark in marks)
    return made


def predicted(rounds):
    return Trace.from_spans([Span(0, "compute", "forward", "F", 0, round(sum(rounds) / len(rounds) * MS))])


def test_a_step_is_as_long_as_on_its_slowest_rank_and_the_one_nearest_the_median_is_drawn():
    reports = [report([10, 11, 12, 13]), report([20, 8, 8, 8], rank=1, late_ms=3)]
    calls = [Span(0, "communication", "send", "send", at * MS, (at + 1) * MS) for at in (500, 2001, 2010, 2012, 3001)]
    calls.append(Span(1, "communication", "barrier", "barrier", 2001 * MS, 2002 * MS))  # agreed on the begin too late
    overlay = overlay_of(reports, predicted, calls=Trace.from_spans(calls))
    assert overlay.measured_s == [0.020, 0.011, 0.012, 0.013]
    assert overlay.measured.duration_s == pytest.approx(0.012)
    assert list(overlay.measured.ranks) == [0, 1]
    assert overlay.predicted_s == [0.010] * 6
    assert overlay.trouble == ""
    drawn = overlay.measured.select(overlay.measured.is_word("lane", "communication"))
    assert sorted(drawn.start_ns.tolist()) == [1 * MS, 10 * MS], "the calls of the drawn step, and no others"


def test_steps_beside_a_busy_process_do_not_count_where_others_do_and_rounds_around_a_window_predict_it():
    overlay = overlay_of([report([10, 11, 90, 91], taken=(0.0, 0.0, 0.9))], predicted)
    assert (overlay.measured_s, overlay.trouble) == ([0.010, 0.011], "")
    overlay = overlay_of([report([10, 11, 12, 13], taken=(0.5, 0.5, 0.5), late_ms=3)], predicted)
    assert overlay.measured.start_ns.tolist() == [3 * MS], "the clock of the drawn step begins where the timed one did"
    assert (len(overlay.measured_s), overlay.trouble) == (4, on_ranks.busy_sentence(0.5))
    overlay = overlay_of([report([10, 10, 10, 10], rounds=(9, 10, 14))], predicted)
    assert overlay.predicted_s == pytest.approx([0.011, 0.009, 0.012, 0.011, 0.0095, 0.014])
    assert overlay.predicted.duration_s == pytest.approx(0.011)


def beside_made_up():
    """Time windows until there are enough, and until time is up; then steps in which one rank sleeps."""
    found = []
    for limits in ({"num_windows": 2}, {"budget_s": -1.0}):
        order, spans = [], SpanWriter(0)

        def step(spans=spans, order=order):
            with spans.span("forward", kind="F"):
                order.append("step")

        def calibrate(order=order):
            return order.append("calibrate") or len(order)

        found.append((time_beside(step, calibrate, spans, steps_per_window=2, **limits), order))
    slow = iter([0, 1])
    uneven = time_window(lambda: time.sleep(0.02 * (dist.get_rank() == next(slow))), 2, torch.device("cpu"))
    return found, uneven


def test_windows_stand_between_calibrations_until_there_are_enough_or_time_is_up(ranks):
    first, second = ranks(2).run(beside_made_up)
    for runs, _ in (first, second):
        for (made, order), num_windows in zip(runs, (2, 1), strict=True):
            assert order == ["calibrate", *["step", "step", "step", "calibrate"] * num_windows]  # one is not timed
            assert made.rounds == [1 + 4 * number for number in range(num_windows + 1)]
            assert [len(made.measured_s), len(made.step_ns)] == [num_windows, 2 * num_windows]
            assert len(made.taken_cores) == num_windows + 1
            assert all(len(made.step_trace(step)) == 1 for step in range(2 * num_windows))
    (seconds, slow), (same, then) = first[1], second[1]
    assert seconds == same >= 0.02, "a step takes as long as on its slowest rank: the mean over ranks is 0.01 s"
    assert min(slow[0][1] - slow[0][0], then[1][1] - then[1][0]) >= 20e6


CPU = torch.device("cpu")


def on_three():
    rank, asked = dist.get_rank(), []

    def refuse():
        raise ValueError(f"rank {rank} cannot")

    made = on_first_rank(lambda: asked.append(rank) or {"made by": rank, "shape": (2, 3)})
    with pytest.raises(ValueError, match="rank 0 cannot"):
        on_first_rank(refuse)
    own = [float(rank), 3.0 - rank]
    return made, asked, on_ranks.mean_over_ranks(own, CPU), on_ranks.largest_over_ranks(own, CPU)


def test_one_rank_makes_it_and_means_and_largest_values_are_the_same_on_every_rank(ranks):
    made = {"made by": 0, "shape": (2, 3)}
    found = ranks(3).run(on_three)
    assert found == [(made, [0] * (rank == 0), [1.0, 2.0], [2.0, 3.0]) for rank in range(3)]


def sent():
    others = on_ranks.OtherProcesses()
    with recorded() as seen:
        on_ranks.mean_over_ranks([1.0, 2.0, 3.0], CPU)
        on_ranks.largest_over_ranks([1.0, 2.0], CPU)
        taken = others.taken()
    return taken, [(call.op, call.num_bytes) for call in seen.records.calls(dist.get_rank())]


def test_one_call_of_8_bytes_per_value(ranks):
    """And a reading of other processes is one small all-reduce, the same on every rank."""
    (taken, calls), second = ranks(2).run(sent)
    assert (taken, calls) == second
    assert calls == [("all_reduce", 24), ("all_reduce", 16), ("all_reduce", 24)]
    assert taken >= 0.0


def begin_twice():
    starter, rank, moments = on_ranks.Starter(CPU), dist.get_rank(), []
    with recorded() as seen:
        for _ in range(2):
            time.sleep(0.02 * rank)  # the last one comes late: no rank begins without it
            come = time.perf_counter()
            begin = starter.begin()
            moments.append((come, begin, time.perf_counter()))
    return moments, [(call.op, call.num_bytes) for call in seen.records.calls(rank)]


def test_all_ranks_begin_at_one_moment_that_lies_ahead_of_the_last_one(ranks):
    found = ranks(3).run(begin_twice)
    for places in zip(*(moments for moments, _ in found), strict=True):
        begins = [begin for _, begin, _ in places]
        assert max(begins) - min(begins) < 1e-6  # one machine, one clock
        assert begins[0] > max(come for come, _, _ in places)
        assert all(left >= begin for _, begin, left in places)
    assert [calls for _, calls in found] == [[("barrier", 0), ("all_reduce", 16)] * 2] * 3

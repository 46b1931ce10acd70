"""Windows: how steps are timed, when enough windows are calm, and how predictions are judged."""

import pytest

from distlab.measure import Window, judge


def windows(count, measured=1.0, predicted=1.0, drift=0.0):
    return [Window(measured, predicted, predicted, predicted * (1 + drift)) for _ in range(count)]


def test_calm_windows_decide():
    verdict = judge(windows(10, predicted=1.1) + windows(5, predicted=3.0, drift=0.2), bar=0.15)
    assert (verdict.num_kept, verdict.num_dropped, verdict.holds) == (10, 5, True)
    assert verdict.median_error == pytest.approx(0.1)
    assert verdict.signed_error == pytest.approx(0.1)


def test_nine_windows_do_not_decide():
    verdict = judge(windows(9) + windows(9, drift=0.2), bar=0.15)
    assert verdict.holds is None
    said = str(verdict)
    assert "not judged: of 18 windows (some steps between two calibrations) 9 were calm, and 10 are needed" in said
    assert "Over all 18 the median step took" in said
    assert "1e+03 ms" in said
    assert said.endswith("run the same command again.")


def test_a_bad_prediction_falls_short():
    assert judge(windows(12, predicted=0.7), bar=0.15).holds is False


def test_noise_excuses_twice_its_size_and_no_more():
    noisy = [Window(m, 1.0, 1.0, 1.0) for m in (0.8, 1.2, 0.8, 1.2, 1.0, 1.0, 1.3, 0.7, 1.3, 0.7, 1.25, 0.75)]
    verdict = judge(noisy, bar=0.01)
    assert verdict.repeat_spread > 0.1
    assert verdict.holds is (verdict.median_error <= 2 * verdict.repeat_spread)


def test_no_window_is_refused():
    with pytest.raises(ValueError, match="no window"):
        judge([], bar=0.1)


def time_made_up(budget_s):
    """Time windows of two steps; each calibration says how much has been done until then."""
    import torch

    from distlab.measure import RankReport
    from distlab.measure.runs.windows import time_windows

    report, order = RankReport(), []
    time_windows(
        report,
        lambda: order.append("ready") or (lambda: order.append("step")),
        lambda: order.append("calibrate") or len(order),
        torch.device("cpu"),
        num_windows=3,
        steps_per_window=2,
        budget_s=budget_s,
    )
    return report, order


@pytest.mark.parametrize(("budget_s", "num_windows"), [(1e9, 3), (-1.0, 1)])
def test_windows_stand_between_calibrations_until_there_are_enough_or_time_is_up(ranks, budget_s, num_windows):
    for report, order in ranks(2).run(time_made_up, budget_s):
        assert order == ["calibrate", *["ready", "step", "step", "step", "calibrate"] * num_windows]
        assert report.rounds == [1 + 5 * number for number in range(num_windows + 1)]
        assert [len(report.measured_s), len(report.step_ns)] == [num_windows, 2 * num_windows]
        assert len(report.taken_cores) == num_windows + 1


def time_uneven_steps():
    """Time two steps in which one rank after the other sleeps for 20 ms."""
    import time

    import torch
    import torch.distributed as dist

    from distlab.measure.runs.windows import time_window

    slow = iter([0, 1])

    def step():
        if dist.get_rank() == next(slow):
            time.sleep(0.02)

    return time_window(step, 2, torch.device("cpu"))


def test_a_step_takes_as_long_as_on_its_slowest_rank(ranks):
    (seconds, first), (same, second) = ranks(2).run(time_uneven_steps)
    assert seconds == same >= 0.02  # the mean over ranks would be 0.01 s and what the machine adds
    assert [len(first), len(second)] == [2, 2]
    assert first[0][1] - first[0][0] >= 20e6
    assert second[1][1] - second[1][0] >= 20e6

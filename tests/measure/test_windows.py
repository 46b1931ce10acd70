import pytest

from distlab.measure.runs.windows import Window, judge


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
    assert "not judged" in str(verdict)


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

"""Rates are in proportion to the batch, and a function of the update's number alone."""

from functools import partial

import pytest
import torch

from distlab.large_batch import LearningRateSchedule, linear_scaled_lr, sqrt_scaled_lr, warmup_factor


def test_rates_scale_with_the_batch_and_warmup_rises_in_equal_steps_to_one():
    assert linear_scaled_lr(0.1, 256, 32) == pytest.approx(0.8)
    assert sqrt_scaled_lr(0.1, 128, 32) == pytest.approx(0.2)
    assert linear_scaled_lr(0.1, 16, 32) == pytest.approx(0.05)
    assert [warmup_factor(step, 4) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert warmup_factor(0, 0) == 1.0


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine"])
def test_schedule_goes_up_then_down(decay):
    schedule = LearningRateSchedule(0.8, 20, num_warmup=5, decay=decay)
    rates = [schedule.at(step) for step in range(25)]
    assert rates[4] == rates[5] == pytest.approx(0.8)
    assert max(rates) == pytest.approx(0.8)
    assert all(a < b for a, b in zip(rates[:4], rates[1:5], strict=True))
    if decay == "constant":
        assert set(rates[4:]) == {rates[4]}
    else:
        assert all(a >= b for a, b in zip(rates[5:], rates[6:], strict=False))
        assert rates[20] == rates[24] == pytest.approx(0.0, abs=1e-12)


def test_a_resumed_run_goes_on_at_the_same_rates():
    """At every place a run may be cut, also inside the warmup, from any rate that the checkpoint left."""
    schedule = LearningRateSchedule(0.8, 20, num_warmup=5, decay="linear", final_lr=0.1)

    def rates(start, stop, found):
        weight = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([{"params": [weight], "lr_scale": 2.0}], lr=found)
        logged = []
        for step in range(start, stop):
            schedule.set(optimizer, step)
            logged.append(optimizer.param_groups[0]["lr"])
        return logged

    whole = rates(0, 20, 1.0)
    assert whole == [2.0 * schedule.at(step) for step in range(20)]
    for cut in range(1, 20):
        first = rates(0, cut, 1.0)
        assert first + rates(cut, 20, first[-1]) == whole


def made(**named):
    return lambda: LearningRateSchedule(**{"peak_lr": 0.1, "num_steps": 5, **named})


BATCHES = [(0, 32), (32, 0), (32.5, 32), (True, 32)]
BAD = [
    *((partial(linear_scaled_lr, 0.1, *sizes), "pass a whole number of samples, at least 1") for sizes in BATCHES),
    (lambda: sqrt_scaled_lr(0.1, 0, 32), "pass a whole number of samples, at least 1"),
    (lambda: warmup_factor(-1, 4), "step is -1"),
    (made(peak_lr=-0.1), "peak_lr is -0.1"),
    (made(num_steps=0), "pass at least 1 update"),
    (made(num_warmup=6), "6 updates of warmup in a run of 5"),
    (made(decay="fast"), "pass one of constant, linear, cosine"),
]


def test_what_cannot_be_is_refused():
    for call, words in BAD:
        with pytest.raises(ValueError, match=words):
            call()

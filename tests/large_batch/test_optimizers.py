"""LARS and LAMB behave as torch optimizers should, also on many ranks; rates are in proportion to the batch."""

import io
from functools import partial

import pytest
import torch
from equal import DENSE, ROW_OPTIMIZERS, Row, assert_rows_equal_one_process, replicas, train
from torch import nn

from distlab.comm import recorded
from distlab.large_batch import (
    LAMB,
    LARS,
    LearningRateSchedule,
    Moments,
    Trust,
    lamb_update,
    lars_update,
    linear_scaled_lr,
    sqrt_scaled_lr,
    warmup_factor,
)

OPTIMIZERS = {name: ROW_OPTIMIZERS[name] for name in ("lars", "lamb")}
BOTH = pytest.mark.parametrize("name", OPTIMIZERS)
ROWS = {name: Row(DENSE, name, replicas()) for name in OPTIMIZERS} | {
    "lars, float32": Row(DENSE, "lars", replicas(), torch.float32)
}


@pytest.mark.equality("large_batch")
@pytest.mark.soak_where(world_size=(2, 4))
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ten_updates_equal_one_process(ranks, world_size):
    assert_rows_equal_one_process(ranks(world_size), ROWS)


@BOTH
def test_state_makes_the_round_trip(name):
    """Saved, loaded with weights_only into an optimizer of other settings, and trained on: bit for bit the same."""
    half, file = train(Row(DENSE, name), range(4)), io.BytesIO()
    torch.save([half.state(), half.optimizer.state_dict()], file)
    file.seek(0)
    other = partial({"lars": LARS, "lamb": LAMB}[name], lr=9.0, trust=Trust(adapt="none"))
    again = train(Row(DENSE, other), range(4, 10), torch.load(file, weights_only=True)).state()
    whole = train(Row(DENSE, name)).state()
    assert all(torch.equal(whole[key], again[key]) for key in whole)


@BOTH
def test_a_step_takes_a_closure_leaves_the_unused_alone_and_hides_no_broken_gradient(name):
    weights = [nn.Parameter(torch.full((2, 2), 2.0)) for _ in range(3)]
    optimizer, before = OPTIMIZERS[name](weights), weights[2].detach().clone()

    def closure():
        optimizer.zero_grad()
        loss = weights[0].square().sum() + weights[1].square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 32.0
    assert closure().item() < 32.0
    for broken in (float("nan"), float("inf")):
        weights[0].grad[0, 0] = broken
        optimizer.step()
        assert not bool(weights[0].isfinite().all()), "hidden"
        assert bool(weights[1].isfinite().all())
    assert torch.equal(weights[2], before)
    assert weights[2] not in optimizer.state
    optimizer.zero_grad()
    optimizer.step()  # nothing at all to do


@BOTH
def test_half_precision_norms_do_not_overflow(name):
    """The sum of 10,000 squares of 300 is beyond float16."""
    for dtype in (torch.bfloat16, torch.float16):
        weight = nn.Parameter(torch.full((100, 100), 300.0, dtype=dtype))
        weight.grad = torch.full_like(weight, 0.5)
        optimizer = {"lars": LARS([weight], 10.0), "lamb": LAMB([weight], 0.01)}[name]
        optimizer.step()
        assert bool(weight.isfinite().all())
        assert weight[0, 0].item() == pytest.approx(297.0, rel=0.01)


@BOTH
def test_what_cannot_be_trained_is_refused(name):
    make = {"lars": LARS, "lamb": LAMB}[name]
    with pytest.raises(ValueError, match="complex64; LARS and LAMB take real floating point"):
        make([torch.zeros(2, dtype=torch.complex64, requires_grad=True)], 0.1)
    embedding = nn.Embedding(10, 3, sparse=True)
    optimizer = make(embedding.parameters(), 0.1)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=r"shape \[10, 3\] is sparse; .*sparse=False"):
        optimizer.step()


WRONG = [
    (LARS, {"lr": -1.0}, "LARS: lr is -1.0"),
    (LARS, {"lr": 0.1, "momentum": 1.0}, "momentum is 1.0; pass a finite number of at least 0 and below 1"),
    (LARS, {"lr": 0.1, "weight_decay": -0.1}, "weight_decay is -0.1"),
    (LARS, {"lr": 0.1, "momentum": 0.0, "nesterov": True}, "pass a momentum above 0"),
    (LAMB, {"lr": "fast"}, "LAMB: lr is 'fast'"),
    (LAMB, {"lr": 0.1, "betas": (0.9,)}, "pass two numbers"),
    (LAMB, {"lr": 0.1, "betas": (0.9, 1.0)}, "one of betas is 1.0"),
    (LAMB, {"lr": 0.1, "eps": 0.0}, "eps is 0.0; pass a finite number above 0"),
    (LAMB, {"lr": 0.1, "weight_decay": float("inf")}, "weight_decay is inf"),
]
TRUSTS = [
    ({"adapt": "some"}, "adapt is 'some'; pass one of matrices, all, none"),
    ({"coefficient": 0.0}, "coefficient is 0.0"),
    ({"max_ratio": -1.0}, "max_ratio is -1.0"),
    ({"max_weight_norm": float("nan")}, "max_weight_norm is nan"),
    ({"ratio_eps": -1e-6}, "ratio_eps is -1e-06"),
]


def test_bad_arguments_are_refused():
    for make, named, words in WRONG:
        with pytest.raises(ValueError, match=words):
            make([nn.Parameter(torch.ones(2))], **named)
        with pytest.raises(ValueError, match=words):  # and in a group's own settings
            make([{"params": [nn.Parameter(torch.ones(2))], **named}], 0.1)
    for named, words in TRUSTS:
        with pytest.raises(ValueError, match=words):
            Trust(**named)


@pytest.mark.parametrize(("make", "num_buffers"), [(LARS, 1), (LAMB, 2)])
def test_buffers_are_of_the_parameters_size_and_all_norms_are_read_at_once(monkeypatch, make, num_buffers):
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    optimizer, waits, tolist = make(model.parameters(), 0.1), [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: waits.append(1) or tolist(tensor))
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert len(waits) == 2  # norms of the weights and of what moves them, together
    kept = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    size = sum(parameter.numel() for parameter in model.parameters())
    assert sum(value.numel() for value in kept if value.dim()) == num_buffers * size


@pytest.mark.on_ranks(1)
def test_formulas_make_new_tensors_and_send_nothing():
    weight, gradient, zeros = torch.ones(3), torch.full((3,), 2.0), torch.zeros(3)
    with recorded() as seen:
        new_weight, buffer = lars_update(weight, gradient, zeros, lr=0.1)
        lamb_weight, moments = lamb_update(weight, gradient, Moments(zeros, zeros, 0), lr=0.1)
    made = [new_weight, buffer, lamb_weight, moments.mean, moments.square]
    same = [torch.equal(weight, torch.ones(3)), torch.equal(gradient, torch.full((3,), 2.0)), not zeros.any()]
    given = {tensor.data_ptr() for tensor in (weight, gradient, zeros)}
    assert len(list(seen.records.calls(0))) == 0
    assert same == [True] * 3
    assert [tensor.data_ptr() in given for tensor in made] == [False] * 5


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

"""LARS and LAMB behave as torch optimizers should, also on many ranks; rates are in proportion to the batch.

They make the papers' updates, with every option, on tensors of every kind.
"""

import io
from functools import partial

import pytest
import torch
from equal import DENSE, ROW_OPTIMIZERS, Row, assert_rows_equal_one_process, replicas, train as train_row
from torch import nn

from distlab import large_batch as lb
from distlab.comm import recorded

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
    half, file = train_row(Row(DENSE, name), range(4)), io.BytesIO()
    torch.save([half.state(), half.optimizer.state_dict()], file)
    file.seek(0)
    other = partial({"lars": lb.LARS, "lamb": lb.LAMB}[name], lr=9.0, trust=lb.Trust(adapt="none"))
    again = train_row(Row(DENSE, other), range(4, 10), torch.load(file, weights_only=True)).state()
    whole = train_row(Row(DENSE, name)).state()
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
        optimizer = {"lars": lb.LARS([weight], 10.0), "lamb": lb.LAMB([weight], 0.01)}[name]
        optimizer.step()
        assert bool(weight.isfinite().all())
        assert weight[0, 0].item() == pytest.approx(297.0, rel=0.01)


@BOTH
def test_what_cannot_be_trained_is_refused(name):
    make = {"lars": lb.LARS, "lamb": lb.LAMB}[name]
    with pytest.raises(ValueError, match="complex64; LA.* takes real floating point"):
        make([torch.zeros(2, dtype=torch.complex64, requires_grad=True)], 0.1)
    embedding = nn.Embedding(10, 3, sparse=True)
    optimizer = make(embedding.parameters(), 0.1)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=r"shape \[10, 3\] is sparse; .*sparse=False"):
        optimizer.step()


WRONG = [
    (lb.LARS, {"lr": -1.0}, "LARS: lr is -1.0"),
    (lb.LARS, {"lr": 0.1, "momentum": 1.0}, "momentum is 1.0; pass a finite number of at least 0 and below 1"),
    (lb.LARS, {"lr": 0.1, "weight_decay": -0.1}, "weight_decay is -0.1"),
    (lb.LARS, {"lr": 0.1, "momentum": 0.0, "nesterov": True}, "pass a momentum above 0"),
    (lb.LAMB, {"lr": "fast"}, "LAMB: lr is 'fast'"),
    (lb.LAMB, {"lr": 0.1, "betas": (0.9,)}, "pass two numbers"),
    (lb.LAMB, {"lr": 0.1, "betas": (0.9, 1.0)}, "one of betas is 1.0"),
    (lb.LAMB, {"lr": 0.1, "eps": 0.0}, "eps is 0.0; pass a finite number above 0"),
    (lb.LAMB, {"lr": 0.1, "weight_decay": float("inf")}, "weight_decay is inf"),
    (lb.Muon, {"lr": -0.1}, "Muon: lr is -0.1"),
    (lb.Muon, {"momentum": 1.0}, "momentum is 1.0; pass a finite number of at least 0 and below 1"),
    (
        lb.Muon,
        {"ns_steps": -1},
        "ns_steps is -1 and compute is 'bfloat16'; pass 0 to 99 steps and one of bfloat16, float32",
    ),
    (lb.Muon, {"compute": "int8"}, "compute is 'int8'; pass 0 to 99 steps"),
    (lb.Muon, {}, r"a tensor of shape \[2\] is no matrix; put its parameter in a group with use_muon=False"),
]


def test_bad_arguments_are_refused():
    for make, named, words in WRONG:
        with pytest.raises(ValueError, match=words):
            make([nn.Parameter(torch.ones(2))], **named)
        with pytest.raises(ValueError, match=words):  # and in a group's own settings
            make([{"params": [nn.Parameter(torch.ones(2))], **named}], 0.1)


BUFFERS = [(lb.LARS, 1), (lb.LAMB, 2), (lb.Muon, 1), (partial(lb.Muon, use_muon=False), 2)]


@pytest.mark.parametrize(("make", "num_buffers"), BUFFERS)
def test_buffers_are_of_the_parameters_size_and_all_norms_are_read_at_once(monkeypatch, make, num_buffers):
    model = nn.Sequential(*(nn.Linear(*sizes, bias=make is not lb.Muon) for sizes in ((4, 6), (6, 3))))
    optimizer, waits, tolist = make(model.parameters(), 0.1), [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: waits.append(1) or tolist(tensor))
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert len(waits) == 2 * (make in (lb.LARS, lb.LAMB))  # norms of weights and of what moves them, together
    kept = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    size = sum(parameter.numel() for parameter in model.parameters())
    assert sum(value.numel() for value in kept if value.dim()) == num_buffers * size


@pytest.mark.on_ranks(1)
def test_formulas_make_new_tensors_and_send_nothing():
    weight, gradient, zeros = torch.ones(3), torch.full((3,), 2.0), torch.zeros(3)
    with recorded() as seen:
        new_weight, buffer = lb.lars_update(weight, gradient, zeros, lr=0.1)
        lamb_weight, moments = lb.lamb_update(weight, gradient, lb.Moments(zeros, zeros, 0), lr=0.1)
        muon = lb.newton_schulz(gradient[None], compute="float32")
    made = [new_weight, buffer, lamb_weight, moments.mean, moments.square, muon]
    same = [torch.equal(weight, torch.ones(3)), torch.equal(gradient, torch.full((3,), 2.0)), not zeros.any()]
    given = {tensor.data_ptr() for tensor in (weight, gradient, zeros)}
    assert len(list(seen.records.calls(0))) == 0
    assert same == [True] * 3
    assert [tensor.data_ptr() in given for tensor in made] == [False] * 6


def test_rates_scale_with_the_batch_and_warmup_rises_in_equal_steps_to_one():
    assert lb.linear_scaled_lr(0.1, 256, 32) == pytest.approx(0.8)
    assert lb.sqrt_scaled_lr(0.1, 128, 32) == pytest.approx(0.2)
    assert lb.linear_scaled_lr(0.1, 16, 32) == pytest.approx(0.05)
    assert [lb.warmup_factor(step, 4) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert lb.warmup_factor(0, 0) == 1.0


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine"])
def test_schedule_goes_up_then_down(decay):
    schedule = lb.LearningRateSchedule(0.8, 20, num_warmup=5, decay=decay)
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
    schedule = lb.LearningRateSchedule(0.8, 20, num_warmup=5, decay="linear", final_lr=0.1)

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
    return lambda: lb.LearningRateSchedule(**{"peak_lr": 0.1, "num_steps": 5, **named})


BATCHES = [(0, 32), (32, 0), (32.5, 32), (True, 32)]
BAD = [
    *((partial(lb.linear_scaled_lr, 0.1, *sizes), "pass a whole number of samples, at least 1") for sizes in BATCHES),
    (lambda: lb.sqrt_scaled_lr(0.1, 0, 32), "pass a whole number of samples, at least 1"),
    (lambda: lb.warmup_factor(-1, 4), "step is -1"),
    (made(peak_lr=-0.1), "peak_lr is -0.1"),
    (made(num_steps=0), "pass at least 1 update"),
    (made(num_warmup=6), "6 updates of warmup in a run of 5"),
    (made(decay="fast"), "pass one of constant, linear, cosine"),
    (partial(lb.Trust, adapt="some"), "adapt is 'some'; pass one of matrices, all, none"),
    (partial(lb.Trust, coefficient=0.0), "coefficient is 0.0"),
    (partial(lb.Trust, max_ratio=-1.0), "max_ratio is -1.0"),
    (partial(lb.Trust, max_weight_norm=float("nan")), "max_weight_norm is nan"),
    (partial(lb.Trust, ratio_eps=-1e-6), "ratio_eps is -1e-06"),
]


def test_what_cannot_be_is_refused():
    for call, words in BAD:
        with pytest.raises(ValueError, match=words):
            call()


SHAPES = [(5, 7), (3, 2, 4), (6,), (1,), (4, 4), (2, 3)]
ZEROS = 4  # this weight starts at zero
STEPS = 12


def tensors(seed=0):
    """Weights of several kinds and lengths, one of them all zeros."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=generator).double() * 10**index for index, shape in enumerate(SHAPES)]
    made[ZEROS].zero_()
    return [torch.nn.Parameter(tensor) for tensor in made]


def gradients(step):
    """Gradients of other lengths than the weights; one is zero in the second step."""
    generator = torch.Generator().manual_seed(100 + step)
    made = [torch.randn(shape, generator=generator).double() / 3**index for index, shape in enumerate(SHAPES)]
    if step == 1:
        made[0].zero_()
    return made


def falling(step):
    return 0.5 / (1 + step)


def train(make, rate=lambda step: None, dtype=torch.float64):
    """Return the weights after some updates, which leave the gradients as they were."""
    weights = [torch.nn.Parameter(weight.detach().to(dtype)) for weight in tensors()]
    optimizer = make(weights)
    for step in range(STEPS):
        for weight, gradient in zip(weights, gradients(step), strict=True):
            weight.grad = gradient.to(dtype)
        if rate(step) is not None:
            for group in optimizer.param_groups:
                group["lr"] = rate(step)
        optimizer.step()
        if isinstance(
            optimizer, lb.LARS | lb.LAMB
        ):  # clipping, logging and accumulation may read them after the update
            assert all(torch.equal(w.grad, g.to(dtype)) for w, g in zip(weights, gradients(step), strict=True))
    return [weight.detach() for weight in weights]


def difference(some, others):
    return max(float((a - b).abs().max()) for a, b in zip(some, others, strict=True))


def by_formula(update, first, **settings):
    """Train as the papers write it, one tensor at a time; `first(weight)` is what it remembers at first."""
    wanted = [weight.detach().clone() for weight in tensors()]
    memories = [first(torch.zeros_like(weight)) for weight in wanted]
    for step in range(STEPS):
        for index, gradient in enumerate(gradients(step)):
            made = update(wanted[index], gradient, memories[index], lr=falling(step), **settings)
            wanted[index], memories[index] = made
    return wanted


def test_lars_makes_the_papers_updates():
    for momentum, weight_decay in ((0.0, 0.1), (0.9, 0.0), (0.9, 0.1)):
        settings, trust = {"momentum": momentum, "weight_decay": weight_decay}, lb.Trust(adapt="all", coefficient=0.02)
        got = train(partial(lb.LARS, lr=1.0, **settings, trust=trust), falling)
        assert difference(got, by_formula(lb.lars_update, lambda zeros: zeros, **settings, coefficient=0.02)) <= 1e-10
        assert difference(got, [weight.detach() for weight in tensors()]) > 1e-3


def test_lamb_makes_the_papers_updates():
    for betas, weight_decay in (((0.9, 0.999), 0.0), ((0.9, 0.999), 0.1), ((0.0, 0.5), 0.1)):
        settings = {"betas": betas, "weight_decay": weight_decay}
        got = train(partial(lb.LAMB, lr=1.0, **settings, trust=lb.Trust(adapt="all")), falling)
        wanted = by_formula(lb.lamb_update, lambda zeros: lb.Moments(zeros, zeros, 0), **settings)
        scale = max(float(weight.abs().max()) for weight in wanted)
        assert difference(got, wanted) <= 1e-10 * max(1.0, scale)
        assert difference(got, [weight.detach() for weight in tensors()]) > 1e-3


def stepped(make):
    """Return matrices after five updates."""
    weights = [nn.Parameter(torch.ones(shape).cumsum(0)) for shape in ((5, 7), (8, 3), (1, 4), (6, 1), (4, 4))]
    optimizer = make(weights)
    for step in range(5):
        for one in weights:
            one.grad = torch.randn(one.shape, generator=torch.Generator().manual_seed(step))
        optimizer.step()
    return [one.detach() for one in weights]


@pytest.mark.parametrize("named", [{}, {"momentum": 0.9, "weight_decay": 0.0, "ns_steps": 3}])
def test_muon_is_torchs_bit_for_bit_and_adamw_where_a_group_says_so(named):
    found = stepped(partial(lb.Muon, lr=0.05, **named))
    assert all(map(torch.equal, found, stepped(partial(torch.optim.Muon, lr=0.05, **named))))
    adamw = stepped(partial(torch.optim.AdamW, weight_decay=0.1))
    assert all(map(torch.equal, adamw, stepped(partial(lb.Muon, use_muon=False))))


def test_five_iterations_bring_singular_values_near_one_and_leave_singular_vectors_and_zeros():
    made, exact = torch.Generator().manual_seed(0), partial(lb.newton_schulz, compute="float64")
    left, right = (torch.linalg.qr(torch.randn(40, 40, generator=made).double())[0] for _ in "uv")
    values = torch.logspace(-2.2, 0, 30).double()
    matrix = left[:, :30] @ torch.diag(values) @ right[:30]
    found = left[:, :30].T @ exact(matrix) @ right[:30].T
    assert (found - torch.diag(found.diagonal())).abs().max() <= 1e-10, "the same singular vectors"
    known = found.diagonal()[values / values.norm() >= 0.005]
    assert len(known) >= 20
    assert 0.68 <= known.min() <= known.max() <= 1.16
    torch.testing.assert_close(exact(matrix[:7].T), exact(matrix[:7]).T)
    assert not lb.newton_schulz(torch.zeros(3, 2)).any()


def test_by_hand():
    """One update each, small enough for paper: |w| = 5, |g| = 10."""
    weight, gradient = torch.tensor([[3.0, 4.0]]), torch.tensor([[6.0, 8.0]])
    moved, buffer = lb.lars_update(weight, gradient, torch.zeros(1, 2), lr=2.0, weight_decay=0.5, coefficient=0.1)
    ratio = 0.1 * 5 / (10 + 0.5 * 5)  # 0.04
    torch.testing.assert_close(buffer, 2.0 * ratio * torch.tensor([[7.5, 10.0]]))
    torch.testing.assert_close(moved, weight - buffer)
    moments = lb.Moments(torch.zeros(1, 2), torch.zeros(1, 2), 0)
    moved, _ = lb.lamb_update(weight, gradient, moments, lr=0.1, eps=0.0)  # Adam's first step is the sign: (1, 1)
    torch.testing.assert_close(moved, weight - 0.1 * 5 / 2**0.5 * torch.ones(1, 2))


def test_without_ratios_they_are_sgd_and_adamw():
    """Every other part of the update, against torch's own."""
    plain = lb.Trust(adapt="none")
    for nesterov in (False, True):
        same = {"lr": 0.1, "weight_decay": 0.01, "nesterov": nesterov, "momentum": 0.9}
        ours = train(partial(lb.LARS, **same, lr_in_buffer=False, trust=plain), falling)
        theirs = train(partial(torch.optim.SGD, **same), falling)
        assert difference(ours, theirs) <= 1e-9
    same = {"lr": 0.1, "eps": 1e-8, "weight_decay": 0.01}
    ours = train(partial(lb.LAMB, **same, trust=plain), falling)
    assert difference(ours, train(partial(torch.optim.AdamW, **same), falling)) <= 1e-9


def test_ratio_with_every_option():
    assert lb.trust_ratio(6.0, 2.0) == 3.0
    assert lb.trust_ratio(6.0, 2.0, lb.Trust(coefficient=0.1)) == pytest.approx(0.3)
    assert lb.trust_ratio(60.0, 2.0, lb.Trust(max_ratio=10.0)) == 10.0
    assert lb.trust_ratio(60.0, 2.0, lb.Trust(max_weight_norm=10.0)) == 5.0  # a limit of the norm, not of the ratio
    assert lb.trust_ratio(6.0, 2.0, lb.Trust(ratio_eps=1.0)) == 2.0
    assert lb.trust_ratio(0.0, 2.0, lb.Trust(coefficient=0.1, max_ratio=0.5)) == 1.0
    assert lb.trust_ratio(6.0, 0.0) == 1.0
    for limits in (lb.Trust(), lb.Trust(max_ratio=10.0), lb.Trust(max_weight_norm=10.0)):
        assert lb.trust_ratio(float("nan"), 2.0, limits) != lb.trust_ratio(float("nan"), 2.0, limits), "NaN stays NaN"
        assert lb.trust_ratio(6.0, float("nan"), limits) != lb.trust_ratio(6.0, float("nan"), limits)


def test_no_option_is_accepted_and_ignored():
    trusts = [{"adapt": "all"}, {"adapt": "none"}, {"coefficient": 0.5}, {"max_ratio": 0.01}, {"max_weight_norm": 0.01}]
    trusts = [{"trust": lb.Trust(**named)} for named in [*trusts, {"ratio_eps": 1.0}]]
    of_lamb = [{"bias_correction": False}, {"betas": (0.8, 0.999)}, {"betas": (0.9, 0.9)}, {"eps": 0.1}]
    of_lars = [{"momentum": 0.5}, {"weight_decay": 0.0}, {"nesterov": True}]
    for optimizer, own in ((lb.LAMB, of_lamb), (lb.LARS, of_lars)):
        base = train(partial(optimizer, lr=0.3, weight_decay=0.1))
        for named in [*trusts, *own]:
            other = train(partial(optimizer, **{"lr": 0.3, "weight_decay": 0.1, **named}))
            assert difference(base, other) > 1e-6, named


@pytest.mark.parametrize("optimizer_class", [lb.LARS, lb.LAMB])
def test_vectors_are_left_out_unless_told_and_the_direction_alone_counts(optimizer_class):
    """A bias moves as by SGD or Adam without decay, and a weight of zeros gets off the ground."""
    decayed = partial(optimizer_class, lr=0.1, weight_decay=0.5)
    plain = train(partial(optimizer_class, lr=0.1, weight_decay=0.0, trust=lb.Trust(adapt="none")))
    left_out, everything = (train(partial(decayed, trust=lb.Trust(adapt=which))) for which in ("matrices", "all"))
    for index, shape in enumerate(SHAPES):
        assert torch.equal(plain[index], left_out[index]) == (len(shape) == 1), shape
    assert all(bool(weights[ZEROS].any()) for weights in (left_out, everything))
    assert all(bool(weight.isfinite().all()) for weight in everything)
    moved = []
    for scale in (1.0, 1000.0):  # the property behind the ratio: the same step
        weight = torch.nn.Parameter(tensors()[0].detach().clone())
        optimizer = optimizer_class([weight], 0.1, **({"eps": 1e-300} if optimizer_class is lb.LAMB else {}))
        for step in range(3):
            weight.grad = scale * gradients(step + 2)[0]
            optimizer.step()
        moved.append(weight.detach())
    torch.testing.assert_close(*moved, rtol=1e-12, atol=0)
    assert not torch.equal(moved[0], tensors()[0])

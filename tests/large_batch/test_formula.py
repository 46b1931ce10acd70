"""LARS and LAMB make the papers' updates, and a peer's, with every option, on tensors of every kind."""

from functools import partial

import pytest
import torch

from distlab.large_batch import LAMB, LARS, Moments, Trust, lamb_update, lars_update, trust_ratio

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
        if isinstance(optimizer, LARS | LAMB):  # clipping, logging and accumulation may read them after the update
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
        settings, trust = {"momentum": momentum, "weight_decay": weight_decay}, Trust(adapt="all", coefficient=0.02)
        got = train(partial(LARS, lr=1.0, **settings, trust=trust), falling)
        assert difference(got, by_formula(lars_update, lambda zeros: zeros, **settings, coefficient=0.02)) <= 1e-10
        assert difference(got, [weight.detach() for weight in tensors()]) > 1e-3


def test_lamb_makes_the_papers_updates():
    for betas, weight_decay in (((0.9, 0.999), 0.0), ((0.9, 0.999), 0.1), ((0.0, 0.5), 0.1)):
        settings = {"betas": betas, "weight_decay": weight_decay}
        got = train(partial(LAMB, lr=1.0, **settings, trust=Trust(adapt="all")), falling)
        wanted = by_formula(lamb_update, lambda zeros: Moments(zeros, zeros, 0), **settings)
        scale = max(float(weight.abs().max()) for weight in wanted)
        assert difference(got, wanted) <= 1e-10 * max(1.0, scale)
        assert difference(got, [weight.detach() for weight in tensors()]) > 1e-3


@pytest.mark.parametrize(("weight_decay", "dtype"), [(0.0, torch.float64), (0.05, torch.float32)])
def test_with_matching_options_they_are_the_peers(weight_decay, dtype):
    """Its LAMB adapts vectors, clips the weight's norm at 10, and adds eps to the ratio's denominator."""
    peer = pytest.importorskip("pytorch_optimizer", reason="the peer of the benchmark (bench extra)")
    settings = {"momentum": 0.9, "weight_decay": weight_decay, "nesterov": weight_decay > 0}
    ours = train(lambda ws: LARS(ws, 2.0, **settings, lr_in_buffer=False, trust=Trust(coefficient=0.01)), dtype=dtype)
    theirs = train(lambda ws: peer.LARS(ws, lr=2.0, **settings, trust_coefficient=0.01), dtype=dtype)
    bound = 1e-10 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(ours, theirs, rtol=bound, atol=bound)
    trust, same = Trust(adapt="all", max_weight_norm=10.0, ratio_eps=1e-6), {"lr": 0.02, "weight_decay": weight_decay}
    ours = train(lambda ws: LAMB(ws, **same, bias_correction=False, trust=trust), dtype=dtype)
    theirs = train(lambda ws: peer.Lamb(ws, **same, weight_decouple=False, adam_debias=True), dtype=dtype)
    torch.testing.assert_close(ours, theirs, rtol=bound, atol=bound)


def test_by_hand():
    """One update each, small enough for paper: |w| = 5, |g| = 10."""
    weight, gradient = torch.tensor([[3.0, 4.0]]), torch.tensor([[6.0, 8.0]])
    moved, buffer = lars_update(weight, gradient, torch.zeros(1, 2), lr=2.0, weight_decay=0.5, coefficient=0.1)
    ratio = 0.1 * 5 / (10 + 0.5 * 5)  # 0.04
    torch.testing.assert_close(buffer, 2.0 * ratio * torch.tensor([[7.5, 10.0]]))
    torch.testing.assert_close(moved, weight - buffer)
    moments = Moments(torch.zeros(1, 2), torch.zeros(1, 2), 0)
    moved, _ = lamb_update(weight, gradient, moments, lr=0.1, eps=0.0)  # Adam's first step is the sign: (1, 1)
    torch.testing.assert_close(moved, weight - 0.1 * 5 / 2**0.5 * torch.ones(1, 2))


def test_without_ratios_they_are_sgd_and_adamw():
    """Every other part of the update, against torch's own."""
    plain = Trust(adapt="none")
    for nesterov in (False, True):
        same = {"lr": 0.1, "weight_decay": 0.01, "nesterov": nesterov, "momentum": 0.9}
        ours = train(partial(LARS, **same, lr_in_buffer=False, trust=plain), falling)
        theirs = train(partial(torch.optim.SGD, **same), falling)
        assert difference(ours, theirs) <= 1e-9
    same = {"lr": 0.1, "eps": 1e-8, "weight_decay": 0.01}
    ours = train(partial(LAMB, **same, trust=plain), falling)
    assert difference(ours, train(partial(torch.optim.AdamW, **same), falling)) <= 1e-9


def test_ratio_with_every_option():
    assert trust_ratio(6.0, 2.0) == 3.0
    assert trust_ratio(6.0, 2.0, Trust(coefficient=0.1)) == pytest.approx(0.3)
    assert trust_ratio(60.0, 2.0, Trust(max_ratio=10.0)) == 10.0
    assert trust_ratio(60.0, 2.0, Trust(max_weight_norm=10.0)) == 5.0  # a limit of the norm, not of the ratio
    assert trust_ratio(6.0, 2.0, Trust(ratio_eps=1.0)) == 2.0
    assert trust_ratio(0.0, 2.0, Trust(coefficient=0.1, max_ratio=0.5)) == 1.0
    assert trust_ratio(6.0, 0.0) == 1.0
    for limits in (Trust(), Trust(max_ratio=10.0), Trust(max_weight_norm=10.0)):
        assert trust_ratio(float("nan"), 2.0, limits) != trust_ratio(float("nan"), 2.0, limits), "NaN stays NaN"
        assert trust_ratio(6.0, float("nan"), limits) != trust_ratio(6.0, float("nan"), limits)


def test_no_option_is_accepted_and_ignored():
    trusts = [{"adapt": "all"}, {"adapt": "none"}, {"coefficient": 0.5}, {"max_ratio": 0.01}, {"max_weight_norm": 0.01}]
    trusts = [{"trust": Trust(**named)} for named in [*trusts, {"ratio_eps": 1.0}]]
    of_lamb = [{"bias_correction": False}, {"betas": (0.8, 0.999)}, {"betas": (0.9, 0.9)}, {"eps": 0.1}]
    of_lars = [{"momentum": 0.5}, {"weight_decay": 0.0}, {"nesterov": True}]
    for optimizer, own in ((LAMB, of_lamb), (LARS, of_lars)):
        base = train(partial(optimizer, lr=0.3, weight_decay=0.1))
        for named in [*trusts, *own]:
            other = train(partial(optimizer, **{"lr": 0.3, "weight_decay": 0.1, **named}))
            assert difference(base, other) > 1e-6, named


@pytest.mark.parametrize("optimizer_class", [LARS, LAMB])
def test_vectors_are_left_out_unless_told_and_the_direction_alone_counts(optimizer_class):
    """A bias moves as by SGD or Adam without decay, and a weight of zeros gets off the ground."""
    decayed = partial(optimizer_class, lr=0.1, weight_decay=0.5)
    plain = train(partial(optimizer_class, lr=0.1, weight_decay=0.0, trust=Trust(adapt="none")))
    left_out, everything = (train(partial(decayed, trust=Trust(adapt=which))) for which in ("matrices", "all"))
    for index, shape in enumerate(SHAPES):
        assert torch.equal(plain[index], left_out[index]) == (len(shape) == 1), shape
    assert all(bool(weights[ZEROS].any()) for weights in (left_out, everything))
    assert all(bool(weight.isfinite().all()) for weight in everything)
    moved = []
    for scale in (1.0, 1000.0):  # the property behind the ratio: the same step
        weight = torch.nn.Parameter(tensors()[0].detach().clone())
        optimizer = optimizer_class([weight], 0.1, **({"eps": 1e-300} if optimizer_class is LAMB else {}))
        for step in range(3):
            weight.grad = scale * gradients(step + 2)[0]
            optimizer.step()
        moved.append(weight.detach())
    torch.testing.assert_close(*moved, rtol=1e-12, atol=0)
    assert not torch.equal(moved[0], tensors()[0])

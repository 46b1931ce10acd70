"""LARS and LAMB make the papers' updates, with every option, on tensors of every kind."""

import copy

import pytest
import torch

from distlab.large_batch import LAMB, LARS, Moments, Trust, lamb_update, lars_update, trust_ratio

SHAPES = [(5, 7), (3, 2, 4), (6,), (1,), (4, 4), (2, 3)]
ZEROS = 4  # this weight starts at zero
STEPS = 12


def tensors(seed=0):
    """Weights of several kinds and lengths, one of them all zeros."""
    generator = torch.Generator().manual_seed(seed)
    made = [
        torch.randn(shape, generator=generator, dtype=torch.float64) * 10**index for index, shape in enumerate(SHAPES)
    ]
    made[ZEROS].zero_()
    return [torch.nn.Parameter(tensor) for tensor in made]


def gradients(step):
    """Gradients of other lengths than the weights; one is zero in the second step."""
    generator = torch.Generator().manual_seed(100 + step)
    made = [
        torch.randn(shape, generator=generator, dtype=torch.float64) / 3**index for index, shape in enumerate(SHAPES)
    ]
    if step == 1:
        made[0].zero_()
    return made


def train(make, weights, rate=lambda step: None, steps=STEPS):
    optimizer = make(weights)
    for step in range(steps):
        for weight, gradient in zip(weights, gradients(step), strict=True):
            weight.grad = gradient.clone()
        if rate(step) is not None:
            for group in optimizer.param_groups:
                group["lr"] = rate(step)
        optimizer.step()
    return [weight.detach() for weight in weights]


def difference(some, others):
    return max(float((a - b).abs().max()) for a, b in zip(some, others, strict=True))


def falling(step):
    return 0.5 / (1 + step)


def by_formula(update, first, **settings):
    """Train as the papers write it, one tensor at a time; `first(weight)` is what it remembers at first."""
    wanted = [weight.detach().clone() for weight in tensors()]
    memories = [first(torch.zeros_like(weight)) for weight in wanted]
    for step in range(STEPS):
        for index, gradient in enumerate(gradients(step)):
            made = update(wanted[index], gradient, memories[index], lr=falling(step), **settings)
            wanted[index], memories[index] = made
    return wanted


@pytest.mark.parametrize(("momentum", "weight_decay"), [(0.0, 0.1), (0.9, 0.0), (0.9, 0.1)])
def test_lars_makes_the_papers_updates(momentum, weight_decay):
    settings, trust = {"momentum": momentum, "weight_decay": weight_decay}, Trust(adapt="all", coefficient=0.02)
    got = train(lambda ws: LARS(ws, 1.0, **settings, trust=trust), tensors(), falling)
    assert difference(got, by_formula(lars_update, lambda zeros: zeros, **settings, coefficient=0.02)) <= 1e-10
    assert difference(got, [weight.detach() for weight in tensors()]) > 1e-3


@pytest.mark.parametrize(("betas", "weight_decay"), [((0.9, 0.999), 0.0), ((0.9, 0.999), 0.1), ((0.0, 0.5), 0.1)])
def test_lamb_makes_the_papers_updates(betas, weight_decay):
    settings = {"betas": betas, "weight_decay": weight_decay}
    got = train(lambda ws: LAMB(ws, 1.0, **settings, trust=Trust(adapt="all")), tensors(), falling)
    wanted = by_formula(lamb_update, lambda zeros: Moments(zeros, zeros, 0), **settings)
    scale = max(float(weight.abs().max()) for weight in wanted)
    assert difference(got, wanted) <= 1e-10 * max(1.0, scale)
    assert difference(got, [weight.detach() for weight in tensors()]) > 1e-3


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
        ours = train(
            lambda ws, n=nesterov: LARS(ws, 0.1, weight_decay=0.01, nesterov=n, lr_in_buffer=False, trust=plain),
            tensors(),
            falling,
        )
        theirs = train(
            lambda ws, n=nesterov: torch.optim.SGD(ws, 0.1, momentum=0.9, weight_decay=0.01, nesterov=n),
            tensors(),
            falling,
        )
        assert difference(ours, theirs) <= 1e-9
    ours = train(lambda ws: LAMB(ws, 0.1, eps=1e-8, weight_decay=0.01, trust=plain), tensors(), falling)
    theirs = train(lambda ws: torch.optim.AdamW(ws, 0.1, eps=1e-8, weight_decay=0.01), tensors(), falling)
    assert difference(ours, theirs) <= 1e-9


def test_the_rate_is_inside_the_buffer_or_outside():
    """Equal while the rate is constant, different when it falls."""

    def lars(inside):
        return lambda ws: LARS(ws, 0.5, lr_in_buffer=inside, trust=Trust(coefficient=0.02))

    assert difference(train(lars(True), tensors()), train(lars(False), tensors())) <= 1e-10
    assert difference(train(lars(True), tensors(), falling), train(lars(False), tensors(), falling)) > 1e-4


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
        base = train(lambda ws, make=optimizer: make(ws, 0.3, weight_decay=0.1), tensors())
        for named in [*trusts, *own]:
            settings = {"weight_decay": 0.1, **named}
            other = train(lambda ws, make=optimizer, settings=settings: make(ws, 0.3, **settings), tensors())
            assert difference(base, other) > 1e-6, named


@pytest.mark.parametrize("optimizer_class", [LARS, LAMB])
def test_vectors_are_left_out_unless_told(optimizer_class):
    """A bias moves as by SGD or Adam without decay, and a weight of zeros gets off the ground."""

    def both(trust):
        return lambda ws: optimizer_class(ws, 0.1, weight_decay=0.5, trust=trust)

    plain = train(lambda ws: optimizer_class(ws, 0.1, weight_decay=0.0, trust=Trust(adapt="none")), tensors())
    left_out = train(both(Trust(adapt="matrices")), tensors())
    for index, shape in enumerate(SHAPES):
        assert torch.equal(plain[index], left_out[index]) == (len(shape) == 1), shape
    everything = train(both(Trust(adapt="all")), tensors())
    assert all(bool(weights[ZEROS].any()) for weights in (left_out, everything))
    assert all(bool(weight.isfinite().all()) for weight in everything)


@pytest.mark.parametrize("optimizer_class", [LARS, LAMB])
def test_the_direction_alone_counts(optimizer_class):
    """The property behind the ratio: a gradient a thousand times as large makes the same step."""

    def moved(scale):
        weight = torch.nn.Parameter(tensors()[0].detach().clone())
        settings = {"eps": 1e-300} if optimizer_class is LAMB else {}
        optimizer = optimizer_class([weight], 0.1, **settings)
        for step in range(3):
            weight.grad = scale * gradients(step + 2)[0]
            optimizer.step()
        return weight.detach()

    torch.testing.assert_close(moved(1.0), moved(1000.0), rtol=1e-12, atol=0)
    start = tensors()[0].detach()
    assert float((moved(1.0) - start).norm()) > 0


def test_a_gradient_is_not_changed():
    """Clipping, logging and accumulation may read it after the update."""
    for optimizer_class in (LARS, LAMB):
        weights = tensors()
        optimizer = optimizer_class(weights, 0.1, weight_decay=0.1)
        for weight, gradient in zip(weights, gradients(0), strict=True):
            weight.grad = gradient.clone()
        before = copy.deepcopy([weight.grad for weight in weights])
        optimizer.step()
        assert difference(before, [weight.grad for weight in weights]) == 0.0

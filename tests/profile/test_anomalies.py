"""NaN, infinity and spikes are traced to the first step, rank and layer; well runs are left alone."""

import math
import random
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distlab.comm import recorded
from distlab.data_parallel import average_flat
from distlab.profile.anomalies import AnomalyError, AnomalyWatch
from distlab.rng import generator

STEPS = 6
PLACES = ("activation", "gradient", "parameter gradient", "weight", "input", "loss")


class Bad(torch.autograd.Function):
    """The identity; one value of its result, or of its gradient, becomes bad."""

    @staticmethod
    def forward(ctx, x, value, element, in_backward):
        ctx.fault = (value, element, in_backward)
        return x.clone() if in_backward else put(x.clone(), element, value)

    @staticmethod
    def backward(ctx, gradient):
        value, element, in_backward = ctx.fault
        return (put(gradient.clone(), element, value) if in_backward else gradient), None, None, None


def put(tensor, element, value):
    tensor.view(-1)[element % tensor.numel()] = value
    return tensor


class Layer(nn.Module):
    """A linear layer that can be made to fail in one of its passes."""

    def __init__(self, *sizes):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(sizes[::-1]) / 3), nn.Parameter(torch.zeros(sizes[1]))
        self.fault = None

    def forward(self, x):
        kind, value, element = self.fault or ("", 0.0, 0)
        weight = Bad.apply(self.weight, value, element, True) if kind == "parameter gradient" else self.weight
        y = nn.functional.linear(x, weight, self.bias)
        y = Bad.apply(y, value, element, False) if kind == "activation" else y
        if kind == "gradient":
            y = nn.functional.linear(Bad.apply(x, value, element, True), weight, self.bias)
        return y


def net():
    torch.manual_seed(0)
    return nn.Sequential(Layer(3, 5), nn.Tanh(), Layer(5, 4), nn.Tanh(), Layer(4, 1))


def train(fault, every=3, steps=STEPS, **named):
    """Train on each rank, with a fault on one of them; return what the watch says, or ""."""
    place, victim, when, layer, value, element = fault
    model, rank = net(), dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with AnomalyWatch(model, every=every, **named) as watch:
        try:
            for step in range(steps):
                x = torch.randn(4, 3, generator=generator(step, rank, "data"))
                is_here = step == when and rank == victim
                if is_here and place == "weight":
                    put(model[layer].weight.data, element, value)
                if is_here and place == "input":
                    put(x, element, value)
                model[layer].fault = (place, value, element) if is_here else None
                loss = model(x).square().mean()
                if is_here and place == "loss":
                    loss = loss * value
                loss.backward()
                average_flat(model.parameters())
                watch.look(step, loss)
                optimizer.step()
                optimizer.zero_grad()
            watch.check()
        except AnomalyError as error:
            return str(error)
    return ""


def expected(place, layer, value):
    kind = "NaN" if math.isnan(value) else "infinity"
    before = {0: "the model got its input", 2: "1", 4: "3"}[layer]
    return {
        "activation": rf"{kind} in forward, at the output of {layer} \(right until {before}\)",
        # in the backward of a layer: the gradient of what came before it
        "gradient": rf"{kind} in backward, in the gradient of the output of {layer - 1} \(right until {layer}\)",
        "parameter gradient": rf"{kind} in backward, in the gradient of {layer}.weight \(right until {layer}\)",
        "weight": rf"{kind} in the weight {layer}.weight as the step began",
        "input": rf"{kind} in the model's input 0: in this rank's data",
        "loss": rf"{kind} in the loss, after all layers' forward",
    }[place]


def many(num, seed):
    import re

    chance, wrong = random.Random(seed), []
    for number in range(num):
        place = PLACES[number % len(PLACES)]
        layer = chance.choice([2, 4] if place == "gradient" else [0, 2, 4])
        value = chance.choice([math.nan, math.inf, -math.inf])
        when, victim = chance.randrange(STEPS), chance.randrange(dist.get_world_size())
        text = train((place, victim, when, layer, value, chance.randrange(99)), every=chance.choice([1, 3, 4]))
        words = expected(place, layer, abs(value))
        if not re.match(rf"step {when}: rank {victim}: {words}", text):
            wrong.append((place, victim, when, layer, value, text))
    return wrong


@pytest.mark.parametrize(
    ("world_size", "num"),
    [(1, 12), (2, 36), (3, 36), pytest.param(4, 300, marks=[pytest.mark.soak, pytest.mark.timeout(900)])],
)
def test_the_first_rank_step_layer_and_pass_are_named_on_every_rank(ranks, world_size, num):
    assert ranks(world_size).run(many, num, world_size) == [[]] * world_size


def test_a_well_run_says_nothing_and_ranks_exchange_8_bytes_per_comparison(ranks):
    def well():
        model, x = net(), torch.randn(4, 3)
        with recorded() as seen, AnomalyWatch(model, every=3) as watch:
            for step in range(6):
                loss = model(x).square().mean()
                loss.backward()
                watch.look(step, loss)
        return [(call.op, call.num_bytes) for call in seen.records.calls(dist.get_rank())]

    assert ranks(2).run(train, ("none", 0, 0, 0, 0.0, 0)) == ["", ""]
    assert ranks(2).run(well) == [[("all_gather", 8)] * 2] * 2


def test_an_update_that_breaks_the_weights_is_the_optimizers(ranks):
    def run():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e38, momentum=0.9)
        watch = AnomalyWatch(model, every=9)
        for step in range(1):
            loss = model(100 * torch.ones(1, 3)).sum() * 1e6
            loss.backward()
            watch.look(step, loss)
            optimizer.step()
            optimizer.zero_grad()
        with pytest.raises(AnomalyError) as caught:
            watch.check()
        return str(caught.value)

    for text in ranks(2).run(run):
        assert text.startswith("step 1: ranks 0, 1: infinity in the weight ")
        assert "the optimizer made it in the step before" in text


def test_the_weights_after_the_last_step_count(ranks):
    def run():
        model = net()
        watch = AnomalyWatch(model)
        model(torch.ones(1, 3)).sum().backward()
        watch.look(7)
        if dist.get_rank() == 1:
            model[2].bias.data[0] = math.nan
        with pytest.raises(AnomalyError) as caught:
            watch.check()
        return str(caught.value)

    assert all("step 8: rank 1: NaN in the weight 2.bias" in text for text in ranks(3).run(run))


def test_an_exchange_that_overflows_is_told_for_all_ranks(ranks):
    def run():
        model = net()
        watch = AnomalyWatch(model, every=1)
        loss = model(torch.ones(1, 3)).square().mean()
        loss.backward()
        model[4].weight.grad.fill_(math.inf)
        with pytest.raises(AnomalyError) as caught:
            watch.look(3, loss)
        return str(caught.value)

    for text in ranks(2).run(run):
        assert text.startswith(
            "step 3: ranks 0, 1: infinity in the gradient of 4.weight after backward: in the exchange"
        )


def test_overflows_of_gradients_do_not_count_with_a_loss_scaler_and_evaluation_is_not_watched(ranks):
    def run():
        assert train(("gradient", 0, 4, 2, math.inf, 0), every=2, gradients=False, steps=5).startswith(
            "step 5: ranks 0"
        )
        model = net()
        watch = AnomalyWatch(model)
        model.eval()
        model(torch.full((1, 3), math.nan))
        model.train()
        watch.check()

    ranks(2).run(run)


def spiked(victim, factor, every):
    """Train 60 steps; on one rank one batch is far out."""
    model, rank = net(), dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watch = AnomalyWatch(model, every=every)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(60):
            x = torch.randn(16, 3, generator=generator(step, rank, "data"))
            x = x * factor if (step, rank) == (50, victim) else x
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            average_flat(model.parameters())
            watch.look(step, loss)
            optimizer.step()
            optimizer.zero_grad()
        watch.check()
    assert [str(one.message) for one in told] == watch.spikes
    return watch.spikes


@pytest.mark.parametrize("every", [1, 20])
def test_a_spike_is_told_on_every_rank_with_rank_and_layer(ranks, every):
    for said in ranks(3).run(spiked, 2, 100.0, every):
        assert len(said) == 1, said
        assert said[0].startswith("step 50: rank 2: the loss is ")
        assert "first in the model's input 0: in this rank's data" in said[0]
    assert ranks(3).run(spiked, 2, 1.0, every) == [[]] * 3


def test_hooks_go_and_results_stay_the_same_bit_for_bit():
    x = torch.randn(4, 3)
    plain, watched = net(), net()
    with AnomalyWatch(watched) as watch:
        for model in (plain, watched):
            model(x).square().mean().backward()
        watch.look(0)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), watched.parameters(), strict=True))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in watched.modules())
    assert not any(parameter._backward_hooks for parameter in watched.parameters())


@pytest.mark.parametrize("named", [{"every": 0}, {"every": True}, {"every": 1.5}])
def test_wrong_arguments_are_refused(named):
    with pytest.raises(ValueError, match="every is"):
        AnomalyWatch(net(), **named)


def test_odd_models_are_watched_empty_and_whole_numbers_too():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.line = nn.Embedding(5, 4), nn.Linear(4, 2).bfloat16()

        def forward(self, tokens, *, more):
            y = self.line(self.table(tokens).bfloat16())
            return {"y": y, "none": None, "empty": y[:0], "more": [more, tokens]}

    model = Odd()
    with AnomalyWatch(model, every=1) as watch:
        out = model(torch.tensor([[1, 2]]), more=torch.ones(2, dtype=torch.complex64))
        out["y"].float().sum().backward()
        watch.look(0, out["y"].sum())
        model(torch.tensor([[1, 2]]), more=torch.tensor([1, math.nan * 1j]))
        with pytest.raises(AnomalyError, match="step 1: rank 0: NaN in the model's input 1"):
            watch.look(1)

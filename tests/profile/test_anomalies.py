"""NaN and infinity are traced to the first step, rank and layer; well runs are left alone."""

import math
import random
import re

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
        x = Bad.apply(x, value, element, True) if kind == "gradient" else x
        y = nn.functional.linear(x, weight, self.bias)
        return Bad.apply(y, value, element, False) if kind == "activation" else y


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
                here = place if step == when and rank == victim else ""
                if here in ("weight", "input"):
                    put(model[layer].weight.data if here == "weight" else x, element, value)
                model[layer].fault = (here, value, element)
                loss = model(x).square().mean() * (value if here == "loss" else 1.0)
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
    chance, wrong = random.Random(seed), []
    for number in range(num):
        place = PLACES[number % len(PLACES)]
        victim, when = chance.randrange(dist.get_world_size()), chance.randrange(STEPS)
        layer = chance.choice([2, 4] if place == "gradient" else [0, 2, 4])
        value = chance.choice([math.nan, math.inf, -math.inf])
        text = train((place, victim, when, layer, value, chance.randrange(99)), every=chance.choice([1, 3, 4]))
        if not re.match(rf"step {when}: rank {victim}: {expected(place, layer, abs(value))}", text):
            wrong.append((place, victim, when, layer, value, text))
    return wrong


@pytest.mark.parametrize(
    ("world_size", "num"), [(3, 30), pytest.param(4, 300, marks=[pytest.mark.soak, pytest.mark.timeout(900)])]
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
        calls = seen.records.calls(dist.get_rank())
        return train(("none", 0, 0, 0, 0.0, 0)), [(call.op, call.num_bytes) for call in calls]

    assert ranks(2).run(well) == [("", [("all_gather", 8)] * 2)] * 2


def told(run):
    with pytest.raises(AnomalyError) as caught:
        run()
    return str(caught.value)


def update():
    """The optimizer makes it: told in the step after."""
    model = net()
    optimizer, watch = torch.optim.SGD(model.parameters(), lr=1e38, momentum=0.9), AnomalyWatch(model, every=9)
    loss = model(100 * torch.ones(1, 3)).sum() * 1e6
    loss.backward()
    watch.look(0, loss)
    optimizer.step()
    return told(watch.check)


def last():
    """It comes after the last step, on one rank."""
    model = net()
    watch = AnomalyWatch(model)
    model(torch.ones(1, 3)).sum().backward()
    watch.look(7)
    if dist.get_rank() == 1:
        model[2].bias.data[0] = math.nan
    return told(watch.check)


def exchange():
    """It comes after backward, on all ranks; and evaluation is not watched."""
    model = net()
    watch = AnomalyWatch(model, every=1)
    model.eval()
    model(torch.full((1, 3), math.nan))
    model.train()
    loss = model(torch.ones(1, 3)).square().mean()
    loss.backward()
    model[4].weight.grad.fill_(math.inf)
    return told(lambda: watch.look(3, loss))


def scaler():
    """A scaler's overflow does not count, bad weights do."""
    return train(("gradient", 0, 4, 2, math.inf, 0), every=2, gradients=False, steps=5)


BY_HAND = {
    update: "step 1: ranks 0, 1: infinity in the weight .*: the optimizer made it in the step before",
    last: "step 8: rank 1: NaN in the weight 2.bias",
    exchange: "step 3: ranks 0, 1: infinity in the gradient of 4.weight after backward: in the exchange",
    scaler: "step 5: ranks 0",
}


def test_what_no_layer_made_is_told_too(ranks):
    for said in ranks(2).run(lambda: [make() for make in BY_HAND]):
        for text, words in zip(said, BY_HAND.values(), strict=True):
            assert re.match(words, text), text


def test_hooks_go_and_results_stay_the_same_bit_for_bit():
    x, plain, watched = torch.randn(4, 3), net(), net()
    with AnomalyWatch(watched) as watch:
        for model in (plain, watched):
            model(x).square().mean().backward()
        watch.look(0)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), watched.parameters(), strict=True))
    watched(torch.full((1, 3), math.nan)).sum().backward()
    watch.look(1, None)  # the gradients that are there are seen, and nothing of layers: the hooks have gone
    with pytest.raises(AnomalyError, match="step 1: rank 0: NaN in the gradient of 0.weight after backward"):
        watch.check()
    for every in (0, True, 1.5):
        with pytest.raises(ValueError, match="every is"):
            AnomalyWatch(net(), every=every)


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

"""Tensors that get no gradient inside of a unit of others: optimizers leave them alone, as in one process."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distlab.sharding import (
    FullyShard,
    ShardedOptimizer,
    full_optimizer_state,
    full_state_dict,
)
from distlab.sharding.fsdp.gradient import is_marked

UPDATES = 6


class Encoder(nn.Module):
    """As BERT: a pooler that no loss needs. `sometimes` is used in a few steps, and `late` from the third on."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(11, 5)
        self.pooler = nn.Linear(5, 5)
        self.layers = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(5, 7), "no": nn.Linear(5, 3)}) for _ in range(2))
        self.down = nn.Linear(7, 5)
        self.sometimes = nn.Linear(5, 5)
        self.late = nn.Linear(5, 5)
        self.double()

    def forward(self, tokens, step):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + self.down(layer["up"](x).tanh())
        x = x + self.sometimes(x) if step in (0, 3, 4) else x
        return x + self.late(x).tanh() if step >= 2 else x


def batch(step, rank=0, num_ranks=1):
    return torch.randint(11, (12, 4), generator=torch.Generator().manual_seed(step)).chunk(num_ranks)[rank]


OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
    "Adam, one by one": lambda parameters: torch.optim.Adam(parameters, lr=0.01, weight_decay=0.1, foreach=False),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, weight_decay=0.1),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=0.01, weight_decay=0.1),
}


def loss_of(model, step, *place):
    return model(batch(step, *place), step).square().mean()


def one_process(name):
    model = Encoder()
    optimizer = OPTIMIZERS[name](model.parameters())
    for step in range(UPDATES):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    named = dict(model.named_parameters())
    return model.state_dict(), {key: optimizer.state[one] for key, one in named.items() if one in optimizer.state}


def fully_sharded(name, options, passes=1):
    place = dist.get_rank(), dist.get_world_size()
    model = FullyShard(Encoder(place[0]), **options)
    optimizer = OPTIMIZERS[name](model.parameters())
    for step in range(UPDATES):
        model.zero_grad()
        if passes == 2:
            with model.no_sync():
                (loss_of(model, step, *place) / 2).backward()
            (loss_of(model, step, *place) / 2).backward()
        else:
            loss_of(model, step, *place).backward()
        model.synchronize()
        optimizer.step()
    return full_state_dict(model), full_optimizer_state(model, optimizer)


def check(expected, got):
    for key, value in expected[0].items():
        torch.testing.assert_close(got[0][key], value, rtol=0, atol=1e-10, msg=key)


@pytest.mark.soak_where(num_ranks=(2,))  # an optimizer does not see how many ranks there are
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_what_no_rank_uses_is_left_alone_as_in_one_process(ranks, name, num_ranks):
    def run():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return fully_sharded(name, {"prefetch": 1})

    expected = one_process(name)
    start = Encoder(0).state_dict()
    for got in ranks(num_ranks).run(run):
        check(expected, got)
        assert torch.equal(got[0]["pooler.weight"], start["pooler.weight"])
        assert torch.equal(got[0]["layers.0.no.bias"], start["layers.0.no.bias"])


@pytest.mark.parametrize("options", [{"reshard_after_forward": False}, {"offload": True}, {"units": []}], ids=str)
def test_options_change_nothing_of_it(ranks, options):
    expected = one_process("AdamW")
    for got in ranks(2).run(lambda: fully_sharded("AdamW", options)):
        check(expected, got)


def test_passes_that_add_up_on_the_rank(ranks):
    expected = one_process("AdamW")
    for got in ranks(2).run(lambda: fully_sharded("AdamW", {}, passes=2)):
        check(expected, got)


def test_replicas(ranks):
    def run():
        rank = dist.get_rank()
        across = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
        along = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
        return fully_sharded("AdamW", {"group": across, "replicas": along})

    expected = one_process("AdamW")
    for got in ranks(4).run(run):
        check(expected, got)


def test_the_saved_state_counts_the_steps_of_each_tensor(ranks):
    expected = one_process("AdamW")[1]
    for got in ranks(3).run(lambda: fully_sharded("AdamW", {})):
        counts = {key: int(one["step"]) for key, one in got[1]["state"].items() if one}
        assert (counts["sometimes.weight"], counts["late.bias"], counts["down.bias"]) == (3, 4, 6)
        for key, one in expected.items():
            assert counts[key] == int(one["step"])
            torch.testing.assert_close(got[1]["state"][key]["exp_avg_sq"], one["exp_avg_sq"], rtol=0, atol=1e-12)
        assert got[1]["state"]["pooler.weight"] == {}


def kept_as_zeros(wrap):
    """zero_grad(set_to_none=False): what was used once has zeros from then on, and moves; what never was does not."""
    place = dist.get_rank(), dist.get_world_size()
    model = Encoder(place[0])
    called, optimizer, between, zero = wrap(model)
    for step in range(UPDATES):
        zero(set_to_none=False)
        loss_of(called, step, *place).backward()
        between()
        optimizer.step()
    return (full_state_dict(called) if isinstance(called, FullyShard) else model.state_dict(),)


def alone_with_zeros():
    model = Encoder()
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    for step in range(UPDATES):
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, step).backward()
        optimizer.step()
    return (model.state_dict(),)


def one_that_one_rank_uses(wrap):
    place = dist.get_rank(), dist.get_world_size()
    step = lambda number: 0 if place[0] == 1 and number > 1 else number if number < 2 else 2  # noqa: E731
    model = Encoder(place[0])
    called, optimizer, between, zero = wrap(model)
    for number in range(UPDATES):
        zero()
        called(batch(number, *place), step(number)).square().mean().backward()
        between()
        optimizer.step()
    return full_state_dict(called) if isinstance(called, FullyShard) else model.state_dict()


def by_zero(model):
    optimizer = ShardedOptimizer(model, OPTIMIZERS["AdamW"], unused="zeros", bucket_bytes=400)
    return model, optimizer, optimizer.synchronize, optimizer.zero_grad


def by_units(model):
    sharded = FullyShard(model)
    return sharded, OPTIMIZERS["AdamW"](sharded.parameters()), sharded.synchronize, sharded.zero_grad


def by_replicas(model):
    from distlab.data_parallel import DataParallel

    replicas = DataParallel(model, unused="zeros")
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    return model, optimizer, replicas.synchronize, optimizer.zero_grad


def by_plain_zero(model):
    called, optimizer, between, _ = by_units(model)
    return called, optimizer, between, optimizer.zero_grad


@pytest.mark.parametrize("wrap", [by_zero, by_units, by_plain_zero])
def test_gradients_that_are_set_to_zeros_are_gradients(ranks, wrap):
    expected = alone_with_zeros()
    for got in ranks(2).run(kept_as_zeros, wrap):
        check(expected, got)


@pytest.mark.parametrize("wrap", [by_zero, by_units])
def test_a_gradient_on_one_rank_counts_as_in_data_parallel(ranks, wrap):
    here = ranks(3)
    expected, got = (here.run(one_that_one_rank_uses, one) for one in (by_replicas, wrap))
    for a, b in zip(expected, got, strict=True):
        check((a,), (b,))


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_sharded_optimizer_by_elements_leaves_them_alone_too(ranks, name):
    def run():
        place = dist.get_rank(), dist.get_world_size()
        model = Encoder(place[0])
        optimizer = ShardedOptimizer(model, OPTIMIZERS[name], stage=2, unused="zeros", bucket_bytes=400)
        for step in range(UPDATES):
            optimizer.zero_grad()
            loss_of(model, step, *place).backward()
            optimizer.synchronize()
            optimizer.step()
        return (model.state_dict(),)

    expected = one_process(name)
    for got in ranks(3).run(run):
        check(expected, got)


class Pooled(Encoder):
    def forward(self, tokens, step):
        return super().forward(tokens, step) + (self.pooler(torch.ones(5).double()) * -0.0).sum()


def test_a_gradient_of_negative_zeros_is_a_gradient(ranks):
    """Zeros of either sign count as zeros: weight decay moves what one process would move."""

    def run():
        model = FullyShard(Pooled(0))
        optimizer = OPTIMIZERS["AdamW"](model.parameters())
        loss_of(model, 0).backward()
        model.synchronize()
        optimizer.step()
        return full_state_dict(model)["pooler.weight"]

    for got in ranks(2).run(run):
        torch.testing.assert_close(got, Encoder(0).pooler.weight.detach() * (1 - 0.01 * 0.1))
    assert is_marked(torch.tensor(-0.0))
    assert not is_marked(torch.tensor(0.0))

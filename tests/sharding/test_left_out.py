"""Tensors that get no gradient, or not in each step, inside of a unit of others: all is as in one process.

So it is, too, where training stops after step 2 and goes on from shards, on other ranks. `late` has no state there, and
`sometimes` a different count of steps than its unit.
"""

import copy
import warnings
from contextlib import nullcontext
from functools import cache

import pytest
import torch
import torch.distributed as dist
from equal import Fully, Zero, square
from refused import message
from torch import nn
from torch.optim.lr_scheduler import CyclicLR
from torch.optim.swa_utils import AveragedModel

from distlab.data_parallel import DataParallel
from distlab.sharding import FullyShard, ShardedOptimizer, full_state_dict

STOP, STEPS = 3, 7


class Encoder(nn.Module):
    """As BERT: a pooler that no loss needs. `sometimes` is used in a few steps, and `late` from the third on.

    A matrix is tied, a bias frozen, a scale without dimensions, a vector of complex numbers. `never` has the last
    elements: the last rank may hold nothing that was updated.
    """

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(11, 5)
        self.pooler = nn.Linear(5, 5)
        self.layers = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(5, 7), "no": nn.Linear(5, 3)}) for _ in range(2))
        self.layers[1]["up"].bias.requires_grad_(False)
        self.down, self.sometimes, self.late = nn.Linear(7, 5), nn.Linear(5, 5), nn.Linear(5, 5)
        self.scale, self.empty = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(0, 3))
        self.pairs = nn.Parameter(torch.ones(5, 2))
        self.head = nn.Linear(5, 11)
        self.head.weight = self.embedding.weight
        self.never = nn.Linear(5, 40)
        self.double()

    def forward(self, tokens, step):
        x = self.embedding(tokens) * torch.view_as_complex(self.pairs).abs()
        for layer in self.layers:
            x = x + self.scale * self.down(layer["up"](x).tanh())
        x = x + self.sometimes(x).tanh() if step in (1, 4) else x
        return self.head(x + self.late(x).tanh() if step >= STOP else x)


def trained(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def by_dim(kind, **options):
    """Return what makes an optimizer with groups as nanoGPT has them: matrices decay, vectors do not."""

    def make(parameters):
        matrices, vectors = ([p for p in parameters if (p.dim() >= 2) == is_matrix] for is_matrix in (True, False))
        return kind([{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}], **options)

    return make


class Replaces(torch.optim.SGD):
    """Puts its results into memory of their own."""

    @torch.no_grad()
    def step(self, closure=None):
        for one in self.param_groups[0]["params"]:
            if one.grad is not None:
                one.data = one.data - 0.1 * one.grad


UNITS = {
    "Replaces": lambda parameters: Replaces(parameters, lr=0.1),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=0.01, weight_decay=0.1, foreach=False),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, weight_decay=0.1),
}
PIECES = {
    "fused": by_dim(torch.optim.AdamW, lr=0.02, fused=True),
    "amsgrad": by_dim(torch.optim.Adam, lr=0.02, amsgrad=True, foreach=True),
    "nesterov": by_dim(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "replaces": lambda parameters: Replaces(parameters, lr=0.1),
    "from ones": by_dim(torch.optim.Adagrad, lr=0.05, initial_accumulator_value=0.1),
}
OPTIMIZERS = UNITS | PIECES


def pieces(module, make_optimizer, **options):
    module.empty = nn.Parameter(module.empty.detach().float())  # so that it has a bucket of its own, without elements
    return Zero(module, make_optimizer, **{"stage": 2, "unused": "zeros", "bucket_bytes": 400, **options})


WAYS = {"units": Fully, "pieces": pieces}


class Replicas:
    """DataParallel, with what a test does with it."""

    def __init__(self, module, make_optimizer):
        self.model, self.optimizer = module, make_optimizer(trained(module))
        self.gradients = DataParallel(module, unused="zeros")

    def full(self):
        return (self.model.state_dict(),)


def batch(step, rank=0, num_ranks=1):
    return torch.randint(11, (12, 4), generator=torch.Generator().manual_seed(step)).chunk(num_ranks)[rank]


@cache
def alone(name, *, to_zeros=False):
    """Train in one process; return the model's state, and the optimizer's by names."""
    model = Encoder()
    optimizer = OPTIMIZERS[name](trained(model))
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=not to_zeros)
        model(batch(step), step).square().mean().backward()
        optimizer.step()
    return model.state_dict(), {key: optimizer.state.get(one, {}) for key, one in model.named_parameters()}


def train(way, name, steps=range(STEPS), *, shards=None, passes=1, zeroed="", replicas=False, **options):
    """Train on ranks, on from shards if there are any; return the full states and this rank's shard."""
    if replicas:
        options |= dict(zip(("group", "replicas"), square(), strict=True))
    place = dist.get_rank(), dist.get_world_size()
    one = WAYS[way](Encoder(place[0]), OPTIMIZERS[name], **options)
    if shards is not None:
        one.load_shards(*shards)
    for step in steps:
        (one.optimizer if zeroed == "by the optimizer" else one.gradients).zero_grad(set_to_none=not zeroed)
        for number in range(passes):
            with one.gradients.no_sync() if number < passes - 1 else nullcontext():
                (one.model(batch(step, *place), step).square().mean() / passes).backward()
        one.gradients.synchronize()
        one.optimizer.step()
    return one.full(), copy.deepcopy(one.part.shard_state())


def check_model(expected, got, told=""):
    for key, value in expected.items():
        close = {"rtol": 0, "atol": 1e-10, "check_dtype": False}
        torch.testing.assert_close(got[key], value, **close, msg=f"{told} {key}")


def check(name, got):
    """Compare the model's state and the optimizer's, with the count of each tensor."""
    model, kept = alone(name)
    check_model(model, got[0], name)
    for key, one in kept.items():
        for what, value in one.items() if one.get("step", 1) else ():  # Adagrad's begins before the first update
            # NAdam's product is in float32 until it is loaded.
            close = {"rtol": 0, "atol": 1e-10} if value.dim() else {"rtol": 1e-6, "atol": 0, "check_dtype": False}
            torch.testing.assert_close(got[1]["state"][key][what], value, **close)


ON = {  # (way, optimizer, options) by number of ranks
    2: [
        *(("units", "AdamW", one) for one in ({"reshard_after_forward": False}, {"units": []})),
        ("units", "AdamW", {"passes": 2}),
    ],
    3: [*(("units", name, {}) for name in UNITS), *(("pieces", name, {}) for name in PIECES)],
    4: [("units", "AdamW", {"replicas": True})],
}


@pytest.mark.parametrize("num_ranks", ON)
def test_what_no_rank_uses_is_left_alone_as_in_one_process(ranks, num_ranks):
    def run():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return [train(way, name, **options)[0] for way, name, options in ON[num_ranks]]

    start = Encoder().state_dict()
    for each in ranks(num_ranks).run(run):
        for (way, name, _), got in zip(ON[num_ranks], each, strict=True):
            check(name, got)
            assert name in ("fused", "amsgrad", "nesterov") or torch.equal(got[0]["never.bias"], start["never.bias"])
            assert way == "pieces" or name == "Adagrad" or got[1]["state"]["pooler.weight"] == {}


def one_rank_uses(way):
    """Train; from step 2 on rank 1 alone uses one layer, and the others a different one."""
    place = dist.get_rank(), dist.get_world_size()
    one = (WAYS | {"replicas": Replicas})[way](Encoder(place[0]), OPTIMIZERS["AdamW"])
    for step in range(STEPS):
        one.gradients.zero_grad()
        seen = 1 if place[0] == 1 and step > 1 else step if step < 2 else STOP
        one.model(batch(step, *place), seen).square().mean().backward()
        one.gradients.synchronize()
        one.optimizer.step()
    return one.full()[0]


class Pooled(Encoder):
    def forward(self, tokens, step):
        return super().forward(tokens, step) + (self.pooler(torch.ones(5).double()) * -0.0).sum()


def of_negative_zeros():
    """Zeros of either sign count as zeros: weight decay moves what one process would move."""
    model = FullyShard(Pooled(0))
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    model(batch(0), 0).square().mean().backward()
    model.synchronize()
    optimizer.step()
    return full_state_dict(model)["pooler.weight"]


ZEROED = [("pieces", "by it"), ("units", "by it"), ("units", "by the optimizer")]


def test_zeros_are_gradients_and_one_rank_is_enough(ranks):
    """What was used once has zeros from then on, and moves; what never was does not."""

    def run():
        used = [one_rank_uses(way) for way in ("replicas", *WAYS)]
        return used, [train(way, "AdamW", zeroed=zeroed)[0][0] for way, zeroed in ZEROED], of_negative_zeros()

    to_zeros = alone("AdamW", to_zeros=True)[0]
    for (replicas, *others), zeroed, pooled in ranks(3).run(run):
        for got in others:
            check_model(replicas, got)
        for got in zeroed:
            check_model(to_zeros, got)
        torch.testing.assert_close(pooled, Encoder(0).pooler.weight.detach() * (1 - 0.01 * 0.1))


SAVED = [("units", "NAdam"), ("pieces", "amsgrad"), ("pieces", "nesterov")]


def test_shards_go_on_on_other_ranks_and_on_the_same_from_their_own(ranks):
    results = ranks(3).run(lambda: [train(way, name, range(STOP)) for way, name in SAVED])
    saved = [(each[0][0][0], [shard for _, shard in each]) for each in zip(*results, strict=True)]

    def go_on(own):
        rest = range(STOP, STEPS)
        states = [(model, [shards[dist.get_rank()]] if own else shards) for model, shards in saved]
        return [train(*one, rest, shards=state)[0] for one, state in zip(SAVED, states, strict=True)]

    for num_ranks, own in ((2, False), (3, True)):
        for each in ranks(num_ranks).run(go_on, own):
            for (_, name), full in zip(SAVED, each, strict=True):
                check(name, full)


def scheduled(is_alone):
    """Train by a schedule of the rate and of momentum; return the states of the model and of an average of it."""
    model, make = Encoder(), OPTIMIZERS["nesterov"]
    optimizer = make(trained(model)) if is_alone else ShardedOptimizer(model, make, stage=2, unused="zeros")
    schedule, average = CyclicLR(optimizer, 0.01, 0.03, 2, cycle_momentum=True), AveragedModel(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        tokens = batch(step) if is_alone else batch(step, dist.get_rank(), dist.get_world_size())
        model(tokens, step).square().mean().backward()
        None if is_alone else optimizer.synchronize()
        optimizer.step()
        average.update_parameters(model)
        schedule.step()
    return model.state_dict(), average.state_dict()


def of_others():
    def make(parameters):
        return torch.optim.SGD([nn.Parameter(one.detach().clone()) for one in parameters], lr=0.1)

    return message(lambda: ShardedOptimizer(Encoder(), make, unused="zeros"))


def test_schedules_and_averages_of_torch_equal_one_process_and_an_optimizer_of_others_is_refused(ranks):
    expected = scheduled(True)
    for found, text in ranks(3).run(lambda: (scheduled(False), of_others())):
        assert text.startswith("ValueError: make_optimizer made an optimizer of other parameters")
        for got, wanted in zip(found, expected, strict=True):
            check_model(wanted, got)

"""Tensors that get no gradient, or not in each step, inside of a unit of others: all is as in one process.

So it is, too, where training stops after step 2 and goes on: in plain torch, on other ranks, from a plain state or from
shards. `late` has no state there, and `sometimes` a different count of steps than its unit.

The state of FSDP2 can do the same: `get_optimizer_state_dict(full_state_dict=True)` of torch 2.13 is by names, too, and
plain torch.optim.AdamW takes it by its own `load_state_dict`.
"""

import copy
import warnings
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from equal import Fully, Zero, square
from torch import nn

from distlab.data_parallel import DataParallel
from distlab.sharding import FullyShard, full_state_dict
from distlab.sharding.fsdp.gradient import is_marked

STOP, STEPS = 3, 7


class Encoder(nn.Module):
    """As BERT: a pooler that no loss needs. `sometimes` is used in a few steps, and `late` from the third on.

    A matrix is tied, a bias frozen, a scale without dimensions. `never` has the last elements: the last rank may hold
    nothing that was updated.
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
        self.head = nn.Linear(5, 11)
        self.head.weight = self.embedding.weight
        self.never = nn.Linear(5, 40)
        self.double()

    def forward(self, tokens, step):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + self.scale * self.down(layer["up"](x).tanh())
        x = x + self.sometimes(x).tanh() if step in (1, 4) else x
        return self.head(x + self.late(x).tanh() if step >= STOP else x)


OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=0.01, weight_decay=0.1),
    "Adam, one by one": lambda parameters: torch.optim.Adam(parameters, lr=0.01, weight_decay=0.1, foreach=False),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, weight_decay=0.1),
}
WAYS = {"units": Fully, "pieces": partial(Zero, stage=2, unused="zeros", bucket_bytes=400)}


class Replicas:
    """DataParallel, with what a test does with it."""

    def __init__(self, module, make_optimizer):
        self.model, self.optimizer = module, make_optimizer(trained(module))
        self.gradients = DataParallel(module, unused="zeros")

    def full(self):
        return (self.model.state_dict(),)


def trained(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def batch(step, rank=0, num_ranks=1):
    return torch.randint(11, (12, 4), generator=torch.Generator().manual_seed(step)).chunk(num_ranks)[rank]


def alone(name, steps=range(STEPS), start=None, *, to_zeros=False):
    """Train in one process; return the model's state and the optimizer's."""
    model = Encoder()
    optimizer = OPTIMIZERS[name](trained(model))
    if start is not None:
        model.load_state_dict(start[0])
        optimizer.load_state_dict(copy.deepcopy(start[1]))
    for step in steps:
        optimizer.zero_grad(set_to_none=not to_zeros)
        model(batch(step), step).square().mean().backward()
        optimizer.step()
    return model.state_dict(), optimizer.state_dict()


def train(way, name, steps=range(STEPS), *, start=None, shards=None, passes=1, zeroed="", replicas=False, **options):
    """Train on ranks, from a full state or from shards; return the full states and this rank's shard."""
    if replicas:
        options |= dict(zip(("group", "replicas"), square(), strict=True))
    place = dist.get_rank(), dist.get_world_size()
    one = WAYS[way](Encoder(place[0]), OPTIMIZERS[name], **options)
    if start is not None:
        one.load(*start)
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


def check_model(expected, got):
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value, rtol=0, atol=1e-10, msg=key)


def check(expected, got):
    """Compare the model's state and the optimizer's, with the count of each tensor."""
    check_model(expected[0], got[0])
    names = [name for name, parameter in Encoder().named_parameters() if parameter.requires_grad]
    kept = {names[key] if isinstance(key, int) else key: one for key, one in got[1]["state"].items()}
    for key, one in expected[1]["state"].items():
        for what, value in one.items() if one.get("step", 1) else ():  # Adagrad's begins before the first update
            # NAdam's product is in float32 until it is loaded.
            close = {"rtol": 0, "atol": 1e-10} if value.dim() else {"rtol": 1e-6, "atol": 0, "check_dtype": False}
            torch.testing.assert_close(kept[names[key]][what], value, **close)
    counts = [one["step"] for one in kept.values() if isinstance(one.get("step"), torch.Tensor)]
    assert len({count.data_ptr() for count in counts}) == len(counts), "each tensor counts its own steps"


ROWS = [
    *(("units", name, 3, {"prefetch": 1}) for name in OPTIMIZERS),
    *(("units", "AdamW", 2, one) for one in ({"reshard_after_forward": False}, {"offload": True}, {"units": []})),
    ("units", "AdamW", 2, {"passes": 2}),
    ("units", "AdamW", 4, {"replicas": True}),
    *(("pieces", name, 3, {}) for name in ("AdamW", "SGD")),
]


@pytest.mark.parametrize(("way", "name", "num_ranks", "options"), ROWS)
def test_what_no_rank_uses_is_left_alone_as_in_one_process(ranks, way, name, num_ranks, options):
    def run():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return train(way, name, **options)

    expected, start = alone(name), Encoder().state_dict()
    for got, _ in ranks(num_ranks).run(run):
        check(expected, got)
        assert all(torch.equal(got[0][key], start[key]) for key in ("pooler.weight", "layers.0.no.bias", "never.bias"))
        assert way == "pieces" or name == "Adagrad" or got[1]["state"]["pooler.weight"] == {}


@pytest.mark.parametrize(("way", "zeroed"), [("pieces", "by it"), ("units", "by it"), ("units", "by the optimizer")])
def test_gradients_that_are_set_to_zeros_are_gradients(ranks, way, zeroed):
    """What was used once has zeros from then on, and moves; what never was does not."""
    expected = alone("AdamW", to_zeros=True)[0]
    for (got, _), _ in ranks(2).run(lambda: train(way, "AdamW", zeroed=zeroed)):
        check_model(expected, got)


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


@pytest.mark.parametrize("way", WAYS)
def test_a_gradient_on_one_rank_counts_as_in_data_parallel(ranks, way):
    for expected, got in zip(*(ranks(3).run(one_rank_uses, each) for each in ("replicas", way)), strict=True):
        check_model(expected, got)


@pytest.mark.parametrize("name", list(OPTIMIZERS)[:3])
@pytest.mark.parametrize("way", WAYS)
def test_what_ranks_saved_goes_on_in_plain_torch_and_back(ranks, way, name):
    whole, half = alone(name), alone(name, range(STOP))
    names = [name for name, parameter in Encoder().named_parameters() if parameter.requires_grad]
    for full, _ in ranks(3).run(train, way, name, range(STOP)):
        check(half, full)
        (group,) = full[1]["param_groups"]
        assert way == "pieces" or group["params"] == names  # plain torch's order
        check(whole, alone(name, range(STOP, STEPS), full))
    for full, _ in ranks(2).run(lambda: train(way, name, range(STOP, STEPS), start=half)):
        check(whole, full)


@pytest.mark.parametrize("way", WAYS)
def test_shards_go_on_on_other_ranks_and_on_the_same_from_their_own(ranks, way):
    whole, results = alone("AdamW"), ranks(3).run(train, way, "AdamW", range(STOP))
    model, shards = results[0][0][0], [shard for _, shard in results]

    def go_on(own):
        return train(way, "AdamW", range(STOP, STEPS), shards=(model, [shards[dist.get_rank()]] if own else shards))

    for num_ranks, own in ((2, False), (3, False), (3, True)):
        for full, _ in ranks(num_ranks).run(go_on, own):
            check(whole, full)


class Pooled(Encoder):
    def forward(self, tokens, step):
        return super().forward(tokens, step) + (self.pooler(torch.ones(5).double()) * -0.0).sum()


def test_a_gradient_of_negative_zeros_is_a_gradient(ranks):
    """Zeros of either sign count as zeros: weight decay moves what one process would move."""

    def run():
        model = FullyShard(Pooled(0))
        optimizer = OPTIMIZERS["AdamW"](model.parameters())
        model(batch(0), 0).square().mean().backward()
        model.synchronize()
        optimizer.step()
        return full_state_dict(model)["pooler.weight"]

    for got in ranks(2).run(run):
        torch.testing.assert_close(got, Encoder(0).pooler.weight.detach() * (1 - 0.01 * 0.1))
    assert is_marked(torch.tensor(-0.0))
    assert not is_marked(torch.tensor(0.0))

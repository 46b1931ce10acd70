"""What tests of "trains like one process" share: a model that makes it hard, its data, trainers and distances."""

from __future__ import annotations

from functools import cache

import torch
import torch.distributed as dist

from distlab.blocks.data import ByteCorpus, python_documentation
from distlab.blocks.models import GPT, GPTConfig
from distlab.data_parallel import Bucketed, Overlapped, average_flat, average_per_parameter
from distlab.large_batch import LAMB
from distlab.rng import generator
from distlab.sharding import (
    FullyShard,
    ShardedOptimizer,
    ShardedState,
    full_optimizer_state,
    full_state_dict,
    load_full_optimizer_state,
    load_full_state_dict,
)
from distlab.tensor_parallel import full_state_dict as full_tensor_state, load_full_state_dict as load_full_tensor_state

BATCH_SIZE = 7  # no world size above 1 divides it
CONFIG = GPTConfig(vocab_size=257, context=12, num_layers=3, num_heads=2, hidden_size=24, tied=True)
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1),
    "lamb": lambda parameters: LAMB(parameters, lr=1e-2),
}


def awkward_model(rank, dtype=torch.float64, config=CONFIG):
    """Odd vocabulary, tied weight, frozen parameters, biases not zero, other weights on every rank."""
    model = GPT(config, generator(0, rank, "weights")).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1, generator=generator(0, rank, name))
    model.blocks[0].feed_forward.widen.bias.requires_grad_(False)
    for block in model.blocks[1:2]:
        block.feed_forward.widen.weight.requires_grad_(False)  # what its inputs' gradient needs
    return model


@cache
def corpus():
    """Built where it is used: in a run on a GPU its bytes lie there."""
    return ByteCorpus(python_documentation(), CONFIG.context)


def backward(model, step, rank=0, world_size=1, *, batches=1):
    """Return calls of backward, one for each batch of a step, whose gradients add up to those of the mean over all."""
    calls = []
    for seed in range(1, batches + 1):
        inputs, targets = corpus().batch(step, BATCH_SIZE, seed=seed, rank=rank, world_size=world_size)
        weight = len(inputs) * world_size / BATCH_SIZE / batches
        calls.append(lambda x=inputs, y=targets, weight=weight: (GPT.loss(model(x), y) * weight).backward())
    return calls


@cache
def alone(optimizer_name, dtype=torch.float64, clip=None, batches=1):
    """Train for ten updates in one process on whole batches."""
    model = awkward_model(0, dtype)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    for step in range(10):
        optimizer.zero_grad()
        for call in backward(model, step, batches=batches):
            call()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return finals(model)


def finals(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def difference(one, other):
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


def square():
    """Return this rank's row and column of 2 x 2 ranks."""
    rank = dist.get_rank()
    row = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
    return row, [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]


def averaging(way, model, bucket_bytes):
    """Return what averages gradients by a rung of the ladder."""
    if way == "per_parameter":
        return lambda: average_per_parameter(model.parameters())
    if way == "flat":
        return lambda: average_flat(model.parameters())
    return {"bucketed": Bucketed, "overlapped": Overlapped}[way](model, None, bucket_bytes).synchronize


class Fully:
    """FullyShard over a module, with what a test does with it."""

    def __init__(self, module, make_optimizer, group=None, tensor=None, **options):
        self.model = self.gradients = FullyShard(module, group, **options)
        self.optimizer = make_optimizer([one for one in self.model.parameters() if one.requires_grad])
        self.part = ShardedState(self.model, self.optimizer)

    def full(self):
        return full_state_dict(self.model), full_optimizer_state(self.model, self.optimizer)

    def load(self, model, optimizer):
        load_full_state_dict(self.model, model)
        load_full_optimizer_state(self.model, self.optimizer, optimizer)

    def load_shards(self, model, shards):
        self.part.load_shards(shards)


class Zero:
    """ShardedOptimizer over a module, whose layers may be cut over the ranks of `tensor`, with the same."""

    def __init__(self, module, make_optimizer, group=None, tensor=None, **options):
        self.model, self.tensor = module, tensor
        self.optimizer = self.gradients = self.part = ShardedOptimizer(module, make_optimizer, group, **options)

    def full(self):
        state = self.model.state_dict() if self.tensor is None else full_tensor_state(self.model, self.tensor)
        return {name: value.clone() for name, value in state.items()}, self.optimizer.full_state_dict()

    def load(self, model, optimizer):
        if self.tensor is None:
            self.model.load_state_dict(model)
        else:
            load_full_tensor_state(self.model, model, self.tensor)
        self.optimizer.load_full_state_dict(optimizer)

    def load_shards(self, model, shards):
        self.load(model, self.optimizer.full_state_dict())
        self.part.load_shards(shards)


class Mean:
    """The plainest hook: an all-reduce."""

    def __init__(self):
        self.seen = []

    def start(self, bucket, group):
        self.seen.append(bucket.buffer.clone())
        bucket.buffer.div_(dist.get_world_size(group))
        return dist.all_reduce(bucket.buffer, group=group, async_op=True)

    def state_dict(self):
        return {}

    def load_state_dict(self, state_dict):
        pass

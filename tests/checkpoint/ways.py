"""Ways to train that a checkpoint must bring back bit for bit: replicas, hooks with a memory, shards, stages."""

import random
from collections import namedtuple
from dataclasses import replace
from functools import cache

import numpy as np
import torch
import torch.distributed as dist
from killing import go_on

from distlab.blocks.data import ByteCorpus, python_documentation
from distlab.blocks.models import GPT, GPTConfig
from distlab.compression import make_hook
from distlab.data_parallel import DataParallel, average_flat, broadcast_parameters, train_step
from distlab.pipeline import Pipeline, StageState, find_tied, split_gpt
from distlab.plan import Precision, make_schedule
from distlab.plan.compression import METHODS, Compression
from distlab.rng import generator, seed_rank
from distlab.sharding import FullyShard, ShardedOptimizer, ShardedState

CONFIG = GPTConfig(vocab_size=256, context=16, num_layers=2, num_heads=2, hidden_size=32, dropout=0.2)
FOUR_LAYERS = replace(CONFIG, num_layers=4, hidden_size=16, tied=True)
REPLICAS = ("manual", "adamw", "hook", "top_k", "powersgd")
SHARDED = {"as it is": {}, "bfloat16": {"precision": Precision("bfloat16")}, "offloaded": {"offload": True}}
SHARDED |= {"ZeRO-1": {"stage": 1}, "ZeRO-2": {"stage": 2}}
SCHEDULES = {"one_f_one_b": 1, "zb_v": 2}


Way = namedtuple("Way", "update parts scheduled parameters close", defaults=[lambda: None])
"""An update by the number of its step and a weight; what is saved, an optimizer to schedule, and what ends it."""


class Coarse:
    """A hook that sends gradients rounded to a grid, and adds what it cut off to the next ones: a state of its rank."""

    def __init__(self):
        self.memory = {}

    def start(self, bucket, group):
        whole = bucket.buffer + self.memory.get(bucket.index, 0.0)
        sent = torch.round(whole * 4096) / 4096
        self.memory[bucket.index] = whole - sent
        bucket.buffer.copy_(sent / dist.get_world_size(group))
        return dist.all_reduce(bucket.buffer, group=group, async_op=True)

    def state_dict(self):
        return {"memory": dict(self.memory)}

    def load_state_dict(self, state_dict):
        self.memory = dict(state_dict["memory"])


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


@cache
def corpus():
    return ByteCorpus(python_documentation(), CONFIG.context)


def batch(step):
    return corpus().batch(step, 6, seed=3, rank=dist.get_rank(), world_size=dist.get_world_size())


def replicas(name, model):
    """By hand, by DataParallel, or by DataParallel with a hook: a compressor of that name, or `Coarse`."""
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = adamw(model.parameters()) if name in ("manual", "adamw") else sgd
    hook = Coarse() if name == "hook" else make_hook(Compression(name)) if name in METHODS else None
    parts = {"model": model, "optimizer": optimizer} | ({"hook": hook} if hook else {})
    if name == "manual":
        broadcast_parameters(model)
        synchronize = lambda: average_flat(model.parameters())  # noqa: E731
    else:
        synchronize = DataParallel(model, bucket_bytes=40_000, first_bucket_bytes=4_000, hook=hook).synchronize

    def update(step, weight):
        train_step(model, optimizer, batch=batch(step), loss_fn=GPT.loss, synchronize=synchronize, weight=weight)

    return Way(update, parts, optimizer, model.parameters)


def shards(options, module):
    if "stage" in options:
        model, optimizer = module, ShardedOptimizer(module, adamw, bucket_bytes=20_000, **options)
        gradients, scheduled, parts = optimizer, optimizer.optimizer, {"model": module, "optimizer": optimizer}
    else:
        gradients = model = FullyShard(module, **options)
        optimizer = scheduled = adamw(model.parameters())
        parts = {"training": ShardedState(model, optimizer)}

    def update(step, weight):
        inputs, targets = batch(step)
        (weight * GPT.loss(model(inputs), targets)).backward()
        gradients.synchronize()
        gradients.clip_gradients_(1.0)
        optimizer.step()
        gradients.zero_grad()

    return Way(update, parts, scheduled, model.parameters, gradients.close)


def stages(name):
    schedule = make_schedule(name, dist.get_world_size(), 2, stages_per_rank=SCHEDULES[name])
    cut = split_gpt(GPT(FOUR_LAYERS, generator(3, 0, "weights")), schedule.num_stages)
    own = {number: cut[number] for number, home in enumerate(schedule.home) if home == dist.get_rank()}
    pipeline = Pipeline(own, schedule, loss=GPT.loss, tied=find_tied(cut))
    optimizer = adamw(pipeline.parameters())

    def update(step, _):
        pipeline.zero_grad()
        pipeline.step(*corpus().batch(step, 4, seed=3))
        optimizer.step()

    return Way(update, {"training": StageState(own, optimizer)}, optimizer, pipeline.parameters, pipeline.close)


def make(name, rank):
    if name in SCHEDULES:
        return stages(name)
    model = GPT(CONFIG, generator(3, rank, "weights"))
    return shards(SHARDED[name], model) if name in SHARDED else replicas(name, model)


def train(directory, name, num_steps=6):
    """Train with everything that has a state; return all of it at the end."""
    rank = dist.get_rank()
    seed_rank(3, rank)
    made, noise = make(name, rank), generator(3, rank, "noise")
    schedule = torch.optim.lr_scheduler.MultiStepLR(made.scheduled, [4], 0.8)

    def one_step(step):
        weight = 1 + 0.1 * random.random() + 0.1 * np.random.rand() + 0.1 * torch.rand((), generator=noise).item()
        made.update(step, weight)
        schedule.step()

    go_on(directory, made.parts | {"schedule": schedule, "noise": noise}, one_step, num_steps)
    draws = random.random(), np.random.rand(), torch.rand(()).item()
    weights = [parameter.detach().clone() for parameter in made.parameters()]
    hook = made.parts.get("hook")
    made.close()
    return weights, made.scheduled.state_dict()["state"], hook and hook.state_dict(), draws

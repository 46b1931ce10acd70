"""Pipelines times data parallelism equals one process; each stage is averaged while the rank still computes."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distlab.comm import mesh_groups
from distlab.hybrid import StageAverages
from distlab.pipeline import Pipeline
from distlab.plan import Mesh, make_schedule
from distlab.rng import generator

SIZES = [5, 7, 3, 6, 4]
NUM_MICROBATCHES = 4
PLANS = {"one_f_one_b": 1, "zb_h1": 1, "interleaved": 2}


def stages_of(num_stages, seed):
    torch.manual_seed(seed)
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in zip(SIZES, SIZES[1:], strict=False)]
    layers[0][0].bias.requires_grad_(False)
    size = len(layers) // num_stages
    return [nn.Sequential(*layers[first : first + size]).double() for first in range(0, len(layers), size)]


def batch(step):
    draw = generator(step, 0, "batch")
    return (torch.randn(16, size, dtype=torch.float64, generator=draw) for size in (SIZES[0], SIZES[-1]))


def loss_fn(output, target):
    return (output - target).square().mean()


def optimizer_of(parameters):
    return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1, momentum=0.9)


def train(name, stages_per_rank, num_replicas):
    groups = mesh_groups(Mesh([("pipeline", 2), ("data", num_replicas)]))
    pipeline_group, replica_group = groups["pipeline"], groups["data"]
    rank, replica = dist.get_rank(pipeline_group), dist.get_rank(replica_group)
    schedule = make_schedule(name, 2, NUM_MICROBATCHES, stages_per_rank=stages_per_rank)
    modules = stages_of(schedule.num_stages, seed=replica)  # other weights in each replica
    own = {number: modules[number] for number, home in enumerate(schedule.home) if home == rank}
    pipeline = Pipeline(own, schedule, pipeline_group, loss=loss_fn)
    averages = StageAverages(pipeline, own, replica_group)
    calls, started = [], pipeline.on_stage_complete

    def note(number):
        calls.append(number)
        started(number)

    pipeline.on_stage_complete = note
    optimizer, losses = optimizer_of(pipeline.parameters()), []
    for step in range(10):
        inputs, targets = (part.chunk(num_replicas)[replica] for part in batch(step))
        pipeline.zero_grad()
        losses.append(pipeline.mean_loss(pipeline.step(inputs, targets)))
        averages.finish()
        optimizer.step()
    pipeline.close()
    for group in groups.values():
        dist.destroy_process_group(group)
    weights = {number: [p.detach() for p in module.parameters()] for number, module in own.items()}
    return weights, losses, calls[: len(own)]


def alone(num_stages):
    model = nn.Sequential(*stages_of(num_stages, seed=0))
    optimizer, losses = optimizer_of(model.parameters()), []
    for step in range(10):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {number: [p.detach() for p in stage.parameters()] for number, stage in enumerate(model)}, losses


def test_two_pipelines_of_two_ranks_equal_one_process(ranks):
    results = ranks(4).run(lambda: {name: train(name, each, 2) for name, each in PLANS.items()})
    for name, each in PLANS.items():
        expected, losses = alone(2 * each)
        for rank, result in enumerate(results):
            weights, _, calls = result[name]
            assert sorted(weights) == list(range(rank // 2, 2 * each, 2)), "rank = stage x data + replica"
            assert calls == sorted(weights, reverse=True), "the last stage's gradients leave first"
            for number, parameters in weights.items():
                for found, wanted in zip(parameters, expected[number], strict=True):
                    assert (found - wanted).abs().max() <= 1e-10, (name, rank, number)
        means = [sum(pair) / 2 for pair in zip(results[0][name][1], results[1][name][1], strict=True)]
        assert means == pytest.approx(losses, abs=1e-10)

"""Pipelines times data parallelism equals one process; each stage is averaged while the rank still computes."""

import pytest
import torch
import torch.distributed as dist
from equal import ROW_OPTIMIZERS, Row, Task, assert_stages_equal, train
from torch import nn

from distlab.comm import mesh_groups
from distlab.hybrid import StageAverages
from distlab.pipeline import Pipeline, split_sequential
from distlab.plan import Mesh, make_schedule
from distlab.rng import generator

SIZES = [5, 7, 3, 6, 4]
PLANS = {"one_f_one_b": 1, "zb_h1": 1, "interleaved": 2}


def model(rank):
    torch.manual_seed(rank)
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in zip(SIZES, SIZES[1:], strict=False)]
    layers[0][0].bias.requires_grad_(False)
    return nn.Sequential(*layers).double()


def batch(step):
    draw = generator(step, 0, "batch")
    return [torch.randn(16, size, dtype=torch.float64, generator=draw) for size in (SIZES[0], SIZES[-1])]


@pytest.mark.on_ranks(4)
def test_two_pipelines_of_two_ranks_equal_one_process():
    alone = train(Row(Task(model, batch), "sgd"))
    for name, stages_per_rank in PLANS.items():
        groups = mesh_groups(Mesh([("pipeline", 2), ("data", 2)]))
        rank, replica = dist.get_rank(groups["pipeline"]), dist.get_rank(groups["data"])
        schedule = make_schedule(name, 2, 4, stages_per_rank=stages_per_rank)
        stages = split_sequential(model(replica), schedule.num_stages)  # other weights in each replica
        own = {number: stages[number] for number, home in enumerate(schedule.home) if home == rank}
        assert list(own) == list(range(dist.get_rank() // 2, schedule.num_stages, 2)), "rank = stage x data + replica"
        pipeline = Pipeline(own, schedule, groups["pipeline"], loss=nn.functional.mse_loss)
        averages = StageAverages(pipeline, own, groups["data"])
        calls, started = [], pipeline.on_stage_complete
        pipeline.on_stage_complete = lambda number, calls=calls, started=started: (
            calls.append(number) or started(number)
        )
        optimizer = ROW_OPTIMIZERS["sgd"](pipeline.parameters())
        for step in range(10):
            inputs, targets = (part.chunk(2)[replica] for part in batch(step))
            pipeline.zero_grad()
            loss = torch.tensor(pipeline.mean_loss(pipeline.step(inputs, targets)), dtype=torch.float64)
            averages.finish()
            optimizer.step()
            dist.all_reduce(loss, group=groups["data"])
            assert loss.item() / 2 == pytest.approx(alone.losses[step], abs=1e-10)
        pipeline.close()
        for group in groups.values():
            dist.destroy_process_group(group)
        assert calls[: len(own)] == sorted(own, reverse=True), "the last stage's gradients leave first"
        assert_stages_equal(own, alone.state(), name)

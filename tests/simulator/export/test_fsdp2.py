"""The FSDP2 code runs on real ranks, and trains like one process."""

import runpy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from equal import CONFIG as TIED, Row, Task, corpus, trained_alone

from distlab.blocks.models import GPT
from distlab.plan import Plan, Precision, Sharding
from distlab.rng import generator
from simulator.export import fsdp2_code

CONFIG = replace(TIED, tied=False)
TASK = Task(lambda rank: GPT(CONFIG, generator(0, 0, "w")).double(), lambda step: corpus().batch(step, 8), GPT.loss)
ALONE = Row(TASK, lambda parameters: torch.optim.AdamW(parameters, lr=1e-2), clip=0.5)


def microbatches(step, num, rank, world_size):
    """Return this rank's part of the batch, in `num` micro-batches."""
    return list(zip(*(each.chunk(world_size)[rank].chunk(num) for each in TASK.batch(step)), strict=True))


def train(files, num_steps=4):
    """Run each file's code; return this rank's losses by file."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    found = {}
    for name, (path, fully, num) in files.items():
        code = SimpleNamespace(**runpy.run_path(path))
        model = code.shard(TASK.make(0), "cpu") if fully else code.shard(TASK.make(0))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2) if fully else code.make_optimizer(model, 1e-2)
        batches = [microbatches(step, num, rank, world_size) for step in range(num_steps)]
        found[name] = [code.train_step(model, optimizer, x, lambda out, y: GPT.loss(out.double(), y)) for x in batches]
    return found


PLANS = {
    "replicated": Plan(2, num_microbatches=2),
    **{f"ZeRO-{stage}": Plan(2, num_microbatches=2, sharding=Sharding(stage)) for stage in (1, 2, 3)},
    "units of two, recomputed, kept": Plan(
        2, sharding=Sharding(3, unit_layers=2, reshard_after_forward=False), recompute="full"
    ),
    "two ahead, every second recomputed": Plan(
        2, sharding=Sharding(3, prefetch=2), recompute="full", recompute_method="every", recompute_layers=2
    ),
    "offloaded": Plan(2, sharding=Sharding(3, offload="all")),
    "bfloat16": Plan(2, sharding=Sharding(3), precision=Precision("bfloat16")),
}
HYBRID = {"hybrid": Plan(4, sharding=Sharding(3, replicas=2))}


def write(plans, folder):
    files = {}
    for index, (name, plan) in enumerate(plans.items()):
        path = folder / f"plan{index}.py"
        path.write_text(fsdp2_code(plan, max_norm=0.5))
        files[name] = str(path), plan.sharding.stage >= 2, plan.num_microbatches
    return files


@pytest.mark.parametrize(("world_size", "plans"), [(2, PLANS), (4, HYBRID)])
def test_the_code_trains_like_one_process(ranks, tmp_path, world_size, plans):
    expected = torch.tensor(trained_alone(ALONE, 4)[2], dtype=torch.float64)
    results = ranks(world_size).run(train, write(plans, tmp_path))
    for name in plans:
        losses = torch.tensor([result[name] for result in results], dtype=torch.float64).mean(dim=0)
        bound = 3e-2 if name == "bfloat16" else 1e-10
        assert (losses - expected).abs().max() <= bound, name


def test_code_says_what_the_plan_says():
    code = fsdp2_code(Plan(8, sharding=Sharding(3, unit_layers=4, replicas=2)), layers="model.layers")
    assert '(2, 4), mesh_dim_names=("replicate", "shard")' in code
    assert "list(model.model.layers)" in code
    assert "first + 4" in code
    assert "set_requires_gradient_sync" not in code
    assert "clip_grad_norm_" not in code
    assert "param_dtype=torch.bfloat16, reduce_dtype=torch.float32" in fsdp2_code(PLANS["bfloat16"])
    assert "MixedPrecisionPolicy" not in fsdp2_code(PLANS["ZeRO-3"])
    for method, part in (("every", "[::3]"), ("block", "[: 3]"), ("uniform", "")):
        plan = Plan(2, recompute="full", recompute_method=method, recompute_layers=3)
        assert f"for layer in model.blocks{part}:" in fsdp2_code(plan)


@pytest.mark.parametrize("options", [{"layers": "blocks; import os"}, {"layers": ""}, {"max_norm": 0.0}])
def test_nothing_but_names_and_numbers_gets_into_the_code(options):
    with pytest.raises(ValueError, match="pass"):
        fsdp2_code(Plan(2, sharding=Sharding(3)), **options)

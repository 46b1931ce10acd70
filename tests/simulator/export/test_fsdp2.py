"""The FSDP2 code runs on real ranks, and trains like one process."""

import importlib.util

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distlab.plan import Plan, Precision, Sharding
from distlab.rng import generator
from simulator.export import fsdp2_code


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Linear(5, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 3, bias=False)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.normal_(std=0.5, generator=generator(0, 0, name))

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(x)


def microbatches(step, num, rank, world_size):
    """Return this rank's part of the batch, in `num` micro-batches."""
    draw = generator(step, 0, "batch")
    x, y = torch.randn(24, 5, generator=draw), torch.randn(24, 3, generator=draw)
    return list(zip(x.chunk(world_size)[rank].chunk(num), y.chunk(world_size)[rank].chunk(num), strict=True))


def alone(num_steps=4, max_norm=0.5):
    """Return the mean losses of one process with the whole batch."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(num_steps):
        ((x, y),) = microbatches(step, 1, 0, 1)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def load(path):
    spec = importlib.util.spec_from_file_location("exported", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(files, num_steps=4):
    """Run each file's code; return this rank's losses by file."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    found = {}
    for name, (path, fully, num) in files.items():
        code = load(path)
        model = code.shard(Model(), "cpu") if fully else code.shard(Model())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2) if fully else code.make_optimizer(model, 1e-2)
        batches = [microbatches(step, num, rank, world_size) for step in range(num_steps)]
        found[name] = [
            code.train_step(model, optimizer, batch, lambda out, y: nn.functional.mse_loss(out.float(), y))
            for batch in batches
        ]
    return found


PLANS = {
    "replicated": Plan(2, num_microbatches=2),
    "ZeRO-1": Plan(2, num_microbatches=2, sharding=Sharding(1)),
    "ZeRO-2": Plan(2, num_microbatches=2, sharding=Sharding(2)),
    "ZeRO-3": Plan(2, num_microbatches=2, sharding=Sharding(3)),
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
    expected = torch.tensor(alone())
    results = ranks(world_size).run(train, write(plans, tmp_path))
    for name in plans:
        losses = torch.tensor([result[name] for result in results]).mean(dim=0)
        bound = 3e-2 if name == "bfloat16" else 1e-5
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

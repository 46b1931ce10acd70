"""Torch's own products run on this backend unchanged, and compute what they compute on gloo."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from distlab.comm import run

NUM_STEPS = 4


def net():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 8)).double()


def train(model, parameters, *, rank=None):
    """Train for some steps on data of the rank."""
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(dist.get_rank() if rank is None else rank)
    for _ in range(NUM_STEPS):
        x = torch.randn(6, 8, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def with_ddp(group, **options):
    model = net()
    train(nn.parallel.DistributedDataParallel(model, process_group=group, **options), model.parameters())
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def with_ddps(group):
    options = ({}, {"bucket_cap_mb": 0.001}, {"gradient_as_bucket_view": True}, {"static_graph": True})
    return torch.stack([with_ddp(group, **named) for named in options])


def with_fsdp2(group):
    from torch.distributed.fsdp import fully_shard

    model, mesh = net(), DeviceMesh.from_group(group, "cpu")
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, model.parameters())
    return torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()])


def with_dtensor(group):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = DeviceMesh.from_group(group, "cpu")
    model = parallelize_module(net(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    train(model, model.parameters(), rank=0)
    columns = distribute_tensor(torch.arange(35.0).reshape(5, 7), mesh, [Shard(1)])
    rows = columns.redistribute(placements=[Shard(0)]).redistribute(placements=[Replicate()]).to_local()
    full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    assert torch.equal(rows, torch.arange(35.0).reshape(5, 7))
    return torch.cat([p.detach().flatten() for p in full])


def with_pipelining(group):
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, size, layers = dist.get_rank(), dist.get_world_size(), list(net())
    layers = layers[:3] if rank == 0 else layers[3:]
    stage = PipelineStage(nn.Sequential(*layers), rank, size, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=lambda y, target: (y - target).square().mean())
    generator = torch.Generator().manual_seed(1)
    x, target = (torch.randn(8, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    losses = []
    for _ in range(2):
        schedule.step(x) if rank == 0 else schedule.step(target=target, losses=losses)
    return torch.cat([p.grad.flatten() for p in stage.submod.parameters()])


def on_both(program):
    """Return what a program computes on gloo and on shared memory."""
    return program(dist.new_group(backend="gloo")), program(dist.group.WORLD)


@pytest.mark.parametrize("program", [with_ddps, with_fsdp2, with_dtensor, with_pipelining])
def test_torchs_products_compute_what_they_compute_on_gloo(shared_ranks, program):
    # With uneven shards torch's own linear layers of DTensor fail, on gloo as well.
    for there, here in shared_ranks(3 if program is with_fsdp2 else 2).run(on_both, program):
        torch.testing.assert_close(here, there, rtol=0, atol=1e-12)


def with_dcp(folder):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    saved = distribute_tensor(torch.arange(30.0).reshape(5, 6), mesh, [Shard(0)])
    dcp.save({"x": saved, "step": 3}, checkpoint_id=folder)
    dcp.async_save({"x": saved, "step": 7}, checkpoint_id=folder).result()
    state = {"x": distribute_tensor(torch.zeros(5, 6), mesh, [Shard(1)]), "step": 0}
    dcp.load(state, checkpoint_id=folder)
    return state["x"].full_tensor(), state["step"]


def test_dcp_saves_also_while_the_ranks_go_on_and_loads_in_a_different_layout(tmp_path):
    for x, step in run(with_dcp, 2, args=(str(tmp_path),), timeout_s=200, nodes=2):  # over shared memory, and a wire
        assert torch.equal(x, torch.arange(30.0).reshape(5, 6))
        assert step == 7

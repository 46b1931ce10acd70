"""Calls on tensors that are no plain memory: expanded and quantized ones, and those that stand for others."""

import warnings

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode


def without_plain_memory(n):
    """Return tensors that are quantized, nested, freed, a DTensor of n ranks, and fake."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # quantized tensors will leave torch
        small = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8)
        nested = torch.nested.nested_tensor([torch.ones(3), torch.ones(4)])
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    cut = DTensor.from_local(torch.ones(4), init_device_mesh("cpu", (n,)), [Shard(0)], run_check=False)
    with FakeTensorMode():
        fake = torch.ones(4)
    return small, nested, freed, cut, fake


def refused_before():
    """Calls on tensors that no call can send or write; return which of them were not refused, or not before."""
    n, me, wrong = dist.get_world_size(), dist.get_rank(), []
    shared, blocks = torch.zeros(1).expand(4), [torch.ones(4) for _ in range(n)]
    whole, wide = torch.ones(4 * n), torch.zeros(1).expand(4 * n)
    small, nested, freed, cut, fake = without_plain_memory(n)
    group = dist.group.WORLD  # its own methods: torch refuses some of these by itself, for some backends
    calls = {
        "got an expanded tensor": {
            "all_reduce": lambda: dist.all_reduce(shared),
            "broadcast": lambda: dist.broadcast(shared, 0),
            "all_gather": lambda: dist.all_gather([shared] * n, blocks[0]),
            "into_tensor": lambda: dist.all_gather_into_tensor(wide, blocks[0]),
            "reduce_scatter": lambda: dist.reduce_scatter(shared, blocks),
            "scatter_tensor": lambda: dist.reduce_scatter_tensor(shared, whole),
            "all_to_all": lambda: dist.all_to_all([shared] * n, blocks),
            "single": lambda: dist.all_to_all_single(wide, whole),
            "gather": lambda: group.gather([[shared] * n], [blocks[0]], dist.GatherOptions()) if me == 0 else refuse(),
            "scatter": lambda: dist.scatter(shared, blocks if me == 0 else None),
            "recv": lambda: dist.recv(shared, (me + 1) % n),
        },
        "moves dense CPU tensors with memory of their own": {
            "quantized, gathered": lambda: group.allgather([[small] * n], [small]),
            "quantized, sent": lambda: group.send([small], (me + 1) % n, 0),
            "nested": lambda: dist.all_reduce(nested),
            "DTensor": lambda: dist.all_reduce(cut),
            "send": lambda: dist.send(cut, (me + 1) % n),
            "freed": lambda: dist.broadcast(freed, 0),
            "recv": lambda: dist.recv(freed, (me + 1) % n),
            "fake": lambda: dist.all_reduce(fake),
            "vmap": lambda: torch.vmap(lambda row: dist.all_reduce(row))(torch.ones(3, 4)),
        },
        "convert the tensor first": {
            "quantized": lambda: group.allreduce([small]),
            "sum": lambda: dist.all_reduce(torch.ones(4, dtype=torch.uint16)),
            "eight bits": lambda: dist.reduce(torch.ones(4).to(torch.float8_e4m3fn), 0),
            "mean": lambda: dist.all_reduce(torch.ones(4, dtype=torch.bool), dist.ReduceOp.AVG),
        },
    }

    def refuse():
        raise ValueError(f"rank {me}: got an expanded tensor")  # a gather writes on the root alone

    for words, cases in calls.items():
        for name, call in cases.items():
            try:
                call()
                wrong.append(f"{name}: done")
            except ValueError as error:
                if words not in str(error) or f"rank {me}" not in str(error):
                    wrong.append(f"{name}: {error}")
    x = torch.ones(2)
    dist.all_reduce(x)  # nothing has begun: the group goes on
    return wrong, x.tolist()


def results_of_functional_collectives():
    """Pass on what functional collectives return, which is there only once somebody asks for it."""
    n, me, world = dist.get_world_size(), dist.get_rank(), dist.group.WORLD

    def result():
        return functional.all_reduce(torch.full((20_000,), me + 1.0), "sum", world)

    total, parts, sent = result(), [torch.empty(20_000) for _ in range(n)], result()
    got = result()
    assert type(total) is functional.AsyncCollectiveTensor
    dist.all_reduce(total)
    dist.all_gather(parts, result())
    dist.send(sent, 1) if me == 0 else dist.recv(got, 0) if me == 1 else None
    return [t.unique().tolist() for t in (total, torch.cat(parts), got)]


class Seen(TorchDispatchMode):
    """Notes what is computed."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.ops.append(str(op))
        return op(*args, **(kwargs or {}))


def seen_by_modes():
    """Return what a mode sees of calls that compute and copy, and what they brought where the default is no CPU."""
    me, n = dist.get_rank(), dist.get_world_size()
    x, scattered = torch.ones(20_000), torch.ones(4, 3).t()
    with Seen() as seen, torch.device("meta"):
        dist.all_reduce(x)
        dist.all_reduce(scattered, dist.ReduceOp.AVG)
        dist.send(scattered, (me + 1) % n) if me == 0 else dist.recv(scattered, 0) if me == 1 else None
    return seen.ops, [x.sum().item(), scattered.sum().item()]

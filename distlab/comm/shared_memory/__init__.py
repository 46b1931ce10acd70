"""A backend of torch.distributed for CPU ranks of one Linux host: `backend="shared"`, beside gloo.

    run(train, 4)                                   # distlab starts the ranks, and they choose it where it works
    dist.init_process_group("shared")               # under torchrun, after `distlab.comm.shared_memory.register()`

gloo moves every byte through the kernel's loopback sockets. Here ranks copy straight through memory that all map.
Collectives, messages, groups, `async_op` and torch's own products (DDP, FSDP2, DTensor, pipelining, DCP) work as on
gloo. Results are equal on all ranks and from run to run, bit for bit. Calls that do not agree raise on every rank that
meets the others, naming what each calls. A rank that ends, leaves or fails ends the others' calls within 0.1 s.

Memory: per group at most 8 MiB per rank (of more than 16 ranks 128 MiB together), and 2 MiB for each pair of ranks that
sends messages one way; only pages that were used exist. Messages that are received in a different order than they were
sent lie with the receiver meanwhile. Nothing has a name in /dev/shm or anywhere else, so nothing can be left behind.
Buckets of `DataParallel`, and shards and gradients of `FullyShard`, lie where all ranks of the group reach them
(`collectives.Buffers`): their collectives copy about half as much.

Limits: ranks of one host, one container and one user; CPU tensors; x86-64; not tuned for more ranks than a machine has
cores. A process forked from a rank may not call. Where one rank of a job cannot share memory and no backend was named,
all take gloo (`distlab.comm.groups.init_group`).

Read `arena` (the memory, and how ranks come to map it) and `meeting` (steps). Then `collectives`
(and how values are combined), `messages` (sends and receives), `work` (what a call returns, and what runs where) and
`group` (what torch sees). `forms` takes the options of a call in all ways that torch knows, and shows calls to its
profiler and modes. `dense` takes tensors as blocks of bytes, `futex` talks to the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

NAME = "shared"


def register(name: str = NAME, make: Callable[..., Any] | None = None) -> None:
    """Let torch.distributed know the backend, or what `make` makes, by its name; once more changes nothing."""
    import torch.distributed as dist

    from distlab.comm.shared_memory import group

    if name not in dist.Backend.backend_list:
        dist.Backend.register_backend(name, make or group.make, extended_api=True, devices=["cpu"])

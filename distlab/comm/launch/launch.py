"""Run a function on several ranks: real processes on this machine, each with its part of one process group.

    def hello():
        total = torch.ones(1)
        dist.all_reduce(total)
        return total.item()

    run(hello, 4)  # [4.0, 4.0, 4.0, 4.0]

It works the same from a script, a test, `python -c` and a notebook's cell. The function travels by value
(cloudpickle), so ranks never import the caller's script, and no `if __name__ == "__main__"` is needed.

The way of a call: `run` -> `Ranks` (deadlines, root cause) -> `Pool` (the processes) -> `forkserver` (starts and guards
them) -> `worker` (inside a rank).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypedDict, Unpack

from distlab.comm.launch.fork_client import fork_server
from distlab.comm.launch.ranks import Ranks
from distlab.nodes import Nodes


class Watching(TypedDict, total=False):
    """Whether `run` records what ranks call, and shows what they print; see there."""

    record: bool
    echo: bool


def run(
    fn: Callable[..., Any],
    world_size: int,
    *,
    args: Sequence[Any] = (),
    timeout_s: float = 60.0,
    backend: str | None = None,
    nodes: Nodes | int = 1,
    **watching: Unpack[Watching],
) -> list[Any]:
    """Call fn(*args) on world_size new ranks and return their results in the order of ranks.

    torch.distributed is initialised when fn starts. What ranks print is shown as it comes, each line after `[rank r]`.

    Args:
        fn: the function; it may come from a notebook's cell or be a lambda.
        world_size: number of ranks.
        args: its arguments, the same on every rank.
        timeout_s: how long the call may take.
        backend: "shared" (ranks meet in shared memory: one Linux host, CPU tensors), "gloo", "nccl", or "cpu": shared
            where that works, else gloo. None: nccl when each rank has its own GPU; gloo when ranks share one; else
            "cpu".
        nodes: how many nodes the ranks make, or `Nodes(2, between="40MB/s,200us")`. What leaves a node
            takes the time of a wire of that speed, else of 1 GB/s and 50 us.
        watching: `record` (True): whether calls of torch.distributed are recorded, so that a hang is explained in words
            and ended early; `echo` (True): whether what ranks print is shown.

    Raises:
        ValueError: an argument cannot be, or something cannot be sent to the ranks; nothing was started.
        RankError: a rank raised, exited or was killed; the root cause comes first.
        RankTimeout: the call took longer than timeout_s; the text says where each rank stands.
    """
    if isinstance(args, str | bytes) or not isinstance(args, Sequence):
        raise ValueError(f"args is {args!r}; pass a tuple, such as args=(1, 2)")
    with Ranks(world_size, timeout_s=timeout_s, backend=backend, nodes=nodes, **watching) as ranks:
        return ranks.run(fn, *args)


def warm() -> None:
    """Start loading torch for the ranks in the background, so that the first call need not wait for it."""
    fork_server()

"""Programs whose ranks do not fit together, each with one fault that is often seen; what must be said of each.

`tests/comm/test_faults_told.py` checks every one, `tools/diagnosis_table.py` writes the table with its times.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import cloudpickle
import torch
import torch.distributed as dist

from distlab.comm import RankError, Ranks

LIMIT_S = 5.0
GROUP_S = 60.0  # so long a hang would last where nobody says what is wrong


def operation(rank: int) -> None:
    """One rank broadcasts where the others sum."""
    x = torch.ones(4)
    dist.broadcast(x, src=0) if rank == 1 else dist.all_reduce(x)


def shape(rank: int) -> None:
    """One rank has a larger tensor."""
    dist.all_reduce(torch.ones(4 + rank // 1 % 2))


def dtype(rank: int) -> None:
    """One rank has a different type."""
    dist.all_reduce(torch.ones(4, dtype=torch.float64 if rank == 1 else torch.float32))


def reduction(rank: int) -> None:
    """One rank takes the largest where the others sum."""
    dist.all_reduce(torch.ones(4), op=dist.ReduceOp.MAX if rank == 1 else dist.ReduceOp.SUM)


def root(rank: int) -> None:
    """One rank expects the data from a different root."""
    dist.broadcast(torch.ones(4), src=1 if rank == 1 else 0)


def swapped(rank: int) -> None:
    """One rank sums two tensors in the other order."""
    a, b = torch.ones(2, 3), torch.ones(6)
    for x in (b, a) if rank == 1 else (a, b):
        dist.all_reduce(x)


def swapped_alike(rank: int) -> None:
    """One rank sums two tensors of one shape in the other order, from lines of its own."""
    a, b = torch.ones(4), torch.full((4,), 100.0)
    if rank == 1:
        dist.all_reduce(b)
        dist.all_reduce(a)
    else:
        dist.all_reduce(a)
        dist.all_reduce(b)


def swapped_functions(rank: int) -> None:
    """One rank calls two functions, alike in what they sum, in the other order."""
    for function in (_sum_biases, _sum_weights) if rank == 1 else (_sum_weights, _sum_biases):
        function(torch.ones(4))


def _sum_weights(x: torch.Tensor) -> None:
    dist.all_reduce(x)


def _sum_biases(x: torch.Tensor) -> None:
    dist.all_reduce(x)


def rotated(rank: int) -> None:
    """One rank makes three calls that are alike, beginning with the last."""
    calls = [_sum_weights, _sum_biases, _sum_scales]
    for function in calls[2:] + calls[:2] if rank == 1 else calls:
        function(torch.ones(4))


def _sum_scales(x: torch.Tensor) -> None:
    dist.all_reduce(x)


def splits(rank: int) -> None:
    """One rank gives other amounts in an all_to_all than the others take."""
    gives = [1, 2, 3] if rank == 1 else [2, 2, 2]
    dist.all_to_all_single(torch.empty(6), torch.ones(6), [2, 2, 2], gives)


def skipped_at_the_end(rank: int) -> None:
    """One rank leaves out the last call."""
    dist.all_reduce(torch.ones(4))
    if rank != 1:
        dist.all_reduce(torch.ones(4))


def skipped_between(rank: int) -> None:
    """One rank leaves out a call, and goes on to the next."""
    if rank != 1:
        dist.all_reduce(torch.ones(4))
    dist.broadcast(torch.ones(8), src=0)


def late_root(rank: int) -> None:
    """The others make a different call after a broadcast whose root had gone on; it waits for nobody."""
    if rank == 0:
        dist.broadcast(torch.ones(4), src=0)
    else:
        dist.all_reduce(torch.ones(4))


def send_alone(rank: int) -> None:
    """A send that nobody receives."""
    if rank == 0:
        dist.send(torch.ones(1 << 20), dst=1)
    dist.barrier()


def receive_alone(rank: int) -> None:
    """A receive for which nobody sends."""
    if rank == 1:
        dist.recv(torch.ones(4), src=0)
    dist.barrier()


def both_receive(rank: int) -> None:
    """Two ranks that both receive first."""
    if rank < 2:
        dist.recv(torch.ones(4), src=1 - rank)
        dist.send(torch.ones(4), dst=1 - rank)


def message_size(rank: int) -> None:
    """A receive that is too small for what is sent."""
    if rank == 0:
        dist.send(torch.ones(8), dst=1)
    elif rank == 1:
        dist.recv(torch.ones(4), src=0)


def to_itself(rank: int) -> None:
    """A message of a rank to itself."""
    if rank == 1:
        dist.send(torch.ones(4), dst=1)


def group_by_some(rank: int) -> None:
    """Only its members make a group."""
    if rank < 2:
        dist.new_group([0, 1])
    dist.barrier()


def groups_turned_round(rank: int) -> None:
    """Two groups made in a different order on one rank."""
    sizes = [[0, 1], [0, 1, 2]] if rank != 1 else [[0, 1, 2], [0, 1]]
    groups = {len(members): dist.new_group(members) for members in sizes}
    dist.all_reduce(torch.ones(4), group=groups[3])


def left_by_one(rank: int) -> None:
    """One rank destroys the process group that the others still use."""
    if rank == 1:
        dist.destroy_process_group()
    else:
        dist.all_reduce(torch.ones(4))


def group_left_by_one(rank: int) -> None:
    """One rank destroys a group of its own that the others still use."""
    group = dist.new_group([0, 1, 2])
    dist.all_reduce(torch.ones(4), group=group)
    if rank == 1:
        dist.destroy_process_group(group)
    else:
        dist.all_reduce(torch.ones(4), group=group)


class Program(NamedTuple):
    """A program with a fault, how many ranks it runs on, and which ranks its message must name with their lines."""

    run: Callable[[int], None]
    lines_of: tuple[int, ...] = (0, 1, 2)

    @property
    def name(self) -> str:
        """Its name, in words."""
        return self.run.__name__.replace("_", " ")


PROGRAMS = (
    *(Program(run) for run in (operation, shape, dtype, reduction, root, swapped, skipped_between)),
    *(Program(run) for run in (swapped_alike, swapped_functions, rotated, splits)),
    Program(late_root),
    Program(skipped_at_the_end, (0, 2)),
    Program(send_alone),
    Program(receive_alone),
    Program(both_receive, (0, 1)),
    Program(message_size, (0, 1)),
    Program(to_itself, (1,)),
    Program(group_by_some, (0, 1)),
    Program(groups_turned_round),
    Program(left_by_one, (0, 2)),
    Program(group_left_by_one, (0, 2)),
)


class Told(NamedTuple):
    """What was said of a program: after how many seconds, and the text; an empty text is silence."""

    seconds: float
    text: str


def has_line(told: Told, rank: int) -> bool:
    """Whether the text has the rank with its line of this file: in one line, or as the traceback below its name."""
    in_one = rf"^[^\n]*\brank {rank}\b[^\n]*_faults\.py:\d+"
    below = rf"^--- rank {rank} ---$(?:\n(?!---)[^\n]*)*_faults\.py\", line \d+, in (?!_run)"
    return re.search(f"{in_one}|{below}", told.text, re.MULTILINE) is not None


def tell(program: Program, backend: str) -> Told:
    """Run a program on three ranks and return what is said of it."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with Ranks(3, timeout_s=GROUP_S, backend=backend) as ranks:
        ranks.run(dist.barrier)
        start = time.monotonic()
        try:
            ranks.run(_run, program.run)
        except RankError as error:
            return Told(time.monotonic() - start, str(error))
        return Told(time.monotonic() - start, "")


def _run(program: Callable[[int], None]) -> None:
    program(dist.get_rank())

"""Backend "shared" against gloo on the same ranks, in turns, beside what memory allows.

Bars of an all-reduce: at most 0.45 of gloo's time at 16 and 64 MiB, half at 1 MiB on 4 ranks, no longer at 1 kB. At 64
MiB it takes at most three times one memcpy of its bytes. All-gather and reduce-scatter of 16 MiB take at most half, a
message of 1 MiB there and back at most 0.7. Ranks meet before each timed call, whose time is that of its slowest rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from _blocks import by_value, slowest, timed
from _rows import Row, compare, noise, without_bar
from _script import run_script
from torch import nn

from distlab.comm import Ranks
from distlab.data_parallel import DataParallel
from distlab.measure import MIN_BLOCKS, interleave

WORLD_SIZES = (2, 4)
KB, MIB = 1 << 10, 1 << 20
ALL_REDUCES = {KB: 1.0, 64 * KB: None, MIB: 0.5, 16 * MIB: 0.45, 64 * MIB: 0.45}  # bytes and bar
CALLS = {"all_gather": (16 * MIB, 0.5), "reduce_scatter": (16 * MIB, 0.5), "send and receive": (MIB, 0.7)}
PROGRAMS = ("gloo", "shared", "gloo")
Wrap = Callable[[nn.Module], tuple[nn.Module, Callable[[], object]]]  # from a model: what to call, what to wait for
WIDTH, DEPTH = 512, 6  # of the model whose step is timed


def call_of(op: str, num_bytes: int, group: dist.ProcessGroup) -> Callable[[], object]:
    """Return a call whose result or source has `num_bytes`, as float32."""
    n, me = dist.get_world_size(), dist.get_rank()
    whole, part = torch.zeros(num_bytes // 4), torch.zeros(num_bytes // 4 // n)  # sums stay what they are
    if op == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    if op == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part, group=group)
    if op == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(part, whole, group=group)
    if me > 1:
        return lambda: None

    def there_and_back() -> None:
        if me == 0:
            dist.send(whole, 1, group=group)
            dist.recv(whole, 1, group=group)
        else:
            dist.recv(whole, 0, group=group)
            dist.send(whole, 0, group=group)

    return there_and_back


@contextlib.contextmanager
def groups() -> Iterator[dict[str, dist.ProcessGroup]]:
    """Make a group of all ranks on either backend; gloo's threads would stay otherwise."""
    made = {name: dist.new_group(backend=name) for name in ("gloo", "shared")}
    yield made
    dist.barrier()
    for group in made.values():
        dist.destroy_process_group(group)


def time_calls(op: str, num_bytes: int, blocks: int) -> list[list[float]]:
    """Run on each rank: time gloo, shared, gloo again, and one memcpy of the bytes, in interleaved blocks."""
    repeats = max(1, min(20, MIB // num_bytes))
    source, target = torch.ones(num_bytes // 4), torch.empty(num_bytes // 4)
    with groups() as made:
        calls = [call_of(op, num_bytes, made[name]) for name in PROGRAMS]
        calls.append(lambda: target.copy_(source))
        for call in calls:
            call()
        return interleave([timed(call, repeats) for call in calls], blocks)


def time_steps(blocks: int) -> list[list[float]]:
    """Run on each rank: time a step of torch's DDP on gloo, of DataParallel on shared, and of DDP on shared."""

    def step_of(wrap: Wrap) -> Callable[[], object]:
        torch.manual_seed(0)
        model = nn.Sequential(*[layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())])
        optimizer, x = torch.optim.SGD(model.parameters(), lr=0.01), torch.randn(32, WIDTH)
        run, synchronize = wrap(model)

        def step() -> None:
            optimizer.zero_grad()
            run(x).square().mean().backward()
            synchronize()
            optimizer.step()

        return step

    def ddp(group: dist.ProcessGroup) -> Wrap:
        return lambda model: (nn.parallel.DistributedDataParallel(model, process_group=group), lambda: None)

    def ours(group: dist.ProcessGroup) -> Wrap:
        return lambda model: (model, DataParallel(model, group=group).synchronize)

    with groups() as made:
        steps = [
            step_of(wrap) for wrap in (ddp(made["gloo"]), ours(made["shared"]), ddp(made["shared"]), ddp(made["gloo"]))
        ]
        for step in steps:
            step()
            step()
        return interleave([timed(step, 1) for step in steps], blocks)


def rows(quick: bool = False) -> Iterator[Row]:
    """Yield a row for each size and operation, gloo's own noise, and the step of a model."""
    by_value(__name__)
    blocks = 4 if quick else MIN_BLOCKS + 4
    for world_size in WORLD_SIZES:
        with Ranks(world_size, timeout_s=300, backend="shared", record=False) as ranks:
            for num_bytes, bar in ALL_REDUCES.items():
                yield from call_rows(ranks, "all_reduce", num_bytes, bar, blocks)
            for op, (num_bytes, bar) in CALLS.items():
                yield from call_rows(ranks, op, num_bytes, bar, blocks)
            yield from step_rows(ranks, blocks)


def call_rows(ranks: Ranks, op: str, num_bytes: int, bar: float | None, blocks: int) -> Iterator[Row]:
    """Yield the rows of one operation at one size."""
    gloo, shared, again, memcpy = slowest(ranks.run(time_calls, op, num_bytes, blocks))
    size = f"{num_bytes // MIB} MiB" if num_bytes >= MIB else f"{num_bytes // KB} kB"
    what = f"{op} of {size} on {ranks.world_size} ranks"
    row = compare(f"{what}: backend shared against gloo", shared, gloo, bar=bar or 1.0)
    has_bar = bar is not None and not (num_bytes == MIB and op == "all_reduce" and ranks.world_size == 2)
    yield row if has_bar else without_bar(row)
    if num_bytes >= 16 * MIB:
        limit = compare(f"{what}: backend shared against one memcpy of the bytes on each rank", shared, memcpy, bar=3.0)
        yield limit if (op, num_bytes) == ("all_reduce", 64 * MIB) else without_bar(limit)
    if num_bytes in (KB, 16 * MIB):
        yield noise(f"gloo's {what}", again, gloo)


def step_rows(ranks: Ranks, blocks: int) -> Iterator[Row]:
    """Yield the rows of a model's step."""
    on_gloo, ours, on_shared, again = slowest(ranks.run(time_steps, blocks))
    what = f"a step of {DEPTH} layers of {WIDTH} x {WIDTH} on {ranks.world_size} ranks"
    yield compare(f"{what}: DataParallel on shared against torch DDP on gloo", ours, on_gloo, bar=0.85)
    yield compare(f"{what}: DataParallel against torch DDP, both on shared", ours, on_shared)
    yield noise(f"torch DDP on gloo, {what}", again, on_gloo)


if __name__ == "__main__":
    run_script(__doc__, rows)

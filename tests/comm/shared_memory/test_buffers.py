"""Buffers that all ranks of a group map: their collectives give the bits of any other; unused ones go."""

import gc
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distlab.blocks.flat import all_gather_single, reduce_scatter_single
from distlab.comm import run
from distlab.comm.shared_memory.group import zeros

CPU = torch.device("cpu")


def values(numel, dtype, salt):
    generator = torch.Generator().manual_seed(100 * salt + dist.get_rank())
    return torch.randn(numel, generator=generator).mul(3).to(dtype)


def different():
    """Hand buffers, their beginnings and other memory to collectives; return what differs from tensors of one's own."""
    me, n, wrong = dist.get_rank(), dist.get_world_size(), []

    def compare(what, one, other):
        if not torch.equal(one, other):
            wrong.append((what, numel, dtype, op))

    for numel, dtype in ((n * 40_000, torch.float32), (n * 100_001, torch.bfloat16), (n * 300_000, torch.int64)):
        buffer = zeros(numel + 64, dtype=dtype, device=CPU, group=None)
        assert buffer.dtype == dtype
        assert not buffer.any()
        for turn, op in enumerate((dist.ReduceOp.SUM, dist.ReduceOp.MAX)):
            length = numel - 7 * n * turn
            plain, mine = values(length, dtype, turn), buffer[:length]
            mine.copy_(plain)
            sums = [torch.empty(length // n, dtype=dtype) for _ in range(3)]
            version = sums[1]._version
            for result, source in ((sums[0], plain), (sums[1], mine), (sums[2], mine if me else plain)):
                reduce_scatter_single(result, source, op)
            compare("sum", sums[0], sums[1])
            compare("one has other memory", sums[0], sums[2])
            assert sums[1]._version == version
            wholes = [torch.empty(n * length, dtype=dtype) for _ in range(2)]
            all_gather_single(wholes[0], plain)
            work = all_gather_single(wholes[1], mine, async_op=True)
            work.wait()
            mine.fill_(turn)  # the others have read it
            compare("gathered", *wholes)
            own = mine[me * (length // n) : (me + 1) * (length // n)]
            mine.copy_(plain)
            reduce_scatter_single(own, mine, op)  # into one's own part of what the others read
            compare("into itself", own, sums[0])
            mine.copy_(plain)
            dist.all_reduce(plain, op)
            work = dist.all_reduce(mine, op, async_op=True)
            work.wait()
            compare("all-reduce", mine, plain)
    return wrong


@pytest.mark.parametrize("world_size", [1, 3])
def test_collectives_of_buffers_have_the_bits_of_any_other(shared_ranks, world_size):
    assert shared_ranks(world_size).run(different) == [[]] * world_size


def sums_of_mixed():
    """Some ranks pass their buffer, others a tensor, a second buffer or a part of one."""
    me = dist.get_rank()
    one, two = (zeros(30_000, dtype=torch.float32, device=CPU, group=None) for _ in range(2))
    cases = {
        "all the first": [one, one, one],
        "one has a tensor": [one, torch.empty(30_000), one],
        "two buffers": [one, two, one],
        "a beginning": [one[:20_000]] * 3,
        "an end": [one[20_000:]] * 3,
    }
    found = {}
    for name, of_ranks in cases.items():
        dist.all_reduce(of_ranks[me].fill_(me + 1.0))
        found[name] = of_ranks[me].unique().tolist()
    part = dist.new_group([0, 2])
    if me != 1:
        mine = zeros(30_000, dtype=torch.float32, device=CPU, group=part).fill_(me + 1.0)
        dist.all_reduce(mine, group=part)
        dist.all_reduce(one.fill_(1.0), group=part)  # the world's, which is none of this group
        assert (mine.unique().tolist(), one.unique().tolist()) == ([4.0], [2.0])
    return found


def test_ranks_that_pass_other_memory_get_the_same_sum(shared_ranks):
    for found in shared_ranks(3).run(sums_of_mixed):
        assert set(map(tuple, found.values())) == {(6.0,)}, found


def mapped():
    return sum("memfd:distlab" in line for line in Path("/proc/self/maps").read_text().splitlines())


def kept_and_left():
    """Return how many mappings a buffer adds, how many stay after it and after its views, and whether a file stays."""
    before = mapped()
    buffer = zeros(50_000, dtype=torch.float32, device=CPU, group=None)
    with_it, part = mapped() - before, buffer[10:20]
    del buffer
    gc.collect()
    with_part = mapped() - before
    part.fill_(3.0)
    del part
    gc.collect()
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    files = [os.readlink(link) for link in links if os.path.lexists(link)]
    again = torch.ones(50_000)
    dist.all_reduce(again)
    named = [path.name for path in Path("/dev/shm").glob("*distlab*")]
    return with_it, with_part, mapped() - before, "/memfd:distlab (deleted)" in files, named, again[0].item()


def test_a_buffer_is_gone_with_the_last_view_of_it_and_no_memory_has_a_name():
    assert run(kept_and_left, 2, backend="shared") == [(1, 1, 0, False, [], 2.0)] * 2

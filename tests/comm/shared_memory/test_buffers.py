"""Buffers that all ranks of a group map: their all-reduce gives the bits of any other; unused ones go."""

import contextlib
import gc
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distlab.blocks.flat import all_gather_single, reduce_scatter_single
from distlab.comm import Ranks, run
from distlab.comm.shared_memory.collectives import SMALL_BYTES, Buffers, Collectives
from distlab.comm.shared_memory.group import zeros
from distlab.data_parallel import DataParallel
from distlab.sharding import FullyShard

OPS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT)


@contextlib.contextmanager
def noted(kind, name, note):
    """Yield a list that gets `note(arguments, result)` of each call of a method on this rank."""
    seen, real = [], getattr(kind, name)

    def noting(*arguments):
        result = real(*arguments)
        seen.append(note(arguments, result))
        return result

    setattr(kind, name, noting)
    try:
        yield seen
    finally:
        setattr(kind, name, real)


def in_place():
    """Note of each all-reduce of buffers how many there are."""
    return noted(Collectives, "_in_place", lambda arguments, _: len(arguments[1]))


def read_where_they_lie():
    """Note of each call that asks for buffers how many it found."""
    return noted(Buffers, "of_all", lambda _, found: len(found))


def values(numel, dtype, salt):
    generator = torch.Generator().manual_seed(100 * salt + dist.get_rank())
    return torch.randn(numel, generator=generator).mul(3).to(dtype)


def differences():
    """All-reduce buffers of several lengths and types beside tensors; return what differs, or went a different way."""
    with in_place() as seen:
        return different_from_tensors(seen)


def different_from_tensors(seen):
    n, wrong, cpu, expected = dist.get_world_size(), [], torch.device("cpu"), 0
    for numel in (20_000, 100_003, 300_000):
        for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64):
            buffer = zeros(numel, dtype=dtype, device=cpu, group=None)
            if buffer.dtype != dtype or buffer.any():
                wrong.append(("zeros", numel, dtype))
            for turn, op in enumerate(OPS[: 1 if dtype == torch.int64 else 4]):
                plain = values(numel, dtype, turn)
                buffer.copy_(plain)
                dist.all_reduce(plain, op)
                work = dist.all_reduce(buffer, op, async_op=turn % 2 == 1)
                if work is not None:
                    work.wait()
                expected += n > 1
                if not torch.equal(plain, buffer) or len(seen) != expected:
                    wrong.append((numel, dtype, op, len(seen), expected))
    return wrong


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_an_all_reduce_of_buffers_gives_the_bits_of_any_other(shared_ranks, world_size):
    assert shared_ranks(world_size).run(differences) == [[]] * world_size


def mixed():
    """Some ranks pass their buffer, others a tensor, a second buffer or a part of one; return sums and ways."""
    with in_place() as seen:
        return sums_of_mixed(seen)


def sums_of_mixed(seen):
    me, cpu = dist.get_rank(), torch.device("cpu")
    one, two = (zeros(30_000, dtype=torch.float32, device=cpu, group=None) for _ in range(2))
    cases = {
        "all the first": [one, one, one],
        "one has a tensor": [one, torch.empty(30_000), one],
        "two buffers": [one, two, one],
        "a beginning": [one[:20_000], one[:20_000], one[:20_000]],
        "an end": [one[20_000:], one[20_000:], one[20_000:]],
        "all the second": [two, two, two],
    }
    found = {}
    for name, of_ranks in cases.items():
        x, before = of_ranks[me], len(seen)
        x.fill_(me + 1.0)
        dist.all_reduce(x)
        found[name] = (x.unique().tolist(), len(seen) - before)
    part = dist.new_group([0, 2])
    if me != 1:
        mine = zeros(30_000, dtype=torch.float32, device=cpu, group=part).fill_(me + 1.0)
        dist.all_reduce(mine, group=part)
        dist.all_reduce(one.fill_(1.0), group=part)  # the world's, which is none of this group
        found["a group"] = (mine.unique().tolist() + one.unique().tolist(), seen[-1])
    return found


def test_ranks_that_pass_other_memory_get_the_same_sum(shared_ranks):
    for rank, found in enumerate(shared_ranks(3).run(mixed)):
        if rank != 1:
            assert found.pop("a group") == ([4.0, 2.0], 2)
        assert found == {
            "all the first": ([6.0], 1),
            "one has a tensor": ([6.0], 0),
            "two buffers": ([6.0], 0),
            "a beginning": ([6.0], 1),
            "an end": ([6.0], 0),
            "all the second": ([6.0], 1),
        }


def mapped():
    return sum("memfd:distlab" in line for line in Path("/proc/self/maps").read_text().splitlines())


def kept_and_left():
    """Return how many mappings a buffer adds, how many stay after it and after its views, and whether a file stays."""
    before, cpu = mapped(), torch.device("cpu")
    buffer = zeros(50_000, dtype=torch.float32, device=cpu, group=None)
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
    return with_it, with_part, mapped() - before, "/memfd:distlab (deleted)" in files, again[0].item()


def test_a_buffer_is_gone_with_the_last_view_of_it():
    assert run(kept_and_left, 2, backend="shared") == [(1, 1, 0, False, 2.0)] * 2


def trained():
    """Return the weights after three steps of DataParallel, all-reduces through buffers, and large buckets."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(60, 200), nn.Tanh(), nn.Linear(200, 200), nn.Tanh(), nn.Linear(200, 5))
    replicas = DataParallel(model, bucket_bytes=100_000, first_bucket_bytes=40_000)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    with in_place() as seen:
        for _ in range(3):
            optimizer.zero_grad()
            replicas.module(torch.randn(8, 60, generator=generator)).square().mean().backward()
            replicas.synchronize()
            optimizer.step()
    large = [bucket for bucket in replicas._buckets if bucket.flat.num_bytes * dist.get_world_size() > SMALL_BYTES]
    return torch.cat([p.detach().flatten() for p in model.parameters()]), len(seen), len(large)


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_buckets_of_data_parallel_are_buffers_and_train_as_on_gloo(shared_ranks, world_size):
    with Ranks(world_size, backend="gloo") as on_gloo:
        theirs = [weights for weights, _, _ in on_gloo.run(trained)]
    for weights, num_in_place, num_large in shared_ranks(world_size).run(trained):
        assert num_in_place == 3 * num_large > 3
        torch.testing.assert_close(weights, theirs[0], rtol=0, atol=1e-6)


def halves():
    """Gather and scatter buffers, their beginnings and other memory; return what differs from tensors of one's own."""
    with read_where_they_lie() as found:
        return different_halves(), found


def different_halves():
    me, n, wrong = dist.get_rank(), dist.get_world_size(), []
    for numel, dtype in ((n * 40_000, torch.float32), (n * 100_001, torch.bfloat16), (n * 300_000, torch.int64)):
        buffer = zeros(numel + 64, dtype=dtype, device=torch.device("cpu"), group=None)
        for turn, (op, length) in enumerate(((dist.ReduceOp.SUM, numel + 0), (dist.ReduceOp.MAX, numel - 7 * n))):
            plain, mine = values(length, dtype, turn), buffer[:length]
            mine.copy_(plain)
            sums = [torch.empty(length // n, dtype=dtype) for _ in range(3)]
            version = sums[1]._version
            for result, source in ((sums[0], plain), (sums[1], mine), (sums[2], mine if me else plain)):
                reduce_scatter_single(result, source, op)
            wrong += [("sum", length, dtype, op)] if not torch.equal(sums[0], sums[1]) else []
            wrong += [("one has other memory", length, dtype)] if not torch.equal(sums[0], sums[2]) else []
            wrong += [("a version", length, dtype)] if sums[1]._version != version else []
            wholes = [torch.empty(n * length, dtype=dtype) for _ in range(2)]
            all_gather_single(wholes[0], plain)
            work = all_gather_single(wholes[1], mine, async_op=True)
            work.wait()
            mine.fill_(turn)  # the others have read it
            wrong += [("gathered", length, dtype)] if not torch.equal(*wholes) else []
            own = mine[me * (length // n) : (me + 1) * (length // n)]
            mine.copy_(plain)
            reduce_scatter_single(own, mine, op)  # into one's own part of what the others read
            wrong += [("into itself", length, dtype)] if not torch.equal(own, sums[0]) else []
    return wrong


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_gathers_and_scatters_of_buffers_have_the_bits_of_any_other(shared_ranks, world_size):
    in_turn = [0, world_size, 0, 0, world_size, world_size]  # what is not a buffer, on all ranks or on one, is copied
    for wrong, found in shared_ranks(world_size).run(halves):
        assert wrong == []
        assert found == ([] if world_size == 1 else in_turn * 6)


def sharded(whole):
    """Return the shards after three steps of FullyShard, and how many gathers and scatters read them where they lie."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(60, 200), nn.Tanh(), nn.Linear(200, 60)) for _ in range(3)]
    model = FullyShard(nn.Sequential(*layers), units=["0", "1", "2"], reshard_after_forward=not whole)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    with read_where_they_lie() as found:
        for step in range(3):
            optimizer.zero_grad()
            for keeps_whole in (True, False) if step == 1 else (False,):
                with model.no_sync() if keeps_whole else contextlib.nullcontext():
                    model(torch.randn(8, 60, generator=generator)).square().mean().backward()
            model.synchronize()
            optimizer.step()
    return torch.cat([shard.detach().to_local() for shard in model.shards]), found


@pytest.mark.parametrize(("world_size", "whole"), [(2, False), (3, True)])
def test_fully_shard_reads_shards_and_gradients_where_they_lie_and_trains_as_on_gloo(shared_ranks, world_size, whole):
    with Ranks(world_size, backend="gloo") as on_gloo:
        theirs = [weights for weights, _ in on_gloo.run(sharded, whole)]
    for (weights, found), other in zip(shared_ranks(world_size).run(sharded, whole), theirs, strict=True):
        torch.testing.assert_close(weights, other, rtol=0, atol=1e-6)
        assert found == [world_size] * len(found)
        assert len(found) >= 3 * 3 + 3 * 2

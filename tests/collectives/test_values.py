"""Every algorithm against torch's own collective: values, equal bits on all ranks, and bits that repeat."""

from itertools import product

import pytest
import torch
import torch.distributed as dist
from equal import DENSE, Row, assert_rows_equal_one_process, net, replicas, same_everywhere, thirteen

from distlab import collectives
from distlab.blocks.gradient_hook import GradientBucket, GradientHook
from distlab.collectives import RingAllReduce
from distlab.comm import recorded
from distlab.data_parallel import DataParallel

ALL_REDUCES = ("ring_all_reduce", "tree_all_reduce", "double_tree_all_reduce", "halving_doubling_all_reduce")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
WHOLE = (torch.int8, torch.uint8, torch.int32, torch.int64)
LENGTHS = (0, 1, 2, 3, 5, 7, 61, 1000)


def own_data(shape, dtype, rank, seed=0):
    """Return different values on each rank: about 1 in size, so that products stay finite."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.7
    if not dtype.is_floating_point and not dtype.is_complex:
        return torch.randint(0, 4, shape, generator=generator).to(dtype)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) + 0.5 + 0.1 * rank).to(dtype)


def reference(tensor, op):
    """Reduce with torch's own collective."""
    expected = tensor.clone()
    if op == "mean":
        dist.all_reduce(expected)
        return expected.div_(dist.get_world_size())
    named = {"sum": "SUM", "max": "MAX", "min": "MIN", "prod": "PRODUCT"}[op]
    dist.all_reduce(expected, getattr(dist.ReduceOp, named))
    return expected


def same_bits_everywhere(tensor):
    """Whether all ranks hold the same bytes."""
    return not tensor.numel() or same_everywhere(tensor.contiguous().view(-1).view(torch.uint8))


def tolerance(dtype):
    """Allow some roundings of the dtype."""
    return 0 if not (dtype.is_floating_point or dtype.is_complex) else 16 * torch.finfo(dtype).eps


def compare(name, shape, dtype, op, **options):
    """Reduce twice, and as torch does."""
    where = f"{name} {shape} {dtype} {op} {options} on rank {dist.get_rank()}"
    mine = own_data(shape, dtype, dist.get_rank())
    got, again = mine.clone(), mine.clone()
    assert getattr(collectives, name)(got, op=op, **options) is got, where
    getattr(collectives, name)(again, op=op, **options)
    expected = reference(mine, op)
    assert torch.allclose(got, expected, rtol=tolerance(dtype), atol=tolerance(dtype)), where
    assert torch.equal(got, again), f"{where}: two runs differ"
    assert same_bits_everywhere(got), f"{where}: ranks differ"


def check_all_reduces():
    for name in ALL_REDUCES:
        for length in LENGTHS:
            compare(name, (length,), torch.float32, "sum")
        for shape in ((), (3, 5), (2, 0, 3)):
            compare(name, shape, torch.float32, "mean")
        for dtype, op in product(FLOATS, ("sum", "mean", "max", "min", "prod")):
            compare(name, (37,), dtype, op)
        for dtype, op in product((*WHOLE, torch.bool), ("sum", "max", "min", "prod")):
            compare(name, (37,), dtype, op)
        for op in ("sum", "mean"):
            compare(name, (37,), torch.complex64, op)
    for name, length in product(("ring_all_reduce", "double_tree_all_reduce"), (0, 1, 5, 100, 1001)):
        compare(name, (length,), torch.float32, "sum", piece_bytes=64)  # cut into pieces, the last ones shorter


def check_first_versions():
    rank = dist.get_rank()
    for name, length in product(("naive_ring_all_reduce", "plain_ring_all_reduce"), LENGTHS):
        mine = own_data((length,), torch.float32, rank)
        expected = reference(mine, "sum")
        torch.testing.assert_close(getattr(collectives, name)(mine), expected)
    plain = collectives.plain_ring_all_reduce(own_data((100,), torch.float32, rank))
    piped = collectives.ring_all_reduce(own_data((100,), torch.float32, rank), piece_bytes=32)
    naive = collectives.naive_ring_all_reduce(own_data((10_000,), torch.float32, rank))
    assert torch.equal(plain, piped), "pieces change no bit"
    assert same_bits_everywhere(plain)
    assert same_bits_everywhere(naive) == (dist.get_world_size() <= 2)  # two add up alike in any order


def check_scatter_and_gather(scatter, gather):
    rank, n = dist.get_rank(), dist.get_world_size()
    for length in LENGTHS:
        mine = own_data((length,), torch.float64, rank)
        whole = mine.clone()
        expected = reference(mine, "sum")
        chunk = getattr(collectives, scatter)(whole)
        pieces = expected.tensor_split(n)
        torch.testing.assert_close(chunk, pieces[rank])
        assert chunk.numel() == 0 or chunk.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        for other, part in enumerate(whole.tensor_split(n)):  # the rest is scratch: nothing may be read from it
            if other != rank:
                part.fill_(torch.nan)
        assert getattr(collectives, gather)(whole) is whole
        torch.testing.assert_close(whole, expected)
        assert same_bits_everywhere(whole)
    chunk = getattr(collectives, scatter)(own_data((2, 9), torch.float32, rank), op="mean")
    torch.testing.assert_close(
        chunk, reference(own_data((2, 9), torch.float32, rank), "mean").view(-1).tensor_split(n)[rank]
    )


def check_every_root():
    rank, n = dist.get_rank(), dist.get_world_size()
    for root in range(n):
        for shape in ((), (0,), (1,), (4, 5), (1001,)):
            expected = own_data(shape, torch.bfloat16, root)
            for got in (
                collectives.tree_broadcast(own_data(shape, torch.bfloat16, rank), root),
                collectives.ring_broadcast(own_data(shape, torch.bfloat16, rank), root),
                collectives.ring_broadcast(own_data(shape, torch.bfloat16, rank), root, piece_bytes=100),
            ):
                assert torch.equal(got, expected)
            expected = reference(own_data(shape, torch.float64, rank), "mean")
            got = collectives.tree_reduce(own_data(shape, torch.float64, rank), root, op="mean")
            assert rank != root or torch.allclose(got, expected)


@pytest.mark.equality("collectives")
@pytest.mark.soak_where(world_size=(2, 4, 8))
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 8])
@pytest.mark.on_ranks
def test_every_algorithm_equals_torch(world_size):
    check_all_reduces()
    check_first_versions()
    check_scatter_and_gather("ring_reduce_scatter", "ring_all_gather")
    check_scatter_and_gather("halving_reduce_scatter", "doubling_all_gather")
    check_every_root()


@pytest.mark.equality("collectives")
@pytest.mark.on_ranks(4)
def test_ranks_are_counted_inside_the_group():
    members = [3, 1, 2]  # the group counts its ranks in this order or sorted; never from global rank 0
    group = dist.new_group(members)
    rank = dist.get_rank()
    if rank == 0:
        return
    mine = own_data((17,), torch.float64, rank)
    expected = mine.clone()
    dist.all_reduce(expected, group=group)
    for name in (*ALL_REDUCES, "naive_ring_all_reduce", "plain_ring_all_reduce"):
        torch.testing.assert_close(getattr(collectives, name)(mine.clone(), group), expected)
    for root in range(3):
        source = own_data((17,), torch.float64, dist.get_global_rank(group, root))
        assert torch.equal(collectives.tree_broadcast(mine.clone(), root, group), source)
        assert torch.equal(collectives.ring_broadcast(mine.clone(), root, group), source)


@pytest.mark.equality("collectives")
@pytest.mark.soak_where(world_size=[8])
@pytest.mark.parametrize(("world_size", "num_local"), [(4, 2), (4, 4), (4, 1), (8, 4), (8, 2)])
@pytest.mark.on_ranks
def test_hierarchical_equals_flat(world_size, num_local):
    num_machines = world_size // num_local
    machines = [[m * num_local + i for i in range(num_local)] for m in range(num_machines)]
    local, _ = dist.new_subgroups_by_enumeration(machines)
    cross, _ = dist.new_subgroups_by_enumeration([list(places) for places in zip(*machines, strict=True)])
    for length, op in product(LENGTHS, ("sum", "mean", "max")):
        mine = own_data((length,), torch.float64, dist.get_rank())
        expected = reference(mine, op)
        again = collectives.hierarchical_all_reduce(mine.clone(), local, cross, op=op)
        got = collectives.hierarchical_all_reduce(mine, local, cross, op=op)
        torch.testing.assert_close(got, expected)
        assert torch.equal(got, again)
        assert same_bits_everywhere(got)


RING = replicas(hook=RingAllReduce())
ROWS = {"sgd": Row(DENSE, "sgd", RING), "adam": Row(DENSE, "adam", RING)}


@pytest.mark.soak_where(world_size=(2, 4))
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ten_updates_equal_one_process(ranks, world_size):
    assert_rows_equal_one_process(ranks(world_size), ROWS)


@pytest.mark.on_ranks(3)
def test_bytes_are_those_of_the_ring_and_one_flag():
    trained, sizes, rank = net(0, rare=False), [], dist.get_rank()

    class Counted(RingAllReduce):
        def start(self, bucket, group):
            sizes.append(bucket.buffer.numel())
            return super().start(bucket, group)

    made = DataParallel(trained, hook=Counted(), bucket_bytes=600, first_bucket_bytes=200)
    trained(thirteen(0)[0]).square().mean().backward()
    with recorded() as recording:
        made.synchronize()
    chunks = [[8 * (size // 3 + (c < size % 3)) for c in range(3)] for size in sizes]
    assert len(sizes) > 1
    sent = recording.records.sent_bytes(rank)
    assert sent == sum(2 * sum(c) - c[rank] - c[(rank + 1) % 3] for c in chunks), "by the own ring, and nothing else"
    flag = recording.records.num_calls("all_reduce"), recording.records.payload_bytes(rank)
    assert flag == (1, 4)  # which says whether any rank found a fault


@pytest.mark.on_ranks(2)
def test_float16_gradients_whose_sum_overflows_have_a_mean():
    buffer = torch.full((6,), 60_000.0, dtype=torch.float16)  # the largest number is 65,504
    RingAllReduce().start(GradientBucket(0, buffer, (buffer,)), None).wait()
    assert torch.equal(buffer, torch.full((6,), 60_000.0, dtype=torch.float16))
    hook = RingAllReduce()
    assert isinstance(hook, GradientHook)
    hook.load_state_dict(hook.state_dict())
    with pytest.raises(ValueError, match=r"expected an empty state, got \['memories'\]"):
        hook.load_state_dict({"memories": {}})

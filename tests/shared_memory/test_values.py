"""Every collective: the values that gloo has, in all types, shapes, sizes and places; equal bits on all ranks."""

import pytest
import torch
import torch.distributed as dist

WORLD_SIZES = (1, 2, 3, 4)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
WHOLE = (torch.int8, torch.uint8, torch.int32, torch.int64)
BEYOND_A_SLOT = 2_300_001  # of float32; a slot holds 1,048,576


def own(shape, dtype=torch.float32, salt=0):
    """Return small whole numbers, different on each rank: exact in each type, whatever the order of a sum."""
    generator = torch.Generator().manual_seed(1000 * salt + dist.get_rank())
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.7
    return torch.randint(0, 4, shape, generator=generator).to(dtype)


def reduced_differently():
    """Return which all-reduces and reduces differ from gloo's."""
    gloo, wrong, n = dist.new_group(backend="gloo"), [], dist.get_world_size()
    names = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
    for dtype in (*FLOATS, *WHOLE, torch.bool):
        for name in names:
            if (name[0] == "B") and dtype.is_floating_point or (name == "AVG" and not dtype.is_floating_point):
                continue  # gloo refuses bits of floats; its mean of whole numbers is tested by itself
            op = getattr(dist.ReduceOp, name)
            for shape in ((), (0,), (1,), (7, 3), (20_011,)):
                mine = own(shape, dtype)
                there, here = mine.clone(), mine.clone()
                dist.all_reduce(there, op, group=gloo)
                dist.all_reduce(here, op)
                to_last = mine.clone()
                dist.reduce(to_last, n - 1, op)
                at_root = torch.equal(to_last, there if dist.get_rank() == n - 1 else mine)
                if not (torch.equal(there, here) and at_root):
                    wrong.append((name, dtype, shape, there.tolist()[:3] if shape else there, here))
    return wrong


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_reduction_of_every_type_is_gloos(shared_ranks, world_size):
    assert shared_ranks(world_size).run(reduced_differently) == [[]] * world_size


def means_of_whole_numbers():
    x = torch.tensor([1, 2, -5]) * (dist.get_rank() + 1)
    dist.all_reduce(x, dist.ReduceOp.AVG)
    return x.tolist()


def test_a_mean_of_whole_numbers_loses_what_is_behind_the_point(shared_ranks):
    assert shared_ranks(2).run(means_of_whole_numbers) == [[1, 3, -7]] * 2


def moved_wrongly(numel):
    """Return which of the other collectives do not bring what they should."""
    n, me, wrong = dist.get_world_size(), dist.get_rank(), []

    def of(rank, part=0):
        return torch.arange(numel) + 1000 * rank + 7 * part

    def check(what, found, expected):
        if not torch.equal(found, expected):
            wrong.append(what)

    x = of(me)
    dist.all_reduce(x)
    check("all_reduce", x, sum(of(r) for r in range(n)))
    x = of(me)
    dist.broadcast(x, n - 1)
    check("broadcast", x, of(n - 1))
    parts = [torch.empty(numel, dtype=torch.int64) for _ in range(n)]
    dist.all_gather(parts, of(me))
    check("all_gather", torch.cat(parts), torch.cat([of(r) for r in range(n)]))
    whole = torch.empty(n * numel, dtype=torch.int64)
    dist.all_gather_into_tensor(whole, of(me))
    check("all_gather_into_tensor", whole, torch.cat(parts))
    x = torch.empty(numel, dtype=torch.int64)
    dist.reduce_scatter(x, [of(me, part) for part in range(n)])
    check("reduce_scatter", x, sum(of(r, me) for r in range(n)))
    y = torch.empty(numel, dtype=torch.int64)
    dist.reduce_scatter_tensor(y, torch.cat([of(me, part) for part in range(n)]))
    check("reduce_scatter_tensor", y, x)
    dist.all_to_all(parts, [of(me, part) for part in range(n)])
    check("all_to_all", torch.cat(parts), torch.cat([of(r, me) for r in range(n)]))
    dist.all_to_all_single(whole, torch.cat([of(me, part) for part in range(n)]))
    check("all_to_all_single", whole, torch.cat(parts))
    dist.gather(of(me), parts if me == 0 else None, 0)
    check("gather", torch.cat(parts), torch.cat([of(r) if me == 0 else of(r, me) for r in range(n)]))
    dist.scatter(x, [of(n - 1, r) for r in range(n)] if me == n - 1 else None, n - 1)
    check("scatter", x, of(n - 1, me))
    return wrong


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("numel", [0, 1, 13, 5000])
def test_data_goes_where_it_should(shared_ranks, world_size, numel):
    assert shared_ranks(world_size).run(moved_wrongly, numel) == [[]] * world_size


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_is_larger_than_a_slot_goes_in_pieces(shared_ranks, world_size):
    assert shared_ranks(world_size).run(moved_wrongly, BEYOND_A_SLOT) == [[]] * world_size


def uneven_exchange():
    n, me = dist.get_world_size(), dist.get_rank()
    gives, takes = [(me + 1) * (s + 1) for s in range(n)], [(s + 1) * (me + 1) for s in range(n)]
    source = torch.full((sum(gives), 2), float(me))
    output = torch.empty(sum(takes), 2)
    dist.all_to_all_single(output, source, takes, gives)
    return output[:, 0].tolist(), [float(s) for s, count in enumerate(takes) for _ in range(count)]


def test_an_uneven_exchange(shared_ranks):
    for found, expected in shared_ranks(3).run(uneven_exchange):
        assert found == expected


def scattered_in_memory():
    """Each collective on tensors that are no block, beside the same on blocks."""
    n, me, wrong = dist.get_world_size(), dist.get_rank(), []

    def both(what, call, *shapes):
        blocks = [own(shape, salt=i) for i, shape in enumerate(shapes)]
        strided = [torch.stack([b, b], -1).transpose(0, 1)[..., 0].transpose(0, 1) for b in blocks]
        assert not any(t.is_contiguous() for t in strided)
        call(*blocks)
        call(*strided)
        if not all(torch.equal(a, b) for a, b in zip(blocks, strided, strict=True)):
            wrong.append(what)

    both("all_reduce", dist.all_reduce, (4, 3))
    both("broadcast", lambda x: dist.broadcast(x, 0), (4, 3))
    both("reduce", lambda x: dist.reduce(x, 0), (4, 3))
    both("all_gather", lambda x, *out: dist.all_gather(list(out), x), *[(4, 3)] * (n + 1))
    both("reduce_scatter", lambda x, *parts: dist.reduce_scatter(x, list(parts)), *[(4, 3)] * (n + 1))
    both("into_tensor", dist.all_gather_into_tensor, (n * 4, 3), (4, 3))
    both("scatter_tensor", dist.reduce_scatter_tensor, (4, 3), (n * 4, 3))
    both("scatter", lambda x, *parts: dist.scatter(x, list(parts) if me == 0 else None), *[(4, 3)] * (n + 1))
    both("gather", lambda x, *out: dist.gather(x, list(out) if me == 0 else None), *[(4, 3)] * (n + 1))
    both("exchange", lambda *t: dist.all_to_all(list(t[:n]), list(t[n:])), *[(4, 3)] * (2 * n))
    both("message", lambda x: dist.send(x, 1) if me == 0 else dist.recv(x, 0) if me == 1 else None, (4, 3))
    return wrong


def test_tensors_that_lie_scattered_in_memory(shared_ranks):
    assert shared_ranks(3).run(scattered_in_memory) == [[]] * 3


def complex_values():
    z = torch.full((3,), complex(1, dist.get_rank()))
    other = z.clone()
    dist.all_reduce(z)
    gathered = [torch.empty(3, dtype=torch.complex64) for _ in range(2)]
    dist.all_gather(gathered, other)
    return z.tolist(), gathered[1].tolist()


def test_complex_numbers(shared_ranks):
    assert shared_ranks(2).run(complex_values) == [([2 + 1j] * 3, [1 + 1j] * 3)] * 2


def sparse_sum():
    me = dist.get_rank()
    x = torch.sparse_coo_tensor([[0, me + 1, 0]], [[1.0, 2.0], [3.0, me], [5.0, 0.0]], (4, 2))
    dist.all_reduce(x)
    return x.to_dense().tolist()


def test_sparse_tensors_are_summed(shared_ranks):
    assert shared_ranks(2).run(sparse_sum) == [[[12.0, 4.0], [3.0, 0.0], [3.0, 1.0], [0.0, 0.0]]] * 2


def bits(seed):
    """Return the bits of a sum whose rounding depends on the order, small and in pieces."""
    found = []
    for numel in (50, 20_000, 400_000):
        generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
        x = torch.randn(numel, generator=generator) * 10 ** torch.randn(numel, generator=generator)
        y = x.clone()
        dist.all_reduce(x)
        dist.all_reduce(y)
        found += [x.view(torch.int32), y.view(torch.int32)]
    return found


def test_bits_repeat_and_are_equal_on_all_ranks(shared_ranks):
    of_ranks = shared_ranks(4).run(bits, 3)
    for first, again in zip(of_ranks[0][::2], of_ranks[0][1::2], strict=True):
        assert torch.equal(first, again)
    for other in of_ranks[1:]:
        assert all(torch.equal(a, b) for a, b in zip(of_ranks[0], other, strict=True))


def in_groups():
    """Two groups at once, of which one has its ranks in another order than the world."""
    me = dist.get_rank()
    groups = [dist.new_group([3, 1]), dist.new_group([0, 2])]
    mine = groups[0 if me in (1, 3) else 1]
    x = torch.tensor([float(me)])
    dist.all_reduce(x, group=mine)
    y = torch.tensor([me])
    dist.broadcast(y, min(dist.get_process_group_ranks(mine)), group=mine)
    parts = [torch.empty(1, dtype=torch.int64) for _ in range(2)]
    dist.all_gather(parts, torch.tensor([me]), group=mine)
    return x.item(), y.item(), [p.item() for p in parts]


def test_groups_of_some_ranks(shared_ranks):
    of_1_and_3, of_0_and_2 = (4.0, 1, [1, 3]), (2.0, 0, [0, 2])
    assert shared_ranks(4).run(in_groups) == [of_0_and_2, of_1_and_3, of_0_and_2, of_1_and_3]


def objects_and_coalesced():
    n, me = dist.get_world_size(), dist.get_rank()
    gathered = [None] * n
    dist.all_gather_object(gathered, {"rank": me})
    told = ["from 0"] if me == 0 else [None]
    dist.broadcast_object_list(told, 0)
    many = [torch.full((k,), float(me)) for k in (1, 5, 0)]
    with dist._coalescing_manager():
        for tensor in many:
            dist.all_reduce(tensor)
    outputs, inputs = [torch.empty(2 * n) for _ in range(2)], [torch.full((2,), float(me + k)) for k in range(2)]
    with dist._coalescing_manager(async_ops=True) as under_way:
        for output, source in zip(outputs, inputs, strict=True):
            dist.all_gather_into_tensor(output, source)
    under_way.wait()
    return gathered, told, [t.tolist() for t in many], [t.tolist() for t in outputs]


def test_objects_and_calls_that_torch_gathers_into_one(shared_ranks):
    for gathered, told, sums, outputs in shared_ranks(2).run(objects_and_coalesced):
        assert gathered == [{"rank": 0}, {"rank": 1}]
        assert told == ["from 0"]
        assert sums == [[1.0], [1.0] * 5, []]
        assert outputs == [[0.0, 0.0, 1.0, 1.0], [1.0, 1.0, 2.0, 2.0]]

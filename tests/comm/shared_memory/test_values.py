"""Every collective: the values that gloo has, in all types, shapes, sizes and places; equal bits on all ranks."""

import pytest
import torch
import torch.distributed as dist
from collective_programs import bits, moved_wrongly, reduced_differently, scattered_in_memory
from odd_tensors import refused_before, results_of_functional_collectives, seen_by_modes

from distlab.comm import Ranks

WORLD_SIZES = (1, 2, 3, 4)
BEYOND_A_SLOT = 1_100_001  # of int64, in three pieces: a slot holds 524,288


@pytest.mark.soak_where(world_size=(2, 4))
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_reduction_of_every_type_is_gloos(shared_ranks, world_size):
    assert shared_ranks(world_size).run(reduced_differently) == [[]] * world_size


def means_of_whole_numbers():
    x = torch.tensor([1, 2, -5]) * (dist.get_rank() + 1)
    dist.all_reduce(x, dist.ReduceOp.AVG)
    return x.tolist()


def all_moved_wrongly(sizes):
    return [wrong for numel in sizes for wrong in moved_wrongly(numel)]


@pytest.mark.soak_where(world_size=(2, 4))
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_data_goes_where_it_should(shared_ranks, world_size):
    sizes = (0, 1, 13, 5000, *([BEYOND_A_SLOT] if world_size in (2, 3) else []))  # the last goes in pieces
    assert shared_ranks(world_size).run(all_moved_wrongly, sizes) == [[]] * world_size


def uneven_exchange():
    n, me = dist.get_world_size(), dist.get_rank()
    gives, takes = [(me + 1) * (s + 1) for s in range(n)], [(s + 1) * (me + 1) for s in range(n)]
    source = torch.full((sum(gives), 2), float(me))
    output = torch.empty(sum(takes), 2)
    dist.all_to_all_single(output, source, takes, gives)
    return output[:, 0].tolist() == [float(s) for s, count in enumerate(takes) for _ in range(count)]


def write_at_once():
    """Write what a call was given and what it returned as soon as it is over, while the others may still read."""
    me, n, wrong = dist.get_rank(), dist.get_world_size(), 0
    for turn in range(40):
        numel = (3, 5_000, 300_000)[turn % 3]
        x, parts = torch.full((numel,), float(me + turn)), [torch.empty(numel) for _ in range(n)]
        dist.all_gather(parts, x)
        x.fill_(-1.0)
        wrong += sum(not bool((part == rank + turn).all()) for rank, part in enumerate(parts))
        for part in parts:
            part.fill_(-2.0)
        y = torch.full((numel,), float(me + turn))
        dist.all_reduce(y)
        wrong += not bool((y == sum(rank + turn for rank in range(n))).all())
        y.fill_(-3.0)
        z = torch.full((numel,), float(turn if me == 0 else -4))
        dist.broadcast(z, 0)
        wrong += not bool((z == turn).all())
        z.fill_(-5.0)
    return wrong


def test_refusals_modes_and_memory_that_is_written_at_once():
    with Ranks(2, timeout_s=60, backend="shared", record=False) as ranks:
        assert ranks.run(write_at_once) == [0, 0]
        assert ranks.run(refused_before) == [([], [2.0, 2.0])] * 2
        assert ranks.run(seen_by_modes) == [([], [40_000.0, 12.0])] * 2


def complex_values():
    z = torch.full((3,), complex(1, dist.get_rank()))
    other = z.clone()
    dist.all_reduce(z)
    gathered = [torch.empty(3, dtype=torch.complex64) for _ in range(2)]
    dist.all_gather(gathered, other)
    return z.tolist(), gathered[1].tolist()


def test_bits_repeat_and_are_equal_on_all_ranks(shared_ranks):
    of_ranks = shared_ranks(4).run(bits, 3)
    for first, again in zip(of_ranks[0][::2], of_ranks[0][1::2], strict=True):
        assert torch.equal(first, again)
    for other in of_ranks[1:]:
        assert all(torch.equal(a, b) for a, b in zip(of_ranks[0], other, strict=True))


def in_groups():
    """Two groups at once, of which one has its ranks in a different order than the world."""
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


OF_1_AND_3, OF_0_AND_2 = (4.0, 1, [1, 3]), (2.0, 0, [0, 2])
GATHERED = (
    [{"rank": 0}, {"rank": 1}],
    ["from 0"],
    [[1.0], [1.0] * 5, []],
    [[0.0, 0.0, 1.0, 1.0], [1.0, 1.0, 2.0, 2.0]],
)


@pytest.mark.parametrize(
    ("program", "on_ranks"),
    [
        (means_of_whole_numbers, [[1, 3, -7]] * 2),  # a mean loses what is behind the point
        (uneven_exchange, [True] * 3),
        (scattered_in_memory, [[]] * 3),
        (results_of_functional_collectives, [[[6.0], [3.0], [3.0]]] * 2),
        (complex_values, [([2 + 1j] * 3, [1 + 1j] * 3)] * 2),
        (in_groups, [OF_0_AND_2, OF_1_AND_3, OF_0_AND_2, OF_1_AND_3]),
        (objects_and_coalesced, [GATHERED] * 2),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a_program_gets_these_values(shared_ranks, program, on_ranks):
    assert shared_ranks(len(on_ranks)).run(program) == on_ranks

"""The Cost lines: bytes sent per rank and number of messages, read from what the ranks really sent."""

import math

import pytest
import torch
import torch.distributed as dist

from distlab import collectives
from distlab.collectives.tree import double_tree
from distlab.comm import recorded

LENGTHS = (0, 1, 3, 12, 121, 1003)
BYTES = 4


def chunk_bytes(length, n):
    return [BYTES * (length // n + (index < length % n)) for index in range(n)]


def check(name, expected, args=(), **options):
    """Compare this rank's bytes and messages with expected(length, rank) -> (bytes, messages)."""
    rank = dist.get_rank()
    for length in LENGTHS:
        tensor = torch.full((length,), float(rank))
        with recorded() as recording:
            getattr(collectives, name)(tensor, *args, **options)
        records, where = recording.records, f"{name}, length {length}, rank {rank}"
        assert (records.sent_bytes(rank), records.num_calls("send")) == expected(length, rank), where
        assert set(records.ops(rank)) <= {"send", "recv"}, where


def num_filled(chunks, absent):
    return sum(size > 0 for index, size in enumerate(chunks) if index not in absent)


def rings(n):
    def all_reduce(length, rank):
        chunks, after = chunk_bytes(length, n), (rank + 1) % n
        return 2 * sum(chunks) - chunks[rank] - chunks[after], num_filled(chunks, {rank}) + num_filled(chunks, {after})

    def in_pieces(length, rank):
        chunks, after = chunk_bytes(length, n), (rank + 1) % n
        # A chunk shorter than its number of pieces has empty ones, which are not sent.
        filled = [min(math.ceil(chunks[0] / 64), size // BYTES) for size in chunks]
        return all_reduce(length, rank)[0], 2 * sum(filled) - filled[rank] - filled[after]

    def reduce_scatter(length, rank):
        chunks = chunk_bytes(length, n)
        return sum(chunks) - chunks[rank], num_filled(chunks, {rank})

    check("ring_all_reduce", all_reduce)
    check("plain_ring_all_reduce", all_reduce)
    check("ring_all_reduce", in_pieces, piece_bytes=64)
    check("ring_reduce_scatter", reduce_scatter)
    check("ring_all_gather", lambda length, rank: reduce_scatter(length, (rank + 1) % n))
    check("naive_ring_all_reduce", lambda length, rank: ((n - 1) * BYTES * length, (n - 1) * (length > 0)))
    assert all_reduce(120 * n, 0) == (2 * (n - 1) * 120 * BYTES, 2 * (n - 1))  # the field's formula


def trees(n):
    def num_children(place):
        lowest = place & -place or 1 << n.bit_length()
        return sum(1 for j in range(n.bit_length()) if 1 << j < lowest and place + (1 << j) < n)

    def times(count, length):
        return count * BYTES * length, count * (length > 0)

    def chain(length, place):
        return (0, 0) if place == n - 1 else (BYTES * length, min(length, math.ceil(BYTES * length / 100)))

    def in_two_trees(length, rank):
        edges = [parents.count(rank) + (parents[rank] is not None) for parents in double_tree(n)]
        sent = [(count * half, count * (half > 0)) for count, half in zip(edges, chunk_bytes(length, 2), strict=True)]
        return tuple(map(sum, zip(*sent, strict=True)))

    for root in {0, n - 1}:
        place = (dist.get_rank() - root) % n
        check("ring_broadcast", lambda length, _, place=place: chain(length, place), (root,), piece_bytes=100)
        check("tree_broadcast", lambda length, _, place=place: times(num_children(place), length), (root,))
        check("tree_reduce", lambda length, rank, root=root: times(rank != root, length), (root,))
    check("tree_all_reduce", lambda length, rank: times(num_children(rank) + (rank > 0), length))
    check("double_tree_all_reduce", in_two_trees)
    assert num_children(0) == math.ceil(math.log2(n))


def halving_bytes(n, length, rank):
    """Count what halving and doubling send, from the definition: blocks of chunks, each half as long as the last."""
    p = 1 << (n.bit_length() - 1)
    pairs, chunks = n - p, chunk_bytes(length, n)
    if rank < 2 * pairs and rank % 2:
        return None
    owned = [chunks[2 * q] + chunks[2 * q + 1] if q < pairs else chunks[q + pairs] for q in range(p)]
    place, sizes = rank // 2 if rank < 2 * pairs else rank - pairs, [2**j for j in range(p.bit_length() - 1)]
    down = [sum(owned[q] for q in range(p) if q // size == place // size ^ 1) for size in sizes]
    up = [sum(owned[q] for q in range(p) if q // size == place // size) for size in sizes]
    assert sum(down) == sum(chunks) - owned[place]
    return [(sum(part), sum(size > 0 for size in part)) for part in (down, up)]


def halving(n):
    pairs = n - (1 << (n.bit_length() - 1))

    def expected(length, rank, folded_sends, partner_sends, parts):
        counted = halving_bytes(n, length, rank)
        if counted is None:
            return folded_sends, int(folded_sends > 0)
        own = [counted[part] for part in parts]
        if rank < 2 * pairs:
            own.append((partner_sends, int(partner_sends > 0)))
        return tuple(map(sum, zip(*own, strict=True)))

    def all_reduce(length, rank):
        return expected(length, rank, BYTES * length, BYTES * length, (0, 1))

    def reduce_scatter(length, rank):
        return expected(length, rank, BYTES * length, chunk_bytes(length, n)[(rank | 1) % n], (0,))

    def all_gather(length, rank):
        return expected(length, rank, chunk_bytes(length, n)[rank], BYTES * length, (1,))

    check("halving_doubling_all_reduce", all_reduce)
    check("halving_reduce_scatter", reduce_scatter)
    check("doubling_all_gather", all_gather)
    if n in (2, 4, 8):
        assert all_reduce(1600, 1) == (2 * (n - 1) * 1600 * BYTES // n, 2 * (n.bit_length() - 1))


@pytest.mark.soak_where(world_size=(2, 3, 8))
@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8])
@pytest.mark.on_ranks
def test_each_algorithm_sends_what_it_says(world_size):
    rings(world_size)
    trees(world_size)
    halving(world_size)


def test_shape_of_the_double_tree():
    for n in range(1, 130):
        inner, sent_parts = [], [0.0] * n
        for parents in double_tree(n):
            assert parents.count(None) == 1
            for rank in range(n):
                steps, at = 0, rank
                while parents[at] is not None:
                    at, steps = parents[at], steps + 1
                assert steps <= math.ceil(math.log2(n))  # every rank reaches the root, and soon
                assert parents.count(rank) <= 2
                sent_parts[rank] += 0.5 * (parents.count(rank) + (parents[rank] is not None))  # of S
            inner.append({parent for parent in parents if parent is not None})
        assert len(inner[0] & inner[1]) <= n % 2
        assert max(sent_parts) <= 2


@pytest.mark.soak_where(world_size=[8])
@pytest.mark.parametrize(("world_size", "m"), [(4, 2), (3, 1), (8, 4)])
@pytest.mark.on_ranks
def test_hierarchical(world_size, m):
    g = world_size // m
    machine, place = divmod(dist.get_rank(), g)
    machines = [[other * g + i for i in range(g)] for other in range(m)]
    local, _ = dist.new_subgroups_by_enumeration(machines)
    cross, _ = dist.new_subgroups_by_enumeration([list(places) for places in zip(*machines, strict=True)])
    for length in LENGTHS:
        tensor = torch.full((length,), float(dist.get_rank()))
        with recorded() as recording:
            collectives.hierarchical_all_reduce(tensor, local, cross)
        chunks = chunk_bytes(length, g)
        parts = chunk_bytes(chunks[place] // BYTES, m)
        after, across = (place + 1) % g, (machine + 1) % m
        inside = 2 * sum(chunks) - chunks[place] - chunks[after]
        sent = recording.records.sent_bytes(dist.get_rank())
        assert sent == inside + 2 * sum(parts) - parts[machine] - parts[across]
        if length >= m * g:
            assert recording.records.num_calls("send") == 2 * (g - 1) + 2 * (m - 1)

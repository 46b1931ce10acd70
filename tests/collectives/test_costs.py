"""The Cost lines: bytes sent per rank and number of messages, read from what the ranks really sent."""

import math

import pytest
import torch
import torch.distributed as dist

from distlab import collectives
from distlab.collectives.tree import double_tree
from distlab.comm import recorded

WORLD_SIZES = (1, 2, 3, 4, 5)
LENGTHS = (0, 1, 3, 12, 120, 121, 1003)
BYTES = 4


def chunk_bytes(length, n):
    return [BYTES * (length // n + (index < length % n)) for index in range(n)]


def check(name, expected, args=(), options=None):
    """Compare this rank's bytes and messages with expected(length, rank) -> (bytes, messages)."""
    rank = dist.get_rank()
    for length in LENGTHS:
        tensor = torch.full((length,), float(rank))
        with recorded() as recording:
            getattr(collectives, name)(tensor, *args, **(options or {}))
        records, where = recording.records, f"{name}, length {length}, rank {rank}"
        assert (records.sent_bytes(rank), records.num_calls("send")) == expected(length, rank), where
        assert set(records.ops(rank)) <= {"send", "recv"}, where


def num_filled(chunks, absent):
    return sum(size > 0 for index, size in enumerate(chunks) if index not in absent)


@pytest.mark.soak_where(world_size=(2, 5))
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.on_ranks
def test_rings(world_size):
    n = world_size

    def all_reduce(length, rank):
        chunks = chunk_bytes(length, n)
        after = (rank + 1) % n
        num_bytes = 2 * sum(chunks) - chunks[rank] - chunks[after]
        return num_bytes, num_filled(chunks, {rank}) + num_filled(chunks, {after})

    def reduce_scatter(length, rank):
        chunks = chunk_bytes(length, n)
        return sum(chunks) - chunks[rank], num_filled(chunks, {rank})

    def all_gather(length, rank):
        return reduce_scatter(length, (rank + 1) % n)

    def naive(length, rank):
        return (n - 1) * BYTES * length, (n - 1) * (length > 0)

    check("ring_all_reduce", all_reduce)
    check("plain_ring_all_reduce", all_reduce)
    check("ring_reduce_scatter", reduce_scatter)
    check("ring_all_gather", all_gather)
    check("naive_ring_all_reduce", naive)
    if n > 1:
        assert all_reduce(1200, 0) == (2 * (n - 1) * 1200 * BYTES / n, 2 * (n - 1))  # the field's formula


@pytest.mark.soak_where(world_size=(2, 5))
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.on_ranks
def test_pieces_of_a_ring_change_messages_but_no_byte(world_size):
    n = world_size
    piece_bytes = 64

    def all_reduce(length, rank):
        chunks = chunk_bytes(length, n)
        k = math.ceil(chunks[0] / piece_bytes)
        after = (rank + 1) % n
        # A chunk shorter than its number of pieces has empty ones, which are not sent.
        filled = [min(k, size // BYTES) for size in chunks]
        messages = 2 * sum(filled) - filled[rank] - filled[after]
        return 2 * sum(chunks) - chunks[rank] - chunks[after], messages

    check("ring_all_reduce", all_reduce, options={"piece_bytes": piece_bytes})


@pytest.mark.soak_where(world_size=(2, 5))
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.on_ranks
def test_broadcasts_and_trees(world_size):
    n = world_size

    def num_children(place):
        lowest = place & -place or 1 << n.bit_length()
        return sum(1 for j in range(n.bit_length()) if 1 << j < lowest and place + (1 << j) < n)

    for root in {0, n - 1}:

        def chain(length, rank, root=root):
            if (rank - root) % n == n - 1:
                return 0, 0
            return BYTES * length, min(length, math.ceil(BYTES * length / 100))

        def broadcast(length, rank, root=root):
            count = num_children((rank - root) % n)
            return count * BYTES * length, count * (length > 0)

        def reduce(length, rank, root=root):
            return (rank != root) * BYTES * length, (rank != root and length > 0)

        check("ring_broadcast", chain, (root,), {"piece_bytes": 100})
        check("tree_broadcast", broadcast, (root,))
        check("tree_reduce", reduce, (root,))

    def all_reduce(length, rank):
        count = num_children(rank) + (rank > 0)
        return count * BYTES * length, count * (length > 0)

    check("tree_all_reduce", all_reduce)
    assert num_children(0) == math.ceil(math.log2(n))


@pytest.mark.soak_where(world_size=(2, 5))
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.on_ranks
def test_double_tree(world_size):
    n = world_size

    def expected(length, rank):
        num_bytes = messages = 0
        for parents, half in zip(double_tree(n), chunk_bytes(length, 2), strict=True):
            edges = parents.count(rank) + (parents[rank] is not None)
            num_bytes += edges * half
            messages += edges * (half > 0)
        return num_bytes, messages

    check("double_tree_all_reduce", expected)


def check_shape_of_the_double_tree(n):
    halves = 0.5, 0.5  # of S
    inner = []
    sent_parts = [0.0] * n
    for parents, half in zip(double_tree(n), halves, strict=True):
        assert parents.count(None) == 1
        for rank in range(n):
            steps, at = 0, rank
            while parents[at] is not None:
                at, steps = parents[at], steps + 1
            assert steps <= math.ceil(math.log2(n))  # every rank reaches the root, and soon
            assert parents.count(rank) <= 2
            sent_parts[rank] += half * (parents.count(rank) + (parents[rank] is not None))
        inner.append({parent for parent in parents if parent is not None})
    assert len(inner[0] & inner[1]) <= n % 2
    assert max(sent_parts) <= 2


def test_shape_of_the_double_tree():
    for n in range(1, 130):
        check_shape_of_the_double_tree(n)


def halving_bytes(n, length, rank):
    """Count what halving and doubling send, from the definition: blocks of chunks, each half as long as the last."""
    p = 1 << (n.bit_length() - 1)
    pairs = n - p
    chunks = chunk_bytes(length, n)
    if rank < 2 * pairs and rank % 2:
        return None
    owned = [chunks[2 * q] + chunks[2 * q + 1] if q < pairs else chunks[q + pairs] for q in range(p)]
    place = rank // 2 if rank < 2 * pairs else rank - pairs
    blocks = [[q for q in range(p) if q // size == place // size] for size in (2**j for j in range(p.bit_length() - 1))]
    theirs = [
        [q for q in range(p) if q // size == place // size ^ 1] for size in (2**j for j in range(p.bit_length() - 1))
    ]
    sizes = [sum(owned[q] for q in block) for block in theirs], [sum(owned[q] for q in block) for block in blocks]
    down, up = ((sum(part), sum(size > 0 for size in part)) for part in sizes)
    assert down[0] == sum(chunks) - owned[place]
    return down, up


@pytest.mark.soak_where(world_size=(2, 4))
@pytest.mark.parametrize("world_size", [*WORLD_SIZES, 8])
@pytest.mark.on_ranks
def test_halving_and_doubling(world_size):
    n = world_size
    pairs = n - (1 << (n.bit_length() - 1))

    def extra(size):
        return size, int(size > 0)

    def expected(length, rank, folded_sends, partner_sends, parts):
        counted = halving_bytes(n, length, rank)
        if counted is None:
            return extra(folded_sends)
        own = [counted[part] for part in parts] + ([extra(partner_sends)] if rank < 2 * pairs else [])
        return sum(size for size, _ in own), sum(messages for _, messages in own)

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
        steps = n.bit_length() - 1
        assert all_reduce(1600, 1) == (2 * (n - 1) * 1600 * BYTES // n, 2 * steps)


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

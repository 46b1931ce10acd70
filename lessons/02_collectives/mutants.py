"""Wrong versions of this lesson's functions, each with the fault that its check must name."""

# ruff: noqa: D103
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from distlab.comm.p2p import Receive, Send, exchange
from distlab.grading import Mutant

from distlab_lesson_02 import wrong_rings as rings  # isort: skip
from distlab_lesson_02 import wrong_sums as sums  # isort: skip

Group = dist.ProcessGroup | None


def relay_sends_its_own(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Sum over all ranks in place: every rank's tensor travels once around the ring, and each rank adds what passes.

    Shapes: any; returns tensor.
    Cost: n-1 steps; (n-1) S bytes sent per rank.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    outgoing, incoming = tensor.clone(), torch.zeros_like(tensor)
    for _ in range(n - 1):
        exchange(Receive(incoming, (rank - 1) % n), Send(outgoing, (rank + 1) % n), group=group)
        tensor += incoming
    return tensor


def relay_swaps_before_adding(tensor: torch.Tensor, group: Group = None) -> torch.Tensor:
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    outgoing, incoming = tensor.clone(), torch.zeros_like(tensor)
    for _ in range(n - 1):
        exchange(Receive(incoming, (rank - 1) % n), Send(outgoing, (rank + 1) % n), group=group)
        outgoing, incoming = incoming, outgoing
        tensor += incoming
    return tensor


def relay_sends_the_sum(tensor: torch.Tensor, group: Group = None) -> torch.Tensor:
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    incoming = torch.zeros_like(tensor)
    for _ in range(n - 1):
        exchange(Receive(incoming, (rank - 1) % n), Send(tensor, (rank + 1) % n), group=group)
        tensor += incoming
    return tensor


def relay_ignores_the_group(tensor: torch.Tensor, group: Group = None) -> torch.Tensor:
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    outgoing, incoming = tensor.clone(), torch.zeros_like(tensor)
    for _ in range(n - 1):
        exchange(Receive(incoming, (rank - 1) % n), Send(outgoing, (rank + 1) % n))
        tensor += incoming
        outgoing, incoming = incoming, outgoing
    return tensor


def _rows(exercise: str, *rows: tuple[Callable[..., Any], str, str, str, int, str]) -> tuple[Mutant, ...]:
    """Make an exercise's wrong versions from (function, name, fault, phrase, world size, source)."""
    return tuple(
        Mutant.written(exercise, name, fn, fault, says, world, source) for fn, name, fault, says, world, source in rows
    )


MUTANTS = (
    *_rows(
        "02.ring_reduce_scatter",
        (rings.scatter_whole_tensors, "whole tensors travel", "too many bytes", "288 bytes", 4, "bug museum 1"),
        (rings.scatter_one_chunk_late, "starts one chunk late", "wrong chunk finished", "chunk 1 is", 3, "common slip"),
        (rings.scatter_copies, "copies instead of adding", "own part overwritten", "rank 0's own", 2, "bug museum 2"),
        (rings.scatter_adds_twice, "one step too many", "too many messages", "2 steps", 3, "common slip"),
        (rings.scatter_forgets_the_tail, "L // n elements a chunk", "wrong length", "7 elements", 2, "bug museum 8"),
        (rings.scatter_passes_on_what_came, "passes on what came", "part missing", "lacks rank", 3, "bug museum 2"),
        (rings.scatter_sends_first, "send, then receive", "deadlock", "one exchange", 2, "bug museum 3"),
        (rings.scatter_straight_to_the_owner, "no neighbours", "not a ring", "also sends to rank 2", 3, "common slip"),
        (rings.scatter_on_a_copy, "works on a copy", "not in place", "not in the tensor", 2, "common slip"),
        (rings.scatter_by_torch, "calls all_reduce", "torch's own collective", "all_reduce", 2, "common shortcut"),
    ),
    *_rows(
        "02.ring_all_gather",
        (rings.gather_one_chunk_early, "another rank's chunk first", "own chunk lost", "overwritten", 3, "common slip"),
        (rings.gather_adds, "adds instead of copying", "added", "copy them", 2, "common slip"),
        (rings.gather_stops_early, "n-2 steps", "chunk never received", "never received", 3, "common slip"),
        (rings.gather_whole_tensors, "whole tensors travel", "too many bytes", "288 bytes", 4, "bug museum 1"),
        (rings.gather_straight_from_the_owner, "no neighbours", "not a ring", "also sends to rank 2", 3, "common slip"),
        (rings.gather_returns_its_chunk, "returns its chunk", "wrong length", "the whole tensor", 2, "common slip"),
    ),
    *_rows(
        "02.repair",
        (relay_sends_its_own, "never passes on", "part missing", "has rank 2's part 2 times", 3, "bug museum 2"),
        (
            relay_swaps_before_adding,
            "adds the wrong buffer",
            "part missing",
            "rank 0's part 2 times",
            2,
            "bug museum 2",
        ),
        (relay_sends_the_sum, "passes on sums", "counted twice", "times", 3, "common slip"),
        (relay_ignores_the_group, "ignores the group", "group ignored", "group=group", 3, "bug museum 7"),
    ),
    *_rows(
        "02.tree_broadcast",
        (rings.broadcast_by_the_root_alone, "the root alone", "root sends to everybody", "sent 3", 4, "common slip"),
        (rings.broadcast_along_a_chain, "a chain", "too many steps", "3 steps", 4, "common slip"),
        (rings.broadcast_from_rank_zero, "always from rank 0", "wrong root", "root 1", 2, "bug museum 7"),
        (rings.broadcast_to_powers_of_two, "powers of two only", "not reached", "rank 2 of 3", 3, "common slip"),
        (rings.broadcast_to_global_ranks, "group ranks as global", "group ignored", "group", 3, "bug museum 7"),
    ),
    *_rows(
        "02.halving_doubling",
        (sums.doubling_of_whole_tensors, "whole tensors", "too many bytes", "192 bytes", 4, "bug museum 1"),
        (sums.halving_never_doubles, "never doubles", "never doubled", "ever larger", 2, "common slip"),
        (sums.halving_keeps_the_sent_half, "both keep one half", "wrong place", "another place", 2, "bug museum 2"),
        (sums.halving_rounds_down, "halves rounded down", "part missing", "element 6", 2, "bug museum 8"),
        (
            sums.halving_walks_forward,
            "doubles in halving's order",
            "doubled in another order",
            "reverse order",
            4,
            "bug museum 8",
        ),
    ),
    *_rows(
        "02.hierarchical",
        (
            sums.two_whole_all_reduces,
            "two whole all-reduces",
            "too many bytes between machines",
            "1/2",
            4,
            "guide code",
        ),
        (sums.levels_swapped, "levels swapped", "groups swapped", "48 bytes inside", 4, "bug museum 7"),
        (sums.levels_never_cross, "never crosses", "machines apart", "its own machine", 4, "bug museum 5"),
        (sums.levels_never_gather, "never gathers", "never gathered", "gather the chunks", 4, "common slip"),
        (
            sums.levels_cross_with_everything,
            "gathers too early",
            "too many bytes between machines",
            "1/2",
            4,
            "guide code",
        ),
    ),
    *_rows(
        "02.times",
        (sums.times_of_one_way, "one way only", "half of it", "come back", 1, "common slip"),
        (sums.times_with_levels_cut_off, "floor of log2", "levels not rounded up", "take a third", 1, "common slip"),
        (sums.times_that_multiply, "bytes times bandwidth", "bytes times bandwidth", "so divide", 1, "common slip"),
        (sums.times_in_bits, "bits for bytes", "bits for bytes", "multiply by 8", 1, "common slip"),
        (sums.times_of_whole_rings, "whole tensors in the ring", "bytes", "instead of 1.875", 1, "bug museum 1"),
        (
            sums.times_with_ring_latencies,
            "a ring's latencies for the tree",
            "latencies",
            "30 latencies",
            1,
            "common slip",
        ),
    ),
)

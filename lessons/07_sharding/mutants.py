"""Wrong versions of lesson 7's functions, most of them seen in public code, and the fault that a check must name."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from distlab_lesson_07 import wrong_steps as steps
from distlab_lesson_07 import wrong_units as units
from torch import Tensor

from distlab.grading import Mutant
from distlab.sharding import gather_into


def full_state_on_rank_0(shards: dict[str, Tensor], shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    """Let only the rank that saves put the state together."""
    state = {}
    if dist.get_rank() == 0:
        for name, shard in shards.items():
            row = torch.empty(shard.numel() * dist.get_world_size(), dtype=shard.dtype)
            gather_into(row, shard)
            state[name] = row[: shapes[name].numel()].view(shapes[name]).clone()
    return state


def _rows(exercise: str, *rows: tuple[str, Callable[..., object], str, str, int, str]) -> tuple[Mutant, ...]:
    """Make mutants of (what is wrong, function, fault, words, world, where it was seen)."""
    return tuple(Mutant.written(exercise, *row) for row in rows)


MUSEUM = "bug museum {}".format
SLIP = "common slip"

MUTANTS = (
    *_rows(
        "07.pieces",
        ("rounded down", steps.pieces_rounded_down, "elements lost", "nobody would update it", 1, SLIP),
        ("places in the row", steps.pieces_in_the_row, "counted in the row", "begins at its own 0", 1, SLIP),
        ("whole tensors", steps.pieces_of_whole_tensors, "unequal shards", "cut through tensors", 1, SLIP),
        ("empty pieces", steps.pieces_with_empty, "empty piece", "leave it out", 1, SLIP),
        ("padding is the last's", steps.pieces_with_padding, "past the end", "belongs to no tensor", 1, SLIP),
    ),
    *_rows(
        "07.step",
        ("all-reduce", steps.step_with_all_reduce, "all-reduce", "the half that you need", 4, SLIP),
        ("updates everything", steps.step_on_everything, "whole row updated", "every rank holds the same", 2, SLIP),
        ("no gather", steps.step_without_gather, "not gathered", "replicas drift apart", 2, MUSEUM(66)),
        ("sum", steps.step_with_sum, "sum not mean", "divide by world_size (3)", 3, MUSEUM(9)),
        ("own gradient", steps.step_on_own_gradient, "own gradient", "nothing of the others", 2, MUSEUM(66)),
        ("a copy", steps.step_on_a_copy, "nothing written", "not a copy", 1, SLIP),
        ("another's shard", steps.step_on_the_last_shard, "wrong shard", "the shard of rank", 2, SLIP),
    ),
    *_rows(
        "07.forward",
        ("never let go", units.forward_keeping, "never let go", "that of the whole model", 2, SLIP),
        ("let go too late", units.forward_rebinding, "two at a time", "del it after compute", 1, SLIP),
        ("shard alone", units.forward_of_shards, "not gathered", "it gathered nothing", 2, SLIP),
        ("all-reduce of zeros", units.forward_by_all_reduce, "all-reduce", "moves zeros", 2, MUSEUM(64)),
        ("first input", units.forward_on_first_input, "input not passed on", "x = compute(...)", 1, SLIP),
        ("gathered twice", units.forward_twice_gathered, "too many bytes", "more than once", 3, MUSEUM(1)),
    ),
    *_rows(
        "07.ahead",
        ("not ahead", units.ahead_not, "not ahead", "only after unit 0 has computed", 2, MUSEUM(25)),
        ("all at once", units.ahead_all, "all at once", "start only the next one", 2, SLIP),
        ("waits at once", units.ahead_waiting, "waits at once", "when its turn has come", 2, MUSEUM(25)),
        ("does not wait", units.ahead_unwaited, "read too early", "was the row read before", 2, MUSEUM(2)),
        ("two ahead", units.ahead_by_two, "three at a time", "the next one only", 2, SLIP),
        ("never let go", units.ahead_keeping, "never let go", "that of the whole model", 2, SLIP),
    ),
    *_rows(
        "07.backward",
        ("sum", units.backward_sum, "sum not mean", "divide by world_size (4)", 4, MUSEUM(9)),
        ("same gradient", units.backward_same_gradient, "gradient not passed on", "the one before", 1, SLIP),
        ("reduced at the end", units.backward_keeping, "never let go", "kept until the end", 4, SLIP),
        ("all-reduce", units.backward_all_reduced, "all-reduce", "what only one needs", 2, SLIP),
        ("whole gradients", units.backward_whole, "whole gradient", "its own part of the sum", 2, SLIP),
        ("turned round", units.backward_turned, "wrong order", "not of backward", 2, SLIP),
        ("own samples", units.backward_alone, "not communicated", "this rank's samples alone", 2, MUSEUM(66)),
    ),
    *_rows(
        "07.clip",
        ("own shards", steps.clip_own, "own shards only", "norm of the own shards only: rank 0", 2, MUSEUM(30)),
        ("n times", steps.clip_replicated_n_times, "replicated counted n times", "add their squares", 3, MUSEUM(31)),
        ("sum of norms", steps.clip_sum_of_norms, "norms added", "lengths do not add", 2, MUSEUM(30)),
        ("mean of squares", steps.clip_mean_square, "averaged", "hold different parts", 2, MUSEUM(30)),
        ("stretches", steps.clip_and_stretch, "scaled up", "clamp the factor at 1", 1, SLIP),
        ("a part", steps.clip_shards_only, "not scaled", "replicated ones alike", 1, MUSEUM(31)),
        ("gathers", steps.clip_gathered, "gradients gathered", "for the sake of one number", 2, SLIP),
    ),
    *_rows(
        "07.repair",
        ("only rank 0", full_state_on_rank_0, "not on every rank", "inside it", 2, MUSEUM(41)),
        ("filled up", steps.state_padded, "filled up", "take the first", 2, SLIP),
        ("flat", steps.state_flat, "flat", "has lost the shape", 1, SLIP),
        ("on every rank", steps.state_everywhere, "whole on every rank", "8 copies of the whole model", 2, SLIP),
        ("own shards", steps.state_of_own, "own shard", "gather the others'", 2, MUSEUM(44)),
    ),
)

"""Wrong versions of lesson 3's functions, most of them seen in public code, and the fault that a check must name."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from distlab_lesson_03 import wrong_averages as starts
from distlab_lesson_03 import wrong_data as data
from distlab_lesson_03 import wrong_overlaps as hooks
from torch import nn

from distlab.grading import Mutant


def average_in_hooks_of_weights(module: nn.Module) -> None:
    """Average what the hook is handed."""

    def gradient_ready(gradient: torch.Tensor) -> None:
        gradient /= dist.get_world_size()
        dist.all_reduce(gradient)

    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(gradient_ready)


def _rows(exercise: str, *rows: tuple[str, Callable[..., object], str, str, int, int]) -> tuple[Mutant, ...]:
    """Make mutants of (what is wrong, function, fault, words, world, number in the bug museum)."""
    return tuple(Mutant(exercise, *row[:-1], f"bug museum {row[-1]}") for row in rows)


MUTANTS = (
    *_rows(
        "03.broadcast",
        (
            "buffers forgotten",
            starts.broadcast_parameters_only,
            "buffers forgotten",
            "buffers still are its own",
            2,
            11,
        ),
        ("frozen forgotten", starts.broadcast_trained_only, "frozen forgotten", "frozen parameters still are", 3, 11),
        ("fills copies", starts.broadcast_copies, "not broadcast", "nothing of rank 0 reached it", 2, 11),
        ("averages instead", starts.broadcast_by_mean, "rank 0 changed", "mean over ranks: nobody's start", 2, 10),
        ("only rank 0 calls", starts.broadcast_on_rank_0_only, "deadlock", "the receivers too", 2, 5),
        ("each its own root", starts.broadcast_from_everyone, "different calls", "the same root, src=0", 2, 7),
    ),
    *_rows(
        "03.average",
        ("sum", starts.average_as_sum, "sum not mean", "4x too large: it is the sum over ranks", 4, 9),
        ("skips None", starts.average_skips_missing, "missing gradient", "count a missing gradient as zeros", 2, 15),
        ("weights", starts.average_weights, "averages parameters", "parameter.grad, not the parameter", 2, 10),
        ("divides twice", starts.average_divides_twice, "divided twice", "once too often", 3, 63),
        ("reduce to rank 0", starts.average_on_rank_0, "only some ranks", "all_reduce, not reduce", 2, 4),
        ("frozen too", starts.average_frozen_too, "frozen parameter", "skip requires_grad=False", 2, 17),
        ("averages copies", starts.average_copies, "not communicated", "nothing of the others reached it", 2, 63),
    ),
    *_rows(
        "03.flat",
        ("one a parameter", starts.flat_one_by_one, "too many calls", "where one all_reduce is asked", 2, 1),
        ("sum", starts.flat_as_sum, "sum not mean", "3x too large: it is the sum over ranks", 3, 9),
        ("never unpacked", starts.flat_never_unpacked, "never copied back", "copy the pieces", 2, 63),
        ("skips None", starts.flat_skips_missing, "missing gradient", "count a missing gradient as zeros", 2, 15),
        ("tied twice", starts.flat_tied_twice, "tied weight twice", "two layers share travels twice", 2, 17),
        ("gathers all", starts.flat_by_gathering, "too many bytes", "sent a rank where one all-reduce", 4, 1),
    ),
    *_rows(
        "03.buckets",
        ("from the front", hooks.buckets_from_the_front, "forward order", "start at the end", 1, 16),
        ("last bucket lost", hooks.buckets_without_the_last, "parameter lost", "is in no bucket", 1, 15),
        ("one too many", hooks.buckets_that_overflow, "closed too late", "held exactly 30 bytes", 1, 16),
        ("never above", hooks.buckets_never_above, "closed too early", "below its capacity of 60", 1, 50),
    ),
    *_rows(
        "03.overlap",
        ("all after backward", hooks.overlap_after_backward, "starts after backward", "nothing overlaps", 2, 25),
        ("waits in the hook", hooks.overlap_waits_in_hook, "waits in backward", "compute stands still", 2, 25),
        ("first full first", hooks.overlap_first_full_first, "order differs", "one order on all ranks", 2, 16),
        ("never set back", hooks.overlap_never_reset, "second step", "every count set back", 2, 50),
        ("unused hangs", hooks.overlap_forgets_unused, "unused parameter", "did not use layer 0", 2, 15),
        ("last of the loop", hooks.overlap_last_of_the_loop, "not started", "sees the loop's last bucket", 2, 16),
        ("one hook a bucket", hooks.overlap_one_hook_a_bucket, "starts too early", "count all gradients", 2, 16),
    ),
    *_rows(
        "03.accumulate",
        (
            "around backward only",
            data.accumulate_quiet_backward,
            "forward outside",
            "forward and backward inside",
            2,
            13,
        ),
        ("flag before backward", data.accumulate_late_flag, "last not averaged", "set it before forward", 2, 14),
        ("not divided", data.accumulate_undivided, "loss not divided", "3x too large: it is the sum of 3", 1, 21),
        ("counts from 0", data.accumulate_from_zero, "early update", "(index + 1) % 3 == 0", 2, 24),
        ("no no_sync", data.accumulate_loudly, "sends every time", "no_sync() was never entered", 2, 13),
        ("all inside no_sync", data.accumulate_silently, "never averaged", "must run outside no_sync()", 3, 14),
        ("never zeroed", data.accumulate_for_ever, "old gradients", "zero_grad() after step()", 2, 21),
        ("around DDP", data.accumulate_around, "around DDP", "call model(inputs)", 2, 12),
        ("zeroes too often", data.accumulate_last_only, "only the last", "the others were thrown away", 2, 24),
    ),
    *_rows(
        "03.sampler",
        ("epoch left out", data.samples_in_one_order, "same order", "the epoch must be part of the seed", 1, 19),
        ("position lost", data.samples_counted, "not repeatable", "a resumed run would see other samples", 1, 43),
        ("epoch restarts", data.samples_from_the_start, "position ignored", "the epoch's first samples twice", 1, 72),
        ("blocks of ranks", data.samples_by_block, "depends on ranks", "cut the batch among ranks", 1, 45),
        ("pads", data.samples_padded, "padded", "some are seen twice", 1, 45),
        ("drops the rest", data.samples_dropped, "samples lost", "the last batch is smaller", 1, 43),
        ("rank in the seed", data.samples_of_each_rank, "ranks overlap", "leave rank out of the seed", 1, 19),
    ),
    *_rows(
        "03.uneven",
        ("mean of means", data.weights_alike, "mean of means", "a token in a short one counts for more", 1, 22),
        ("own tokens", data.weights_of_own, "own tokens only", "where all ranks together have 19", 2, 23),
        ("no world_size", data.weights_that_sum_to_one, "divided twice", "the mean over ranks divides by it", 3, 63),
        ("a call each", data.weights_call_each, "a call each", "add up first, then call once", 2, 5),
        ("empty stays away", data.weights_skip_empty, "rank without data", "must all_reduce its 0", 3, 5),
        ("micro-batches counted", data.weights_by_count, "mean of means", "weight by tokens", 4, 23),
    ),
    *_rows(
        "03.repair",
        ("weights, not gradients", average_in_hooks_of_weights, "averages parameters", "itself has changed", 2, 10),
        ("divides later", hooks.hooks_divide_later, "sum not mean", "divide by world_size (2)", 2, 63),
        ("returns nothing", hooks.hooks_return_nothing, "not communicated", "nothing of the others", 2, 63),
        ("another module", hooks.hooks_on_a_copy, "never communicates", "of this module's own", 2, 12),
        ("never waits", hooks.hooks_never_wait, "not waited", "half summed", 2, 63),
    ),
)

"""Wrong versions of lesson 3's functions, most of them seen in public code, and the fault that a check must name."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from distlab_lesson_03 import wrong_averages as starts
from distlab_lesson_03 import wrong_overlaps as hooks
from torch import nn

from distlab.grading.exercise import Mutant


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
        "03.repair",
        ("weights, not gradients", average_in_hooks_of_weights, "averages parameters", "itself has changed", 2, 10),
        ("divides later", hooks.hooks_divide_later, "sum not mean", "divide by world_size (2)", 2, 63),
        ("returns nothing", hooks.hooks_return_nothing, "not communicated", "nothing of the others", 2, 63),
        ("another module", hooks.hooks_on_a_copy, "never communicates", "of this module's own", 2, 12),
        ("never waits", hooks.hooks_never_wait, "not waited", "half summed", 2, 63),
    ),
)

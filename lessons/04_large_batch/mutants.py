"""Wrong versions of lesson 4's functions, most of them seen in public code, and the fault that a check must name."""

from __future__ import annotations

from collections.abc import Callable

import torch
from distlab_lesson_04 import wrong_layers as layers
from distlab_lesson_04 import wrong_rates as rates

from distlab.grading import Mutant


def warm_up_from_what_it_finds(
    optimizer: torch.optim.Optimizer, peak_lr: float, *, num_warmup: int, first_step: int
) -> Callable[[], None]:
    """Take the optimizer's rate for the peak, and set it only while warming up."""
    step, base_lr = first_step, optimizer.param_groups[0]["lr"]

    def before_update() -> None:
        nonlocal step
        if step < num_warmup:
            for group in optimizer.param_groups:
                group["lr"] = base_lr * (step + 1) / num_warmup
        step += 1

    return before_update


def _rows(exercise: str, *rows: tuple[str, Callable[..., object], str, str, int, str]) -> tuple[Mutant, ...]:
    """Make mutants of (what is wrong, function, fault, words, world, where it was seen)."""
    return tuple(Mutant.written(exercise, *row) for row in rows)


MUTANTS = (
    *_rows(
        "04.rate",
        ("not scaled", rates.rate_not_scaled, "not scaled", "multiply by batch / base_batch", 1, "common"),
        ("inverse", rates.rate_inverse, "scaled inversely", "the larger batch has the smaller rate", 1, "common"),
        ("square root", rates.rate_by_root, "square root", "square-root scaling; linear is asked", 1, "common"),
        ("from zero", rates.rate_from_zero, "warmup starts at zero", "one update late", 1, "common"),
        ("beyond the peak", rates.rate_beyond_the_peak, "above the peak", "beyond the full rate", 1, "common"),
        ("divides by zero", rates.rate_divides_by_zero, "divides by zero", "num_warmup 0 means no warmup", 1, "common"),
        ("no warmup", rates.rate_without_warmup, "no warmup", "the full rate from the start", 1, "common"),
        (
            "from the base rate",
            rates.rate_from_the_base,
            "warms up from the base rate",
            "a share of the peak",
            1,
            "Goyal et al.",
        ),
        ("jumps", rates.rate_that_jumps, "warms up to the base rate", "and then jumps", 1, "bug museum 68"),
    ),
    *_rows(
        "04.accumulate",
        ("sum", rates.accumulate_sum, "sum of micro-batches", "added, not averaged", 1, "bug museum 21"),
        ("equal weights", rates.accumulate_equally, "uneven micro-batches", "weight each by its samples", 1, "common"),
        ("only the last", rates.accumulate_last, "only the last", "sets gradients back", 1, "common"),
        ("alone", rates.accumulate_alone, "not communicated", "nothing of the others", 2, "common"),
        ("sum over ranks", rates.accumulate_rank_sum, "sum not mean", "3x too large", 3, "bug museum 9"),
        ("divided twice", rates.accumulate_divided_twice, "divided twice", "2x too small", 2, "common"),
        (
            "sends each",
            rates.accumulate_averages_again,
            "sends every micro-batch",
            "sends after every",
            2,
            "bug museum 22",
        ),
        ("sums again", rates.accumulate_sums_again, "sums again", "summed again", 2, "bug museum 22"),
        ("at once", rates.accumulate_at_once, "one large batch", "memory that holds one", 1, "common"),
    ),
    *_rows(
        "04.lars",
        (
            "decay left out",
            layers.lars_without_decay_in_the_ratio,
            "decay not in the ratio",
            "its denominator is |gradient| + decay",
            1,
            "bug museum 67",
        ),
        ("one length", layers.lars_norm_of_the_sum, "norm of the sum", "two lengths are added", 1, "common"),
        ("biases too", layers.lars_on_everything, "vectors adapted", "left out of the ratio", 1, "bug museum 67"),
        ("stuck at zero", layers.lars_stuck_at_zero, "stuck at zero", "can never leave", 1, "bug museum 55"),
        ("rate outside", layers.lars_with_the_rate_outside, "rate outside the buffer", "after the rate fell", 1, "SGD"),
        ("upside down", layers.lars_upside_down, "upside down", "|weight| goes on top", 1, "common"),
        ("decays biases", layers.lars_decays_biases, "vectors decayed", "decay pulls at a bias", 1, "bug museum 55"),
        ("in place", layers.lars_in_place, "changed argument", "the argument buffer was changed", 1, "common"),
    ),
    *_rows(
        "04.lamb",
        ("not corrected", layers.lamb_not_corrected, "not corrected", "divide by 1 - 0.9^step", 1, "bug museum 53"),
        (
            "corrected too late",
            layers.lamb_ratio_before_correction,
            "ratio before correction",
            "correct first",
            1,
            "bug museum 53",
        ),
        ("returns corrected", layers.lamb_returns_corrected, "returns corrected", "corrected again", 1, "common"),
        ("decay outside", layers.lamb_decay_outside, "decay outside the ratio", "after the ratio", 1, "AdamW"),
        ("clipped", layers.lamb_clipped, "weight's norm clipped", "clipped at 10", 1, "bug museum 54"),
        ("stuck at zero", layers.lamb_stuck_at_zero, "stuck at zero", "can never leave", 1, "bug museum 55"),
        ("divides by zero", layers.lamb_divides_by_zero, "nan", "0 / 0", 1, "bug museum 54"),
        ("of the gradient", layers.lamb_of_the_gradient, "ratio of the gradient", "it is the update's", 1, "LARS"),
    ),
    *_rows(
        "04.repair",
        ("from what it finds", warm_up_from_what_it_finds, "wrong base", "taken for the peak", 1, "bug museum 68"),
        ("again", rates.warm_up_again, "warms up again", "begin at first_step", 1, "bug museum 68"),
        ("does not count", rates.warm_up_that_does_not_count, "does not count", "count the updates", 1, "common"),
        ("one group", rates.warm_up_first_group, "one group only", "set every group", 1, "common"),
        ("from zero", rates.warm_up_from_zero, "starts at zero", "not nothing", 1, "common"),
        ("new runs only", rates.warm_up_only_new_runs, "stays where it was", "before every update", 1, "common"),
    ),
)

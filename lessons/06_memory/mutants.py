"""Wrong versions of lesson 6's functions, most of them seen in public code, and the fault that a check must name."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from distlab_lesson_06 import wrong_counts as counts
from distlab_lesson_06 import wrong_recomputes as recomputes
from distlab_lesson_06 import wrong_steps as steps
from torch import Tensor, nn

from distlab.grading import Mutant


def accumulate_then_backward(model: nn.Module, microbatches: list[tuple[Tensor, Tensor]]) -> float:
    """Add up the losses of all micro-batches, then go backward once."""
    num_tokens = sum(targets.numel() for _, targets in microbatches)
    mean = torch.zeros((), dtype=next(model.parameters()).dtype)
    for inputs, targets in microbatches:
        logits = model(inputs)
        loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum") / num_tokens
        mean = mean + loss
    mean.backward()
    return mean.item()


def _rows(exercise: str, *rows: tuple[str, Callable[..., object], str, str, int, str]) -> tuple[Mutant, ...]:
    """Make mutants of (what is wrong, function, fault, words, world, where it was seen)."""
    return tuple(Mutant.written(exercise, *row) for row in rows)


MUSEUM = "bug museum {}".format
SLIP = "common slip"
CLAIM = "popular claim"

MUTANTS = (
    *_rows(
        "06.states",
        ("inference", counts.states_of_inference, "kinds", "training holds", 1, CLAIM),
        ("copy of float32", counts.states_with_two_copies, "counted twice", "need no second copy", 1, SLIP),
        ("no float32 copy", counts.states_without_master, "copy forgotten", "lose small updates", 1, CLAIM),
        ("one type for all", counts.states_one_type, "type of gradients", "a type of their own", 1, SLIP),
        ("16-bit moments", counts.states_half_moments, "16-bit moments", "whatever the parameters are", 1, CLAIM),
        ("all split at stage 1", counts.states_all_sharded, "sharded too early", "stage 3 is the first", 1, CLAIM),
        ("copy not split", counts.states_master_whole, "not sharded", "splits master weights", 1, SLIP),
        ("rounded down", counts.states_rounded_down, "rounded down", "belong to nobody", 1, SLIP),
        ("split over replicas", counts.states_over_all, "replicas ignored", "a full set of shards", 1, SLIP),
    ),
    *_rows(
        "06.activations",
        (
            "34 under recompute",
            counts.activations_34,
            "recompute keeps too much",
            "input alone",
            1,
            "public calculator",
        ),
        (
            "sequence parallel assumed",
            counts.activations_always_parallel,
            "sequence parallel assumed",
            "which is off here",
            1,
            "Megatron-LM's estimator",
        ),
        ("no scores", counts.activations_without_scores, "scores forgotten", "5 a s / h", 1, SLIP),
        ("scores of all heads", counts.activations_whole_scores, "scores whole", "a share of the heads", 1, SLIP),
        ("elements", counts.activations_in_elements, "elements", "has 2 bytes", 1, SLIP),
        ("selective keeps", counts.activations_selective_keeps, "scores kept", "drops the scores", 1, SLIP),
        ("input split", counts.activations_all_split, "input split", "each hold the whole input", 1, SLIP),
    ),
    *_rows(
        "06.recompute",
        ("keeps all", recomputes.recompute_nothing, "not recomputed", "runs once", 1, SLIP),
        ("recomputes and keeps", recomputes.recompute_and_keep, "keeps them too", "still held", 1, SLIP),
        ("other dropout", recomputes.recompute_other_dropout, "another dropout", "get_rng_state", 1, MUSEUM(39)),
        ("moves the generator", recomputes.recompute_moves_generator, "generator moved", "fork_rng", 1, MUSEUM(39)),
        ("data needs no gradient", recomputes.recompute_not_anchored, "no gradients", "are no inputs", 1, MUSEUM(29)),
        ("input's gradient lost", recomputes.recompute_stops, "input without gradient", "again.grad", 1, MUSEUM(32)),
        ("gradient of x alone", recomputes.recompute_x_alone, "parameters forgotten", "leaves those of", 1, SLIP),
        ("from ones", recomputes.recompute_from_ones, "gradient ignored", "the gradient that comes in", 1, SLIP),
    ),
    *_rows(
        "06.repair",
        ("one backward", accumulate_then_backward, "activations pile up", "backward after each", 1, MUSEUM(59)),
        ("one batch again", steps.accumulate_one_batch, "activations pile up", "alive together", 1, MUSEUM(59)),
        ("graphs kept", steps.accumulate_kept_graphs, "activations pile up", "alive together", 1, SLIP),
        ("sum of means", steps.accumulate_sum_of_means, "not divided", "the sum of 4 means", 1, MUSEUM(21)),
        ("mean of means", steps.accumulate_mean_of_means, "mean of means", "half as many tokens", 1, MUSEUM(22)),
        ("zeroed", steps.accumulate_after_zero, "only the last", "zero_grad only before", 1, SLIP),
    ),
    *_rows(
        "06.master",
        ("16-bit update", steps.master_ignored, "updated in 16 bits", "rounded away", 1, CLAIM),
        ("rebuilt", steps.master_rebuilt, "rebuilt from 16 bits", "keep the masters", 1, SLIP),
        ("not copied back", steps.master_not_copied, "not copied back", "never see an update", 1, SLIP),
        ("16-bit product", steps.master_rounded_product, "multiplied in 16 bits", "gradient.float()", 1, SLIP),
        ("float32 weights", steps.master_as_weight, "weights turned float32", "copy_", 1, SLIP),
        ("new tensors", steps.master_rebound, "nothing written", "gives the name", 1, SLIP),
        ("all in float32 first", steps.master_all_at_once, "all at once", "4 bytes a parameter again", 1, SLIP),
    ),
    *_rows(
        "06.scaler",
        ("alone", steps.scaler_alone, "decided alone", "share the decision", 2, MUSEUM(4)),
        ("in a branch", steps.scaler_in_a_branch, "call in a branch", "on every rank in every step", 2, MUSEUM(5)),
        ("all must overflow", steps.scaler_min, "one is enough", "not with MIN", 2, SLIP),
        ("NaN alone", steps.scaler_nan_only, "infinity missed", "isfinite", 1, SLIP),
        ("first gradient", steps.scaler_first_gradient, "overflow missed", "look at all gradients", 1, SLIP),
        ("not unscaled", steps.scaler_not_unscaled, "not unscaled", "before clipping", 1, SLIP),
        ("into the list", steps.scaler_into_list, "not unscaled", "in place", 1, SLIP),
        ("next scale", steps.scaler_next_scale, "next scale", "afterwards", 1, SLIP),
        ("not in a row", steps.scaler_streak_goes_on, "streak goes on", "in a row", 1, SLIP),
        ("never grows", steps.scaler_never_grows, "never grows", "stays low for ever", 1, SLIP),
        ("a call a gradient", steps.scaler_call_each, "too many calls", "one number a step", 2, SLIP),
    ),
)

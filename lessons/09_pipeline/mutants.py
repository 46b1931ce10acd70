"""Wrong versions of lesson 9's functions, most of them seen in public code, and the fault that a check must name."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from distlab_lesson_09 import wrong_orders as orders
from distlab_lesson_09 import wrong_split as split
from distlab_lesson_09 import wrong_steps as steps
from torch import Tensor, nn

from distlab.grading import Mutant


def forward_told_at_once(stage: nn.Module, inputs: list[Tensor], num_microbatches: int, like: Tensor) -> list[Tensor]:
    """Run micro-batches forward through all stages; tell every rank each output."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    outputs = []
    for i in range(num_microbatches):
        x = torch.empty_like(like)
        if rank == 0:
            x = inputs[i]
        else:
            dist.recv(x, rank - 1)
        y = stage(x).detach()
        if rank < last:
            dist.send(y, rank + 1)
        dist.broadcast(y, last)
        outputs.append(y)
    return outputs


def _rows(exercise: str, *rows: tuple[str, Callable[..., object], str, str, int, str]) -> tuple[Mutant, ...]:
    """Make mutants of (what is wrong, function, fault, words, world, where it was seen)."""
    return tuple(Mutant.written(exercise, *row) for row in rows)


MUSEUM = "bug museum {}".format
SLIP = "common slip"
SERIAL = "micro-batch 1 enters stage 0 only after micro-batch 0 left stage"

MUTANTS = (
    *_rows(
        "09.gpipe",
        ("one by one", orders.gpipe_serial, "stages never overlap", f"{SERIAL} 3", 1, MUSEUM(58)),
        ("stage 0 everywhere", orders.gpipe_stage_zero, "wrong stage", "rank 1 holds stage 1", 1, SLIP),
        ("from 1", orders.gpipe_from_one, "past the end", "micro-batches are 0 to 7", 1, SLIP),
        ("one backward", orders.gpipe_one_backward, "missing action", "never runs 0B1", 1, MUSEUM(59)),
        ("orders differ", orders.gpipe_mixed, "too long", "in one order", 1, MUSEUM(27)),
    ),
    *_rows(
        "09.bubble",
        ("over busy", orders.bubble_over_busy, "idle over busy", "divide by the sum of both", 1, SLIP),
        ("busy", orders.bubble_busy, "busy", "the part which is busy", 1, SLIP),
        ("one stage", orders.bubble_of_one_stage, "stages a rank", "a stage is smaller", 1, SLIP),
        ("old total", orders.bubble_of_old_total, "old total", "divide by the new total", 1, SLIP),
        ("p", orders.bubble_of_p, "off by one", "p - 1 hand-overs", 1, SLIP),
    ),
    *_rows(
        "09.one_f_one_b",
        ("GPipe", orders.alternate_all_first, "peak in flight", "8 on rank 0 where 1F1B needs 4", 1, SLIP),
        ("same warm-up", orders.alternate_same_warm_up, "peak in flight", "4 on rank 1 where 1F1B needs 3", 1, SLIP),
        ("no warm-up", orders.alternate_no_warm_up, "stages never overlap", f"{SERIAL} 3", 1, MUSEUM(25)),
        ("short warm-up", orders.alternate_short_warm_up, "too long", "- 1 - r forward passes", 1, SLIP),
        ("last rank turned", orders.alternate_turned, "deadlock", "nobody can go on", 1, MUSEUM(27)),
        ("runs past the end", orders.alternate_past_the_end, "past the end", "micro-batches are 0 to 7", 1, SLIP),
        ("newest first", orders.alternate_newest_first, "newest first", "comes back first", 1, MUSEUM(27)),
        ("no minimum", orders.alternate_without_minimum, "past the end", "2 micro-batches: rank 0 has 0F2", 1, SLIP),
        ("no end", orders.alternate_without_end, "missing action", "never runs 0B5", 1, SLIP),
    ),
    *_rows(
        "09.run_rank",
        ("unscaled", steps.runner(steps.Unscaled), "loss not scaled", "must be divided by 4", 2, MUSEUM(26)),
        ("no grad", steps.runner(steps.NoGrad), "no gradient", "does not require grad", 2, MUSEUM(29)),
        ("no grad, zeros", steps.runner(steps.ZeroGrad), "no gradient", "no gradient reached stage 2", 4, MUSEUM(29)),
        (
            "last in first out",
            steps.runner(steps.Stack),
            "micro-batches mixed up",
            "through micro-batch 3",
            2,
            MUSEUM(27),
        ),
        ("next target", steps.runner(steps.NextTarget), "wrong target", "output met micro-batch 1's", 1, MUSEUM(27)),
        ("blocking", steps.runner(steps.Blocking), "blocking sends", "dist.isend", 2, MUSEUM(3)),
        ("backward last", steps.runner(steps.AtTheEnd), "one backward at the end", "where 1F1B needs 3", 3, MUSEUM(59)),
        ("own order", steps.runner(steps.OwnOrder), "order", "its actions are F0, F1, F2, F3", 1, SLIP),
        ("one buffer", steps.runner(steps.OneBuffer), "one buffer", "a tensor of its own", 2, MUSEUM(27)),
        ("loss everywhere", steps.runner(steps.LossEverywhere), "returned", "the others return None", 2, SLIP),
        ("one by one", steps.runner(steps.OneByOne), "stages never overlap", f"{SERIAL} 3", 4, MUSEUM(25)),
        ("twice the bytes", steps.runner(steps.ToEverybody), "too many bytes", "activations to the next", 2, SLIP),
    ),
    *_rows(
        "09.split",
        ("now", split.split_now, "nothing deferred", "to fill a bubble with", 1, SLIP),
        ("one now", split.split_one_now, "too much now", "4 products are made before", 1, SLIP),
        ("loop variable", split.split_loop_variable, "same for all", "the loop's last values", 1, SLIP),
        ("before tanh", split.split_before_tanh, "before tanh", "went through tanh; keep it after", 1, SLIP),
        ("twice", split.split_twice, "chain twice", "3 products now and 6 later", 1, SLIP),
        ("reversed", split.split_reversed, "reversed", "layer 0's first", 1, SLIP),
        ("no tanh", split.split_without_tanh, "no tanh", "leaves tanh out", 1, SLIP),
        ("last gradient", split.split_last_grad, "gradient kept too late", "its own place in the chain", 1, SLIP),
    ),
    *_rows(
        "09.zero_bubble",
        ("W at once", orders.split_at_once, "W at once", "takes 30 units where 27 are enough", 1, SLIP),
        ("W last", orders.split_all_last, "peak in flight", "8 on rank 0 where ZB-H1 needs 4", 1, SLIP),
        ("turned", orders.split_turned, "peak in flight", "7 on rank 0 where ZB-H1 needs 4", 1, SLIP),
        ("not split", orders.split_not, "not split", "write it as I and W", 1, SLIP),
        ("W first", orders.split_w_first, "too early", "0W0 before 0I0", 1, SLIP),
        ("W lost", orders.split_without_w, "missing action", "never runs 1W7", 1, SLIP),
    ),
    *_rows(
        "09.repair",
        ("told at once", forward_told_at_once, "stages never overlap", f"{SERIAL} 1", 2, MUSEUM(25)),
        ("barrier", steps.forward_with_barrier, "stages never overlap", f"{SERIAL} 2", 3, MUSEUM(25)),
        ("sent at the end", steps.forward_all_then_send, "sent at the end", "idles until then", 2, MUSEUM(59)),
        ("sends left alone", steps.forward_left_alone, "sends left alone", "never waits for 4 of its 4", 2, SLIP),
        ("one batch", steps.forward_in_one, "forward passes", "ran its stage 1 times for 4", 2, MUSEUM(58)),
        ("own output", steps.forward_of_own, "own output", "broadcast it from rank 2", 3, MUSEUM(28)),
    ),
)

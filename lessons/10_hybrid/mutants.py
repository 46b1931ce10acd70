"""Wrong versions of lesson 10's functions, most of them seen in public code, and the fault that a check must name."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from distlab_lesson_10 import wrong_mesh as mesh
from distlab_lesson_10 import wrong_steps as steps
from torch import Tensor

from distlab.grading import Mutant


def step_by_rank(
    first: Tensor, second: Tensor, x: Tensor, target: Tensor, groups: dict[str, dist.ProcessGroup]
) -> tuple[Tensor, Tensor, Tensor]:
    """Take samples by rank, as in data parallel."""
    data, tensor = groups["data"], groups["tensor"]
    part, num_parts = dist.get_rank(), dist.get_world_size()
    x, target = x.chunk(num_parts)[part], target.chunk(num_parts)[part]
    hidden = torch.tanh(x @ first)
    output = hidden @ second
    dist.all_reduce(output, group=tensor)
    difference = output - target
    loss, grad = difference.square().mean(), 2 * difference / difference.numel()
    grad_second = hidden.T @ grad
    grad_first = x.T @ (grad @ second.T * (1 - hidden.square()))
    for value in (loss, grad_first, grad_second):
        dist.all_reduce(value, group=data)
        value /= dist.get_world_size(data)
    return loss, grad_first, grad_second


def _rows(exercise: str, *rows: tuple[str, Callable[..., object], str, str, int, str]) -> tuple[Mutant, ...]:
    """Make mutants of (what is wrong, function, fault, words, world, where it was seen)."""
    return tuple(Mutant.written(exercise, *row) for row in rows)


MUSEUM = "bug museum {}".format
SLIP = "common slip"

MUTANTS = (
    *_rows(
        "10.coordinates",
        ("first fastest", mesh.place_first_fastest, "first axis fastest", "the last axis varies fastest", 1, SLIP),
        ("no division", mesh.place_undivided, "not divided", "That is rank % 2", 1, SLIP),
        ("own size", mesh.place_by_own_size, "own size", "the axis' own size", 1, SLIP),
        ("no rest", mesh.place_without_rest, "outside", "It must lie in 0..1", 1, SLIP),
        ("from 1", mesh.place_from_one, "from one", "counted from 0", 1, SLIP),
    ),
    *_rows(
        "10.groups",
        ("neighbours", mesh.groups_of_neighbours, "neighbours", "[0, 1] mixes places 0, 1 on tensor", 1, MUSEUM(7)),
        ("far apart", mesh.groups_far_apart, "mixed", "[0, 4] mixes places 0, 1 on pipeline", 1, SLIP),
        ("one place", mesh.groups_of_one_place, "same place", "all stand at the same place on pipeline", 1, SLIP),
        ("rank 0's", mesh.groups_with_rank_0, "one group", "waits for ever", 1, MUSEUM(6)),
        ("first block", mesh.groups_of_the_first_block, "rank missing", "rank 4 is in none", 1, MUSEUM(6)),
    ),
    *_rows(
        "10.my_batch",
        ("by rank", mesh.part_by_rank, "divided by all ranks", "by all 8 ranks", 1, SLIP),
        ("rank modulo data", mesh.part_by_rank_in_data, "tensor ranks read different data", "of different", 1, SLIP),
        ("same seed", mesh.part_of_first, "data ranks read the same", "adds nothing to the gradient", 1, MUSEUM(19)),
        ("no expert", mesh.part_without_expert, "expert forgotten", "as those of data do", 1, SLIP),
        ("no context", mesh.part_without_context, "context forgotten", "cuts the positions", 1, SLIP),
        ("one micro-batch", mesh.part_in_one, "micro-batches", "has 1 micro-batches, expected 2", 1, MUSEUM(58)),
        ("scattered", mesh.part_scattered, "positions scattered", "one piece each", 1, SLIP),
        ("data + expert", mesh.part_overlapping, "positions lost", "without gaps", 1, SLIP),
    ),
    *_rows(
        "10.gradient_axes",
        ("world size", mesh.axes_over_world, "divided by world size", "4 times too small", 1, MUSEUM(9)),
        ("sum", mesh.axes_sum, "sum not mean", "each rank's loss is a mean", 1, MUSEUM(9)),
        ("divided by data", mesh.axes_over_data, "divided by data alone", "expert and context", 1, SLIP),
        ("divided by summed", mesh.axes_over_summed, "divided by the sum's ranks", "whatever the param", 1, SLIP),
        ("no context", mesh.axes_data_only, "context forgotten", "copies drift apart", 1, SLIP),
        ("all axes", mesh.axes_all, "stages mixed", "hold different layers", 1, SLIP),
        (
            "norms forgotten",
            mesh.axes_norm_forgotten,
            "norm not summed",
            "its own part of the positions",
            1,
            MUSEUM(35),
        ),
        ("data twice", mesh.axes_twice, "summed twice", "data is listed 2 times", 1, SLIP),
        ("norms always", mesh.axes_norm_always, "copies summed", "2 times too large", 1, SLIP),
        ("tied forgotten", mesh.axes_tied_forgotten, "tied not summed", "first and last stage", 1, MUSEUM(17)),
        ("experts averaged", mesh.axes_experts_mixed, "experts mixed", "different experts", 1, SLIP),
    ),
    *_rows(
        "10.global_norm",
        ("own part", steps.norm_of_own, "own part only", "of the parts on this rank", 2, MUSEUM(30)),
        ("own stage", steps.norm_of_stage, "own stage only", "every stage clips by another", 3, MUSEUM(30)),
        ("all copies", steps.norm_of_all_copies, "replicated counted t times", "tensor rank 3 times", 3, MUSEUM(31)),
        (
            "whole on tensor",
            steps.norm_with_copies_on_tensor,
            "replicated counted t times",
            "on every tensor rank 2 times",
            2,
            MUSEUM(31),
        ),
        ("replicas", steps.norm_with_replicas, "copies counted", "data is no axis", 4, MUSEUM(31)),
        ("float32", steps.norm_rounded, "rounded", "torch.float64", 1, SLIP),
        ("divided first", steps.norm_of_divided, "divided before the square", "divide their squares", 2, SLIP),
        ("norms added", steps.norm_of_norms, "norms added", "lengths do not add", 2, MUSEUM(30)),
        ("averaged", steps.norm_averaged, "averaged", "divided by all 2 ranks", 2, MUSEUM(30)),
        ("calls a gradient", steps.norm_by_tensor, "a call a tensor", "different numbers of them", 3, MUSEUM(5)),
        ("elements sent", steps.norm_gathered, "gradients sent", "one number is enough", 2, SLIP),
    ),
    *_rows(
        "10.place",
        ("as given", mesh.order_given, "tensor across nodes", "8.0 GB a rank", 1, SLIP),
        ("turned round", mesh.order_busiest_slowest, "turned round", "the other way round", 1, SLIP),
        ("busiest fastest", mesh.order_busiest_fastest, "room left", "is there an axis that still fits", 1, SLIP),
        ("greedy", mesh.order_by_greed, "others send more", "leaves no room in a node", 1, SLIP),
        ("per bit", mesh.order_by_bits, "per doubling", "but leaves room for 4 in a node", 1, SLIP),
        ("largest fastest", mesh.order_largest_fastest, "tensor across nodes", "next to each other", 1, SLIP),
        ("fits alone", mesh.order_fitting_first, "room left", "is there an axis that still fits", 1, SLIP),
    ),
    *_rows(
        "10.find_the_bug",
        ("by rank", step_by_rank, "tensor ranks read different data", "by the place on the data axis", 2, SLIP),
        ("world size", steps.stepper(divide=None), "divided by world size", "the size of the data axis", 2, MUSEUM(9)),
        ("all ranks", steps.stepper(gradients=None, divide=None), "slices summed", "must not be mixed", 2, SLIP),
        ("tensor group", steps.stepper(gradients="tensor", divide="tensor"), "slices summed", "data group", 2, SLIP),
        ("sum", steps.stepper(divide=""), "sum not mean", "not divided by their number", 2, MUSEUM(9)),
        ("own", steps.stepper(gradients="", divide=""), "gradients not averaged", "drift apart", 2, MUSEUM(66)),
        ("own columns", steps.stepper(outputs=""), "outputs not summed", "the tensor group", 2, MUSEUM(35)),
        ("wrong group", steps.stepper(outputs="data"), "outputs of other samples summed", "data group", 4, MUSEUM(7)),
        (
            "rank // tensor",
            steps.stepper(samples="rank // tensor"),
            "tensor ranks read different data",
            "by the place on",
            4,
            SLIP,
        ),
        ("rank % data", steps.stepper(samples="rank % data"), "tensor ranks read different data", "ask the", 4, SLIP),
        ("part of all", steps.stepper(samples="of all ranks"), "samples left out", "size of the data axis", 2, SLIP),
        ("whole batch", steps.stepper(samples="all"), "whole batch", "works on all 12 samples", 4, SLIP),
        ("place 0 alone", steps.step_on_place_0, "gradients not averaged", "drift apart", 4, MUSEUM(5)),
    ),
)

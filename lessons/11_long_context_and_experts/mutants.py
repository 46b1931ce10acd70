"""Wrong versions of lesson 11's functions, most of them seen in public code, and the fault that a check must name."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from distlab_lesson_11 import wrong_attention as attention
from distlab_lesson_11 import wrong_experts as experts
from distlab_lesson_11 import wrong_merges as merges
from distlab_lesson_11 import wrong_routes as routes
from torch import nn

from distlab.grading import Mutant


def synchronize_everything(shared: list[nn.Parameter], experts: list[nn.Parameter]) -> None:
    """Average all gradients over the ranks, as data parallelism does."""
    n = dist.get_world_size()
    for parameter in [*shared, *experts]:
        dist.all_reduce(parameter.grad)
        parameter.grad /= n


def _rows(exercise: str, *rows: tuple[str, Callable[..., object], str, str, int, str]) -> tuple[Mutant, ...]:
    """Make mutants of (what is wrong, function, fault, words, world, where it was seen)."""
    return tuple(Mutant.written(exercise, *row) for row in rows)


MUSEUM = "bug museum {}".format
SLIP = "common slip"
RING, ASK = attention.ring, experts.ask

MUTANTS = (
    *_rows(
        "11.merge",
        ("plain mean", merges.merge_plain_mean, "plain mean", "counts both parts alike", 1, SLIP),
        ("without max", merges.merge_without_max, "overflow", "subtract the larger log_sum first", 1, SLIP),
        ("logarithms as shares", merges.merge_by_logarithms, "logarithms as shares", "exp of them", 1, SLIP),
        ("logs added", merges.merge_adding_logs, "log_sum added", "multiplies the sums", 1, SLIP),
        ("larger log", merges.merge_larger, "larger log_sum", "the smaller counts too", 1, SLIP),
        ("swapped", merges.merge_swapped, "shares swapped", "the other's share", 1, SLIP),
        ("not divided", merges.merge_undivided, "shares not divided", "do not add up to 1", 1, SLIP),
        ("not rescaled", merges.merge_without_rescaling, "first mean not rescaled", "weight it had alone", 1, SLIP),
        ("max left out", merges.merge_keeping_max_out, "maximum not added back", "never added back", 1, SLIP),
        ("by ratio", merges.merge_by_ratio, "nothing visible", "counts alone", 1, SLIP),
        ("in place", merges.merge_in_place, "changed argument", "make new tensors", 1, MUSEUM(40)),
    ),
    *_rows(
        "11.zigzag",
        ("straight", merges.zigzag_straight, "uneven work", "straight pieces", 1, SLIP),
        ("stripes", merges.zigzag_striped, "stripes", "the mask cuts through every block", 1, SLIP),
        ("r and n + r", merges.zigzag_parallel, "uneven work", "not r and n + r", 1, SLIP),
        ("late first", merges.zigzag_late_first, "not ascending", "in the order", 1, SLIP),
        ("2n - r", merges.zigzag_overlapping, "positions lost", "is on no rank", 1, SLIP),
    ),
    *_rows(
        "11.ring",
        ("gathered", RING(attention.Gathered), "whole sequence gathered", "which is what did not fit", 2, SLIP),
        ("local positions", RING(attention.LocalPositions), "local positions", "of the whole sequence", 2, SLIP),
        ("strict mask", RING(attention.Strict), "own position hidden", "visible is >=, not >", 1, SLIP),
        ("no mask", RING(attention.NoMask), "no mask", "keys that come after them", 1, SLIP),
        ("plain mean", RING(attention.PlainMean), "plain mean", "counts every block alike", 2, SLIP),
        ("stale log_sum", RING(attention.StaleLogSum), "log_sum not kept", "keep the total", 3, SLIP),
        ("not rescaled", RING(attention.NotRescaled), "mean not rescaled", "shrink what was there", 2, SLIP),
        ("values stay", RING(attention.ValuesStay), "values stay behind", "a key and its value", 2, SLIP),
        ("keys stay", RING(attention.KeysStay), "keys stay behind", "a key and its value", 2, SLIP),
        ("mask transposed", RING(attention.MaskTransposed), "mask transposed", "queries down the rows", 2, SLIP),
        ("divided by D", RING(attention.DividedByD), "divided by D", "the root of D", 1, SLIP),
        ("without max", RING(attention.WithoutMax), "overflow", "exp of a score of hundreds", 1, SLIP),
        ("softmax", RING(attention.Softmax), "nothing visible", "all scores are -inf", 2, SLIP),
        ("blocking", RING(attention.Blocking), "blocking sends", "nobody comes to its recv", 2, MUSEUM(3)),
        ("one hop more", RING(attention.OneHopMore), "too many bytes", "brings home what everybody has", 2, SLIP),
        ("same again", RING(attention.SameAgain), "same keys again", "what has just arrived", 3, SLIP),
        ("other way", RING(attention.OtherWay), "wrong owner", "they are those of rank - k", 3, SLIP),
        ("alone", RING(attention.Alone), "own keys alone", "hand keys and values on", 2, SLIP),
    ),
    *_rows(
        "11.route",
        ("by token", routes.route_by_token, "by token", "takes the place of a later token's first", 1, SLIP),
        ("each choice", routes.route_each_choice, "capacity a choice", "all choices together", 1, SLIP),
        ("off by one", routes.route_off_by_one, "off by one", "one more than its capacity", 1, SLIP),
        ("unlimited", routes.route_unlimited, "capacity ignored", "its capacity is 3", 1, SLIP),
        ("silent", routes.route_silently, "drops uncounted", "nobody would hear", 1, SLIP),
        ("tokens", routes.route_counting_tokens, "tokens counted", "count choices", 1, SLIP),
        ("not normalised", routes.route_unnormalised, "not normalised", "divide by the sum", 1, SLIP),
        ("one normalised", routes.route_normalising_one, "one choice normalised", "leave the probability", 1, SLIP),
        ("softmax", routes.route_with_softmax, "softmax twice", "went through a softmax already", 1, SLIP),
        ("by probability", routes.route_by_probability, "by probability", "earlier token first", 1, SLIP),
        ("whole tokens", routes.route_whole_tokens, "whole token dropped", "its other choice stays", 1, SLIP),
        ("mixed up", routes.route_mixed_up, "orders mixed", "token by token", 1, SLIP),
        ("after drops", routes.route_after_drops, "weights after drops", "stay as they were", 1, SLIP),
        ("detached", routes.route_detached, "no gradient", "the router would learn nothing", 1, SLIP),
    ),
    *_rows(
        "11.ask",
        ("not put back", ASK(experts.NotPutBack), "not put back", "put each back where its token was", 3, SLIP),
        ("not sorted", ASK(experts.NotSorted), "not sorted", "sorted by expert", 2, SLIP),
        ("sorted twice", ASK(experts.SortedTwice), "sorted twice", "order.argsort()", 3, SLIP),
        ("no weights", ASK(experts.WithoutWeights), "weights forgotten", "not multiplied by weights", 1, SLIP),
        ("weighted before", ASK(experts.WeightedBefore), "weighted before", "multiply its answer", 1, SLIP),
        ("autograd cut", ASK(experts.AutogradCut), "autograd cut", "is not in the graph", 1, MUSEUM(32)),
        ("counts not swapped", ASK(experts.NotSwapped), "counts", "swap the two lists", 2, SLIP),
        ("stays away", ASK(experts.SkippedWhenEmpty), "rank stays away", "whose expert nobody asked", 3, SLIP),
        ("everywhere", ASK(experts.EverythingEverywhere), "too much work", "to its own expert", 2, SLIP),
        ("own expert", ASK(experts.OwnExpert), "own expert", "no token has travelled", 2, SLIP),
    ),
    *_rows(
        "11.balance",
        ("probabilities", experts.balance_of_probabilities, "probabilities twice", "really chosen", 1, SLIP),
        ("no E", experts.balance_without_experts, "not times E", "lacks the factor E", 1, SLIP),
        ("over tokens", experts.balance_over_tokens, "not over choices", "2 choices a token", 1, SLIP),
        ("first choices", experts.balance_of_first, "first choices alone", "as much work", 1, SLIP),
        ("softmax", experts.balance_with_softmax, "softmax twice", "a softmax already", 1, SLIP),
        ("chosen", experts.balance_of_chosen, "chosen alone", "also those that chose others", 1, SLIP),
        ("asked alone", experts.balance_of_asked, "unasked forgotten", "needs minlength", 1, SLIP),
        ("detached", experts.balance_detached, "no gradient", "the loss would change nothing", 1, SLIP),
    ),
    *_rows(
        "11.repair",
        ("averaged", synchronize_everything, "experts averaged", "which only share a name", 2, SLIP),
        ("not divided", experts.synchronize_undivided, "experts not divided", "divide by world_size", 2, SLIP),
        ("nothing sent", experts.synchronize_nothing, "not shared", "replicas drift apart", 2, SLIP),
        ("padded", experts.synchronize_padded, "too many bytes", "an all-reduce of what is shared", 2, MUSEUM(64)),
    ),
)

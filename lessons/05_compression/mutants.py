"""Wrong versions of lesson 5's functions, most of them seen in public code, and the fault that a check must name."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from distlab_lesson_05 import wrong_choices as choices
from distlab_lesson_05 import wrong_codes as codes
from torch import Tensor

from distlab.compression import pack_bits, unpack_bits
from distlab.grading import Mutant


def average_signs_in_bytes(gradient: Tensor) -> Tensor:
    """Calculate with unsigned bytes."""
    magnitude = gradient.abs().mean()
    payload = torch.cat([magnitude.view(1).view(torch.uint8), pack_bits((gradient >= 0).to(torch.uint8), 1)])
    payloads = [torch.empty_like(payload) for _ in range(dist.get_world_size())]
    dist.all_gather(payloads, payload)
    total = torch.zeros_like(gradient)
    for theirs in payloads:
        ones = unpack_bits(theirs[4:], 1, gradient.numel())
        signs = 2 * ones - 1
        total += theirs[:4].view(torch.float32) * signs
    return total / dist.get_world_size()


def _rows(exercise: str, *rows: tuple[str, Callable[..., object], str, str, int, str]) -> tuple[Mutant, ...]:
    """Make mutants of (what is wrong, function, fault, words, world, where it was seen)."""
    return tuple(Mutant.written(exercise, *row) for row in rows)


MUSEUM = "bug museum {}".format
SLIP = "common slip"

MUTANTS = (
    *_rows(
        "05.top_k",
        ("zeros travel", choices.top_k_with_zeros, "dense on the wire", "zeros cost as many", 2, MUSEUM(64)),
        ("all-reduce of values", choices.top_k_reduced, "indices differ", "different elements", 2, MUSEUM(48)),
        ("added once", choices.top_k_added_once, "overwritten", "adds a place only once", 2, MUSEUM(48)),
        ("largest, signed", choices.top_k_signed, "not by magnitude", "choose by magnitude", 1, SLIP),
        ("sum", choices.top_k_sum, "sum not mean", "divide by world_size (3)", 3, MUSEUM(9)),
        ("8-byte indices", choices.top_k_wide, "wide indices", "12 bytes a pair", 2, SLIP),
        ("top-k of the mean", choices.top_k_of_mean, "top-k of the mean", "has sent everything before", 2, MUSEUM(64)),
    ),
    *_rows(
        "05.random_k",
        ("seeded by rank", choices.random_k_by_rank, "choices differ", "not the rank", 2, MUSEUM(49)),
        ("always the same", choices.random_k_same_places, "same places", "seed with the step", 1, MUSEUM(49)),
        ("not scaled", choices.random_k_unscaled, "not scaled", "multiply by L / k", 1, SLIP),
        ("zeros travel", choices.random_k_masked, "dense on the wire", "zeros cost as many", 2, MUSEUM(64)),
        ("indices travel", choices.random_k_with_indices, "indices travel", "nobody needs indices", 2, SLIP),
        ("sum", choices.random_k_sum, "sum not mean", "divide by world_size (2)", 2, MUSEUM(9)),
        ("drawn twice", choices.random_k_repeated, "not k elements", "each place once", 1, SLIP),
    ),
    *_rows(
        "05.pack",
        ("highest bits first", codes.pack_highest_first, "order in the byte", "looks for it in the lowest", 1, SLIP),
        ("a byte each", codes.pack_a_byte_each, "not packed", "returned a byte a code", 1, MUSEUM(51)),
        ("tail lost", codes.pack_without_tail, "tail lost", "the last codes fill no whole byte", 1, SLIP),
        ("shifted by place", codes.pack_by_place, "codes overlap", "share bits", 1, SLIP),
        ("filled in front", codes.pack_padded_in_front, "padded in front", "fill up at the end", 1, SLIP),
        ("changes its argument", codes.pack_in_place, "changed argument", "work on a copy", 1, MUSEUM(40)),
    ),
    *_rows(
        "05.quantize",
        ("cut off", codes.quantize_cut_off, "rounded down", "cut off, not rounded", 1, MUSEUM(52)),
        ("step of zero", codes.quantize_zero_step, "step of zero", "0 / 0 is NaN", 1, MUSEUM(65)),
        ("signed bytes", codes.quantize_int8, "int8 overflow", "codes need uint8", 1, MUSEUM(52)),
        ("sign of the offset", codes.quantize_wrong_sign, "sign of the offset", "decoding adds it", 1, MUSEUM(52)),
        ("codes summed", codes.quantize_sums_codes, "codes summed", "decode each, then add", 2, MUSEUM(65)),
        (
            "own step for all",
            codes.quantize_own_step,
            "own step for all",
            "those that came with the codes",
            2,
            MUSEUM(65),
        ),
        ("not packed", codes.quantize_unpacked, "not packed", "a byte or more for each code", 2, MUSEUM(51)),
    ),
    *_rows(
        "05.repair",
        ("unsigned bytes", average_signs_in_bytes, "unsigned arithmetic", "2 * 0 - 1 in uint8 is 255", 1, MUSEUM(52)),
        ("0 for -1", codes.signs_of_bits, "zero for negative", "a bit of 0 means -1", 1, SLIP),
        (
            "own magnitude",
            codes.signs_own_magnitude,
            "own magnitude for all",
            "the one that came with them",
            2,
            MUSEUM(65),
        ),
        ("majority", codes.signs_majority, "majority", "asked is the mean", 3, SLIP),
        ("numbers travel", codes.signs_unpacked, "not packed", "a byte or more for each sign", 2, MUSEUM(64)),
        ("sum", codes.signs_sum, "sum not mean", "divide by world_size (2)", 2, MUSEUM(9)),
    ),
    *_rows(
        "05.feedback",
        ("never used", choices.memory_ignored, "memory never added", "is never sent", 1, MUSEUM(46)),
        ("another tensor", choices.memory_rebound, "never remembered", "memory.copy_", 1, SLIP),
        ("old rest lost", choices.memory_of_gradient, "older rest forgotten", "not gradient - sent", 1, SLIP),
        ("rest of the mean", choices.memory_of_mean, "rest of the mean", "correct for all", 2, MUSEUM(47)),
        ("keeps what it sent", choices.memory_of_all, "sent is kept too", "subtract it", 1, SLIP),
        ("wrong sign", choices.memory_negative, "wrong sign", "would be subtracted", 1, SLIP),
        ("piled up", choices.memory_piled_up, "piled up", "replace it", 1, SLIP),
    ),
    *_rows(
        "05.powersgd",
        ("never communicates", codes.low_rank_alone, "not communicated", "replicas drift apart", 2, MUSEUM(66)),
        ("one factor", codes.low_rank_first_factor_only, "second factor alone", "all_reduce q too", 2, MUSEUM(66)),
        ("both orthogonal", codes.low_rank_both_orthogonal, "both orthogonal", "lost the size", 1, MUSEUM(66)),
        ("not orthogonal", codes.low_rank_not_orthogonal, "not orthogonal", "no projection", 1, SLIP),
        ("orthogonal too early", codes.low_rank_too_early, "orthogonal too early", "first all_reduce p", 2, SLIP),
        ("cold start", codes.low_rank_cold, "no warm start", "return the new q", 1, SLIP),
        ("matrix travels", codes.low_rank_of_everything, "matrix travels", "the thin factors", 2, MUSEUM(64)),
    ),
)

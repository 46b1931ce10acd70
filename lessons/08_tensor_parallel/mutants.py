"""Wrong versions of lesson 8's functions, most of them seen in public code, and the fault that a check must name."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
import torch.nn.functional as F
from distlab_lesson_08 import wrong_layers as layers
from distlab_lesson_08 import wrong_splits as splits
from distlab_lesson_08 import wrong_state as state
from torch import Tensor

from distlab.grading import Mutant
from distlab.tensor_parallel import reduce_from_ranks


def embed(tokens: Tensor, weight: Tensor, vocab_size: int) -> Tensor:
    """Look tokens up in an embedding of which every rank holds the rows of some tokens."""
    width = vocab_size // dist.get_world_size()
    index = tokens - dist.get_rank() * width
    here = (index >= 0) & (index < width)
    x = F.embedding(index.where(here, 0), weight) * here.unsqueeze(-1)
    return reduce_from_ranks(x)


def _rows(exercise: str, *rows: tuple[str, Callable[..., object], str, str, int, str]) -> tuple[Mutant, ...]:
    """Make mutants of (what is wrong, function, fault, words, world, where it was seen)."""
    return tuple(Mutant.written(exercise, *row) for row in rows)


MUSEUM = "bug museum {}".format
SLIP = "common slip"

MUTANTS = (
    *_rows(
        "08.cut",
        ("turned", layers.cut_turned, "column and row swapped", "[output features, input features]", 1, SLIP),
        ("bias everywhere", layers.cut_with_every_bias, "bias on every rank", "counts 2 times", 1, MUSEUM(34)),
        ("bias in parts", layers.cut_with_bias_in_parts, "bias cut", "all 12 output features", 1, SLIP),
        ("bias shared", layers.cut_with_shared_bias, "bias divided", "learns 2 times as fast", 1, SLIP),
        ("views", layers.cut_as_views, "a view of the whole", "clone it", 1, SLIP),
        ("full layer", layers.cut_nothing, "whole layer", "taken the place of its part", 1, MUSEUM(38)),
    ),
    *_rows(
        "08.f_and_g",
        ("no f", layers.pair_without_f, "missing f", "all_reduce it in backward", 2, MUSEUM(35)),
        ("plain call", layers.pair_with_plain_call, "graph cut", "it has no history", 2, MUSEUM(32)),
        ("two sums", layers.pair_with_two_sums, "gradient t times", "3 times the gradient", 3, MUSEUM(33)),
        ("in place", layers.pair_in_place, "changed argument", "clone before you sum", 2, SLIP),
        ("swapped", layers.pair_swapped, "swapped", "return (f, g)", 2, SLIP),
        ("by gathering", layers.pair_by_gathering, "too many bytes", "one all-reduce in f's backward", 4, SLIP),
    ),
    *_rows(
        "08.mlp",
        ("bias inside", layers.mlp_bias_inside, "bias counted t times", "4 times", 4, MUSEUM(34)),
        ("bias on one", layers.mlp_bias_on_one, "bias on some ranks", "copies drift apart", 2, SLIP),
        ("no f", layers.mlp_without_f, "missing f", "differs from rank to rank", 2, MUSEUM(35)),
        ("no g", layers.mlp_without_g, "not summed", "different activations", 2, SLIP),
        ("features gathered", layers.mlp_gathering, "features gathered", "4 times as many as x has", 2, SLIP),
        ("plain all-gather", layers.mlp_with_all_gather, "graph cut", "no gradient reaches", 2, MUSEUM(32)),
        ("two sums", layers.mlp_two_sums, "gradient t times", "2 times what it should be", 2, MUSEUM(33)),
        ("no gelu", layers.mlp_no_gelu, "no gelu", "without GeLU", 1, SLIP),
    ),
    *_rows(
        "08.heads",
        ("one piece", splits.heads_in_one_piece, "cut as one piece", "with a worse loss", 1, MUSEUM(36)),
        ("all keys", splits.heads_with_all_keys, "keys not shared out", "like the queries", 1, SLIP),
        ("dealt out", splits.heads_dealt_out, "heads dealt out", "every 2. head", 1, SLIP),
        ("rounded down", splits.heads_rounded_down, "no error", "Raise ValueError", 1, SLIP),
        ("thirds", splits.heads_in_thirds, "equal sections", "[A d, K d, K d]", 1, MUSEUM(36)),
    ),
    *_rows(
        "08.cross_entropy",
        ("padding", state.entropy_with_padding, "padding counted", "beyond the vocabulary", 2, MUSEUM(37)),
        ("own maximum", state.entropy_with_own_maximum, "own maximum", "different scales", 2, SLIP),
        ("unmasked", state.entropy_unmasked, "others' targets", "mask what is not here", 2, SLIP),
        ("no maximum", state.entropy_without_maximum, "overflow", "subtract the largest", 1, SLIP),
        ("gathered", state.entropy_gathered, "logits gathered", "all scores travel", 2, SLIP),
        ("two sums", state.entropy_summed_twice, "gradient t times", "2 times what it should be", 2, MUSEUM(33)),
        ("plain call", state.entropy_with_plain_call, "half a graph", "sum of exponentials", 2, MUSEUM(32)),
        ("own targets", state.entropy_of_own_targets, "target not summed", "leaves out its score", 2, SLIP),
        ("cut", state.entropy_cut, "graph cut", "it has no history", 1, MUSEUM(32)),
    ),
    *_rows(
        "08.sequence",
        ("own positions", splits.sequence_without_sum, "not summed back", "sum over ranks", 2, SLIP),
        ("zeros", splits.sequence_alone, "not joined back", "all-gather them", 2, SLIP),
        ("own result", splits.sequence_not_summed, "not summed", "the ranks' sum", 2, SLIP),
        ("all-reduce", splits.sequence_by_all_reduce, "all-reduce", "the half that you need", 2, SLIP),
        ("mean", splits.sequence_of_means, "mean not sum", "parts are added up", 3, MUSEUM(33)),
        ("swapped", splits.sequence_swapped, "swapped", "the other way round", 2, SLIP),
        ("cut", splits.sequence_cut, "graph cut", "it has no history", 2, MUSEUM(32)),
    ),
    *_rows(
        "08.dropout",
        ("same everywhere", state.drop_same, "split, masks equal", "repeats along the tensor", 2, MUSEUM(39)),
        ("different everywhere", state.drop_different, "whole, masks differ", "copies drift apart", 2, MUSEUM(39)),
        ("seed + rank", state.drop_colliding, "seeds collide", "derive_seed", 2, MUSEUM(39)),
        ("seed x rank", state.drop_multiplied, "seeds collide", "seed 14 on rank 0", 2, SLIP),
        ("one purpose", state.drop_for_one_purpose, "split equals whole", "different purposes", 2, SLIP),
        ("torch's generator", state.drop_globally, "generator moved", "of its own", 2, MUSEUM(39)),
        ("not scaled", state.drop_unscaled, "not scaled", "divide it by 1 - p", 1, SLIP),
    ),
    *_rows(
        "08.clip",
        ("own", state.clip_own, "own part only", "different factors", 2, MUSEUM(30)),
        ("all summed", state.clip_all_summed, "whole counted t times", "once for each rank", 3, MUSEUM(31)),
        ("partial as parts", state.clip_partial_as_parts, "squares of parts", "not the sum of squares", 2, SLIP),
        ("partial forgotten", state.clip_partial_forgotten, "partial not summed", "positions alone", 2, MUSEUM(31)),
        ("no root", state.clip_without_root, "no root", "sum of squares", 1, SLIP),
        ("mean of partial", state.clip_mean_of_partial, "mean of partial", "parts are added up", 2, SLIP),
        ("whole summed", state.clip_whole_summed, "whole summed", "the same gradient on each", 2, SLIP),
        ("stretches", state.clip_stretching, "scaled up", "clamp the factor at 1", 1, SLIP),
    ),
    *_rows(
        "08.repair",
        ("rounded down", splits.embed_rounded_down, "vocabulary not divisible", "Round up", 2, MUSEUM(37)),
        ("unmasked", splits.embed_unmasked, "others' tokens", "must add zeros", 3, SLIP),
        ("alone", splits.embed_alone, "not summed", "lie on", 2, SLIP),
        ("cut", splits.embed_cut, "graph cut", "it has no history", 2, MUSEUM(32)),
        ("rows mixed", splits.embed_rows_mixed, "rows mixed", "rows of its own", 2, SLIP),
        ("two sums", splits.embed_summed_twice, "gradient t times", "counts it 2 times", 2, MUSEUM(33)),
    ),
)

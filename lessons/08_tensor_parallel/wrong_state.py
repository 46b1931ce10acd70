"""Wrong versions of the loss over a cut vocabulary, of dropout, and of the norm of gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from distlab_lesson_08.wrong_layers import function
from torch import Tensor

from distlab.rng import derive_seed
from distlab.tensor_parallel import reduce_from_ranks


def _added(x: Tensor) -> Tensor:
    x = x.clone()
    dist.all_reduce(x)
    return x


def _loss(
    logits: Tensor,
    targets: Tensor,
    vocab_size: int,
    *,
    pads: bool = True,
    common: bool = True,
    masks: bool = True,
    shift: bool = True,
    wrong_sum: bool = False,
    plain_total: bool = False,
    own_target: bool = False,
) -> Tensor:
    """Compute the loss with some of its steps left out."""
    add = function(_added, _added) if wrong_sum else reduce_from_ranks
    width = logits.shape[1]
    first = dist.get_rank() * width
    if pads:
        logits = logits.masked_fill(torch.arange(first, first + width) >= vocab_size, -torch.inf)
    largest = logits.detach().amax(1)
    if common:
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    if not shift:
        largest = torch.zeros_like(largest)
    total = (logits - largest.unsqueeze(1)).exp().sum(1).nan_to_num(0.0, posinf=torch.inf)
    total = _added(total.detach()) if plain_total else add(total)
    if not common:
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    here = (targets >= first) & (targets < first + width)
    own = logits.gather(1, (targets - first).where(here, 0).unsqueeze(1)).squeeze(1)
    own = own.masked_fill(~here, 0.0) if masks else own
    return (total.log() + largest - (own if own_target else add(own))).mean()


def entropy_with_padding(logits: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Count the columns that fill the vocabulary up."""
    return _loss(logits, targets, vocab_size, pads=False)


def entropy_with_own_maximum(logits: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Subtract what is largest here."""
    return _loss(logits, targets, vocab_size, common=False)


def entropy_unmasked(logits: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Add a score for targets that are not here."""
    return _loss(logits, targets, vocab_size, masks=False)


def entropy_without_maximum(logits: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Take exponentials of scores as they are."""
    return _loss(logits, targets, vocab_size, shift=False)


def entropy_summed_twice(logits: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Sum gradients over ranks in backward, as torch.distributed.nn does."""
    return _loss(logits, targets, vocab_size, wrong_sum=True)


def entropy_with_plain_call(logits: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Sum the exponentials by a call through which no gradient comes."""
    return _loss(logits, targets, vocab_size, plain_total=True)


def entropy_of_own_targets(logits: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Leave out the scores of targets that are not here."""
    return _loss(logits, targets, vocab_size, own_target=True)


def entropy_gathered(logits: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Give every rank all scores."""
    rank = dist.get_rank()

    def join(part: Tensor) -> Tensor:
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts, 1)

    whole = function(join, lambda gradient: gradient.chunk(dist.get_world_size(), 1)[rank])
    return F.cross_entropy(whole(logits)[:, :vocab_size], targets)


def entropy_cut(logits: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Sum by calls through which no gradient comes."""
    return _loss(logits.detach(), targets, vocab_size)


def drop_same(x: Tensor, p: float, seed: int, is_split: bool) -> Tensor:
    """Draw the same mask on every rank, also for parts."""
    return _dropped(x, p, derive_seed(seed, 0, "dropout"))


def drop_different(x: Tensor, p: float, seed: int, is_split: bool) -> Tensor:
    """Draw another mask on every rank, also for what all hold."""
    return _dropped(x, p, derive_seed(seed, dist.get_rank(), "dropout"))


def drop_colliding(x: Tensor, p: float, seed: int, is_split: bool) -> Tensor:
    """Add the rank to the seed."""
    return _dropped(x, p, seed + (dist.get_rank() if is_split else 0))


def drop_multiplied(x: Tensor, p: float, seed: int, is_split: bool) -> Tensor:
    """Multiply the seed by the rank's number from 1 on."""
    return _dropped(x, p, seed * (dist.get_rank() + 1 if is_split else 1))


def drop_globally(x: Tensor, p: float, seed: int, is_split: bool) -> Tensor:
    """Seed torch's own generator."""
    torch.manual_seed(_own_seed(seed, is_split))
    return F.dropout(x, p)


def drop_unscaled(x: Tensor, p: float, seed: int, is_split: bool) -> Tensor:
    """Leave what stays as it is."""
    return (1 - p) * _dropped(x, p, _own_seed(seed, is_split))


def drop_for_one_purpose(x: Tensor, p: float, seed: int, is_split: bool) -> Tensor:
    """Let rank 0's own mask be the one that all have in common."""
    return _dropped(x, p, derive_seed(seed, dist.get_rank() if is_split else 0, "dropout"))


def _own_seed(seed: int, is_split: bool) -> int:
    return derive_seed(seed, dist.get_rank() if is_split else 0, "split" if is_split else "whole")


def _dropped(x: Tensor, p: float, seed: int) -> Tensor:
    return x * (torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)) >= p) / (1 - p)


Lists = tuple[list[Tensor], list[Tensor], list[Tensor]]


def _scale(lists: Lists, square: Tensor, max_norm: float) -> Tensor:
    norm = square.sqrt()
    for gradient in (one for gradients in lists for one in gradients):
        gradient *= (max_norm / norm).clamp(max=1.0)
    return norm


def _squares(gradients: list[Tensor]) -> Tensor:
    return sum((one.square().sum() for one in gradients), torch.zeros((), dtype=torch.float64))


def clip_own(split: list[Tensor], whole: list[Tensor], partial: list[Tensor], max_norm: float) -> Tensor:
    """Find the norm of what is here."""
    for gradient in partial:
        dist.all_reduce(gradient)
    return _scale((split, whole, partial), _squares([*split, *whole, *partial]), max_norm)


def clip_all_summed(split: list[Tensor], whole: list[Tensor], partial: list[Tensor], max_norm: float) -> Tensor:
    """Sum the squares of everything, replicated or not."""
    for gradient in partial:
        dist.all_reduce(gradient)
    square = _squares([*split, *whole, *partial])
    dist.all_reduce(square)
    return _scale((split, whole, partial), square, max_norm)


def clip_partial_as_parts(split: list[Tensor], whole: list[Tensor], partial: list[Tensor], max_norm: float) -> Tensor:
    """Take the gradients of a norm for parts like any other."""
    square = _squares([*split, *partial])
    dist.all_reduce(square)
    return _scale((split, whole, partial), square + _squares(whole), max_norm)


def clip_partial_forgotten(split: list[Tensor], whole: list[Tensor], partial: list[Tensor], max_norm: float) -> Tensor:
    """Take the gradients of a norm for the same on every rank."""
    square = _squares(split)
    dist.all_reduce(square)
    return _scale((split, whole, partial), square + _squares([*whole, *partial]), max_norm)


def clip_stretching(split: list[Tensor], whole: list[Tensor], partial: list[Tensor], max_norm: float) -> Tensor:
    """Scale up what is short."""
    for gradient in partial:
        dist.all_reduce(gradient)
    square = _squares(split)
    dist.all_reduce(square)
    norm = (square + _squares([*whole, *partial])).sqrt()
    for gradient in [*split, *whole, *partial]:
        gradient *= max_norm / norm
    return norm


def clip_without_root(split: list[Tensor], whole: list[Tensor], partial: list[Tensor], max_norm: float) -> Tensor:
    """Take the sum of squares for the norm."""
    for gradient in partial:
        dist.all_reduce(gradient)
    square = _squares(split)
    dist.all_reduce(square)
    square = square + _squares([*whole, *partial])
    return _scale((split, whole, partial), square * square, max_norm)


def clip_mean_of_partial(split: list[Tensor], whole: list[Tensor], partial: list[Tensor], max_norm: float) -> Tensor:
    """Average the gradients of a norm, as data parallelism would."""
    for gradient in partial:
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    square = _squares(split)
    dist.all_reduce(square)
    return _scale((split, whole, partial), square + _squares([*whole, *partial]), max_norm)


def clip_whole_summed(split: list[Tensor], whole: list[Tensor], partial: list[Tensor], max_norm: float) -> Tensor:
    """Sum what every rank has whole, too."""
    for gradient in [*partial, *whole]:
        dist.all_reduce(gradient)
    square = _squares(split)
    dist.all_reduce(square)
    return _scale((split, whole, partial), square + _squares([*whole, *partial]), max_norm)

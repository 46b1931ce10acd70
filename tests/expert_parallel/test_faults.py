"""What does not fit is refused on every rank, and nobody is left waiting."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distlab.blocks.clip import NotFiniteError
from distlab.expert_parallel import (
    ExpertParallel,
    MixtureOfExperts,
    Router,
    clip_gradients_,
    expert_parallel,
    reduce_gradients,
)


def full(hidden_size=4, num_experts=3, **options):
    return MixtureOfExperts(
        Router(hidden_size, num_experts, **options), [nn.Linear(hidden_size, hidden_size) for _ in range(num_experts)]
    )


def wider():
    layer = full()
    layer.experts[2] = nn.Linear(4, 5)
    return layer


def text_of(function, error=ValueError):
    try:
        function()
    except error as found:
        return str(found)
    return "no error"


def at_construction():
    rank = dist.get_rank()
    lonely = [dist.new_group([other]) for other in range(dist.get_world_size())][rank]
    return [
        text_of(lambda: ExpertParallel.from_full(full(num_experts=3 + rank))),
        text_of(lambda: ExpertParallel.from_full(full(top_k=1 + rank))),
        text_of(lambda: ExpertParallel.from_full(full(capacity_factor=None if rank else 1.5))),
        text_of(lambda: ExpertParallel(Router(4, 2), {rank if rank == 0 else 5: nn.Linear(4, 4)})),
        text_of(lambda: ExpertParallel.from_full(full(), balance_over="everybody")),
        text_of(lambda: expert_parallel(nn.Linear(2, 2))),
        text_of(lambda: reduce_gradients(ExpertParallel.from_full(full(), lonely))),
        text_of(lambda: ExpertParallel.from_full(wider())),
        text_of(lambda: ExpertParallel.from_full(full()).total_load()),
        text_of(lambda: clip_gradients_(ExpertParallel.from_full(full()), 0.0)),
    ]


def in_forward():
    rank = dist.get_rank()
    layer = ExpertParallel.from_full(full())
    x = torch.ones(2, 4)
    inputs = [x[:, :3], torch.tensor(1.0), x.long(), x.double(), "text"]
    found = [text_of(lambda one=one: layer(one if rank == 1 else x)) for one in inputs]
    with torch.no_grad() if rank == 0 else nullcontext():
        found.append(text_of(lambda: layer(x)))
    found.append(text_of(lambda: layer.train(rank == 0)(x)))
    layer.train()
    layer(x).sum().backward()  # and it goes on
    reduce_gradients(layer)
    if rank == 1:
        next(iter(layer.experts.values())).bias.grad[0] = torch.nan
    found.append(text_of(lambda: clip_gradients_(layer, 1.0), NotFiniteError))
    return found


def everything():
    return at_construction(), in_forward()


def test_every_rank_hears_of_what_does_not_fit(ranks):
    results = ranks(2).run(everything)
    words = [
        "the layers given to ExpertParallel.from_full",
        "the settings of ExpertParallel",
        "the settings of ExpertParallel",
        "holds experts [5], expected [1]",
        "balance_over is 'everybody'",
        "no MixtureOfExperts",
        "and the group given has [0, 1]",
        "expert 2 turns [0, 4] into [0, 5]",
        "no batch has passed",
        "max_norm is 0.0",
    ]
    for texts, _ in results:
        for text, wanted in zip(texts, words, strict=True):
            assert wanted in text
    own = ["got [2, 3]", "got []", "got torch.int64", "the layer is torch.float32", "got str"]
    for rank, (_, texts) in enumerate(results):
        for text, wanted in zip(texts, own, strict=False):
            assert (
                f"rank 1: ExpertParallel: {'' if wanted[0] == 't' else 'expected'}" if rank else "rank 1 gave"
            ) in text
            assert rank == 0 or wanted in text
        assert "ranks disagree on whether gradients are on: rank 0 False, rank 1 True" in texts[5]
        assert "ranks disagree on the mode (train or eval): rank 0 True, rank 1 False" in texts[6]
        assert "experts.2.bias (rank 1)" in texts[7]


def mixed():
    """Run on each rank: two dtypes at once, which one rank alone cannot see."""
    layer = ExpertParallel.from_full(full())
    layer.double() if dist.get_rank() else None
    return text_of(lambda: layer(torch.ones(2, 4, dtype=layer.router.scores.weight.dtype)))


def test_dtypes_that_differ_between_ranks_are_refused(ranks):
    for text in ranks(2).run(mixed):
        assert "ranks disagree on the rows' dtype: rank 0 torch.float32, rank 1 torch.float64" in text


def fewer():
    """Run on each rank: one expert among all ranks, one of which has no tokens."""
    layer = ExpertParallel.from_full(full(num_experts=1, top_k=1))
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(torch.ones(dist.get_rank(), 4, requires_grad=True))
    (y.sum() + layer.balance_loss).backward()
    return layer.load, layer.total_load(), y.shape, y.dtype


@pytest.mark.parametrize("world_size", [2, 3])
def test_fewer_experts_than_ranks(ranks, world_size):
    tokens = sum(range(world_size))
    for rank, (load, total, shape, dtype) in enumerate(ranks(world_size).run(fewer)):
        assert load.kept == (rank,)
        assert total == (tokens, (tokens,), (tokens,), 0)
        assert list(shape) == [rank, 4]
        assert dtype == torch.float32

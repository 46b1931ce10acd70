"""Statistics of shards outside of an optimizer: refused in words on every rank, since each would get its own number."""

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from refused import message
from torch import nn

from distlab.rng import generator
from distlab.sharding import FullyShard, ShardedOptimizer


def net():
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)).double()
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, std=0.4, generator=generator(0, 0, name))
    return model


def trained():
    model = FullyShard(net())
    model(torch.ones(2, 7, dtype=torch.float64) * (dist.get_rank() + 1)).square().mean().backward()
    model.synchronize()
    return model


STATISTICS = {
    "square and sum": lambda p: p.grad.pow(2).sum(),
    "clip by hand": lambda p: (p.grad.detach() ** 2).sum().sqrt(),
    "of data": lambda p: (p.data * p.data).sum(),
    "of a copy": lambda p: p.grad.detach().clone().abs().max(),
    "of another type": lambda p: p.detach().float().cpu().mean(),
    "not finite": lambda p: p.grad.isfinite().all(),
    "a penalty": lambda p: F.mse_loss(p, torch.zeros_like(p)),
    "one vector": lambda p: nn.utils.parameters_to_vector([p, p]),
    "numpy": lambda p: p.detach().numpy(),
    "a number": lambda p: p.data[:1].item(),
    "a row": lambda p: p[0],
    "of a list": lambda p: torch._foreach_max([p.grad, p.grad]),
    "a direction": lambda p: F.normalize(p.grad, dim=0),
    "by product": lambda p: torch.dot(p.detach(), p.grad),
    "dimensions of data": lambda p: p.data.ndim,
    "norm of data": lambda p: p.grad.data.norm(),
    "norms of a list": lambda p: torch._foreach_norm([p.grad.data]),
    "norm, twice data": lambda p: torch.linalg.vector_norm(p.data.data),
    "frequencies": lambda p: torch.fft.fft(p.detach()),
    "largest so far": lambda p: p.detach().cummax(0),
    "order": lambda p: torch.argsort(p.detach()),
}


ELSE = ("one vector", "dimensions of data", "norm of data", "norms of a list", "norm, twice data")  # words of their own


def asked(statistics):
    shard = next(trained().parameters())
    return {name: message(lambda ask=ask: ask(shard)) for name, ask in statistics.items()}


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_number_of_a_part_is_refused_on_every_rank(ranks, num_ranks):
    for rank, texts in enumerate(ranks(num_ranks).run(asked, STATISTICS)):
        for name, text in texts.items():
            assert text.startswith(f"ValueError: rank {rank}: "), (name, text)
            assert " of a shard" in text, (name, text)
            assert "to_local()" in text or name in ELSE, (name, text)


def by_element():
    """What people write by element, beside the same on plain tensors; what they count."""
    model = trained()
    shard = next(model.parameters())
    plain, slope = shard.to_local().clone(), shard.grad.to_local().clone()
    average = shard.detach().clone()
    with torch.no_grad():
        shard.sub_(0.1 * shard.grad.sign() + 0.01 * shard)
        average.mul_(0.9).add_(shard.detach(), alpha=0.1)
    new = plain - (0.1 * slope.sign() + 0.01 * plain)
    held = sum(one.numel() for one in model.parameters())
    norm = model.clip_gradients_(math.inf)
    return (
        bool(torch.equal(shard.to_local(), new)),
        bool(torch.allclose(average.to_local(), 0.9 * plain + 0.1 * new)),
        (type(held), held, f"{shard.numel():,}"),
        [type(one) for one in (shard.to_local(), average.to_local())],
        norm.item(),
    )


def test_work_by_element_and_counts_of_memory_go_on(ranks):
    for moved, averaged, (kind, held, shown), types, norm in ranks(2).run(by_element):
        assert moved
        assert averaged
        assert types == [torch.Tensor] * 2
        assert (kind, held, shown) == (int, 20 + 9, "20")
        assert norm > 0


def in_a_hook():
    model = trained()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: [p.grad.pow(2).sum() for p in model.parameters()])
    return message(optimizer.step)


def test_a_hook_around_a_step_is_the_users(ranks):
    for rank, text in enumerate(ranks(2).run(in_a_hook)):
        assert text.startswith(f"ValueError: rank {rank}: sum of a shard"), text


def of_pieces():
    model = net()
    optimizer = ShardedOptimizer(model, lambda p: torch.optim.AdamW(p, lr=0.1))
    model(torch.ones(2, 7, dtype=torch.float64)).square().mean().backward()
    optimizer.synchronize()
    return [message(lambda p=p: p.grad.pow(2).sum()) for _, p in optimizer.named_pieces()]


def test_pieces_of_zero_refuse_it_too(ranks):
    for rank, texts in enumerate(ranks(2).run(of_pieces)):
        assert texts
        assert all(text.startswith(f"ValueError: rank {rank}: sum of a shard") for text in texts), texts

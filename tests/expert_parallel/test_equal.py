"""Experts split over ranks train like one process that holds them all, and send what they say."""

from itertools import product

import pytest
import torch
import torch.distributed as dist
from equal import Row, Task, Way, assert_rows_equal_one_process, awkward_model, square
from torch import nn

from distlab import expert_parallel
from distlab.blocks.data import ByteCorpus, python_documentation
from distlab.blocks.models import GPT, GPTConfig
from distlab.comm import recorded
from distlab.expert_parallel.layer import own_experts
from distlab.recompute import recompute_blocks
from distlab.rng import generator

HIDDEN, EXPERTS = 6, 5  # no number of ranks above 1 divides the experts
BALANCE, MAX_NORM = 0.1, 0.05
CONFIG = GPTConfig(vocab_size=257, context=7, num_layers=2, num_heads=2, hidden_size=8)


def mixture(seed, **options):
    torch.manual_seed(seed)
    experts = [nn.Sequential(nn.Linear(HIDDEN, 9), nn.GELU(), nn.Linear(9, HIDDEN)) for _ in range(EXPERTS)]
    layer = expert_parallel.MixtureOfExperts(
        expert_parallel.Router(HIDDEN, EXPERTS, **{"top_k": 2, **options}), experts
    ).double()
    with torch.no_grad():
        layer.router.scores.weight[-1] -= 2.0  # far from even: hardly anybody asks the last one
    return layer


def tokens_of(rank, step=0):
    """Return a rank's tokens: of unequal number, and none on the third rank of a first step."""
    num = 0 if (rank, step) == (2, 0) else 4 + 3 * rank
    return torch.randn(num, HIDDEN, dtype=torch.float64, generator=generator(step, rank, "tokens"))


def gradients_of(module):
    return {name: p.grad for name, p in module.named_parameters()}


def differ(layer, whole):
    """Return by how much gradients differ from those of one process that holds all experts."""
    wanted = gradients_of(whole)
    return max((mine - wanted[name]).abs().max().item() for name, mine in gradients_of(layer).items() if mine.numel())


def once(top_k, with_gradient):
    """One pass: outputs, gradients and counts are those of one process that has all ranks' tokens."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    layer = expert_parallel.ExpertParallel.from_full(mixture(rank, top_k=top_k))  # rank 0's values win
    x = tokens_of(rank).requires_grad_(with_gradient)
    y = layer(x)
    (y.sin().sum() * world_size + BALANCE * layer.balance_loss).backward()
    expert_parallel.reduce_gradients(layer)
    whole = mixture(0, top_k=top_k)
    inputs = [tokens_of(other).requires_grad_() for other in range(world_size)]
    outputs = whole(torch.cat(inputs))
    (outputs.sin().sum() + BALANCE * whole.balance_loss).backward()
    assert torch.allclose(y, outputs.split([len(one) for one in inputs])[rank], rtol=0, atol=1e-12)
    # each rank's loss is n times its part of the whole one, so that their mean is the whole one
    assert not with_gradient or torch.allclose(x.grad / world_size, inputs[rank].grad, rtol=0, atol=1e-12)
    assert differ(layer, whole) <= 1e-12
    assert layer.balance_loss.item() == pytest.approx(whole.balance_loss.item(), abs=1e-12)
    assert layer.load.tokens == len(x)
    assert (layer.load.choices, layer.total_load()) == (layer.load.kept, whole.load)
    assert sum(whole.load.choices) == top_k * len(outputs)
    return gradients_of(layer)


@pytest.mark.equality("expert_parallel")
@pytest.mark.soak_where(world_size=(1, 2, 4))
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.on_ranks
def test_split_experts_equal_one_process(world_size):
    rank = dist.get_rank()
    once(1, True)
    for one, other in zip(once(2, True).values(), once(2, rank % 2 == 1).values(), strict=True):
        assert torch.equal(one, other)  # whether inputs require gradients changes nothing else
    layer = expert_parallel.ExpertParallel.from_full(mixture(rank))
    with recorded() as seen:
        layer(tokens_of(rank, 1)).sum().backward()
    own = own_experts(EXPERTS, rank, world_size)
    rows = sum(layer.load.kept) + sum(layer.total_load().kept[own.start : own.stop])  # sent, and taken here
    calls = [(call.op, call.num_bytes) for call in seen.records.rank(rank)]
    counts = 8 * (EXPERTS + 4 * world_size)
    sums = [num_bytes for op, num_bytes in calls if op == "all_reduce"]
    assert len(calls) == (6 if world_size > 1 else 0)
    assert sum(num_bytes for _, num_bytes in calls) == (2 * rows * HIDDEN * 8 + counts + sum(sums) if calls else 0)
    assert sum(sums) == (8 * (2 * EXPERTS + 1) if calls else 0)  # the balance loss, which no loss used
    assert {op for op, _ in calls} <= {"all_to_all", "all_reduce"}


def gpt(rank):
    return expert_parallel.mix_experts(awkward_model(rank, config=CONFIG), 3, generator(0, rank, "experts")).double()


def thirteen_tokens(step):
    x = tokens_of(3, step)
    return x, x.flip(-1).tanh()


def text(step):
    return ByteCorpus(python_documentation(), CONFIG.context).batch(step, 5, seed=1)


LAYER = Task(mixture, thirteen_tokens, more_loss=lambda layer: BALANCE * layer.balance_loss)
MODEL = Task(gpt, text, GPT.loss, more_loss=lambda model: BALANCE * expert_parallel.balance_loss(model))


def split_layer(model, make):
    layer = expert_parallel.ExpertParallel.from_full(model)
    return Way(layer, make(layer.parameters()), lambda: expert_parallel.reduce_gradients(layer))


def split_gpt(recomputed=False, replicated=False):
    def technique(model, make):
        group, replicas = square() if replicated else (None, None)
        if replicated:
            model.load_state_dict(gpt(0).state_dict())
        expert_parallel.expert_parallel(model, group, balance_over=dist.group.WORLD if replicated else "group")
        if recomputed:
            recompute_blocks(model)
        reduce = lambda: expert_parallel.reduce_gradients(model, group, replicas=replicas)  # noqa: E731
        clip = lambda norm: expert_parallel.clip_gradients_(model, norm, group)  # noqa: E731
        return Way(model, make(model.parameters()), reduce, clip=clip)

    return technique


LAYERS = {name: Row(LAYER, name, split_layer) for name in ("sgd", "adam")}
CLIPPED = {"a GPT": Row(MODEL, "adam", split_gpt(), clip=MAX_NORM)}
RECOMPUTED = {"recomputed": Row(MODEL, "sgd", split_gpt(recomputed=True), clip=MAX_NORM)}
REPLICAS = {"replicas": Row(MODEL, "sgd", split_gpt(replicated=True), clip=MAX_NORM)}
WORLDS = [(1, LAYERS | RECOMPUTED), (2, CLIPPED | RECOMPUTED), (3, LAYERS | CLIPPED), (4, REPLICAS)]


@pytest.mark.equality("expert_parallel")
@pytest.mark.soak_where(world_size=(1,))
@pytest.mark.parametrize(("world_size", "rows"), WORLDS, ids=["1", "2", "3", "4"])
def test_experts_train_like_one_process(ranks, world_size, rows):
    assert_rows_equal_one_process(ranks(world_size), rows)


@pytest.mark.on_ranks(3)
def test_capacity_drops_what_one_process_drops_of_each_ranks_tokens():
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    whole = mixture(0, capacity_factor=0.6)
    layer = expert_parallel.ExpertParallel.from_full(mixture(rank, capacity_factor=0.6), balance_over="rank")
    loads = {}
    for step, other in product((1, 2), range(num_ranks)):
        wanted = whole(tokens_of(other, step))
        (wanted.square().sum() + whole.balance_loss / num_ranks).backward()
        loads[step, other] = whole.load
        if other == rank:
            y = layer(tokens_of(rank, step))
            assert torch.allclose(y, wanted, rtol=0, atol=1e-12)
            (y.square().sum() * num_ranks + layer.balance_loss).backward()
    expert_parallel.reduce_gradients(layer)
    assert differ(layer, whole) <= 1e-10
    with torch.no_grad():
        layer(tokens_of(rank, 1))
    total, every = layer.total_load(), [loads[1, other] for other in range(num_ranks)]
    assert layer.load == loads[1, rank]
    assert layer.load.dropped_choices > 0
    assert total.dropped_choices == sum(load.dropped_choices for load in every)
    assert total.dropped_tokens == sum(load.dropped_tokens for load in every)

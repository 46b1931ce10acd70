"""Experts split over ranks train like one process that holds them all, and send what they say."""

from functools import cache

import pytest
import torch
import torch.distributed as dist
from equal import Row, Task, Way, assert_rows_equal_one_process, outcome
from torch import nn

from distlab.blocks.data import ByteCorpus, python_documentation
from distlab.blocks.models import GPT, GPTConfig
from distlab.comm import recorded
from distlab.expert_parallel import (
    ExpertParallel,
    MixtureOfExperts,
    Router,
    balance_loss,
    clip_gradients_,
    expert_parallel,
    mix_experts,
    reduce_gradients,
)
from distlab.expert_parallel.layer import own_experts
from distlab.recompute import recompute_blocks
from distlab.rng import generator

HIDDEN, EXPERTS = 6, 5  # no number of ranks above 1 divides the experts
BALANCE, MAX_NORM = 0.1, 0.05
CONFIG = GPTConfig(vocab_size=257, context=8, num_layers=2, num_heads=2, hidden_size=8)


def mixture(seed, *, top_k=2, num_experts=EXPERTS, capacity_factor=None):
    torch.manual_seed(seed)
    experts = [
        nn.Sequential(nn.Linear(HIDDEN, 9), nn.GELU(), nn.Linear(9, HIDDEN)) for _ in range(num_experts)
    ]  # their biases are not zero
    router = Router(HIDDEN, num_experts, top_k=top_k, capacity_factor=capacity_factor)
    layer = MixtureOfExperts(router, experts).double()
    with torch.no_grad():
        layer.router.scores.weight[-1] -= 2.0  # far from even: hardly anybody asks the last one
    return layer


def tokens_of(rank, step=0):
    """Return a rank's tokens: of unequal number, and none on the third rank of a first step."""
    num = 0 if (rank, step) == (2, 0) else 4 + 3 * rank
    return torch.randn(num, HIDDEN, dtype=torch.float64, generator=generator(step, rank, "tokens"))


def once(top_k, with_gradient):
    """Run on each rank: one pass; return output and all gradients."""
    layer = ExpertParallel.from_full(mixture(dist.get_rank(), top_k=top_k))  # rank 0's values win
    x = tokens_of(dist.get_rank()).requires_grad_(with_gradient[dist.get_rank()])
    y = layer(x)
    (y.sin().sum() * dist.get_world_size() + BALANCE * layer.balance_loss).backward()
    reduce_gradients(layer)
    found = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return y.detach(), x.grad, found, layer.load, layer.total_load(), layer.balance_loss.item()


def everything():
    """Run on each rank what one world size is asked; return a name for each result."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    found = {}
    for top_k in (1, 2):
        found[f"once {top_k}"] = once(top_k, [True] * num_ranks)
    found["some inputs"] = once(2, [other % 2 == 1 for other in range(num_ranks)])
    layer = ExpertParallel.from_full(mixture(rank))
    with recorded() as seen:
        layer(tokens_of(rank, 1)).sum().backward()
    found["bytes"] = {op: seen.records.payload_bytes(rank, op) for op in ("all_to_all", "all_reduce")}
    found["all"] = seen.records.payload_bytes(rank)
    found["calls"] = seen.records.rank(rank).num_calls()
    found["rows"] = rows_here(layer, num_ranks)
    return found


def rows_here(layer, num_ranks):
    """How many rows this rank's experts take of all ranks' tokens, and how many it sends."""
    own = own_experts(EXPERTS, dist.get_rank(), num_ranks)
    taken = layer.total_load().kept[own.start : own.stop]
    return sum(layer.load.kept), sum(taken)


def difference(one, other):
    return max((value - other[name]).abs().max().item() for name, value in one.items() if value.numel())


@pytest.mark.equality("expert_parallel")
@pytest.mark.soak_where(world_size=(1, 2, 4))
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_split_experts_equal_one_process(ranks, world_size):
    results = ranks(world_size).run(everything)
    for top_k in (1, 2):
        check_once([result[f"once {top_k}"] for result in results], top_k, world_size)
    for result in results:
        for one, other in zip(result["some inputs"][2].values(), result["once 2"][2].values(), strict=True):
            assert torch.equal(one, other)  # whether inputs require gradients changes nothing else
        check_bytes(result, world_size)


def check_once(results, top_k, world_size):
    layer = mixture(0, top_k=top_k)
    inputs = [tokens_of(rank).requires_grad_() for rank in range(world_size)]
    y = layer(torch.cat(inputs))
    (y.sin().sum() + BALANCE * layer.balance_loss).backward()
    expected = {name: parameter.grad for name, parameter in layer.named_parameters()}
    parts = y.split([len(x) for x in inputs])
    for x, part, (found, gradient, gradients, load, total, loss) in zip(inputs, parts, results, strict=True):
        assert torch.allclose(found, part, rtol=0, atol=1e-12)
        # each rank's loss is n times its part of the whole one, so that their mean is the whole one
        assert torch.allclose(gradient / world_size, x.grad, rtol=0, atol=1e-12)
        assert difference(gradients, expected) <= 1e-12
        assert loss == pytest.approx(layer.balance_loss.item(), abs=1e-12)
        assert load.tokens == len(x)
        assert load.choices == load.kept
        assert total == layer.load
        assert sum(total.choices) == top_k * len(y)


def check_bytes(result, world_size):
    if world_size == 1:
        assert (result["all"], result["calls"]) == (0, 0)
        return
    sent, taken = result["rows"]
    counts = 8 * (EXPERTS + 4 * world_size)
    assert result["bytes"]["all_to_all"] == 2 * (sent + taken) * HIDDEN * 8 + counts
    assert result["bytes"]["all_reduce"] == 8 * (2 * EXPERTS + 1)  # the balance loss, which no loss used
    assert sum(result["bytes"].values()) == result["all"]
    assert result["calls"] == 6


def gpt(rank):
    model = mix_experts(GPT(CONFIG, generator(0, rank, "weights")), 3, generator(0, rank, "experts")).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1, generator=generator(0, rank, name))
    model.blocks[0].attention_norm.bias.requires_grad_(False)
    return model


def two_groups():
    """Return the group of this rank's experts, and that of the ranks with the same experts."""
    rank, found = dist.get_rank(), []
    for sets in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]):
        found += [group for group, members in [(dist.new_group(m), m) for m in sets] if rank in members]
    return found


@cache
def corpus():
    return ByteCorpus(python_documentation(), CONFIG.context)


def thirteen_tokens(step):
    x = tokens_of(3, step)
    return x, x.flip(-1).tanh()


LAYER = Task(mixture, thirteen_tokens, more_loss=lambda layer: BALANCE * layer.balance_loss)
MODEL = Task(
    gpt, lambda step: corpus().batch(step, 5, seed=1), GPT.loss, more_loss=lambda model: BALANCE * balance_loss(model)
)


def split_layer(model, make):
    layer = ExpertParallel.from_full(model)
    return Way(layer, make(layer.parameters()), lambda: reduce_gradients(layer))


def split_gpt(recomputed=False, replicated=False):
    def technique(model, make):
        group, replicas = two_groups() if replicated else (None, None)
        if replicated:
            model.load_state_dict(gpt(0).state_dict())
        expert_parallel(model, group, balance_over=dist.group.WORLD if replicated else "group")
        if recomputed:
            recompute_blocks(model)
        reduce = lambda: reduce_gradients(model, group, replicas=replicas)  # noqa: E731
        clip = lambda norm: clip_gradients_(model, norm, group)  # noqa: E731
        return Way(model, make(model.parameters()), reduce, clip=clip)

    return technique


LAYERS = {name: Row(LAYER, name, split_layer) for name in ("sgd", "adam")}
GPTS = {
    "adam": Row(MODEL, "adam", split_gpt(), clip=MAX_NORM),
    "recomputed": Row(MODEL, "sgd", split_gpt(recomputed=True), clip=MAX_NORM),
}
REPLICAS = {"replicas": Row(MODEL, "sgd", split_gpt(replicated=True), clip=MAX_NORM)}


@pytest.mark.equality("expert_parallel")
@pytest.mark.soak_where(world_size=(1,))
@pytest.mark.parametrize(
    ("world_size", "rows"), [(1, LAYERS | GPTS), (2, GPTS), (3, LAYERS), (4, REPLICAS)], ids=["1", "2", "3", "4"]
)
def test_experts_train_like_one_process(ranks, world_size, rows):
    assert_rows_equal_one_process(ranks(world_size), rows)


@pytest.mark.on_ranks(3)
def test_training_repeats_bit_for_bit():
    (one, _), (other, _) = outcome(LAYERS["sgd"]), outcome(LAYERS["sgd"])
    assert all(torch.equal(one[name], other[name]) for name in one)


def limited(num_steps=3):
    """Run on each rank: a capacity that binds; return outputs, gradients and the count of what was dropped."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    layer = ExpertParallel.from_full(mixture(rank, capacity_factor=0.6), balance_over="rank")
    outputs = []
    for step in range(1, num_steps):
        y = layer(tokens_of(rank, step))
        outputs.append(y.detach())
        (y.square().sum() * num_ranks + layer.balance_loss).backward()
    reduce_gradients(layer)
    with recorded() as seen, torch.no_grad():
        layer(tokens_of(rank, 1))
    sent = seen.records.payload_bytes(rank, "all_to_all")
    return outputs, {n: p.grad for n, p in layer.named_parameters()}, layer.load, layer.total_load(), sent


def test_capacity_drops_what_one_process_drops_of_each_ranks_tokens(ranks):
    world_size, layer = 3, mixture(0, capacity_factor=0.6)
    results = ranks(world_size).run(limited)
    loads = {}
    for step in (1, 2):
        for rank in range(world_size):
            y = layer(tokens_of(rank, step))
            assert torch.allclose(results[rank][0][step - 1], y, rtol=0, atol=1e-12)
            (y.square().sum() + layer.balance_loss / world_size).backward()
            loads[rank, step] = layer.load
    expected = {name: parameter.grad for name, parameter in layer.named_parameters()}
    own = [own_experts(EXPERTS, rank, world_size) for rank in range(world_size)]
    for rank, (_, gradients, load, total, sent) in enumerate(results):
        assert difference(gradients, expected) <= 1e-10
        assert load == loads[rank, 1]
        assert load.dropped_choices > 0
        assert total.dropped_choices == sum(loads[other, 1].dropped_choices for other in range(world_size))
        assert total.dropped_tokens == sum(loads[other, 1].dropped_tokens for other in range(world_size))
        taken = sum(total.kept[own[rank].start : own[rank].stop])
        assert sent == (sum(load.kept) + taken) * HIDDEN * 8 + 8 * (EXPERTS + 4 * world_size)

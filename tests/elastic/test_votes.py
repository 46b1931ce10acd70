"""Flipped bits of weights and gradients are found: rank, step and tensor."""

import random

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as some

from distlab.comm import recorded
from distlab.data_parallel import average_flat
from distlab.elastic.votes import CorruptionError, ReplicaVotes, bit_sum
from distlab.rng import generator

NUM_STEPS = 4


def net(dtype):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)).to(dtype)


def flip(tensor, element, bit):
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    row = tensor.detach().view(-1).view(kinds[tensor.element_size()])
    number = 1 << bit if bit < 8 * tensor.element_size() - 1 else -(1 << bit)
    row[element] ^= number


def train(fault, every, dtype):
    """Run on each rank: train with a flipped bit on one of them; return the text of the vote, or nothing."""
    victim, when, index, of_gradient, place, bit = fault
    model, votes = net(dtype), ReplicaVotes(every=every)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    try:
        for step in range(NUM_STEPS):
            x = torch.randn(4, 3, generator=generator(step, dist.get_rank(), "data")).to(dtype)
            model(x).square().mean().backward()
            average_flat(model.parameters())
            if step == when and dist.get_rank() == victim:
                parameter = [*model.parameters()][index % 4]
                tensor = parameter.grad if of_gradient else parameter
                flip(tensor, place % tensor.numel(), bit % (8 * tensor.element_size()))
            votes.look(step, model)
            optimizer.step()
            optimizer.zero_grad()
        votes.vote()
    except CorruptionError as error:
        return str(error)
    return ""


def many(num, seed, every):
    chance = random.Random(seed)  # the same on all ranks
    wrong = []
    for number in range(num):
        dtype = (torch.float32, torch.float64, torch.bfloat16)[number % 3]
        victim, when, index = chance.randrange(dist.get_world_size()), chance.randrange(NUM_STEPS), chance.randrange(4)
        fault = (victim, when, index, chance.random() < 0.5, chance.randrange(99), chance.randrange(64))
        text = train(fault, every, dtype)
        kind = "the gradient of " if fault[3] else ""
        name = f"{kind}{[name for name, _ in net(dtype).named_parameters()][index]}"
        if not text.startswith(f"step {when}: {name}: rank {victim} differs from the "):
            wrong.append((fault, text))
        if number % 10 == 0 and train((-1, *fault[1:]), every, dtype):
            wrong.append("a false alarm")
    return wrong


@pytest.mark.parametrize(
    ("world_size", "num", "every"),
    [(3, 40, 3), *(pytest.param(*one, marks=[pytest.mark.soak]) for one in ((4, 20, 50), (3, 200, 3)))],
)
def test_each_flipped_bit_is_found_with_its_rank_its_step_and_its_tensor(
    ranks, world_size, num, every, record_property
):
    results = ranks(world_size).run(many, num, world_size, every)
    record_property("tried", num)
    record_property("held", num - len(results[0]))
    assert results == [[]] * world_size


def test_two_replicas_see_it_and_cannot_say_which_is_wrong(ranks):
    for text in ranks(2).run(train, (1, 2, 0, False, 0, 3), 2, torch.float32):
        assert "step 2: 0.weight: replicas differ, and no majority says which are right" in text


def measure():
    """Run on each rank: the calls of three looks and their vote."""
    model, votes = net(torch.float32), ReplicaVotes(every=3)
    with recorded() as seen:
        for step in range(3):
            votes.look(step, model)
    return [(call.op, call.num_bytes) for call in seen.records.calls(dist.get_rank())]


def swap():
    """Run on each rank: two calls that are alike, in swapped order on one rank; return what a vote says."""
    model, votes = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)), ReplicaVotes(every=9)
    for parameter in model.parameters():
        parameter.data.fill_(0.5)
    model(torch.randn(4, 3, generator=generator(0, dist.get_rank(), "data"))).square().sum().backward()
    order = [model[0].weight, model[1].weight]
    for parameter in reversed(order) if dist.get_rank() == 1 else order:
        dist.all_reduce(parameter.grad)
    for bias in (model[0].bias, model[1].bias):
        dist.all_reduce(bias.grad)
    votes.look(4, model)
    with pytest.raises(CorruptionError) as caught:
        votes.vote()
    return str(caught.value)


def drift():
    """Run on each rank: sets of tensors change together, then one rank has a gradient less; then steps differ."""
    model, votes = net(torch.float32), ReplicaVotes(every=9)
    for step in range(3):
        if step == 1:  # on all ranks
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
        votes.look(step, model)
    votes.vote()
    votes.vote()  # nothing new
    if dist.get_rank() == 0:
        model[0].weight.grad = None
    votes.look(3, model)
    for _ in range(2):
        with pytest.raises(ValueError, match="ranks disagree on the steps and tensors that replicas vote on"):
            votes.vote()
        votes.look_at(4 + dist.get_rank(), {})


def test_a_vote_is_one_gather_and_a_look_sends_nothing(ranks):
    for calls in ranks(3).run(measure):
        assert len(calls) == 2, "what is compared is agreed on, and compared"
        assert calls[1][0].startswith("all_gather")
        assert calls[1][1] == 8 * 3 * 4 or calls[1][1] == 3 * 8 * 3 * 4, calls


def test_calls_in_swapped_order_and_other_steps_or_tensors_are_told_by_a_vote(ranks):
    for text in ranks(3).run(swap):
        assert text.startswith("step 4: the gradient of 0.weight and 1 more: rank 1 differs from the 2 others")
    ranks(3).run(drift)
    for every in (0, True, 2.0):
        with pytest.raises(ValueError, match="every is"):
            ReplicaVotes(every=every)


@settings(max_examples=100, deadline=None)
@given(some.integers(1, 40), some.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int8]), some.data())
def test_one_flipped_bit_always_changes_the_sum(numel, dtype, data):
    offset = data.draw(some.integers(0, 3))
    tensor = torch.randint(-100, 100, (numel + offset,)).to(dtype)[offset:]
    before = bit_sum(tensor)
    bits = 8 * tensor.element_size()
    flip(tensor, data.draw(some.integers(0, numel - 1)), data.draw(some.integers(0, bits - 1)))
    assert bit_sum(tensor) != before

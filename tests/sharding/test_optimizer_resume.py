"""ShardedOptimizer's states: a run resumes bit for bit, and a full state loads at any number of ranks."""

import copy

import pytest
import torch
import torch.distributed as dist
from optimizer_net import Net, adam, run_steps, same, weights
from torch import nn

from distlab.sharding import ShardedOptimizer
from distlab.sharding.zero.scatter_in_backward import owners_of


def resume(stage, split):
    """Train 4 steps; or 2, save, build anew, load, and 2 more."""

    def build(seed):
        model = Net(seed)
        optimizer = ShardedOptimizer(model, adam, stage=stage, split=split, bucket_bytes=1_000)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1, 0.5)
        return model, optimizer, schedule

    def steps(numbers, model, optimizer, schedule):
        for number in numbers:
            run_steps(model, optimizer, [number])
            schedule.step()

    straight = build(0)
    steps(range(4), *straight)
    first = build(0)
    steps(range(2), *first)
    saved = [part.state_dict() for part in first]
    full = first[1].full_state_dict()
    again = build(5)
    for part, state in zip(again, saved, strict=True):
        part.load_state_dict(state)
    steps(range(2, 4), *again)
    for _, optimizer, _ in (straight, first, again):
        optimizer.close()
    rates = [one[1].param_groups[0]["lr"] for one in (straight, again)]
    return weights(straight[0]), weights(again[0]), rates, (saved[0], full)


def test_a_run_resumes_bit_for_bit(ranks):
    for stage, split in ((1, "elements"), (2, "elements"), (2, "tensors")):
        for straight, again, rates, _ in ranks(2).run(resume, stage, split):
            assert same(straight, again), (stage, split)
            assert rates == [1e-2 / 16] * 2


def carry_over(model_state, full, split, bucket_bytes):
    """Load a full state here, return it again, and train on."""
    model = Net(7)
    model.load_state_dict(model_state)
    optimizer = ShardedOptimizer(model, adam, stage=2, split=split, bucket_bytes=bucket_bytes)
    optimizer.load_full_state_dict(full)
    again = optimizer.full_state_dict()
    for_one = optimizer.full_state_dict(to_rank=0)
    assert (for_one is None) == (dist.get_rank() != 0)
    x = torch.ones(4, 13)
    model(x).square().mean().backward()
    optimizer.synchronize()
    optimizer.step()
    optimizer.close()
    return again, weights(model)


def test_a_full_state_loads_at_any_number_of_ranks(ranks):
    _, _, _, (model_state, full) = ranks(2).run(resume, 1, "elements")[0]
    model = Net()
    model.load_state_dict(model_state)
    optimizer = adam([p for p in model.parameters() if p.requires_grad])
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    optimizer.load_state_dict(
        {"state": {i: copy.deepcopy(full["state"][name]) for i, name in enumerate(names)},
         "param_groups": [full["param_groups"][0] | {"params": list(range(len(names)))}]}
    )  # fmt: skip
    model(torch.ones(4, 13)).square().mean().backward()
    optimizer.step()
    for world_size, split, bucket_bytes in ((1, "elements", 10**6), (3, "elements", 500), (4, "tensors", 2_000)):
        results = ranks(world_size).run(carry_over, model_state, full, split, bucket_bytes)
        for again, final in results:
            assert all((final[name] - p).abs().max() < 1e-6 for name, p in model.named_parameters())
            assert again["state"].keys() == full["state"].keys()
            for name, entry in full["state"].items():
                assert all(torch.equal(value, again["state"][name][key]) for key, value in entry.items()), name
            assert sorted(again["param_groups"][0]["params"]) == sorted(names)


def more_ranks_than_elements():
    model = nn.Linear(1, 1, bias=False)
    seen = []

    def make(pieces):
        seen.extend(piece.origin if hasattr(piece, "origin") else None for piece in pieces)
        return adam(pieces)

    optimizer = ShardedOptimizer(model, make, stage=2)
    (model(torch.full((1, 1), float(dist.get_rank()))) * 2).sum().backward()
    optimizer.synchronize()
    norm = optimizer.clip_gradients_(1e9)
    optimizer.step()
    optimizer.close()
    return model.weight.item(), norm.item(), seen


def test_a_rank_may_own_nothing(ranks):
    results = ranks(3).run(more_ranks_than_elements)
    assert len({value for value, _, _ in results}) == 1
    assert all(norm == pytest.approx(2.0) for _, norm, _ in results)  # the mean of 0, 2 and 4
    assert results[0][2] == [("weight", (1, 1))]
    assert results[1][2] == [("weight", (1, 1))], "groups are made of whole parameters on every rank"


def start_equal():
    model = Net(dist.get_rank())
    optimizer = ShardedOptimizer(model, adam)
    optimizer.close()
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_the_first_rank_gives_its_weights_and_buffers(ranks):
    first = Net(0).state_dict()
    assert all(same(first, state) for state in ranks(2).run(start_equal))


def test_owners_are_even():
    load = [0, 0, 0]
    owners = owners_of([7, 1, 5, 5, 1, 2, 3], load)
    assert sorted(load) == [8, 8, 8]
    assert len(owners) == 7


def save_and_cut_anew(directory, num_ranks, split, stage, bucket_bytes):
    """Save this rank's shard; or take up the shards of other ranks: return the whole state."""
    model = Net()
    optimizer = ShardedOptimizer(model, adam, stage=stage, split=split, bucket_bytes=bucket_bytes)
    if num_ranks is None:
        run_steps(model, optimizer, range(2))
        torch.save(optimizer.state_dict(), directory / f"shard {dist.get_rank()}")
    else:
        states = [torch.load(directory / f"shard {rank}", weights_only=True) for rank in range(num_ranks)]
        optimizer.check_shards(states)
        with pytest.raises(ValueError, match=r"the state's number of ranks is 3, expected"):
            optimizer.load_state_dict(states[0])
        with pytest.raises(ValueError, match="elements of .* were not given; pass the saved shards of all ranks"):
            optimizer.check_shards(states[:1])
        optimizer.load_shards(states)
    full = optimizer.full_state_dict()
    optimizer.close()
    return full


def test_shards_of_any_number_of_ranks_are_cut_anew(ranks, tmp_path):
    saved = ranks(3).run(save_and_cut_anew, tmp_path, None, "elements", 1, 1_000)[0]
    assert all(entry["step"] == 2 for name, entry in saved["state"].items())
    for world_size, split, stage in ((1, "elements", 2), (2, "tensors", 1), (4, "elements", 2)):
        for full in ranks(world_size).run(save_and_cut_anew, tmp_path, 3, split, stage, 700):
            assert full["state"].keys() == saved["state"].keys()
            for name, entry in saved["state"].items():
                assert all(torch.equal(value, full["state"][name][key]) for key, value in entry.items()), name

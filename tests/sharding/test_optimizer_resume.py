"""ShardedOptimizer's states: a run resumes bit for bit, and a full state loads at any number of ranks."""

import pytest
import torch
import torch.distributed as dist
from optimizer_net import Net, adam, run_steps, same
from torch import nn

from distlab.sharding import ShardedOptimizer


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


def resumed(stage):
    """Save after two steps, go on; then go on from what was saved in a new optimizer of a model that is elsewhere."""
    model = Net()
    optimizer = ShardedOptimizer(model, adam, stage=stage, split="tensors", bucket_bytes=700)
    run_steps(model, optimizer, range(2))
    state, start = optimizer.state_dict(), {name: one.clone() for name, one in model.state_dict().items()}
    run_steps(model, optimizer, range(2, 4))
    other = Net(seed=5)
    again = ShardedOptimizer(other, adam, stage=stage, split="tensors", bucket_bytes=700)
    other.load_state_dict(start)
    again.load_state_dict(state)
    run_steps(other, again, range(2, 4))
    return same(model.state_dict(), other.state_dict()), same(start, model.state_dict())


@pytest.mark.parametrize("stage", [1, 2])
def test_whole_tensors_go_on_bit_for_bit(ranks, stage):
    assert ranks(3).run(resumed, stage) == [(True, False)] * 3

"""A sharded model's state, whole or in shards, means the same on any number of ranks, and refuses what it is not."""

import pytest
import torch
import torch.distributed as dist

from distlab.comm import RankError, Ranks
from distlab.models import GPT, GPTConfig
from distlab.rng import generator
from distlab.sharding import (
    FullyShard,
    full_optimizer_state,
    full_state_dict,
    load_full_optimizer_state,
    load_full_state_dict,
    load_sharded_state_dict,
    sharded_state_dict,
)

CONFIG = GPTConfig(vocab_size=31, context=8, num_layers=2, num_heads=2, hidden_size=12)
OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


def awkward(seed=0, hidden_size=12):
    """Tied, partly frozen, of odd sizes, with buffers of which one is saved."""
    config = GPTConfig(vocab_size=31, context=8, num_layers=2, num_heads=2, hidden_size=hidden_size)
    model = GPT(config, generator(seed, 0, "weights"))
    model.blocks[0].feed_forward.widen.bias.requires_grad_(False)
    model.blocks[1].register_buffer("seen", torch.arange(3.0) + seed)
    model.register_buffer("scratch", torch.ones(2), persistent=False)
    return model


def sharded(seed=0, *, units=None, dtype=torch.float32, optimizer="adamw", **options):
    model = FullyShard(awkward(seed).to(dtype), units=units, **options)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, OPTIMIZERS[optimizer](trained)


def train(model, optimizer, steps):
    for step in steps:
        tokens = torch.randint(31, (3, 8), generator=generator(step, dist.get_rank(), "data"))
        GPT.loss(model(tokens), tokens).backward()
        model.synchronize()
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()


def same(one, other):
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def whole(model, optimizer):
    state = full_optimizer_state(model, optimizer)
    groups = [{**group, "params": sorted(group["params"])} for group in state["param_groups"]]
    return full_state_dict(model), state["state"], groups


def save(directory, optimizer_name, units=None):
    """Train; save in shards and whole; train on, for what a resumed run must do."""
    model, optimizer = sharded(optimizer=optimizer_name, units=units)
    train(model, optimizer, range(2))
    dist.barrier()
    torch.save(sharded_state_dict(model, optimizer), directory / f"{dist.get_rank()}-of-{dist.get_world_size()}")
    before = whole(model, optimizer)
    train(model, optimizer, range(2, 4))
    return before, whole(model, optimizer)


def read(directory, num_ranks, ranks=None):
    ranks = range(num_ranks) if ranks is None else ranks
    return [torch.load(directory / f"{rank}-of-{num_ranks}", weights_only=True) for rank in ranks]


def load(directory, num_ranks, optimizer_name, units=None, *, own=False):
    """Load into another model, save again for the next number of ranks; return the whole, then train on."""
    model, optimizer = sharded(seed=9, optimizer=optimizer_name, units=units)
    rank = dist.get_rank()
    load_sharded_state_dict(model, read(directory, num_ranks, [rank] if own else None), optimizer)
    torch.save(sharded_state_dict(model, optimizer), directory / f"{rank}-of-{dist.get_world_size()}")
    before = whole(model, optimizer)
    train(model, optimizer, range(2, 4))
    return before, whole(model, optimizer)


@pytest.mark.equality("checkpoint")
@pytest.mark.soak_where(optimizer=["sgd"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_four_ranks_two_three_and_one_hold_the_same_and_go_on(ranks, tmp_path, optimizer):
    """Saved by 4 ranks, loaded by 2 in other units, saved by those, loaded by 3, then by 1, then by 1 again."""
    saved, later = ranks(4).run(save, tmp_path, optimizer)[0]
    assert saved[0].keys() == awkward().state_dict().keys()
    assert same(saved[0]["blocks.1.seen"], torch.arange(3.0))
    previous = 4
    for world_size, units in ((2, ["blocks.1"]), (3, None), (1, []), (1, None)):
        results = ranks(world_size).run(load, tmp_path, previous, optimizer, units)
        for before, _ in results:
            assert same(before, saved), world_size
        previous = world_size
    resumed = ranks(4).run(load, tmp_path, 1, optimizer)
    assert all(same(after, later) for _, after in resumed)  # the same data on as many ranks: the same bits


@pytest.mark.soak_where(world_size=(1, 2))
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_with_its_own_shard_alone_a_run_goes_on_bit_for_bit(ranks, tmp_path, world_size):
    expected = ranks(world_size).run(save, tmp_path, "adamw")
    resumed = ranks(world_size).run(lambda: load(tmp_path, world_size, "adamw", own=True))
    assert same(resumed, expected)


def test_saving_twice_gives_the_same_bytes(ranks):
    def twice():
        model, optimizer = sharded()
        train(model, optimizer, range(1))
        return sharded_state_dict(model, optimizer), sharded_state_dict(model, optimizer)

    assert all(same(*pair) for pair in ranks(2).run(twice))


def full_both_ways(path):
    """Whole states travel through one file."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    model, optimizer = sharded()
    train(model, optimizer, range(2))
    everywhere, kept = full_state_dict(model), full_optimizer_state(model, optimizer)
    to_last = full_state_dict(model, to_rank=num_ranks - 1)
    assert to_last == {} or rank == num_ranks - 1
    assert rank != num_ranks - 1 or same(to_last, everywhere)
    if rank == 0:
        torch.save((everywhere, kept), path)
    plain = awkward(5)
    plain.load_state_dict(everywhere)  # it is what an unsharded module takes
    answers = []
    for units in (["blocks.0"], []):
        other, its_optimizer = sharded(9, units=units)
        load_full_state_dict(other, everywhere)
        load_full_optimizer_state(other, its_optimizer, kept)
        assert same(full_state_dict(other), everywhere)
        assert same(full_optimizer_state(other, its_optimizer)["state"], kept["state"])
        tokens = torch.randint(31, (2, 8), generator=generator(7, 0, "probe"))
        with torch.no_grad():
            answers.append(torch.equal(other(tokens), plain(tokens)))
    return answers


@pytest.mark.equality("checkpoint")
def test_the_whole_state_is_the_modules_own_and_comes_back(ranks, tmp_path):
    for world_size in (1, 2, 3, 4):
        assert ranks(world_size).run(full_both_ways, tmp_path / "whole") == [[True, True]] * world_size

    def load_whole():
        everywhere, kept = torch.load(tmp_path / "whole", weights_only=True)
        model, optimizer = sharded(9)
        load_full_state_dict(model, everywhere)
        load_full_optimizer_state(model, optimizer, kept)
        return same(full_state_dict(model), everywhere), same(
            full_optimizer_state(model, optimizer)["state"], kept["state"]
        )

    assert ranks(2).run(load_whole) == [(True, True)] * 2  # saved by 4


def refusals():
    """Each bad state, on one rank or on all: the words of the error, and proof that nothing has changed."""
    rank = dist.get_rank()
    model, optimizer = sharded()
    train(model, optimizer, range(1))
    mine = sharded_state_dict(model, optimizer)
    states = [None, None]
    dist.all_gather_object(states, mine)
    train(model, optimizer, range(1, 2))
    later = [None, None]
    dist.all_gather_object(later, sharded_state_dict(model, optimizer))
    wide = FullyShard(awkward(hidden_size=16))
    wide_optimizer = torch.optim.AdamW(p for p in wide.parameters() if p.requires_grad)
    half, half_optimizer = sharded(dtype=torch.bfloat16)
    unlike = torch.optim.AdamW([{"params": [p]} for p in model.parameters() if p.requires_grad])
    full, kept = full_state_dict(model), full_optimizer_state(model, optimizer)
    two = {**full, "output.weight": full["output.weight"] + 1}
    more = {**full, "head.weight": torch.zeros(2)}
    foreign = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))])
    cases = {
        "missing": lambda: load_sharded_state_dict(wide_units, states[:1]),
        "two saves": lambda: load_sharded_state_dict(model, [states[0], later[1]], optimizer),
        "another model": lambda: load_sharded_state_dict(wide, states),
        "another precision": lambda: load_sharded_state_dict(half, states, half_optimizer),
        "other groups": lambda: load_sharded_state_dict(model, states, unlike),
        "no optimizer saved": lambda: load_sharded_state_dict(
            model, [{**one, "groups": None, "digests": []} for one in states], optimizer
        ),
        "no shard": lambda: load_sharded_state_dict(model, [full]),
        "on one rank": lambda: load_sharded_state_dict(model, states if rank == 0 else [], optimizer),
        "foreign optimizer": lambda: sharded_state_dict(model, foreign),
        "full: another model": lambda: load_full_state_dict(model, more),
        "full: another shape": lambda: load_full_state_dict(wide, full),
        "full: another precision": lambda: load_full_state_dict(half, full),
        "full: two values": lambda: load_full_state_dict(model, two),
        "full: none": lambda: load_full_state_dict(model, None),
        "full: no such rank": lambda: full_state_dict(model, to_rank=2),
        "full: other ranks": lambda: full_state_dict(model, to_rank=rank),
        "full: on one rank": lambda: load_full_state_dict(model, full if rank == 1 else more),
        "full optimizer": lambda: load_full_optimizer_state(wide, wide_optimizer, kept),
        "full optimizer: none": lambda: load_full_optimizer_state(model, optimizer, full),
    }
    wide_units, _ = sharded(units=[])
    before = whole(model, optimizer)
    texts = {}
    for name, call in cases.items():
        with pytest.raises(ValueError) as caught:  # noqa: PT011 (looked at below)
            call()
        texts[name] = str(caught.value)
    assert same(whole(model, optimizer), before)
    return texts


WORDS = {
    "missing": ["elements of token_embedding.weight were not given; pass the saved shards of all ranks"],
    "two saves": ["shard 0 of 2 and shard 1 of 2 are from different saves"],
    "another model": ["token_embedding.weight is [31, 16] in the model and [31, 12] in the saved state"],
    "another precision": [
        "is bfloat16 in the model and float32 in the saved state; build the model in the type of the save"
    ],
    "other groups": ["the optimizer's groups have"],
    "no optimizer saved": ["no optimizer was saved with these"],
    "no shard": ["not a saved shard", "load_full_state_dict"],
    "on one rank": ["rank 1: no saved shard was given"],
    "foreign optimizer": ["a parameter [3] that is not a shard of the model"],
    "full: another model": ["head.weight is a tensor in the state and nothing in the model"],
    "full: another shape": ["token_embedding.weight is [31, 16] in the model and [31, 12] in the saved state"],
    "full: another precision": ["is bfloat16 in the model and float32 in the saved state"],
    "full: two values": ["output.weight and token_embedding.weight are one parameter in the model"],
    "full: none": ["the state is NoneType; pass a module's state_dict() on every rank"],
    "full: no such rank": ["rank 2 is none of the group's 0..1"],
    "full: other ranks": ["ranks disagree on the call of full_state_dict"],
    "full: on one rank": ["rank 0: head.weight is a tensor"],
    "full optimizer": ["exp_avg of token_embedding.weight is [31, 12] in the saved state and [31, 16] here"],
    "full optimizer: none": ["not an optimizer's state"],
}


def test_what_does_not_fit_is_refused_on_every_rank_and_changes_nothing(ranks):
    results = ranks(2).run(refusals)
    assert results[0] == results[1]  # the same words on every rank
    assert results[0].keys() == WORDS.keys()
    for name, words in WORDS.items():
        assert all(word in results[0][name] for word in words), (name, results[0][name])


def test_a_full_state_asked_for_on_one_rank_ends_in_words_and_not_in_a_hang():
    def only_first():
        model, _ = sharded()
        if dist.get_rank() == 0:
            full_state_dict(model, to_rank=0)

    with Ranks(2, timeout_s=30) as two, pytest.raises(RankError) as caught:
        two.run(only_first)
    assert "rank 0 waits in all_gather" in str(caught.value)
    assert "rank 1 has returned without it" in str(caught.value)
    assert "in full_state_dict" in str(caught.value)

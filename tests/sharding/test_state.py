"""A sharded model's state, whole or in shards, means the same on any number of ranks, and refuses what it is not."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from equal import joined, square
from killing import same_bits as same
from refused import message

from distlab.blocks.models import GPT, GPTConfig
from distlab.rng import generator
from distlab.sharding import FullyShard, ShardedState, full_state_dict, load_full_state_dict

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
    return model, OPTIMIZERS[optimizer]([parameter for parameter in model.parameters() if parameter.requires_grad])


def train(model, optimizer, steps):
    for step in steps:
        tokens = torch.randint(31, (3, 8), generator=generator(step, dist.get_rank(), "data"))
        GPT.loss(model(tokens), tokens).backward()
        model.synchronize()
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()


def sets(hybrid):
    """Return the options for two sets of two shards on 4 ranks."""
    return dict(zip(("group", "replicas"), square(), strict=True)) if hybrid else {}


def whole(model, optimizer):
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return full_state_dict(model), joined(ShardedState(model, optimizer))["state"], options


def save(directory, optimizer_name, units=None, *, hybrid=False):
    """Train; save in shards and whole; train on, for what a resumed run must do."""
    model, optimizer = sharded(optimizer=optimizer_name, units=units, **sets(hybrid))
    train(model, optimizer, range(2))
    dist.barrier()
    torch.save(
        ShardedState(model, optimizer).shard_state(), directory / f"{dist.get_rank()}-of-{dist.get_world_size()}"
    )
    before = whole(model, optimizer)
    train(model, optimizer, range(2, 4))
    return before, whole(model, optimizer)


def read(directory, num_ranks, ranks=None):
    ranks = range(num_ranks) if ranks is None else ranks
    return [torch.load(directory / f"{rank}-of-{num_ranks}", weights_only=True) for rank in ranks]


def load(directory, num_ranks, optimizer_name, units=None, *, own=False, ranks=None, hybrid=False):
    """Load into a different model, save again for the next number of ranks; return the whole, then train on."""
    model, optimizer = sharded(seed=9, optimizer=optimizer_name, units=units, **sets(hybrid))
    rank = dist.get_rank()
    ShardedState(model, optimizer).load_shards(read(directory, num_ranks, [rank] if own else ranks))
    if ranks is None:
        torch.save(ShardedState(model, optimizer).shard_state(), directory / f"{rank}-of-{dist.get_world_size()}")
    before = whole(model, optimizer)
    train(model, optimizer, range(2, 4))
    return before, whole(model, optimizer)


@pytest.mark.equality("checkpoint")
@pytest.mark.soak_where(optimizer=["sgd"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_four_ranks_two_three_and_one_hold_the_same_and_go_on(ranks, tmp_path, optimizer):
    """Saved by 4 ranks, loaded by 2 in other units, saved by those, loaded by 3, then by 1; by 4 again."""
    saved, later = ranks(4).run(save, tmp_path, optimizer)[0]
    assert saved[0].keys() == awkward().state_dict().keys()
    assert same(saved[0]["blocks.1.seen"], torch.arange(3.0))
    previous = 4
    for world_size, units in ((2, ["blocks.1"]), (3, None), (1, [])):
        for before, _ in ranks(world_size).run(load, tmp_path, previous, optimizer, units):
            assert same(before, saved), world_size
        previous = world_size
    resumed = ranks(4).run(load, tmp_path, 1, optimizer)
    assert all(same(after, later) for _, after in resumed)  # the same data on as many ranks: the same bits


def test_either_set_of_shards_of_hybrid_sharding_loads_anywhere_and_the_own_shard_is_enough(ranks, tmp_path):
    saved, later = ranks(4).run(lambda: save(tmp_path, "adamw", hybrid=True))[0]
    ways = [{"ranks": [2, 3], "hybrid": True}, {"own": True, "hybrid": True}]
    for found in ranks(4).run(lambda: [load(tmp_path, 4, "adamw", **how) for how in ways]):
        for before, after in found:
            assert same(before, saved)
            assert same(after, later)
    for before, _ in ranks(2).run(lambda: load(tmp_path, 4, "adamw", ranks=[2, 3])):
        assert same(before, saved)


def full_both_ways(path):
    """The whole state travels through one file."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    model, optimizer = sharded()
    train(model, optimizer, range(2))
    part = ShardedState(model, optimizer)
    assert same(part.shard_state(), part.shard_state())
    everywhere, to_last = full_state_dict(model), full_state_dict(model, to_rank=num_ranks - 1)
    assert same(to_last, everywhere if rank == num_ranks - 1 else {})
    if rank == 0:
        torch.save(everywhere, path)
    plain = awkward(5)
    plain.load_state_dict(everywhere)  # it is what an unsharded module takes
    for units in (["blocks.0"], []):
        other = load_whole(everywhere, units=units)
        tokens = torch.randint(31, (2, 8), generator=generator(7, 0, "probe"))
        with torch.no_grad():
            assert torch.equal(other(tokens), plain(tokens))


def load_whole(everywhere, **options):
    """Load a whole state into a different model; it comes back."""
    model, _ = sharded(9, **options)
    load_full_state_dict(model, everywhere)
    assert same(full_state_dict(model), everywhere)
    return model


@pytest.mark.equality("checkpoint")
def test_the_whole_state_is_the_modules_own_and_comes_back(ranks, tmp_path):
    ranks(3).run(full_both_ways, tmp_path / "whole")
    for world_size in (1, 2):
        ranks(world_size).run(lambda: load_whole(torch.load(tmp_path / "whole", weights_only=True)) and None)


class Counts(torch.nn.Linear):
    """Keeps a scale that is no buffer, as quantised layers do."""

    def get_extra_state(self):
        return {"scale": 1.0}


def prepared():
    """Return a model with its states now and earlier, and models and optimizers that these do not fit."""
    s = SimpleNamespace(rank=dist.get_rank())
    s.model, s.optimizer = sharded()
    s.states = [None, None]
    train(s.model, s.optimizer, [0])
    dist.all_gather_object(s.states, ShardedState(s.model, s.optimizer).shard_state())
    s.full = full_state_dict(s.model)
    s.wide = FullyShard(awkward(hidden_size=16))
    s.half, s.half_optimizer = sharded(dtype=torch.bfloat16)
    s.one_unit, _ = sharded(units=[])
    s.by_shard = torch.optim.AdamW([{"params": [p]} for p in s.model.parameters() if p.requires_grad])
    s.foreign = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))])
    s.more = {**s.full, "head.weight": torch.zeros(2)}
    s.two = {**s.full, "output.weight": s.full["output.weight"] + 1}
    s.no_groups = [{**one, "groups": None} for one in s.states]
    s.counts = FullyShard(torch.nn.Sequential(torch.nn.Linear(2, 3), Counts(3, 3)))
    return s


SHAPES = "token_embedding.weight is [31, 16] in the model and [31, 12] in the saved state"
KINDS = "is bfloat16 in the model and float32 in the saved state"
EXTRA = "1 has an extra state (get_extra_state), which shards do not save"
WHOLE_NOW = "is not in a shard now; save and load outside of summon() and of forward"
REFUSED = [
    ("were not given; pass the saved shards", lambda s: ShardedState(s.one_unit).load_shards(s.states[:1])),
    (SHAPES, lambda s: ShardedState(s.wide).load_shards(s.states)),
    (KINDS, lambda s: ShardedState(s.half, s.half_optimizer).load_shards(s.states)),
    ("the optimizer's groups have", lambda s: ShardedState(s.model, s.by_shard).load_shards(s.states)),
    ("no optimizer was saved with these", lambda s: ShardedState(s.model, s.optimizer).load_shards(s.no_groups)),
    ("load_full_state_dict", lambda s: ShardedState(s.model).load_shards([s.full])),
    ("no saved shard was given", lambda s: ShardedState(s.model).check_shards([])),
    ("a parameter [3] that is not a shard of the model", lambda s: ShardedState(s.model, s.foreign).shard_state()),
    ("head.weight is a tensor in the state and nothing", lambda s: load_full_state_dict(s.model, s.more)),
    (SHAPES, lambda s: load_full_state_dict(s.wide, s.full)),
    (KINDS, lambda s: load_full_state_dict(s.half, s.full)),
    ("output.weight and token_embedding.weight are one", lambda s: load_full_state_dict(s.model, s.two)),
    ("the state is NoneType; pass a module's", lambda s: load_full_state_dict(s.model, None)),
    ("an optimizer and its state together", lambda s: load_full_state_dict(s.model, s.full, None, {"state": {}})),
    ("is not an optimizer's by names", lambda s: load_full_state_dict(s.model, s.full, s.optimizer, {"state": {}})),
    ("rank 2 is none of the group's 0..1", lambda s: full_state_dict(s.model, to_rank=2)),
    ("ranks disagree on the call of full_state_dict", lambda s: full_state_dict(s.model, to_rank=s.rank)),
    ("rank 0: head.weight is a tensor", lambda s: load_full_state_dict(s.model, s.full if s.rank else s.more)),
    (EXTRA, lambda s: full_state_dict(s.counts)),
    (EXTRA, lambda s: ShardedState(s.counts).shard_state()),
    (EXTRA, lambda s: load_full_state_dict(s.counts, {})),
    (WHOLE_NOW, lambda s: inside_summon(s.model)),
]


def inside_summon(model):
    with model.summon():
        full_state_dict(model)


def refusals():
    s = prepared()
    before = whole(s.model, s.optimizer)
    texts = [message(lambda call=call: call(s)) for _, call in REFUSED]
    assert same(whole(s.model, s.optimizer), before)
    return texts


def test_what_does_not_fit_is_refused_on_every_rank_and_changes_nothing(ranks):
    for texts in ranks(2).run(refusals):
        for text, (words, _) in zip(texts, REFUSED, strict=True):
            assert text.startswith("ValueError: ")
            assert words in text, (words, text)

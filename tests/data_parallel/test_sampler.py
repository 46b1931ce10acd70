"""Which samples a rank sees: none lost, none twice, in any number of ranks, and on from any position."""

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from torch.utils.data import DataLoader, DistributedSampler as TorchSampler

from distlab.data_parallel import DistributedBatchSampler, DistributedSampler, loss_weight

sizes = st.tuples(st.integers(1, 6), st.integers(0, 40)).map(lambda pair: (pair[0], pair[0] + pair[1]))
tails = st.sampled_from(["drop", "pad", "keep"])


def samplers(num_samples, world_size, state=None, **options):
    made = [DistributedSampler(range(num_samples), rank=r, world_size=world_size, **options) for r in range(world_size)]
    for sampler in made:
        if state is not None:
            sampler.load_state_dict(state)
    return made


def dealt(made):
    """All ranks' samples in the order in which the ranks take turns."""
    shares = [list(sampler) for sampler in made]
    return [share[turn] for turn in range(max(map(len, shares))) for share in shares if turn < len(share)]


def repeated(made, epoch):
    for sampler in made:
        sampler.set_epoch(epoch)  # asked for, an epoch is repeated
    return made


def check_batches(batched):
    """Every rank makes as many batches, each sample is in one, and the weights of a step add up."""
    batches = [list(sampler) for sampler in batched]
    expected = [index for one in batched for index in repeated([one.sampler], one.sampler.epoch)[0]]
    assert {len(own) for own in batches} == {len(sampler) for sampler in batched}
    assert [index for own in batches for batch in own for index in batch] == expected
    assert all(len(batch) == batched[0].batch_size for own in batches for batch in own[:-1])
    for step in range(len(batched[0])):
        together, total = [len(own[step]) for own in batches], batched[0].global_size(step)
        assert all(1 <= size <= batched[0].batch_size + 1 for size in together)
        assert sum(together) == total
        assert math.isclose(sum(loss_weight(size, total, len(batched)) for size in together), len(batched))


@settings(max_examples=100, deadline=None)
@given(sizes, tails, st.integers(0, 3), st.booleans(), st.integers(1, 7))
def test_no_sample_is_lost_or_seen_twice(size, tail, epoch, shuffle, batch_size):
    world_size, num_samples = size
    made = samplers(num_samples, world_size, tail=tail, shuffle=shuffle)
    repeated(made, epoch)
    lengths = [len(sampler) for sampler in made]
    order, rest = made[0].order().tolist(), num_samples % world_size
    seen = dealt(made)
    assert sorted(order) == list(range(num_samples))
    assert sum(lengths) == made[0].num_handed_out == len(seen)
    if tail == "keep":
        assert seen == order
        assert lengths == sorted(lengths, reverse=True)
    elif tail == "drop":
        assert seen == order[: num_samples - rest]
    else:
        assert seen == order + order[: -num_samples % world_size]
    assert lengths[0] - lengths[-1] <= (tail == "keep")
    if not shuffle and tail != "keep":
        how = {"shuffle": False, "drop_last": tail == "drop"}
        theirs = [TorchSampler(range(num_samples), world_size, rank, **how) for rank in range(world_size)]
        assert [list(sampler) for sampler in theirs] == [list(sampler) for sampler in repeated(made, epoch)]
    check_batches([DistributedBatchSampler(sampler, batch_size) for sampler in repeated(made, epoch)])


@settings(max_examples=100, deadline=None)
@given(sizes, tails, st.data())
def test_resumed_with_any_number_of_ranks_nothing_is_lost_or_seen_twice(size, tail, data):
    world_size, num_samples = size
    seed, epoch = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 2))
    state, seen = None, []
    for _ in range(3):  # stopped twice, each time with a different number of ranks
        # A loop need not know whether it was resumed: it sets the epoch all the same.
        made = repeated(samplers(num_samples, world_size, state, seed=seed, tail=tail), epoch)
        left = len(made[-1])
        steps = data.draw(st.integers(0, max(0, left - 1)))
        iterators = [iter(sampler) for sampler in made]
        seen += [next(iterator) for _ in range(steps) for iterator in iterators]
        states = [sampler.state_dict() for sampler in made]
        assert all(other == states[0] for other in states)
        assert states[0]["position"] == len(seen)
        state, world_size = states[0], data.draw(st.integers(1, min(6, num_samples)))
    last = samplers(num_samples, world_size, state, seed=seed, tail=tail)
    order = last[0].order().tolist()
    seen += dealt(last)
    assert seen[:num_samples] == order[: len(seen)]  # the order that nobody interrupted
    missing = num_samples - len(seen)
    assert missing == 0 if tail == "keep" else missing < len(last)


def test_an_epoch_has_its_own_order_made_once_and_a_forgotten_set_epoch_is_an_error(monkeypatch):
    made, real = [], DistributedSampler.order
    monkeypatch.setattr(DistributedSampler, "order", lambda sampler: made.append(sampler.epoch) or real(sampler))
    first, again, other = (DistributedSampler(range(50), rank=0, world_size=1, seed=s) for s in (3, 3, 4))
    orders = []
    for epoch in range(4):
        orders.append([list(sampler) for sampler in repeated([first, again, other], epoch)])
        assert orders[-1][0] == orders[-1][1] != orders[-1][2]
    assert len({tuple(order) for order, _, _ in orders}) == 4
    assert made == [epoch for epoch in range(4) for _ in range(3)], "one permutation an epoch"
    theirs = TorchSampler(range(20), 2, 0)
    assert list(theirs) == list(theirs)
    ours = DistributedSampler(range(20), rank=1, world_size=2)
    first = list(ours)
    with pytest.raises(RuntimeError, match=r"rank 1: epoch 0 is begun a second time.*set_epoch\(1\)"):
        list(ours)
    ours.set_epoch(0)
    assert list(ours) == first  # asked for, it is repeated
    ours.set_epoch(1)
    assert list(ours) != first
    ordered = DistributedSampler(range(9), rank=0, world_size=2, shuffle=False, tail="keep")
    assert list(ordered) == list(ordered) == [0, 2, 4, 6, 8]  # nothing to forget


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_data_loader_resumes_where_training_stood_and_begins_each_epoch_once(num_workers):
    data = torch.arange(23)

    def loader(sampler, **options):
        return DataLoader(data, batch_sampler=DistributedBatchSampler(sampler, 2), num_workers=num_workers, **options)

    def fresh():
        sampler = DistributedSampler(data, rank=1, world_size=3, tail="keep", seed=5)
        sampler.set_epoch(2)
        return sampler

    sampler, epochs = fresh(), []
    steady = loader(sampler, persistent_workers=num_workers > 0)
    for epoch in (1, 2):
        sampler.set_epoch(epoch)
        epochs.append([batch.tolist() for batch in steady])
    whole = epochs[1]
    assert len(steady) == len(whole) == 4  # 8 samples on this rank, 7 on the last
    assert sum(whole, []) == list(fresh())
    assert epochs[0] != whole
    stopped = fresh()
    for step, batch in enumerate(loader(stopped), 1):
        assert batch.tolist() == whole[step - 1]
        if step == 2:
            state = stopped.state_dict(step * 2)  # a worker may have fetched more by now: the number is said
            break
    assert state["position"] == 12
    resumed = DistributedSampler(data, rank=1, world_size=3, tail="keep", seed=5)
    resumed.load_state_dict(state)
    resumed.set_epoch(2)
    assert [batch.tolist() for batch in loader(resumed)] == whole[2:]
    assert resumed.state_dict()["position"] == 23


def test_a_finished_epoch_stays_finished_until_the_next():
    made = samplers(11, 2, tail="keep")
    assert len(dealt(made)) == 11
    states = [sampler.state_dict() for sampler in made]
    assert states[0] == states[1]
    resumed = samplers(11, 3, states[0], tail="keep")
    assert dealt([resumed[0]]) == []
    resumed[1].set_epoch(0)
    assert list(DistributedBatchSampler(resumed[1], 2)) == []
    resumed[0].set_epoch(1)
    assert len(list(resumed[0])) == 4


def make(**changes):
    return DistributedSampler(**{"dataset": range(10), "rank": 0, "world_size": 2, **changes})


STATE = {"num_samples": 10, "seed": 0, "shuffle": True, "epoch": 1, "position": 4}


def loaded(**changes):
    sampler = make(tail="keep")
    sampler.load_state_dict({**STATE, **changes})
    return sampler


LEFT = "rank 0: 1 samples are left of epoch 1 for 2 ranks"
BAD = [
    (lambda: make(dataset=range(1)), "1 samples leave some of 2 ranks without one; use fewer ranks or more data"),
    (lambda: make(dataset=10), r"got 10: pass it, or range\(length\)"),
    (lambda: make(rank=2), "rank 2 is not one of 2 ranks"),
    (lambda: make(rank=None), "rank is None and world_size 2; pass both"),
    (lambda: make(tail="wrap"), "tail is 'wrap'; choose one of drop, pad, keep"),
    (lambda: make().set_epoch(-1), "epoch is -1; pass 0 or more"),
    (lambda: make().state_dict(1), "rank 0: num_taken is 1, but 0 samples were handed out"),
    (lambda: make().load_state_dict({}), "has no num_samples, seed, shuffle, epoch, position"),
    (lambda: loaded(num_samples=9), "num_samples 9, this sampler has 10"),
    (lambda: loaded(seed=1), "seed 1, this sampler has 0"),
    (lambda: loaded(shuffle=False), "shuffle False, this sampler has True"),
    (lambda: loaded(position=11), "position 11 cannot be.*0 to 10"),
    (lambda: loaded(epoch=-1), "epoch -1 or position 4 cannot be"),
    (lambda: next(iter(DistributedBatchSampler(loaded(position=9), 2))), LEFT),
    (lambda: DistributedBatchSampler(make(), 0), "batch_size is 0; pass at least 1"),
    (lambda: DistributedBatchSampler(make(), 2).global_size(3), "step is 3; this pass has 3 batches"),
]


def test_what_cannot_be_is_refused():
    for action, words in BAD:
        with pytest.raises(ValueError, match=words):
            action()


@pytest.mark.on_ranks(3)
def test_the_group_gives_the_rank_and_checks_that_all_agree():
    rank = dist.get_rank()
    sampler = DistributedSampler(range(10), tail="keep")
    assert list(sampler) == sampler.order().tolist()[rank::3]
    with pytest.raises(ValueError, match=r"ranks disagree on the sampler's(.|\n)*rank 1 has"):
        DistributedSampler(range(10 + rank))

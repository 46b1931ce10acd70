"""Batch, learning rate and samples are a function of the position, on any number of ranks: nothing is lost."""

from collections import Counter

import pytest
from hypothesis import given, strategies as some

from distlab.blocks.data import SampleOrder, rank_slice
from distlab.elastic import BatchRule, Work
from distlab.large_batch import LearningRateSchedule

RULES = some.sampled_from([BatchRule(6), BatchRule(7), BatchRule(6, 3, "linear"), BatchRule(4, 2, "sqrt")])


@given(RULES, some.integers(10, 40), some.integers(1, 3), some.lists(some.integers(1, 4), min_size=1, max_size=60))
def test_whatever_the_ranks_are_at_each_step_every_sample_is_used_once_an_epoch(rule, num_samples, num_epochs, sizes):
    work, order = Work(rule, num_samples, num_epochs, seed=1, lr=0.1), SampleOrder(num_samples, 1)
    counted, position, number = Counter(), 0, 0
    while position < work.end:
        world_size = min(sizes[number % len(sizes)], work.end - position)
        batch = work.batch_at(position, world_size)
        for rank in range(world_size):
            start, stop = rank_slice(batch, rank, world_size)
            assert stop > start
            counted.update(order.samples(position + start, position + stop).tolist())
        position, number = position + batch, number + 1
    assert counted == dict.fromkeys(range(num_samples), num_epochs)


def test_an_epochs_samples_are_a_permutation_of_their_own():
    order = SampleOrder(11, 3)
    epochs = [order.samples(11 * epoch, 11 * epoch + 11).tolist() for epoch in range(3)]
    assert all(sorted(epoch) == list(range(11)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert order.samples(5, 27).tolist() == [*epochs[0][5:], *epochs[1], *epochs[2][:5]]
    assert order.samples(4, 4).tolist() == []
    assert SampleOrder(11, 4).samples(0, 11).tolist() != epochs[0]


@pytest.mark.parametrize(
    ("rule", "batches", "rates"),
    [
        (BatchRule(12), {1: 12, 2: 12, 3: 12, 5: 12}, {1: 0.5, 2: 0.5, 5: 0.5}),
        (BatchRule(12, 4, "linear"), {1: 3, 2: 6, 4: 12, 8: 24}, {1: 0.125, 2: 0.25, 4: 0.5, 8: 1.0}),
        (BatchRule(12, 4, "sqrt"), {1: 3, 4: 12, 16: 48}, {1: 0.25, 4: 0.5, 16: 1.0}),
    ],
)
def test_the_batch_and_the_rate_follow_the_rule(rule, batches, rates):
    assert {ranks: rule.batch_on(ranks) for ranks in batches} == batches
    assert {ranks: Work(rule, 12, lr=0.5).lr_at(0, ranks) for ranks in rates} == rates


def test_a_schedule_is_counted_in_samples_so_it_ends_with_the_data_on_any_number_of_ranks():
    schedule = LearningRateSchedule(1.0, 20, num_warmup=4, decay="linear")
    work = Work(BatchRule(8, 2, "linear"), num_samples=80, num_epochs=2, lr=schedule)
    for position in (0, 8, 64, 152):
        base = schedule.at(position // 8)
        assert [work.lr_at(position, ranks) for ranks in (1, 2, 4)] == [base / 2, base, base * 2]
    assert Work(BatchRule(8), 80).lr_at(16, 3) is None
    assert Work(BatchRule(8), 80, lr=0.3).lr_at(16, 3) == 0.3


def test_the_last_step_takes_the_rest():
    work = Work(BatchRule(4), 11)
    assert [work.batch_at(position, 2) for position in (0, 4)] == [4, 7]
    assert Work(BatchRule(4), 12).batch_at(8, 2) == 4


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: BatchRule(0), "BatchRule: batch is 0; pass a whole number of at least 1"),
        (lambda: BatchRule(True), "batch is True"),
        (lambda: BatchRule(8, 2.5, "linear"), "world_size is 2.5"),
        (lambda: BatchRule(8, 4), "world_size is 4 and lr 'same'; pass both"),
        (lambda: BatchRule(8, lr="linear"), "world_size is None and lr 'linear'; pass both"),
        (lambda: BatchRule(8, 4, "cubic"), "lr 'cubic'; pass both, with lr='linear' or 'sqrt'"),
        (lambda: BatchRule(10, 4, "sqrt"), "4 ranks cannot share a batch of 10 evenly; pass a multiple of 4"),
        (lambda: BatchRule(2).batch_on(3), "a batch of 2 leaves some of 3 ranks without a sample; start at most 2"),
        (lambda: Work(BatchRule(2), 0), "num_samples is 0"),
        (lambda: Work(BatchRule(2), 10, 0), "num_epochs is 0"),
        (lambda: Work(BatchRule(2), 10, lr=float("nan")), "lr is nan"),
        (lambda: Work(BatchRule(2), 10, lr=-1), "lr is -1"),
        (lambda: Work(BatchRule(2, 2, "sqrt"), 10), "the rule changes the learning rate .sqrt. and lr is None"),
        (lambda: Work(BatchRule(30), 10, 2), "a batch of 30 is more than the run's 20 samples"),
        (
            lambda: Work(BatchRule(4), 12).batch_at(10, 3),
            "2 of the run's 12 samples are left for 3 ranks; start at most 2",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(make, words):
    with pytest.raises(ValueError, match=words) as caught:
        make()
    assert "\n" not in str(caught.value)

"""Runs that start again on as many ranks, on more or on fewer, after faults of every kind; and what they refuse."""

import os
import re
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from elastic_job import MORE, SCHEDULE, notes, plainly, train, used
from killing import same_bits

from distlab.checkpoint import newest, save
from distlab.comm import RankError, recorded
from distlab.elastic import BatchRule, ElasticRun, Saves, Work, run_elastic
from distlab.sharding import FullyShard, ShardedState
from distlab.tensor_parallel import parallelize_module

EVEN = {"num_samples": 96, "num_epochs": 3, "dropout": 0.0, "dtype": "float64"}  # 24 steps of 12 samples


def kill_at(*steps, kind="kill"):
    return [(kind, step, index, 0.0) for index, step in enumerate(steps)]


def restarted(folder, world_size=2, **changes):
    """Train with restarts; return what rank 0 returned, and the warnings of restarts."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        how = lambda folder: train(folder, **changes)  # noqa: E731 (travels by value)
        results = run_elastic(how, world_size, args=(folder,), max_restarts=20, timeout_s=200)
    return results[0], [str(one.message) for one in caught if "starting anew" in str(one.message)]


WHOLE = {}


@pytest.fixture
def whole(ranks, tmp_path_factory):
    """Train without a fault, once for each number of ranks and options; return the final weights and moments."""

    def of(num_ranks, **changes):
        key = (num_ranks, *changes.items())
        if key not in WHOLE:
            WHOLE[key] = ranks(num_ranks).run(lambda: train(tmp_path_factory.mktemp("whole"), **changes))[0][:2]
        return WHOLE[key]

    return of


@pytest.mark.soak_where(optimizer=["adam"])
@pytest.mark.parametrize(("optimizer", "bound"), [("sgd", 1e-10), ("adam", 1e-8)])
def test_on_more_and_fewer_ranks_the_run_that_keeps_its_batch_ends_with_the_same_numbers(
    whole, tmp_path, optimizer, bound
):
    """Adam divides by a gradient's own size: what rounding changed grows, so its bound is a wider one."""
    expected, sizes, faults = whole(4, optimizer=optimizer, **EVEN), [4, 2, 3], kill_at(4, 15)
    final, words = restarted(tmp_path, lambda start: sizes[start], optimizer=optimizer, faults=faults, **EVEN)
    assert len(words) == 2
    assert used(tmp_path) == dict.fromkeys(range(96), 3)
    for name, value in expected[0].items():
        assert (final[0][name] - value).abs().max() <= bound, name
    assert not all(torch.equal(final[0][name], value) for name, value in expected[0].items())


def test_where_the_batch_grows_with_the_ranks_the_rate_follows_and_no_sample_is_lost(tmp_path):
    changes = {"rule": [12, 2, "linear"], "num_samples": 101, "num_epochs": 3, "dropout": 0.0}
    sizes, faults = [1, 4], kill_at(22)
    (_, _, made), words = restarted(tmp_path, lambda start: sizes[start], faults=faults, **changes)
    assert len(words) == 1
    assert used(tmp_path) == dict.fromkeys(range(101), 3)
    assert [batch for _, batch, _ in made[:-1]] == [24] * (len(made) - 1)
    assert made[-1][0] + made[-1][1] == 303
    for position, _, rate in made:
        assert rate == pytest.approx(2 * SCHEDULE.at(position // 12))


def draws_of(folder, num_epochs, make):
    """Run on each rank: go on, and draw a number in each step."""
    torch.manual_seed(1)
    with ElasticRun(folder, make(), work=Work(BatchRule(4), 8, num_epochs, seed=2), saves=Saves(1)) as run:
        return [torch.rand(1).item() for _ in run]


def plain_part():
    return {"model": torch.nn.Linear(1, 1)}


def shards(units):
    model = FullyShard(torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 5)), units=units)
    return {"training": ShardedState(model, torch.optim.SGD(model.parameters(), lr=0.0))}


def test_generators_begin_anew_where_the_number_of_ranks_or_the_plan_changed(ranks, tmp_path):
    """Else ranks would draw the masks of the run's first steps again."""
    for name, num_after, before, after in (
        ("ranks", 3, plain_part, plain_part),
        ("plan", 2, partial(shards, ["0", "1"]), partial(shards, [])),
    ):
        first = ranks(2).run(draws_of, tmp_path / name, 1, before)
        other = ranks(num_after).run(draws_of, tmp_path / name, 2, after)
        assert len({draw for rank in other for draw in rank}) == 2 * num_after  # each rank, each step
        assert not {draw for rank in other for draw in rank} & {draw for rank in first for draw in rank}


@pytest.mark.soak_where(beside=[True])  # tests/checkpoint/test_async.py has errors of saves beside training
@pytest.mark.parametrize("beside", [False, True])
def test_a_full_disk_costs_a_warning_and_a_checkpoint_and_nothing_else(ranks, whole, tmp_path, beside):
    def run():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            final = train(tmp_path, beside=beside, faults=[("disk", 4, 1, 0.0)])
        return final[:2], [str(one.message) for one in caught]

    for final, texts in ranks(2).run(run):
        assert same_bits(final, whole(2))
        (text,) = [text for text in texts if "cannot save" in text]
        assert "cannot save step 6" in text
        assert "rank 1: [Errno 28] No space left on device" in text
        assert "training goes on" in text


def test_a_last_save_that_fails_is_an_error_and_the_one_before_it_stays(ranks, tmp_path):
    with pytest.raises(RankError, match=r"cannot save step 33 in .*rank 0: \[Errno 28\] No space left on device"):
        ranks(2).run(lambda: train(tmp_path, faults=[("disk", 32, 0, 0.0)]))
    assert newest(tmp_path / "saved").step == 30


FAULTS = [  # each with words of the restart that it costs; "" where it costs none
    (("kill", 2, 1, 0.0), "was killed by SIGKILL"),
    (("slow", 4, 0, 0.02), ""),
    (("flip", 7, 2, 0.0), r"CorruptionError: step 9: \d\.\w+.*: rank 2 differs from the 2 others"),
    (("disk", 10, 1, 0.0), ""),
    (("flip gradient", 13, 1, 0.0), r"CorruptionError: step 15: \d\.\w+.*: rank 1 differs from the 2 others"),
    (("exception", 16, 0, 0.0), "RuntimeError: Fault.kind='exception', step=16"),
    (("flip moment", 20, 0, 0.0), r"step 21: \w+ of optimizer's parameter \d.*: rank 0 differs from the 2 others"),
]


@pytest.mark.parametrize("beside", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_faults_of_every_kind_are_survived_bit_for_bit_and_flipped_bits_are_seen_before_they_are_saved(
    whole, tmp_path, beside
):
    """The last bit flips after the last update before a save: no weight is wrong yet."""
    assert {kind for (kind, *_), _ in FAULTS} == {"kill", *MORE}
    final, words = restarted(tmp_path, 3, beside=beside, faults=[fault for fault, _ in FAULTS])
    assert same_bits(final[:2], whole(3))
    assert used(tmp_path) == dict.fromkeys(range(101), 4)
    expected = [text for _, text in FAULTS if text]
    for number, (text, pattern) in enumerate(zip(words, expected, strict=True), 1):
        assert re.search(pattern, text), text
        assert f"restart {number} of 20" in text


def test_asked_to_end_one_rank_takes_all_along_and_new_ranks_go_on_where_they_were(whole, tmp_path):
    final, words = restarted(tmp_path, beside=True, save_every=1000, pause_s=0.01, faults=[("leave", 7, 1, 0.0)])
    assert same_bits(final[:2], whole(2))
    assert len(words) == 1
    made = [number for _, _, number, *_ in notes(tmp_path)]
    assert sorted(made) == sorted(2 * [*range(max(made) + 1)]), "nothing was made twice, or not at all"


def test_the_plainest_loop_survives_too(ranks, tmp_path):
    expected = ranks(2).run(lambda: plainly(tmp_path / "whole"))[0]

    def until(last):
        real = os.fsync
        left = [last]

        def fsync(descriptor):
            left[0] -= 1
            if left[0] == 0 and dist.get_rank() == 1:
                os.kill(os.getpid(), 9)
            return real(descriptor)

        os.fsync = fsync
        try:
            return plainly(tmp_path / "killed")
        finally:
            os.fsync = real

    for flushes in (2, 7):
        with pytest.raises(RankError, match="SIGKILL"):
            ranks(2).run(until, flushes)
    assert same_bits(ranks(2).run(until, -1)[0], expected)


def test_a_step_sends_four_bytes(ranks, tmp_path):
    def calls_of(num_samples):
        torch.manual_seed(0)
        parts, work = {"model": torch.nn.Linear(2, 2)}, Work(BatchRule(2), num_samples)
        with recorded() as calls:
            with ElasticRun(tmp_path / str(num_samples), parts, work=work) as run:
                assert len(list(run)) == num_samples // 2
        calls = calls.records.calls(dist.get_rank())
        return len(calls), [call.num_bytes for call in calls if call.op == "all_reduce"]

    for (few, few_sums), (many, many_sums) in zip(*(ranks(2).run(calls_of, number) for number in (4, 12)), strict=True):
        assert many - few == 4  # steps
        assert few_sums == [4] * 2
        assert many_sums == [4] * 6


def cut_parts():
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
    model = parallelize_module(model, {"0": "column", "2": "row"}, example=(torch.ones(2, 4),))
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


def own_shards():
    return {"optimizer": torch.optim.SGD(FullyShard(torch.nn.Linear(4, 4)).parameters(), lr=0.1)}


def begin(directory, work, parts=None):
    """Run on each rank: go through the steps; return their numbers, or the refusal."""
    torch.manual_seed(0)
    made = {"model": torch.nn.Linear(2, 2)} if parts is None else parts()
    try:
        with ElasticRun(directory, made, work=work(dist.get_rank()), saves=Saves(2)) as run:
            return [step.number for step in run]
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def refused(ranks, num_ranks, directory, words, work, parts=None):
    for text in ranks(num_ranks).run(begin, directory, work, parts):
        assert isinstance(text, str), "refused before the first step"
        assert re.search(words, text), text
        assert "\n" not in text
        assert str(directory) in text or "work of an elastic run" in text or "differ between ranks" in text


def test_what_no_rule_covers_is_refused_on_every_rank_in_one_line(ranks, tmp_path):
    def work(samples=12, epochs=2, seed=1, **by_rank):
        given = {"rule": BatchRule(2), "num_samples": samples, "num_epochs": epochs, "seed": seed}
        return lambda rank: Work(**given | {key: value[rank] for key, value in by_rank.items()})

    run = tmp_path / "run"
    assert ranks(2).run(begin, run, work(epochs=1)) == [list(range(6))] * 2
    for num_ranks, its_work, words in (
        (3, work(), "ValueError: cannot train in .*a batch of 2 leaves some of 3 ranks without a sample"),
        (2, work(seed=9), "was saved with seed 1 and this run has 9: samples would be taken twice"),
        (2, work(samples=11), "was saved with num_samples 12 and this run has 11"),
        (2, work(rule=[BatchRule(2), BatchRule(3)]), "ranks disagree on the work of an elastic run"),
        (2, work(num_epochs=[2, 3]), "ranks disagree on the work of an elastic run"),
        (2, work(lr=[0.1, 0.2]), "ranks disagree on the work of an elastic run"),
    ):
        refused(ranks, num_ranks, run, words, its_work)
    assert [*map(len, ranks(2).run(begin, run, work()))] == [6, 6]
    assert ranks(2).run(begin, run, work()) == [[], []], "it is over"
    refused(ranks, 2, run, "is at sample 24 of a run of 12; pass more num_epochs", work(epochs=1))
    for name, parts, words in (
        (
            *("cut", cut_parts),
            r"ValueError: parameters differ between ranks .rank 1 differs from rank 0.: model: 0.weight",
        ),
        ("shards", own_shards, "ValueError: cannot train in .*optimizer holds shards.*ShardedState"),
    ):
        refused(ranks, 2, tmp_path / name, words, work(), parts)
        assert newest(tmp_path / name) is None


def test_a_directory_that_cannot_be_used_is_refused_on_every_rank(ranks, tmp_path):
    """A different program's checkpoint, a different model's; a file, a broken link; a place nobody may write."""
    work = lambda rank: Work(BatchRule(2), 8)  # noqa: E731 (travels by value)
    (tmp_path / "file").write_text("here")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    save(tmp_path / "plain", 3, parts={"model": torch.nn.Linear(2, 2)}, data_position=7)
    ranks(2).run(begin, tmp_path / "smaller", work, lambda: {"model": torch.nn.Linear(2, 1)})
    for directory, words in (
        (tmp_path / "file", "rank 0: no checkpoint can be written there .File exists.; pass a directory for them"),
        (tmp_path / "pipe", "File exists"),
        (tmp_path / "link", "File exists"),
        (tmp_path / "file" / "below", "cannot train in .*rank 0: no checkpoint can be written there .Not a directory"),
        ("/proc/nothing", "cannot train in .*rank 0: .*; pass a directory for them"),
        (tmp_path / "plain", "was not saved by an ElasticRun; pass a directory of its own"),
        (tmp_path / "smaller", "build the same model"),
    ):
        refused(ranks, 2, directory, words, work)


def test_arguments_that_cannot_be_are_refused(tmp_path):
    begin = partial(ElasticRun, tmp_path, {}, work=Work(BatchRule(2), 8))
    for call, words in (
        (partial(begin, saves=Saves(0)), "every is 0; pass the number of steps between two saves"),
        (partial(run_elastic, print, 2, max_restarts=-1), "max_restarts is -1"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def test_a_mistake_is_not_tried_again_and_after_the_last_restart_the_root_cause_is_raised():
    def fail(error):
        raise error

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with pytest.raises(RankError, match="raised ValueError: no such data"):
            run_elastic(fail, 2, args=(ValueError("no such data"),), max_restarts=5)
    with pytest.warns(UserWarning, match="starting anew .restart 1 of 1"):
        with pytest.raises(RankError, match="rank . of 2 raised RuntimeError: the data is gone"):
            run_elastic(fail, 2, args=(RuntimeError("the data is gone"),), max_restarts=1)

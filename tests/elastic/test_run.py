"""Runs that start again on as many ranks, on more or on fewer, after faults of every kind; and what they refuse."""

import os
import random
import re
import warnings

import pytest
import torch
import torch.distributed as dist
from elastic_job import SCHEDULE, plainly, train, used
from killing import same_bits
from more_faults import MORE, MoreFaults

from distlab.checkpoint import PerRank, newest, save
from distlab.checkpoint.parts import moments_of
from distlab.comm import RankError, recorded
from distlab.data_parallel import DataParallel
from distlab.elastic import BatchRule, ElasticRun, Fault, Saves, Work, run_elastic
from distlab.elastic.votes import CorruptionError, ReplicaVotes
from distlab.rng import generator
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
        results = run_elastic(how, world_size, args=(folder,), max_restarts=20, timeout_s=60)
    return results[0], [str(one.message) for one in caught if "starting anew" in str(one.message)]


@pytest.mark.soak_where(optimizer=["sgd"])
@pytest.mark.parametrize(("optimizer", "beside"), [("sgd", False), ("adam", True)])
def test_killed_ranks_start_anew_and_the_final_bits_are_the_same(ranks, tmp_path, optimizer, beside):
    expected = ranks(3).run(lambda: train(tmp_path / "whole", optimizer=optimizer))[0]
    faults = kill_at(5, 13, 14)
    final, words = restarted(tmp_path / "killed", 3, optimizer=optimizer, beside=beside, faults=faults)
    assert same_bits(final[:2], expected[:2])
    assert len(words) == 3
    assert all("was killed by SIGKILL" in text for text in words)
    assert "restart 2 of 20" in words[1]
    assert used(tmp_path / "killed") == dict.fromkeys(range(101), 4)


@pytest.mark.soak_where(optimizer=["adam"])
@pytest.mark.parametrize(("optimizer", "bound"), [("sgd", 1e-10), ("adam", 1e-8)])
def test_on_more_and_fewer_ranks_the_run_that_keeps_its_batch_ends_with_the_same_numbers(
    ranks, tmp_path, optimizer, bound
):
    """Adam divides by a gradient's own size: what rounding changed grows, so its bound is a wider one."""
    expected = ranks(4).run(lambda: train(tmp_path / "whole", optimizer=optimizer, **EVEN))[0]
    sizes = [4, 2, 3, 1, 4]
    final, words = restarted(
        tmp_path / "changed", lambda start: sizes[start], optimizer=optimizer, faults=kill_at(4, 9, 15, 19), **EVEN
    )
    assert len(words) == 4
    assert used(tmp_path / "changed") == dict.fromkeys(range(96), 3)
    for name, value in expected[0].items():
        assert (final[0][name] - value).abs().max() <= bound, name
    assert not all(torch.equal(final[0][name], value) for name, value in expected[0].items())


@pytest.mark.parametrize(("lr", "factor"), [("linear", 2.0), ("sqrt", 2.0**0.5)])
def test_where_the_batch_grows_with_the_ranks_the_rate_follows_and_no_sample_is_lost(tmp_path, lr, factor):
    changes = {"rule": [12, 2, lr], "num_samples": 101, "num_epochs": 3, "dropout": 0.0}
    sizes, faults = [2, 1, 4], kill_at(8, 22)
    (_, _, made), words = restarted(tmp_path, lambda start: sizes[start], faults=faults, **changes)
    assert len(words) == 2
    assert used(tmp_path) == dict.fromkeys(range(101), 3)
    assert [batch for _, batch, _ in made[:-1]] == [24] * (len(made) - 1)
    assert made[-1][0] + made[-1][1] == 303
    for position, _, rate in made:
        assert rate == pytest.approx(factor * SCHEDULE.at(position // 12))


def test_generators_begin_anew_where_the_number_of_ranks_changed(ranks, tmp_path):
    """Else ranks would draw the masks of the run's first steps again."""

    def begin(num_epochs):
        torch.manual_seed(1)
        parts, work = {"model": torch.nn.Linear(1, 1)}, Work(BatchRule(4), 8, num_epochs, seed=2)
        with ElasticRun(tmp_path, parts, work=work, saves=Saves(1)) as run:
            return [torch.rand(1).item() for _ in run]

    first = ranks(2).run(begin, 1)
    same, other = ranks(2).run(begin, 2), ranks(3).run(begin, 3)
    assert len({draw for rank in other for draw in rank}) == 6  # each rank, each step
    assert not {draw for rank in other for draw in rank} & {draw for rank in first + same for draw in rank}


def test_generators_begin_anew_where_shards_were_cut_anew(ranks, tmp_path):
    """The same number of ranks with another plan: their generators are not loaded either."""

    def begin(num_epochs, units):
        torch.manual_seed(1)
        model = FullyShard(torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 5)), units=units)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        parts, work = {"training": ShardedState(model, optimizer)}, Work(BatchRule(4), 8, num_epochs, seed=2)
        with ElasticRun(tmp_path, parts, work=work, saves=Saves(1)) as run:
            return [torch.rand(1).item() for _ in run]

    first, other = ranks(2).run(begin, 1, ["0", "1"]), ranks(2).run(begin, 2, [])
    assert len({draw for rank in other for draw in rank}) == 4  # each rank, each step
    assert not {draw for rank in other for draw in rank} & {draw for rank in first for draw in rank}


@pytest.mark.soak_where(beside=[True])  # tests/checkpoint/test_async.py has errors of saves beside training
@pytest.mark.parametrize("beside", [False, True])
def test_a_full_disk_costs_a_warning_and_a_checkpoint_and_nothing_else(ranks, tmp_path, beside):
    expected = ranks(2).run(lambda: train(tmp_path / "whole"))[0]

    def with_faults():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the full disk's: told below
            return train(tmp_path / "full", beside=beside, faults=[("disk", 4, 1, 0.0), ("kill", 7, 0, 0.0)])

    with pytest.raises(RankError, match="SIGKILL"):
        ranks(2).run(with_faults)
    assert newest(tmp_path / "full" / "saved").step == 3
    assert same_bits(ranks(2).run(with_faults)[0][:2], expected[:2])

    def first_part():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(tmp_path / "told", beside=beside, faults=[("disk", 4, 1, 0.0)])
        return [str(one.message) for one in caught]

    for texts in ranks(2).run(first_part):
        (text,) = [text for text in texts if "cannot save" in text]
        assert "cannot save step 6" in text
        assert "rank 1: [Errno 28] No space left on device" in text
        assert "training goes on" in text


def test_a_last_save_that_fails_is_an_error_and_the_one_before_it_stays(ranks, tmp_path):
    with pytest.raises(RankError, match=r"cannot save step 33 in .*rank 0: \[Errno 28\] No space left on device"):
        ranks(2).run(lambda: train(tmp_path, faults=[("disk", 32, 0, 0.0)]))
    assert newest(tmp_path / "saved").step == 30


def test_a_flipped_bit_is_seen_before_it_is_saved_and_the_run_goes_back(ranks, tmp_path):
    expected = ranks(3).run(lambda: train(tmp_path / "whole"))[0]
    final, words = restarted(tmp_path / "flipped", 3, faults=[("flip", 7, 2, 0.0)])
    assert same_bits(final[:2], expected[:2])
    (text,) = words
    assert "CorruptionError: step 9: " in text
    assert "rank 2 differs from the 2 others" in text


@pytest.mark.soak_where(beside=[False])  # the test above saves so
@pytest.mark.parametrize("beside", [False, True])
def test_a_flipped_bit_of_a_moment_is_seen_before_it_is_saved_and_the_run_goes_back(ranks, tmp_path, beside):
    expected = ranks(3).run(lambda: train(tmp_path / "whole"))[0]
    final, words = restarted(tmp_path / "flipped", 3, beside=beside, flip_moment_at=8)
    assert same_bits(final[:2], expected[:2])
    (text,) = words
    assert "CorruptionError: step 9: exp_avg of optimizer's parameter 0: " in text
    assert "rank 2 differs from the 2 others" in text


def vote_on(folder, plan):
    """Look at gradients, weights and moments after each update; return what a vote said."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    optimizer, replicas = torch.optim.AdamW(model.parameters(), lr=1e-2), DataParallel(model)
    votes, faults = ReplicaVotes(every=6), MoreFaults(plan, folder, model, optimizer)
    try:
        for number in range(6):
            faults.before_step(number, dist.get_rank(), dist.get_world_size())
            model(torch.randn(4, 6, generator=generator(number, dist.get_rank(), "data"))).square().mean().backward()
            replicas.synchronize()
            optimizer.step()
            votes.look(number, model)
            votes.look_at(number, moments_of({"optimizer": optimizer}))
            optimizer.zero_grad()
    except CorruptionError as error:
        return str(error)
    finally:
        replicas.close()
    return "nothing"


def test_votes_find_step_rank_and_tensor_of_every_bit_that_a_plan_flips(ranks, tmp_path):
    kinds = ("flip", "flip gradient", "flip moment")
    plans = [[Fault(kinds[seed % 3], seed % 6, seed % 4 % 3)] for seed in range(18)]
    told = ranks(3).run(lambda: [vote_on(tmp_path / str(seed), plan) for seed, plan in enumerate(plans)])
    assert told[0] == told[1] == told[2]
    for seed, ((fault,), text) in enumerate(zip(plans, told[0], strict=True)):
        name = (tmp_path / str(seed) / "more" / "fault-0").read_text().partition("] of ")[2]
        assert re.match(f"step {fault.step}: {name}( and .* more)?: rank {fault.rank} differs from the 2 others", text)


@pytest.mark.parametrize("kind", ["flip gradient", "flip moment"])
def test_a_bit_that_flips_in_an_update_is_seen_before_it_is_saved_and_the_run_goes_back(ranks, tmp_path, kind):
    expected = ranks(3).run(lambda: train(tmp_path / "whole"))[0]
    final, words = restarted(tmp_path / "flipped", 3, faults=[(kind, 7, 1, 0.0)])
    assert same_bits(final[:2], expected[:2])
    (text,) = words
    assert "CorruptionError: step 9: " in text
    assert "rank 1 differs from the 2 others" in text


def test_a_moment_that_nobody_has_used_yet_is_voted_on_too(ranks, tmp_path):
    """The bit flips after the last update before the save: the weights are still right."""

    def run():
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.Adam(model.parameters())
        with ElasticRun(
            tmp_path, {"model": model, "optimizer": optimizer}, work=Work(BatchRule(4), 8), saves=Saves(1)
        ) as elastic:
            for _ in elastic:
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                if dist.get_rank() == 1:
                    optimizer.state[model.weight]["exp_avg_sq"].view(torch.int32)[1, 0] ^= 1

    with pytest.raises(RankError, match="step 1: exp_avg_sq of optimizer's parameter 0: rank 1 differs from the 2 oth"):
        ranks(3).run(run)
    assert newest(tmp_path) is None


def test_a_plan_of_every_kind_of_fault_is_survived_bit_for_bit(ranks, tmp_path):
    chance, kinds = random.Random(28), ("kill", *MORE)
    expected = ranks(2).run(lambda: train(tmp_path / "whole"))[0]
    plan = [(kind, chance.randrange(30), chance.randrange(2), chance.uniform(0, 0.02)) for kind in (*kinds, "kill")]
    final, words = restarted(tmp_path / "faulty", faults=plan)
    assert same_bits(final[:2], expected[:2])
    assert used(tmp_path / "faulty") == dict.fromkeys(range(101), 4)
    assert len(words) >= 3


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


def refused(ranks, num_ranks, directory, work, parts=None):
    def begin():
        torch.manual_seed(0)
        made = {"model": torch.nn.Linear(2, 2)} if parts is None else parts()
        chosen = work(dist.get_rank()) if callable(work) else work
        try:
            with ElasticRun(directory, made, work=chosen, saves=Saves(2)) as run:
                return [step.number for step in run]
        except (ValueError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"

    return ranks(num_ranks).run(begin)


def test_what_no_rule_covers_is_refused_on_every_rank_in_one_line(ranks, tmp_path):
    work = Work(BatchRule(2), 12, 2, seed=1)
    assert refused(ranks, 2, tmp_path / "run", Work(BatchRule(2), 12, 1, seed=1)) == [list(range(6))] * 2
    cases = [
        (3, work, "ValueError: cannot train in .*a batch of 2 leaves some of 3 ranks without a sample"),
        (
            2,
            Work(BatchRule(2), 12, 2, seed=9),
            "was saved with seed 1 and this run has 9: samples would be taken twice",
        ),
        (2, Work(BatchRule(2), 11, 2, seed=1), "was saved with num_samples 12 and this run has 11"),
        (2, lambda rank: Work(BatchRule(2 + rank), 12, 2, seed=1), "ranks disagree on the work of an elastic run"),
        (2, lambda rank: Work(BatchRule(2), 12, 2 + rank, seed=1), "ranks disagree on the work of an elastic run"),
        (2, lambda rank: Work(BatchRule(2), 12, 2, seed=1, lr=0.1 * (1 + rank)), "ranks disagree on the work"),
    ]
    for num_ranks, its_work, words in cases:
        texts = refused(ranks, num_ranks, tmp_path / "run", its_work)
        for text in texts:
            assert isinstance(text, str), texts
            assert re.search(words, text), text
            assert "\n" not in text


def test_a_directory_that_cannot_be_used_is_refused_on_every_rank(ranks, tmp_path):
    """Another program's checkpoint, another model's; a file, a pipe, a broken link; a place nobody may write."""
    work = Work(BatchRule(2), 8)
    (tmp_path / "file").write_text("here")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    save(tmp_path / "plain", 3, parts={"model": torch.nn.Linear(2, 2)}, data_position=7)
    refused(ranks, 2, tmp_path / "smaller", work, lambda: {"model": torch.nn.Linear(2, 1)})
    cases = [
        (tmp_path / "file", "Not a directory"),
        (tmp_path / "pipe", "Not a directory"),
        (tmp_path / "link", "No such file|cannot"),
        (tmp_path / "file" / "below", "cannot train in .*rank 0: no checkpoint can be written there .Not a directory"),
        ("/proc/nothing", "cannot train in .*rank 0: .*; pass a directory for them"),
        (tmp_path / "plain", "was not saved by an ElasticRun; pass a directory of its own"),
        (tmp_path / "smaller", "build the same model"),
    ]
    for directory, words in cases:
        for text in refused(ranks, 2, directory, work):
            assert isinstance(text, str), directory
            assert re.search(words, text), text
            assert str(directory) in text
            assert "\n" not in text


def cut_parts():
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
    model = parallelize_module(model, {"0": "column", "2": "row"}, example=(torch.ones(2, 4),))
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


def own_shards():
    model = FullyShard(torch.nn.Linear(4, 4))
    return {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


def test_parts_that_are_cut_over_ranks_are_refused_at_the_start_and_a_per_rank_part_trains(ranks, tmp_path):
    work = Work(BatchRule(2), 12)
    cases = [
        (
            "cut",
            cut_parts,
            r"ValueError: parameters differ between ranks .rank 1 differs from rank 0.: model: 0.weight",
        ),
        ("shards", own_shards, "ValueError: cannot train in .*optimizer holds shards"),
    ]
    for name, parts, words in cases:
        for text in refused(ranks, 2, tmp_path / name, work, parts):
            assert isinstance(text, str), "refused before the first step"
            assert re.search(words, text), text
            assert "PerRank(" in text or "ShardedState(" in text
            assert "\n" not in text
        assert newest(tmp_path / name) is None
    per_rank = lambda: {"training": PerRank(cut_parts())}  # noqa: E731 (travels by value)
    assert refused(ranks, 2, tmp_path / "per rank", work, per_rank) == [list(range(6))] * 2
    assert newest(tmp_path / "per rank").step == 6


def test_arguments_that_cannot_be_are_refused(tmp_path):
    work = Work(BatchRule(2), 8)
    with pytest.raises(ValueError, match="every is 0; pass the number of steps between two saves"):
        ElasticRun(tmp_path, {}, work=work, saves=Saves(0))
    with pytest.raises(ValueError, match="leave_within_s is -1"):
        ElasticRun(tmp_path, {}, work=work, leave_within_s=-1)
    with pytest.raises(ValueError, match="max_restarts is -1"):
        run_elastic(print, 2, max_restarts=-1)


def test_a_mistake_of_the_caller_is_not_tried_again():
    def refuse():
        raise ValueError("no such data")

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with pytest.raises(RankError, match="raised ValueError: no such data"):
            run_elastic(refuse, 2, max_restarts=5)


def test_after_the_last_restart_the_root_cause_is_raised():
    def fail():
        raise RuntimeError("the data is gone")

    with pytest.warns(UserWarning, match="starting anew .restart 1 of 1"):
        with pytest.raises(RankError, match="rank . of 2 raised RuntimeError: the data is gone"):
            run_elastic(fail, 2, max_restarts=1)

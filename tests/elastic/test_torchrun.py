"""Killed under torchrun: training goes on within seconds, and ends as if nobody had killed anything."""

import os
import signal
import time

import psutil
import pytest
import torch
from elastic_job import notes, random_kills, ranks_of, torchrun, train, used, wait_for
from killing import same_bits

from distlab.checkpoint import newest
from distlab.comm import run


def final_of(folder):
    return torch.load(folder / "final.pt", weights_only=True)


@pytest.fixture
def uninterrupted(ranks, tmp_path):
    return lambda num_ranks=2, **changes: ranks(num_ranks).run(lambda: train(tmp_path / "whole", **changes))[0][:2]


@pytest.mark.soak_where(optimizer=["sgd"])  # tests/comm/test_groups.py: torchrun alone restarts after a kill
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_rank_is_killed_and_the_final_bits_are_those_of_the_uninterrupted_run(uninterrupted, tmp_path, optimizer):
    changes = {"optimizer": optimizer, "num_epochs": 8}
    num_ranks, is_standby, count = (2, False, 1) if optimizer == "sgd" else (3, True, 2)
    expected, folder = uninterrupted(num_ranks, **changes), tmp_path / "killed"
    with torchrun(folder, num_ranks, standby=is_standby, pause_s=0.05, **changes) as job:
        times = random_kills(folder, job, count)
        assert job.wait(100) == 0, (folder / "output.txt").read_text()
    assert same_bits(final_of(folder), expected)
    assert used(folder) == dict.fromkeys(range(101), 8)
    assert len({token for _, token, *_ in notes(folder)}) == len(times) + 1


@pytest.mark.soak  # one rank that is asked is below; test_run.py goes on with another number of ranks
def test_asked_to_end_the_ranks_save_and_leave_and_another_number_of_them_goes_on(uninterrupted, tmp_path):
    changes = {"num_samples": 96, "dropout": 0.0, "dtype": "float64", "optimizer": "sgd"}
    expected = uninterrupted(2, **changes)
    folder = tmp_path / "left"
    with torchrun(folder, 3, standby=True, pause_s=0.1, save_every=1000, **changes) as job:
        wait_for(lambda: len(notes(folder)) > 12, job)
        job.terminate()
        job.wait(100)
    assert "ends now" not in (folder / "output.txt").read_text()
    last = max(number for _, _, number, *_ in notes(folder))
    assert newest(folder / "saved").step == last + 1
    with torchrun(folder, 2, standby=True, **changes) as job:
        assert job.wait(100) == 0, (folder / "output.txt").read_text()
    final = final_of(folder)
    assert used(folder) == dict.fromkeys(range(96), 4)
    for name, value in expected[0].items():
        assert (final[0][name] - value).abs().max() <= 1e-10


def test_one_rank_that_is_asked_to_end_takes_all_along_and_torchrun_starts_them_again(uninterrupted, tmp_path):
    expected = uninterrupted(2)
    folder = tmp_path / "asked"
    with torchrun(folder, 2, standby=True, pause_s=0.02, save_every=1000) as job:
        wait_for(lambda: len(notes(folder)) > 12, job)
        os.kill(ranks_of(job)[1], signal.SIGTERM)
        assert job.wait(100) == 0, (folder / "output.txt").read_text()
    tokens = [token for _, token, *_ in notes(folder)]
    numbers = [[number for _, token, number, *_ in notes(folder) if token == one] for one in dict.fromkeys(tokens)]
    assert len(numbers) == 2
    assert min(numbers[1]) == max(numbers[0]) + 1  # nothing was made twice
    assert same_bits(final_of(folder), expected)


def test_a_rank_that_does_not_come_to_the_end_of_its_step_leaves_at_the_limit(tmp_path):
    with torchrun(tmp_path, 2, standby=True, max_restarts=0, hang_at=5, leave_within_s=1.0) as job:
        wait_for(lambda: len(notes(tmp_path)) == 10, job)
        found = ranks_of(job)
        job.terminate()
        job.wait(100)
    assert not any(map(psutil.pid_exists, found))
    assert newest(tmp_path / "saved").step == 3
    text = (tmp_path / "output.txt").read_text()
    for rank in range(2):
        assert f"rank {rank}: was asked to end (SIGTERM) 1 s ago and is still in step 5; ends now" in text


def seconds_to_leave(folder, num_ranks, num_notes, **changes):
    with torchrun(folder, num_ranks, standby=True, **changes) as job:
        wait_for(lambda: len(notes(folder)) >= num_notes, job)
        job.terminate()
        begin = time.monotonic()
        job.wait(100)
        return time.monotonic() - begin


@pytest.mark.soak
def test_leaving_takes_seconds(tmp_path):
    assert seconds_to_leave(tmp_path / "asked", 3, 12, pause_s=0.1, save_every=1000) < 10
    assert seconds_to_leave(tmp_path / "hangs", 2, 10, max_restarts=0, hang_at=5, leave_within_s=1.0) < 8


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_fifty_kills_fifty_recoveries(tmp_path, optimizer, record_property):
    changes = {"optimizer": optimizer, "num_samples": 1001, "num_epochs": 16}
    expected = run(lambda: train(tmp_path / "whole", **changes), 4, timeout_s=600)[0][:2]
    folder = tmp_path / "killed"
    with torchrun(folder, standby=True, pause_s=0.02, **changes) as job:
        times = random_kills(folder, job, 50)
        record_property("tried", 50)
        for seconds in times:  # from a kill to a step that was never made before
            record_property("seconds", seconds)
        assert job.wait(900) == 0, (folder / "output.txt").read_text()
    assert same_bits(final_of(folder), expected)
    assert used(folder) == dict.fromkeys(range(1001), 16)

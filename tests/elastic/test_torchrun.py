"""Killed under torchrun: training goes on within seconds, and ends as if nobody had killed anything."""

import time

import pytest
import torch
from elastic_job import notes, random_kills, torchrun, train, used, wait_for
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
    num_ranks, is_standby, count = (2, False, 2) if optimizer == "sgd" else (3, True, 1)
    expected, folder = uninterrupted(num_ranks, **changes), tmp_path / "killed"
    with torchrun(folder, num_ranks, standby=is_standby, pause_s=0.05, **changes) as job:
        times = random_kills(folder, job, count)
        assert job.wait(100) == 0, (folder / "output.txt").read_text()
    assert same_bits(final_of(folder), expected)
    assert used(folder) == dict.fromkeys(range(101), 8)
    assert len({token for _, token, *_ in notes(folder)}) == len(times) + 1


@pytest.mark.soak  # test_run.py asks one rank, and goes on with a different number of ranks
def test_asked_to_end_the_ranks_save_and_leave_within_seconds_and_a_different_number_goes_on(uninterrupted, tmp_path):
    changes = {"num_samples": 96, "dropout": 0.0, "dtype": "float64", "optimizer": "sgd"}
    expected = uninterrupted(2, **changes)
    folder = tmp_path / "left"
    with torchrun(folder, 3, standby=True, pause_s=0.1, save_every=1000, **changes) as job:
        wait_for(lambda: len(notes(folder)) > 12, job)
        begin = time.monotonic()
        job.terminate()
        job.wait(100)
    assert time.monotonic() - begin < 10
    assert "ends now" not in (folder / "output.txt").read_text()
    last = max(number for _, _, number, *_ in notes(folder))
    assert newest(folder / "saved").step == last + 1
    with torchrun(folder, 2, standby=True, **changes) as job:
        assert job.wait(100) == 0, (folder / "output.txt").read_text()
    final = final_of(folder)
    assert used(folder) == dict.fromkeys(range(96), 4)
    for name, value in expected[0].items():
        assert (final[0][name] - value).abs().max() <= 1e-10


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

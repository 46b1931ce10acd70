"""Killed under torchrun: training goes on within seconds, and ends as if nobody had killed anything."""

import pytest
import torch
from elastic_job import notes, random_kills, torchrun, train, used
from killing import same_bits

from distlab.comm import run


def final_of(folder):
    return torch.load(folder / "final.pt", weights_only=True)


@pytest.fixture
def uninterrupted(ranks, tmp_path):
    return lambda **changes: ranks(2).run(lambda: train(tmp_path / "whole", **changes))[0][:2]


@pytest.mark.soak_where(optimizer=["sgd"])  # tests/comm/test_groups.py: torchrun alone restarts after a kill
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_rank_is_killed_and_the_final_bits_are_those_of_the_uninterrupted_run(uninterrupted, tmp_path, optimizer):
    is_standby, count, num_epochs = (False, 2, 8) if optimizer == "sgd" else (True, 1, 5)
    changes = {"optimizer": optimizer, "num_epochs": num_epochs}
    expected, folder = uninterrupted(**changes), tmp_path / "killed"
    with torchrun(folder, 2, standby=is_standby, pause_s=0.05, **changes) as job:
        times = random_kills(folder, job, count)
        assert job.wait(100) == 0, (folder / "output.txt").read_text()
    assert same_bits(final_of(folder), expected)
    assert used(folder) == dict.fromkeys(range(101), num_epochs)
    assert len({token for _, token, *_ in notes(folder)}) == len(times) + 1


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

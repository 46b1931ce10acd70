"""Killed at any moment a run goes on, and ends with the very bits of the run that was never killed.

Here a few kills of one way to train, in the soak 20 of each way; benchmarks/checkpoint.py makes 100 of each.
"""

import sys

import checkpoint  # benchmarks/checkpoint.py
import cloudpickle
import pytest

KILLS = 20


@pytest.fixture(autouse=True)
def _ranks_get_the_benchmark_by_value():
    cloudpickle.register_pickle_by_value(sys.modules["checkpoint"])


def require_the_same_bits(way, kills):
    wrong, _, killed = checkpoint.count_wrong_endings(kills, 2, way)
    assert (wrong, killed) == (0, kills)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", ["fsdp"])
def test_a_run_killed_three_times_ends_with_the_same_bits(way, monkeypatch):
    monkeypatch.setattr(checkpoint, "NUM_STEPS", 12)
    require_the_same_bits(way, 3)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("way", checkpoint.WAYS)
def test_every_killed_run_ends_with_the_same_bits(way, record_property):
    record_property("tried", KILLS)
    record_property("figure", way)
    require_the_same_bits(way, KILLS)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world_size", [1, 4])
def test_no_kill_while_saving_loses_a_checkpoint(world_size, record_property):
    lost = checkpoint.count_lost_checkpoints(100, world_size)
    record_property("tried", 100)
    record_property("held", 100 - lost)
    record_property("figure", f"100 kills of {world_size} rank{'s' * (world_size > 1)}")
    assert lost == 0

"""Killed at any moment a run goes on, and ends with the very bits of the run that was never killed.

Here a few kills of three ways to train, in the soak 20 of each way; benchmarks/checkpoint.py makes 100 of each.
"""

import sys

import checkpoint  # benchmarks/checkpoint.py
import cloudpickle
import pytest

KILLS = 20


@pytest.fixture(autouse=True)
def _ranks_get_the_benchmark_by_value():
    cloudpickle.register_pickle_by_value(sys.modules["checkpoint"])


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("way", "kills"),
    [
        *((way, 3) for way in ("bucketed", "fsdp", "pipeline")),
        *(pytest.param(way, KILLS, marks=pytest.mark.soak) for way in checkpoint.WAYS),
    ],
)
def test_every_killed_run_ends_with_the_same_bits(way, kills, record_property, monkeypatch):
    if kills < KILLS:
        monkeypatch.setattr(checkpoint, "NUM_STEPS", 12)
    wrong, _, killed = checkpoint.count_wrong_endings(kills, 2, way)
    record_property("tried", kills)
    record_property("figure", way)
    assert (wrong, killed) == (0, kills)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world_size", [1, 4])
def test_no_kill_while_saving_loses_a_checkpoint(world_size, record_property):
    lost = checkpoint.count_lost_checkpoints(100, world_size)
    record_property("tried", 100)
    record_property("held", 100 - lost)
    record_property("figure", f"100 kills of {world_size} rank{'s' * (world_size > 1)}")
    assert lost == 0

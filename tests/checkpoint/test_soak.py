"""The long proofs: 20 kills of each way of training, and 200 while saving. benchmarks/checkpoint.py makes 100 a way."""

import sys

import checkpoint  # benchmarks/checkpoint.py
import cloudpickle
import pytest

KILLS = 20
pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]


@pytest.fixture(autouse=True)
def _ranks_get_the_benchmark_by_value():
    cloudpickle.register_pickle_by_value(sys.modules["checkpoint"])


@pytest.mark.parametrize("way", checkpoint.WAYS)
def test_every_killed_run_ends_with_the_same_bits(way, record_property):
    wrong, _, kills = checkpoint.count_wrong_endings(KILLS, 2, way)
    record_property("tried", KILLS)
    record_property("figure", way)
    assert (wrong, kills) == (0, KILLS)


@pytest.mark.parametrize("world_size", [1, 4])
def test_no_kill_while_saving_loses_a_checkpoint(world_size, record_property):
    lost = checkpoint.count_lost_checkpoints(100, world_size)
    record_property("tried", 100)
    record_property("held", 100 - lost)
    record_property("figure", f"100 kills of {world_size} rank{'s' * (world_size > 1)}")
    assert lost == 0

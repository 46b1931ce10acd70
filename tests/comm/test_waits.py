"""How often the host waits in a step: counted on a GPU by torch's profiler, and the counter itself on any machine."""

import pytest
from on_device.waits import BLOCKS_THE_HOST, READS_A_VALUE, STEPS, count_waits, num_waits

from distlab.comm import Ranks, device


def test_the_counter_sees_what_is_read_and_every_program_runs(ranks):
    def count():
        return {name: count_waits(name, "cpu") for name in STEPS}

    for found in ranks(2).run(count):
        assert found["DataParallel"][READS_A_VALUE] == 1
        assert found["FullyShard"][READS_A_VALUE] == 0
        assert all(num_waits(counts) == 0 for counts in found.values()), "a CPU has no stream to wait for"
        assert all(counts[name] == 0 for counts in found.values() for name in BLOCKS_THE_HOST)


@pytest.mark.skipif(device.num_gpus() == 0, reason="needs a GPU: its waits are counted")
@pytest.mark.parametrize("name", [name for name, program in STEPS.items() if program.allowed is not None])
def test_the_host_waits_for_a_gpu_no_more_than_it_must(name):
    with Ranks(max(1, device.num_gpus()), timeout_s=120) as ranks:
        for counts in ranks.run(count_waits, name, "cuda"):
            assert num_waits(counts) <= STEPS[name].allowed, (counts, STEPS[name].why)

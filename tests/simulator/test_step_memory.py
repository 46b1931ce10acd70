import numpy as np
import pytest

from distlab.plan import Plan
from simulator import cluster, gpt_workload, memory_of, simulate
from simulator.memory.memory import KINDS

WORKLOAD = gpt_workload(hidden_size=64, num_layers=6, num_heads=4, sequence_length=32, vocab_size=100)


@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b"])
def test_a_stage_holds_what_its_schedule_keeps_in_flight(schedule):
    step = simulate(WORKLOAD, cluster("laptop"), Plan(pipeline=4, num_microbatches=8, schedule=schedule))
    for rank, stage in enumerate(step.stages):
        size = sum(layer.activation_bytes - layer.logits_bytes for layer in stage.layers)
        in_flight = 8 if schedule == "gpipe" else min(8, 4 - rank)
        assert step.memory.of("activations", rank) == in_flight * size
        logits = sum(layer.logits_bytes for layer in stage.layers)
        assert step.memory.of("logits", rank) == (in_flight + 1) * logits  # beside the last ones their log-softmax
        assert step.memory.of("parameters", rank) == stage.num_parameters * 2
        assert step.memory.of("optimizer", rank) == stage.num_parameters * 8
        assert step.memory.of("master weights", rank) == stage.num_parameters * 4


@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b"])
def test_memory_over_time_peaks_at_the_peak_and_ends_empty(schedule):
    step = simulate(WORKLOAD, cluster("laptop"), Plan(pipeline=3, num_microbatches=5, schedule=schedule))
    for stage in range(3):
        times, rows = step.memory.over_time(stage)
        assert (np.diff(times) > 0).all()
        assert rows.shape == (len(times), len(KINDS))
        assert rows.max(axis=0).tolist() == step.memory.peak_bytes[stage].tolist()
        assert rows.sum(axis=1).max() == step.memory.total_bytes[stage]
        assert rows[-1, KINDS.index("activations")] == rows[-1, KINDS.index("temporary")] == 0
        assert (rows >= 0).all()


@pytest.mark.parametrize("sync", ["per_parameter", "flat", "bucketed", "overlapped"])
def test_only_copied_gradients_take_buffers(sync):
    step = simulate(WORKLOAD, cluster("laptop"), Plan(data=2, gradient_sync=sync))
    assert step.memory.of("buffers") == (WORKLOAD.gradient_bytes if sync in ("flat", "bucketed") else 0)


def test_fits():
    step = simulate(WORKLOAD, cluster("laptop"), Plan())
    assert step.memory.fits(cluster("dgx-h100").device)
    assert step.memory.max_bytes == step.memory.total_bytes.max()


def test_without_a_clock_the_peaks_are_the_same():
    plan = Plan(pipeline=3, num_microbatches=5)
    timed, counted = simulate(WORKLOAD, cluster("laptop"), plan).memory, memory_of(WORKLOAD, plan)
    assert timed.has_clock
    assert not counted.has_clock
    lengths = [[len(stage.kept) for stage in memory.stages] for memory in (timed, counted)]
    if lengths[0] == lengths[1]:  # they cut by time, and by matrix products
        assert timed.peak_bytes.tolist() == counted.peak_bytes.tolist()


def test_senseless_questions_are_refused():
    step = simulate(WORKLOAD, cluster("laptop"), Plan())
    with pytest.raises(ValueError, match="choose one of parameters, gradients"):
        step.memory.of("cache")

import numpy as np
import pytest

from distlab.plan.records import Plan
from simulator import activation_bytes_per_layer, adam_state_bytes, cluster, gpt_workload, simulate
from simulator.memory import KINDS
from simulator.units import bytes_to_gb, bytes_to_gib

WORKLOAD = gpt_workload(hidden_size=64, num_layers=6, num_heads=4, sequence_length=32, vocab_size=100)

# 1910.02054 (ZeRO) Table 1: model states in GB of 7.5B parameters; stage, ranks, GB as printed.
ZERO_TABLE_1 = (
    (0, 1, 120.0),
    (1, 4, 52.5),
    (1, 16, 35.6),
    (1, 64, 31.4),
    (1, 256, 30.4),
    (1, 1024, 30.1),
    (2, 4, 41.3),
    (2, 16, 21.6),
    (2, 64, 16.6),
    (2, 256, 15.4),
    (2, 1024, 15.1),
    (3, 4, 30.0),
    (3, 16, 7.5),
    (3, 64, 1.88),
    (3, 256, 0.47),
    (3, 1024, 0.12),
)


@pytest.mark.parametrize(("stage", "ranks", "printed"), ZERO_TABLE_1)
def test_zero_table_1(stage, ranks, printed):
    found = bytes_to_gb(adam_state_bytes(7.5e9, zero_stage=stage, num_ranks=ranks))
    assert found == pytest.approx(printed, rel=0.003, abs=0.006)


@pytest.mark.parametrize(
    ("hidden", "heads", "layers", "micro", "stages", "options", "printed"),
    [  # 2205.05198 Figure 1, GiB of activations on the first pipeline stage's ranks; Table 3's configurations, t = 8
        (6144, 64, 48, 4, 1, {}, 59.25),
        (6144, 64, 48, 4, 1, {"sequence_parallel": True, "recompute": "selective"}, 9.5625),
        (12288, 96, 96, 1, 8, {}, 66.84375),
        (12288, 96, 96, 1, 8, {"sequence_parallel": True, "recompute": "selective"}, 12.3515625),
    ],
)
def test_korthikanti_figure_1(hidden, heads, layers, micro, stages, options, printed):
    each = activation_bytes_per_layer(hidden, heads, 2048, micro, tensor=8, **options)
    # 1F1B's first stage holds p micro-batches of l/p layers; 175B runs v = 3 chunks a rank: 1 + (p-1)/(p v) more.
    factor = 1 + (stages - 1) / (stages * 3) if stages > 1 else 1
    assert bytes_to_gib(each * layers * factor) == pytest.approx(printed, rel=0.02)


def test_activation_formula_on_one_rank_and_full_recompute():
    unit = 16 * 2 * 8
    assert activation_bytes_per_layer(8, 2, 16, 2) == unit * (34 + 5 * 2 * 16 / 8)
    assert activation_bytes_per_layer(8, 2, 16, 2, recompute="full") == 2 * unit


@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b"])
def test_a_stage_holds_what_its_schedule_keeps_in_flight(schedule):
    step = simulate(WORKLOAD, cluster("laptop"), Plan(pipeline=4, num_microbatches=8, schedule=schedule))
    for rank, stage in enumerate(step.stages):
        size = sum(layer.activation_bytes for layer in stage.layers)
        in_flight = 8 if schedule == "gpipe" else min(8, 4 - rank)
        assert step.memory.of("activations", rank) == in_flight * size
        assert step.memory.of("parameters", rank) == stage.num_parameters * 2
        assert step.memory.of("optimizer", rank) == stage.num_parameters * 12


@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b"])
def test_memory_over_time_peaks_at_the_peak_and_ends_empty(schedule):
    step = simulate(WORKLOAD, cluster("laptop"), Plan(pipeline=3, num_microbatches=5, schedule=schedule))
    for stage in range(3):
        times, rows = step.memory.over_time(stage)
        assert (np.diff(times) > 0).all()
        assert rows.shape == (len(times), len(KINDS))
        assert rows.max(axis=0).tolist() == step.memory.peak_bytes[stage].tolist()
        assert rows[-1, KINDS.index("activations")] == 0
        assert (rows >= 0).all()


@pytest.mark.parametrize("sync", ["per_parameter", "flat", "bucketed", "overlapped"])
def test_only_copied_gradients_take_buffers(sync):
    step = simulate(WORKLOAD, cluster("laptop"), Plan(data=2, gradient_sync=sync))
    assert step.memory.of("buckets") == (WORKLOAD.gradient_bytes if sync in ("flat", "bucketed") else 0)


def test_fits():
    step = simulate(WORKLOAD, cluster("laptop"), Plan())
    assert step.memory.fits(cluster("dgx-h100").device)
    assert step.memory.max_bytes == step.memory.total_bytes.max()


def test_senseless_questions_are_refused():
    step = simulate(WORKLOAD, cluster("laptop"), Plan())
    with pytest.raises(ValueError, match="choose one of parameters, gradients"):
        step.memory.of("cache")
    with pytest.raises(ValueError, match="choose a stage of 0 to 3"):
        adam_state_bytes(1, zero_stage=4)
    with pytest.raises(ValueError, match="at least 1"):
        activation_bytes_per_layer(0, 1, 1, 1)
    with pytest.raises(ValueError, match="choose none, selective or full"):
        activation_bytes_per_layer(8, 1, 1, 1, recompute="maybe")

"""Published tables and the usual guides' figures, computed from a workload and a plan; errors printed with -s."""

from dataclasses import replace

import pytest

from distlab.plan import Layer, Plan, Precision, Sharding, Work, Workload
from simulator import activation_bytes_per_layer, adam_state_bytes, memory_of, model_by_name
from simulator.memory.memory import KINDS
from simulator.models.by_name import MODELS
from simulator.units import GB, GIB

STATES = KINDS[:4]  # parameters, gradients, optimizer, master weights
MEGATRON = Precision("bfloat16", gradients="float32")  # 2 + 4 + 8 + 4 bytes a parameter

# 1910.02054 (ZeRO) Table 1, the 7.5B model: ranks; then GB a rank of Pos, Pos+g and Pos+g+p as printed.
ZERO_TABLE_1 = (
    (1, "120", "120", "120"),
    (4, "52.5", "41.3", "30"),
    (16, "35.6", "21.6", "7.5"),
    (64, "31.4", "16.6", "1.88"),
    (256, "30.4", "15.4", "0.47"),
    (1024, "30.1", "15.1", "0.12"),
)


def states(memory, stage=0):
    return sum(memory.of(kind, stage) for kind in STATES)


def one_layer(num_parameters):
    layer = Layer("all", (num_parameters,), Work(), Work(), Work())
    return Workload("model", (layer,), bytes_per_parameter=2, master_bytes_per_parameter=4)


def printed_digits(text):
    return len(text.partition(".")[2])


@pytest.mark.parametrize("row", ZERO_TABLE_1, ids=lambda row: f"{row[0]} ranks")
def test_zero_table_1_to_the_printed_digits(row):
    for stage, printed in enumerate(row[1:], 1):
        memory = memory_of(one_layer(7_500_000_000), Plan(data=row[0], sharding=Sharding(stage)))
        half = 0.5 * 10 ** -printed_digits(printed)
        assert abs(states(memory) / GB - float(printed)) <= half + 1e-6, (stage, printed)
        assert states(memory) == pytest.approx(adam_state_bytes(7.5e9, zero_stage=stage, num_ranks=row[0]), rel=1e-6)


@pytest.mark.parametrize(
    ("name", "micro", "options", "printed", "mean"),
    [  # 2205.05198 Figure 1, GiB; Table 3's configurations: t = 8; 175B with p = 8 and 3 chunks a rank
        ("gpt-22b", 4, {}, 59.25, 45.5625),
        ("gpt-22b", 4, {"sequence_parallel": True, "recompute": "selective"}, 9.5625, 45.5625),
        ("gpt-3-175b", 1, {}, 66.84375, 45.5625),
        ("gpt-3-175b", 1, {"sequence_parallel": True, "recompute": "selective"}, 12.3515625, 45.5625),
    ],
)
def test_korthikanti_figure_1(name, micro, options, printed, mean):
    """The figure counts layers alone: parameters of the embedding are in ours, its activations are left out."""
    stages = 8 if name == "gpt-3-175b" else 1
    if stages > 1:
        options = options | {"schedule": "interleaved", "stages_per_rank": 3}
    plan = Plan(tensor=8, pipeline=stages, num_microbatches=64, precision=MEGATRON, **options)
    workload = model_by_name(name, microbatch_size=micro)
    embedding, *others = workload.layers
    layers = (replace(embedding, activation_bytes=0), *others)
    memory = memory_of(replace(workload, layers=layers), plan)
    found = memory.of("activations") / GIB
    each = [states(memory, stage) / GIB for stage in range(stages)]
    error = found / printed - 1
    print(f"\n{name} {options}: activations {found:.2f} GiB, printed {printed:.2f}: {error:+.2%}", end="; ")
    print(f"states {sum(each) / stages:.2f}, printed {mean:.2f}: {sum(each) / stages / mean - 1:+.2%}", end="; ")
    print(f"first stage, which has the embedding, {each[0] / mean - 1:+.2%}")
    assert abs(error) < 0.005
    assert abs(sum(each) / stages / mean - 1) < 0.02
    assert 0 <= each[0] / mean - 1 < 0.045


@pytest.mark.parametrize("name", MODELS)
def test_every_named_model_counts(name):
    workload = model_by_name(name, sequence_length=128)
    memory = memory_of(workload, Plan(recompute="full"))
    assert states(memory) == 16 * workload.num_parameters


def test_senseless_questions_are_refused():
    with pytest.raises(ValueError, match="choose a stage of 0 to 3"):
        adam_state_bytes(1, zero_stage=4)
    with pytest.raises(ValueError, match="at least 1"):
        activation_bytes_per_layer(0, 1, 1, 1)
    with pytest.raises(ValueError, match="choose none, selective or full"):
        activation_bytes_per_layer(8, 1, 1, 1, recompute="maybe")
    with pytest.raises(ValueError, match="choose one of llama-2-7b"):
        model_by_name("llama-9")
    with pytest.raises(ValueError, match="microbatch_size is 0"):
        model_by_name("llama-2-7b", microbatch_size=0)

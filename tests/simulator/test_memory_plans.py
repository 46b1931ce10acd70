"""memory_of under every kind of plan: what divides what, when it is held, and that every count has its reason."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from distlab.plan import Layer, Plan, Precision, Sharding, Work, Workload
from simulator import gpt_workload, memory_of
from simulator.memory.memory import KINDS

GPT = gpt_workload(hidden_size=96, num_layers=5, num_heads=4, sequence_length=40, vocab_size=311, microbatch_size=4)
PSI = GPT.num_parameters
A, B = KINDS.index("activations"), KINDS.index("buffers")


def layer(num_parameters, **sizes):
    return Layer("layer", (num_parameters,), Work(1.0), Work(1.0), Work(1.0), **sizes)


def workload_of(*sizes, **options):
    return Workload("w", tuple(layer(size, activation_bytes=1000) for size in sizes), **options)


def held(plan, workload=GPT):
    return memory_of(workload, plan)


@pytest.mark.parametrize("ranks", [1, 3, 64])
def test_each_stage_of_sharding_divides_what_it_says(ranks):
    shard = -(-PSI // ranks)
    for stage in range(4):
        memory = held(Plan(data=ranks, sharding=Sharding(stage)))
        spare = 8 * 7 if stage == 3 else 0  # at most an element a unit
        assert memory.of("optimizer") == pytest.approx(8 * (shard if stage else PSI), abs=spare)
        assert memory.of("master weights") == pytest.approx(4 * (shard if stage else PSI), abs=spare)
        assert memory.of("gradients") == pytest.approx(2 * (shard if stage >= 2 else PSI), abs=2 * 7)
        assert memory.of("parameters") == pytest.approx(2 * (shard if stage == 3 else PSI), abs=spare)


@pytest.mark.parametrize(
    ("precision", "per_parameter"),
    [
        (None, 2 + 2 + 8 + 4),
        (Precision(), 4 + 4 + 8),
        (Precision("bfloat16"), 2 + 4 + 8 + 4),
        (Precision("bfloat16", gradients="bfloat16"), 16),
        (Precision("float16", master=False, gradients="float16"), 2 + 2 + 4),
        (Precision("float64", gradients="float64"), 8 + 8 + 16),
    ],
)
def test_precision_counts_bytes_a_parameter(precision, per_parameter):
    memory = held(Plan(precision=precision))
    assert sum(memory.of(kind) for kind in KINDS[:4]) == per_parameter * PSI


def test_recompute_keeps_inputs_and_makes_the_rest_of_one_layer_again():
    plain, selective, full = (held(Plan(recompute=name)) for name in ("none", "selective", "full"))
    block = GPT.layers[1]
    ends = GPT.layers[0].activation_bytes + GPT.layers[-1].activation_bytes - GPT.layers[-1].logits_bytes
    assert plain.of("activations") == ends + 5 * block.activation_bytes
    assert selective.of("activations") == ends + 5 * (block.activation_bytes - block.score_bytes)
    assert full.of("activations") == ends + 5 * block.input_bytes
    again = full.stages[0].backward[1, KINDS.index("temporary")]
    assert again - plain.stages[0].backward[1, KINDS.index("temporary")] == block.activation_bytes - block.input_bytes
    assert plain.max_bytes > selective.max_bytes > full.max_bytes


def test_tensor_parallelism_divides_matrices_but_not_norms():
    one, two = held(Plan()), held(Plan(tensor=2))
    split = sum(each.tensor_parameters for each in GPT.layers)
    assert one.of("parameters") - two.of("parameters") == 2 * split // 2
    per_block = 2 * 2 * 96 + 2 * 96  # two norms, and the biases of the two products by rows
    assert PSI - split == 5 * per_block + 40 * 96
    assert held(Plan(tensor=2, sequence_parallel=True)).of("activations") < two.of("activations")


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (4, 3), (7, 9)])
def test_one_f_one_b_holds_what_lies_between_a_stage_and_the_end(stages, microbatches):
    workload = workload_of(*range(10, 17))
    for schedule in ("gpipe", "one_f_one_b"):
        plan = Plan(pipeline=stages, num_microbatches=microbatches, schedule=schedule)
        memory = held(plan, workload)
        for stage in range(stages):
            most = microbatches if schedule == "gpipe" else min(microbatches, stages - stage)
            assert memory.of("activations", stage) == most * 1000 * len(memory.stages[stage].kept)


def test_gathered_units_come_and_go_and_prefetch_takes_one_more():
    workload = workload_of(*[1000] * 8, bytes_per_parameter=4)
    for prefetch in (0, 1, 2):
        memory = held(Plan(data=4, sharding=Sharding(3, prefetch=prefetch)), workload)
        forward, backward = memory.stages[0].forward[:, B], memory.stages[0].backward[:, B]
        gathered = [4000 * min(prefetch + 1, 8 - unit) for unit in range(8)]
        assert forward.tolist() == gathered
        sent = [4000 + 3000 if unit < 7 else 0 for unit in range(8)]  # the last unit's gradients, and what arrives
        assert backward.tolist() == [g + s for g, s in zip(reversed(gathered), sent, strict=True)]
        _, rows = memory.over_time()
        assert rows[-1, B] == 0
    wide = held(Plan(data=4, sharding=Sharding(3, unit_layers=4, prefetch=0)), workload)
    assert wide.stages[0].forward[:, B].tolist() == [16000] * 8


def test_offload_moves_bytes_to_the_host():
    plan = Plan(data=4, sharding=Sharding(3))
    stays = held(plan)
    optimizer, everything = (held(Plan(data=4, sharding=Sharding(3, offload=what))) for what in ("optimizer", "all"))
    states = [stays.of(kind) for kind in KINDS[:4]]
    assert stays.host_bytes == 0
    assert optimizer.host_bytes == states[2] + states[3]
    one, two = held(Plan()), held(Plan(context=2))
    assert two.of("logits") == one.of("logits") / 2 > 0
    assert two.of("buffers") == 4 * GPT.layers[1].input_bytes / 2  # keys and values, and their gradients
    assert everything.host_bytes == pytest.approx(sum(states), abs=8)
    assert [everything.of(kind) for kind in KINDS[:4]] == [0, 0, 0, 0]
    assert everything.of("buffers") == stays.of("buffers")


def test_micro_batches_before_the_last_keep_gradients_beside_the_buckets():
    column = KINDS.index("gradients")
    for stage in (0, 1):
        one, many = (held(Plan(data=2, num_microbatches=count, sharding=Sharding(stage))) for count in (1, 3))
        assert one.of("gradients") == 2 * PSI
        assert many.of("gradients") == 4 * PSI
        _, rows = many.over_time()
        assert rows[-1, column] == 2 * PSI  # the last micro-batch takes them into the buckets
    assert held(Plan(data=2, num_microbatches=3, sharding=Sharding(2))).of("gradients") == -(-PSI // 2) * 2


def test_gradients_grow_in_the_first_backward_where_no_bucket_holds_them():
    column = KINDS.index("gradients")
    _, alone = held(Plan(num_microbatches=2)).over_time()
    _, buckets = held(Plan(data=2)).over_time()
    grown = alone[:, column]
    assert grown[0] == 0
    assert (np.diff(grown) >= 0).all()
    assert len(np.unique(grown)) == 1 + 6  # the head is tied: it has no parameters of its own
    assert grown[-1] == 2 * PSI
    assert (buckets[:, column] == 2 * PSI).all()


plans = st.builds(
    Plan,
    data=st.sampled_from([1, 2, 4, 12]),
    pipeline=st.integers(1, 4),
    num_microbatches=st.integers(1, 6),
    schedule=st.sampled_from(["gpipe", "one_f_one_b"]),
    gradient_sync=st.sampled_from(["flat", "overlapped"]),
    sharding=st.builds(
        Sharding,
        stage=st.integers(0, 3),
        unit_layers=st.integers(1, 9),
        reshard_after_forward=st.booleans(),
        prefetch=st.integers(0, 3),
    ),
    precision=st.sampled_from([None, Precision(), Precision("bfloat16"), Precision("float16", master=False)]),
    recompute=st.sampled_from(["none", "selective", "full"]),
    tensor=st.sampled_from([1, 2, 3]),
    context=st.sampled_from([1, 2]),
    sequence_parallel=st.booleans(),
)


@settings(max_examples=30, deadline=None)
@given(plan=plans)
def test_the_short_order_has_the_peaks_of_the_whole_step(plan):
    memory = held(plan)
    for stage in range(plan.pipeline):
        rows = memory.rows(stage)
        assert rows.min() >= 0
        assert rows.max(axis=0).tolist() == memory.peak_bytes[stage].tolist()
        assert rows.sum(axis=1).max() == memory.total_bytes[stage]
        assert memory.at_peak_bytes[stage].sum() <= memory.peak_bytes[stage].sum()
        times, over = memory.over_time(stage)
        assert (np.diff(times) > 0).all()
        assert over.max() == rows.max()


def test_senseless_questions_are_refused():
    with pytest.raises(ValueError, match="use at most 7 stages"):
        held(Plan(pipeline=8))
    with pytest.raises(ValueError, match="choose one of parameters, gradients"):
        held(Plan()).of("cache")

"""memory_of under every kind of plan; and by how much a plan does not fit, where, and the smallest change that fits."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import simulator as sim
from distlab.plan import Device, Layer, Plan, Precision, Sharding, Software, Work, Workload
from distlab.plan.compression import Compression
from simulator import DoesNotFitError, check_fit, cluster, gpt_workload, memory_of, model_by_name, simulate
from simulator.memory.advice import find_change, split_samples
from simulator.memory.memory import KINDS
from simulator.units import format_bytes

GPT = gpt_workload(hidden_size=96, num_layers=5, num_heads=4, sequence_length=40, vocab_size=311, microbatch_size=4)
PSI = GPT.num_parameters
HOSTED, POOLED = Software(hosts_gradients=True), Software(scatters_each=True, pools_gradients=True, keeps_messages=True)
FUSED, EAGER = Software(fused_gate=True, loss_copies=(0.5, 0.0, 0.0, 0.0)), Software(norm_bytes=4.0)
A, B = KINDS.index("activations"), KINDS.index("buffers")


def workload_of(*sizes, **options):
    own = (Work(1.0), Work(1.0), Work(1.0), 1000)  # bytes of activations
    return Workload("w", tuple(Layer("layer", (size,), *own) for size in sizes), **options)


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


def test_precision_counts_bytes_a_parameter():
    half = Precision("float16", master=False, gradients="float16")
    types = (None, Precision(), Precision("bfloat16"), half, Precision("float64", gradients="float64"))
    counted = [sum(map(held(Plan(precision=precision)).of, KINDS[:4])) / PSI for precision in types]
    assert counted == [2 + 2 + 8 + 4, 4 + 4 + 8, 2 + 4 + 8 + 4, 2 + 2 + 4, 8 + 8 + 16]


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
        memory = held(Plan(pipeline=stages, num_microbatches=microbatches, schedule=schedule), workload)
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
        assert memory.over_time()[1][-1, B] == 0
    for live, most in ((None, 8000), (2500, 10000)):  # two tensors, or as many as may live
        own = Software(by_tensor=True, live_elements=live)
        assert memory_of(workload, Plan(4, sharding=Sharding(3, prefetch=2)), software=own).of("buffers") == most + 7000
    alone = memory_of(GPT, Plan(4, sharding=Sharding(3)), software=Software(by_tensor=True)).stages[0].forward[:, B]
    assert alone[1:6].tolist() == [2 * 2 * 4 * 96 * 96] * 5, "two tensors of a block, and none of embedding and head"
    wide = held(Plan(data=4, sharding=Sharding(3, unit_layers=4, prefetch=0)), workload)
    assert wide.stages[0].forward[:, B].tolist() == [16000] * 8


def test_without_reshard_the_model_is_whole_when_backward_begins():
    workload = workload_of(*[1000] * 5, bytes_per_parameter=4)
    memory = held(Plan(data=2, sharding=Sharding(3, reshard_after_forward=False)), workload)
    assert memory.stages[0].forward[:, B].tolist() == [8000, 12000, 16000, 20000, 20000]
    assert (memory.stages[0].between[B], memory.of("buffers")) == (20000, 16000 + 4000 + 2000)  # one let go, two come
    assert held(Plan(data=2, sharding=Sharding(3)), workload).of("buffers") < 20000


def test_stage_two_fills_one_bucket_while_another_travels():
    workload = workload_of(*[1000] * 50, bytes_per_parameter=4)
    memory = held(Plan(data=4, sharding=Sharding(2), bucket_bytes=20_000), workload)
    assert memory.stages[0].always[B] == 40_000
    assert memory.of("buffers") == 40_000 + 2 * 20_000 * 3 // 4  # those that arrive
    assert held(Plan(data=4, sharding=Sharding(2)), workload).of("buffers") == 350_000  # no more than there are


def test_offload_moves_bytes_to_the_host():
    stays = held(Plan(data=4, sharding=Sharding(3)))
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
    deepspeed = memory_of(GPT, Plan(data=4, sharding=Sharding(3, offload="optimizer")), software=HOSTED)
    assert (deepspeed.of("gradients"), deepspeed.host_bytes) == (0, optimizer.host_bytes + states[1])


def test_micro_batches_before_the_last_keep_gradients_beside_the_buckets():
    column = KINDS.index("gradients")
    for stage in (0, 1):
        one, many = (held(Plan(data=2, num_microbatches=count, sharding=Sharding(stage))) for count in (1, 3))
        assert one.of("gradients") == 2 * PSI
        assert many.of("gradients") == 4 * PSI
        _, rows = many.over_time()
        assert rows[-1, column] == 2 * PSI  # the last micro-batch takes them into the buckets
    assert held(Plan(data=2, num_microbatches=3, sharding=Sharding(2))).of("gradients") == -(-PSI // 2) * 2
    grown = held(Plan(num_microbatches=2)).over_time()[1][:, column]  # no bucket holds them: they grow in backward
    assert (grown[0], grown[-1], len(np.unique(grown))) == (0, 2 * PSI, 1 + 6)  # a tied head has none of its own
    assert (np.diff(grown) >= 0).all()


plans = st.builds(
    Plan, data=st.sampled_from([1, 2, 4, 12]), pipeline=st.integers(1, 4), num_microbatches=st.integers(1, 6),
    schedule=st.sampled_from(["gpipe", "one_f_one_b"]), gradient_sync=st.sampled_from(["flat", "overlapped"]),
    sharding=st.builds(Sharding, st.integers(0, 3), st.integers(1, 9), st.booleans(), prefetch=st.integers(0, 3)),
    precision=st.sampled_from([None, Precision(), Precision("bfloat16"), Precision("float16", master=False)]),
    recompute=st.sampled_from(["none", "selective", "full"]), tensor=st.sampled_from([1, 2, 3]),
    context=st.sampled_from([1, 2]), sequence_parallel=st.booleans(),
)  # fmt: skip


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


WORKLOAD = model_by_name("gpt-2-124m")  # one sample a micro-batch, which cannot be cut
FOUR = model_by_name("gpt-2-124m", microbatch_size=4)
NO_ROOM = 1_000_000


def device(num_bytes, host=None):
    return Device("card", 1e12, 1e11, num_bytes, host_memory_bytes=host)


def size_of(**options):
    return memory_of(WORKLOAD, Plan(**options)).max_bytes


def smallest_change(workload, plan, on):
    """Return the plan with the smallest change that fits, or None."""
    change = find_change(workload, plan, on)
    return change and change.plan


def refusal(plan, on, workload=WORKLOAD):
    with pytest.raises(DoesNotFitError) as caught:
        check_fit(workload, plan, on)
    return caught.value


def test_a_verdict_has_a_margin():
    memory = held(Plan())
    said = [memory.verdict(device(part * memory.max_bytes)) for part in (1.2, 1.18, 1.0, 0.999)]
    assert said == ["fits", "tight", "tight", "does not fit"]
    assert memory.reserved_bytes == (int(1.03 * memory.max_bytes), int(1.36 * memory.max_bytes + 1.3e9))


def test_one_byte_too_little_is_refused_with_everything_said():
    error = refusal(Plan(data=4), device(size_of(data=4) - 1))
    assert isinstance(error, ValueError)
    text = str(error)
    assert text.startswith("ranks 0 to 3: the plan needs ")
    assert "card has" in text
    for kind in ("activations", "optimizer", "parameters", "gradients", "master weights", "logits"):
        assert kind in text
    assert "smallest change that fits: Sharding(stage=1), which holds" in text
    assert error.change.plan == Plan(data=4, sharding=Sharding(1))


def test_the_fullest_stage_and_its_ranks_are_named():
    wide = [Layer(f"l{i}", (size,), Work(1.0), Work(1.0), Work(1.0)) for i, size in enumerate((10, 10, 5000, 10))]
    workload = Workload("w", tuple(wide))
    error = refusal(Plan(pipeline=4, data=2, tensor=3), device(1000), workload)
    assert str(error).startswith("ranks 12 to 17 (stage 2): the plan needs 120 kB")
    assert str(refusal(Plan(pipeline=4), device(1000), workload)).startswith("rank 2 (stage 2)")


SOME, FULL = {"recompute": "selective"}, {"recompute": "full"}


@pytest.mark.parametrize(
    "wanted", [{"sharding": Sharding(2)}, SOME, SOME | {"sharding": Sharding(2)}, {**FULL, "sharding": Sharding(3)}]
)
def test_what_a_plan_needs_is_found_and_nothing_dearer(wanted):
    """With exactly the room that the wanted plan takes, the answer fits and no cheaper candidate does."""
    room = size_of(data=8, **wanted)
    found = smallest_change(WORKLOAD, Plan(data=8), device(room))
    assert found is not None
    assert memory_of(WORKLOAD, found).max_bytes <= room
    if wanted != SOME:  # a stage of sharding alone may be leaner, and costs less
        assert found == Plan(data=8, **wanted)


def test_micro_batches_are_cut_where_nothing_else_fits_and_keep_their_work():
    half = split_samples(FOUR, 2)
    error = refusal(Plan(), device(memory_of(half, Plan(num_microbatches=2)).max_bytes), FOUR)
    assert (error.change.split, error.change.plan.num_microbatches) == (2, 2)
    assert "micro-batches half as large and num_microbatches=2" in str(error)
    assert (half.samples, half.num_parameters) == (2, FOUR.num_parameters)
    for mine, whole in zip(half.layers, FOUR.layers, strict=True):
        assert 2 * mine.activation_bytes == whole.activation_bytes
        assert 2 * mine.forward.matmul_flops == whole.forward.matmul_flops
        assert mine.forward.num_kernels == whole.forward.num_kernels
    with pytest.raises(ValueError, match="do not divide 4 samples"):
        split_samples(FOUR, 3)


def test_what_a_plan_has_is_never_taken_back():
    plan = Plan(data=8, recompute="full", sharding=Sharding(2))
    found = smallest_change(WORKLOAD, plan, device(size_of(data=8, recompute="full", sharding=Sharding(3))))
    assert found == replace(plan, sharding=Sharding(3))
    compressed = Plan(data=8, compression=Compression("top_k"))
    change = find_change(WORKLOAD, compressed, device(0.8 * memory_of(WORKLOAD, compressed).max_bytes))
    assert change.plan.sharding.stage == 0


def test_offload_is_offered_where_the_host_has_memory():
    plan = Plan(data=8, sharding=Sharding(3), recompute="full")
    lean = memory_of(WORKLOAD, replace(plan, sharding=Sharding(3, offload="optimizer")))
    room = lean.max_bytes
    for host in (lean.host_bytes, None):  # None: nobody said what the host has
        change = find_change(WORKLOAD, plan, device(room, host))
        assert change.plan.sharding.offload == "optimizer"
        assert change.holds.endswith(f" and {format_bytes(lean.host_bytes)} of the host's memory per rank")
    assert smallest_change(WORKLOAD, plan, device(room, lean.host_bytes - 1)).world_size > plan.world_size


def test_offload_without_memory_is_refused():
    plan = Plan(data=8, sharding=Sharding(3, offload="all"))
    needed = memory_of(WORKLOAD, plan).host_bytes
    error = refusal(plan, device(80e9, needed - 1000))
    assert "offload 'all' needs" in str(error)
    assert "of the host's memory" in str(error)
    assert "0 B of it" in str(refusal(plan, device(80e9, 0.0)))
    check_fit(WORKLOAD, plan, device(80e9, needed))
    check_fit(WORKLOAD, plan, device(80e9))


def test_where_nothing_fits_more_ranks_are_named():
    large = model_by_name("gpt-2-1.5b")
    error = refusal(Plan(data=2), device(1.5e9, 0.0), large)
    assert "; smallest change that fits: data=" in str(error)
    change = error.change
    assert change.why == "no change makes it fit on 2 ranks; "
    assert memory_of(large, change.plan).max_bytes <= 1.5e9
    assert find_change(large, replace(change.plan, data=change.plan.data // 2), device(1.5e9, 0.0)).plan.data > 2
    nothing = refusal(Plan(), device(NO_ROOM))
    assert nothing.change is None
    assert "nor do more data or tensor ranks" in str(nothing)


PLANS = [
    (WORKLOAD, Plan(), 1.1),  # one rank: sharding carries offload
    (FOUR, Plan(data=2, num_microbatches=2), 1.2),
    (WORKLOAD, Plan(4, 2, 4, schedule="zb_h1"), 0.8),
    (WORKLOAD, Plan(4, 2, 4, schedule="interleaved", stages_per_rank=2), 0.6),
    (WORKLOAD, Plan(data=4, sharding=Sharding(3, replicas=2, reshard_after_forward=False)), 0.5),
    (FOUR, Plan(data=2, recompute="full", recompute_method="block", recompute_layers=2), 0.9),
    (WORKLOAD, Plan(data=2, compression=Compression("top_k")), 1.4),
    (sim.mix_experts(WORKLOAD, 4), Plan(data=2, expert=2), 2.0),
    (WORKLOAD, Plan(tensor=2, context=2), 0.3),
]


@pytest.mark.parametrize(("workload", "plan", "gigabytes"), PLANS)
def test_a_change_runs_and_fits_and_no_single_one_does_where_it_says_so(workload, plan, gigabytes):
    on = replace(cluster("dgx-a100", 2**14).device, memory_bytes=gigabytes * 1e9)

    def run(own, tried):
        return simulate(own, cluster("dgx-a100", 2**14), tried).memory

    assert not run(workload, plan).fits(on)
    change = find_change(workload, plan, on, run=run)
    again = run(split_samples(workload, change.split), change.plan)
    assert again.fits(on)
    assert change.holds.startswith(format_bytes(again.max_bytes))
    assert (change.plan.world_size > plan.world_size) == change.why.startswith("no change makes it fit on ")
    singles = [{"recompute": name} for name in ("selective", "full")]
    singles += [{"sharding": replace(plan.sharding, stage=stage)} for stage in (1, 2) if plan.compression is None]
    if change.why.startswith("no single"):
        assert not any(memory_of(workload, replace(plan, **one)).fits(on) for one in singles)


def test_what_a_step_holds_is_what_does_not_fit():
    """The plan as it is is no advice, although a different cut of its stages fits."""
    plan = Plan(data=2)
    counted = memory_of(WORKLOAD, plan)
    more = replace(counted, at_peak_bytes=counted.at_peak_bytes + np.eye(1, len(KINDS), dtype=np.int64) * 1000)
    room = device(counted.max_bytes)
    check_fit(WORKLOAD, plan, room)
    with pytest.raises(DoesNotFitError, match="1 kB too much") as found:
        check_fit(WORKLOAD, plan, room, run=lambda own, tried: more if tried == plan else memory_of(own, tried))
    assert found.value.change.plan != plan


def test_beside_a_pipeline_whole_sums_stay_and_parameters_where_software_gathers_once():
    plan = Plan(data=4, pipeline=2, num_microbatches=4, sharding=Sharding(3), precision=Precision("bfloat16"))
    ways = (Software(), Software(gathers_once=True), Software(scatters_each=True), POOLED)
    each, once, sharded, pooled = (memory_of(GPT, plan, software=software) for software in ways)
    stays = [memory.stages[0].always[KINDS.index("gradients")] for memory in (sharded, pooled)]
    messages = [stage.always[B] for stage in pooled.stages]
    assert messages == [4 * 2 * GPT.layers[1].output_bytes, 4 * 2 * 40 * 4 * 311], "outputs, gradients; 16-bit logits"
    assert (stays, pooled.of("gradients")) == ([0, sharded.of("gradients")], sharded.of("gradients"))
    assert once.of("gradients") == each.of("gradients") == pytest.approx(4 * sharded.of("gradients"), rel=1e-3)
    assert once.stages[0].always[B] == 2 * 4 * sharded.of("gradients") / 4, "16 bits of each parameter of the stage"
    assert each.stages[0].always[B] == 0
    machine = replace(cluster("dgx-h100", 8), software=ways[0])
    spans = [simulate(GPT, replace(machine, software=own), plan).layer_trace for own in ways[:2]]
    gathers = [sum(span.name.startswith("all_gather") for span in trace) for trace in spans]
    assert gathers[0] == 2 * 4 * gathers[1], "forward and backward of four micro-batches"


def test_inputs_of_products_are_kept_in_8_bits_by_transformer_engine_and_in_16_by_torchao():
    ways = (("none", 0), ("products", 0), ("products", 1), ("mxfp8", 0), ("nvfp4", 0))
    kept = [memory_of(GPT, Plan(float8=way), software=Software(casts_twice=two)).of("activations") for way, two in ways]
    inputs = 5 * 40 * 4 * (96 + 96 + 96 + 4 * 96)  # of attention, its output, and both products of the feed-forward
    assert (kept[0] - kept[1], kept[2]) == (inputs, kept[0])
    assert [(kept[0] - each) / inputs for each in kept[3:]] == [1 - 1 / 32, 3 / 2 - 1 / 16]
    for way, width in (("none", 2), ("products", 1)):  # of two norms' outputs the half that another rank made
        plan, ways = Plan(tensor=2, sequence_parallel=True, float8=way), [Software(casts_twice=True)]
        ways.append(replace(ways[0], keeps_gathered=True))
        less, more = (memory_of(GPT, plan, software=own).of("activations") for own in ways)
        assert more - less == width * 5 * 40 * 4 * 2 * 96 / 2


def test_software_says_what_a_loss_and_a_gate_keep():
    sizes = sim.LlamaSizes(64, 2, 4, 4, 96, 311)
    for mixture, kept in ((None, 2 * 96), (sim.Mixture(4, top_k=2), 2 * 2 * 96 + 2 * 2 * 64)):  # of a token and a layer
        model = sim.llama_workload(replace(sizes, mixture=mixture), sequence_length=40)
        plain, fused, eager = (memory_of(model, Plan(), software=own) for own in (Software(), FUSED, EAGER))
        more = np.diff([memory.of("activations") for memory in (fused, plain, eager)]).tolist()
        assert more == [2 * 40 * kept, 2 * 40 * 2 * 4 * 64], "a gate; and of two norms 4 bytes"
        assert (plain.of("logits"), fused.of("logits")) == (2 * 4 * 40 * 311, 2 * 40 * 311), "32 bits twice, and 16"


# Published gibibytes: MooreThreads/SimuMax@4dcaae51, b200_release_v1.2_summary.md, 405B of 4 layers.
SUMS = Precision("bfloat16", gradients="float32", reduce="float32")


@pytest.mark.parametrize(("tensor", "published"), [(4, 52.9), (8, 38.6)], ids=["tensor 4", "tensor 8"])
def test_published_memory_of_tensor_parallel_plans(tensor, published):
    sizes = sim.LlamaSizes(16384, 4, 128, 16, 53248, 128256)
    model, own = sim.fuse_attention(sim.llama_workload(sizes, sequence_length=4096)), {"tensor": tensor}
    plan = Plan(8 // tensor, num_microbatches=8, sequence_parallel=True, sharding=Sharding(1), precision=SUMS, **own)
    software = cluster("dgx-b200", 8, stack="megatron-core").software
    assert memory_of(model, plan, software=software).max_bytes / 2**30 == pytest.approx(published, rel=0.05)

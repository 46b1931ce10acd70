"""Runs by any plan, measured and predicted: what is counted of a model, which calls are timed, a run on real ranks."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from distlab import measure
from distlab.blocks.models import GPTConfig
from distlab.expert_parallel import Load
from distlab.measure.count import gpt
from distlab.measure.machine.fit import fit_line, median_of
from distlab.measure.machine.speed import Observation
from distlab.measure.runs import calibrate, calls as timed_calls
from distlab.measure.runs.calls import MESSAGE_BYTES, CallTimes, kinds_of_calls, links_of, steps_of
from distlab.plan import AXES, Cluster, Contention, Device, Link, Plan, Protocol, Sharding, Work, make_schedule
from distlab.plan.compression import Compression, exchanges
from distlab.tensor_parallel import parallelize, splits_of
from simulator import MeasuredCodec
from simulator.hardware.cost import steps_s

CPU = torch.device("cpu")
SMALL = GPTConfig(context=16, num_layers=2, num_heads=4, hidden_size=32, tied=False)
B, S, H, V, L = 4, SMALL.context, SMALL.hidden_size, SMALL.vocab_size, SMALL.num_layers
WORKS = ("forward", "input_gradient", "weight_gradient")
QUANTIZED = Plan(data=2, compression=Compression("quantize", bits=8))


def total(parts, name):
    return sum((getattr(part, name) for part in parts), Work())


def made_up_round(plan):
    """A round as of a machine of 1e9 FLOP/s whose every call takes 1 ms and 1 ns per byte."""
    works = (Work(1e9, 0.0, 10), Work(0.0, 1e9, 20), Work(1e8, 1e8, 1000))
    seconds = [work.matmul_flops / 1e9 + work.memory_bytes / 1e10 + work.num_kernels * 1e-6 for work in works]
    seen = tuple(Observation("made up", work, each) for work, each in zip(works, seconds, strict=True))
    compute = measure.Round(seen, (1e-3, 1.1e-3, 2e-3, 4e-3, 1.4e-2), Contention())
    each = tuple(1e-3 + 1e-9 * size for size in MESSAGE_BYTES)
    steps = {kind: steps_of(kind, getattr(plan, axes[0])) for kind, axes in kinds_of_calls(plan).items()}
    calls = {kind: CallTimes(own, MESSAGE_BYTES, each) for kind, own in steps.items()}
    codec = None if plan.compression is None else MeasuredCodec(plan.compression, 2, 1e-3, 1e-8, 2e-3, 1e-8)
    return calibrate.CalibrationRound(compute, calls, codec)


def test_regions_are_exactly_the_products_between_norms():
    counted = gpt.count_gpt(SMALL, B)
    blocks = [layer for layer in counted.layers if layer.name.startswith("blocks.")]
    assert len(blocks) == L
    for block in blocks:
        attention, feed_forward = block.regions
        products, scores = B * S * H * H, B * S * S * H
        found = [[getattr(region, name).matmul_flops for name in WORKS] for region in block.regions]
        assert found[0] == [8 * products + 4 * scores, 8 * products + 10 * scores, 8 * products]
        assert found[1] == [16 * products] * 3
        # the first product's weights, while its input's sum travels
        assert [region.beside.matmul_flops for region in block.regions] == [6 * products, 8 * products]
        assert attention.attention.forward.matmul_flops == 4 * scores
        for name in WORKS:  # norms and sums are left, and no product
            rest = getattr(block, name).without(total(block.regions, name))
            assert rest.matmul_flops == 0
            assert rest.num_kernels > 0
        assert {region.input_bytes for region in block.regions} == {attention.output_bytes} == {4 * B * S * H}
    rest = [layer.weight_gradient for layer in gpt.without_accumulation(counted).layers]
    for layer, left in zip(counted.layers, rest, strict=True):  # gradients taken as they come cost no addition
        assert left.matmul_flops == layer.weight_gradient.matmul_flops
        more = layer.weight_gradient.without(left)
        assert more.memory_bytes == min(3 * 4 * layer.num_parameters, layer.weight_gradient.memory_bytes)
        assert more.num_kernels == min(
            gpt.BACKWARD_KERNELS * len(layer.parameter_sizes), layer.weight_gradient.num_kernels
        )


def test_experts_are_counted_apart_from_what_chooses_them_and_are_as_busy_as_on_the_busiest_rank():
    counted, plan = gpt.count_gpt(SMALL, B, num_experts=4, top_k=2), Plan(expert=2)
    for layer in counted.layers:
        assert (layer.experts is not None) == layer.name.startswith("blocks.")
        if layer.experts is not None:
            rows = 2 * B * S
            assert layer.experts.forward.matmul_flops == layer.experts.weight_gradient.matmul_flops == 16 * rows * H * H
            assert layer.experts.row_bytes == 4 * rows * H
            assert layer.expert_parameters == 4 * (8 * H * H + 5 * H)
            left = layer.forward.without(layer.experts.forward).without(layer.regions[0].forward)
            assert left.matmul_flops == 2 * B * S * H * 4  # the router
    busy = gpt.with_expert_loads(counted, (1.0, 2.0), plan)
    assert gpt.with_expert_loads(counted, (), plan) is gpt.with_expert_loads(counted, (1.0, 1.0), Plan()) is counted
    assert gpt.with_expert_loads(counted, (1.0, 2.0), plan, cores=1) == counted  # all ranks share one core
    wide = replace(plan, data=2)  # four ranks on three cores: a rank that computes alone is 4/3 times as fast
    less = gpt.with_expert_loads(counted, (1.0, 1.25), plan)
    assert gpt.with_expert_loads(counted, (1.0, 1.5), wide, cores=3) == less
    first, second = ([layer for layer in each.layers if layer.experts] for each in (counted, busy))
    assert first[0] == second[0]
    for name in WORKS:  # the experts' work doubles, and the rest of the layer stays
        own, more = getattr(first[1].experts, name), getattr(second[1].experts, name)
        assert more == own.times(2)
        rest, still = (getattr(layer, name).without(part) for layer, part in ((first[1], own), (second[1], more)))
        assert (still.matmul_flops, still.num_kernels) == (rest.matmul_flops, rest.num_kernels)
        assert still.memory_bytes == pytest.approx(rest.memory_bytes)
    training, rounds = measure.TrainingRun(SMALL, plan, batch_size=2 * B, num_experts=4), [made_up_round(plan)] * 2
    report = measure.RankReport(workload=counted, rounds=rounds, measured_s=[1.0], expert_loads=[(1.0, 1.0)])
    even = measure.RunResult(training, [report])
    uneven = measure.RunResult(training, [replace(report, expert_loads=[(1.0, 2.0)])])
    found = uneven.windows[0].predicted_s - even.windows[0].predicted_s
    assert found == pytest.approx(uneven.predicted.duration_s - even.predicted.duration_s)


def test_calls_are_those_of_the_plan():
    everything = Plan(data=2, tensor=2, context=2, pipeline=2, expert=2, num_microbatches=2, context_kind="all_to_all")
    halves = {"all_gather", "reduce_scatter", "all_reduce"}
    assert kinds_of_calls(Plan()) == kinds_of_calls(Plan(data=2)) == {}  # replicas' all-reduces are timed anyway
    assert kinds_of_calls(Plan(tensor=2, data=4)) == {"all_reduce": ("data",)}  # where most ranks are
    axes = ("tensor", "context", "expert", "data")
    assert kinds_of_calls(everything) == {"all_reduce": axes, "all_to_all": axes[1:3], "send": ("pipeline",)}
    for plan in (Plan(tensor=2, sequence_parallel=True), Plan(data=2, sharding=Sharding(1))):
        assert set(kinds_of_calls(plan)) == halves
    plan = Plan(tensor=4, sequence_parallel=True)
    for kind, link in links_of(median_of([made_up_round(plan).calls] * 3)).items():
        assert steps_s(1e6, steps_of(kind, 4), link) == pytest.approx(1e-3 + 1e-3, rel=1e-6)  # as measured


@pytest.mark.parametrize("sequence", [False, True])
def test_predicted_bytes_are_those_that_ranks_send(sequence):
    plan = Plan(tensor=2, sequence_parallel=sequence)
    step = calibrate.predict_step(gpt.count_gpt(SMALL, B), made_up_round(plan), plan)
    # the Cost of parallelize, which its tests hold against ranks
    wanted = 8 * B * S * H * L + 4 * B * S * H + 6 * B * S + sequence * (2 * (4 * L + 2) * H + S * H)
    assert step.sent_bytes_by_axis["tensor"] == pytest.approx(4 * wanted * (2 - 1) / 2)


def test_a_pass_costs_what_was_measured_beside_its_work():
    """Of a mesh forward and backward, by the rows that a block hands on; of whole replicas backward, by gradients."""
    for plan in (Plan(tensor=2), Plan(tensor=2, sequence_parallel=True), Plan(context=2), Plan(data=2)):
        counted, measured = gpt.count_gpt(SMALL, B), made_up_round(plan)
        plain = calibrate.predict_step(counted, measured, plan)
        block = next(layer for layer in counted.layers if layer.name.startswith("blocks."))
        size = calibrate.bytes_of(block, plan)
        assert size == 4 * (sum(block.parameter_sizes) if plan.data == 2 else B * S * H)
        for passes, cost in (
            ((calibrate.ByteCost(size, 0.01), calibrate.ByteCost(3 * size, 0.01)), 0.01),
            ((calibrate.ByteCost(2 * size, 0.02), calibrate.ByteCost(4 * size, 0.04)), 0.01),
            ((calibrate.ByteCost(2 * size, 0.03), calibrate.ByteCost(4 * size, 0.05)), 0.02),
        ):
            more = calibrate.predict_step(counted, replace(measured, overhead=calibrate.Overhead(passes)), plan)
            num_passes = L if plan.data == 2 else 2 * L
            assert more.duration_s - plain.duration_s == pytest.approx(num_passes * cost, abs=1e-6), plan
            if plan.data == 2:
                assert more.timing.end_ns[0] == plain.timing.end_ns[0], "a forward waits for nobody"


def test_costs_are_fitted_with_no_negative_part():
    for seconds, fitted in (
        ((3.0, 5.0), (1.0, 2.0)),
        ((4.0, 2.0), (3.0, 0.0)),  # no fewer seconds for more bytes
        ((1.0, 4.0), (0.0, 1.8)),  # nothing below zero for no bytes: the line through zero that is closest
        ((-1.0, -2.0), (0.0, 0.0)),
    ):
        assert fit_line((1.0, 2.0), seconds) == pytest.approx(fitted)
    # below zero: the noise of a step
    found = calibrate.Overhead((calibrate.ByteCost(1e3, 0.02), calibrate.ByteCost(3e3, -0.01)))
    assert (found.codec_slowdown, calibrate.Overhead().codec_slowdown) == pytest.approx((1.005, 1.0))
    sizes = [1e3, 1e4, 1e5]
    assert fit_line(sizes, [1e-3 + 1e-8 * size for size in sizes], relative=True) == pytest.approx((1e-3, 1e-8))


PLANS = {
    "sharded": Plan(data=2, sharding=Sharding(3)),
    "compressed": QUANTIZED,
    "pipeline": Plan(pipeline=2, num_microbatches=4, schedule="zb_h1"),
    "mesh": Plan(tensor=2, context=2),
}


@pytest.mark.parametrize(("name", "cost_s"), [*((name, 0.02) for name in PLANS), ("mesh", 0.0), ("pipeline", -0.001)])
def test_the_cost_that_made_a_step_longer_is_found_again_from_its_length(name, cost_s):
    plan, measured = PLANS[name], made_up_round(PLANS[name])
    workload = calibrate.count_model(replace(SMALL, num_layers=4), 2, plan, device=CPU)
    size = next(filter(None, (calibrate.bytes_of(layer, plan) for layer in workload.layers)))
    overhead = calibrate.Overhead((calibrate.ByteCost(size, cost_s),))
    costly = calibrate.predict_step(workload, replace(measured, overhead=overhead), plan)
    wanted_s = costly.duration_s + 50 * min(0.0, cost_s)
    found = calibrate.solve_cost(workload, wanted_s, measured, plan, order=AXES, cores=None)
    assert found.seconds < 0 if cost_s < 0 else found.seconds == pytest.approx(cost_s, rel=0.01, abs=1e-6)


def test_stages_have_the_whole_model_and_ranks_that_share_cores_fill_each_others_bubbles():
    plan = Plan(pipeline=2, num_microbatches=2)
    counted = gpt.count_gpt(SMALL, B)
    stages = gpt.merge_stages(counted, 2)
    assert gpt.merge_stages(counted, 1) is counted
    assert [calibrate.num_blocks(stage) for stage in stages.layers] == [1, 1]
    for name in WORKS:
        assert total(stages.layers, name) == total(counted.layers, name)
    assert stages.layers[0].output_bytes == 4 * B * S * H  # what one stage hands to the next
    step = calibrate.predict_step(stages, made_up_round(plan), plan)
    assert step.bubble_fraction > 0.1
    busy = sum(span.end_ns - span.start_ns for span in step.trace if span.lane == "compute") / 2 / 1e9
    shared = calibrate.predict_step(stages, made_up_round(plan), plan, cores=1)
    assert busy <= shared.duration_s < (busy + step.duration_s) / 2  # messages are waited for all the same
    assert calibrate.predict_step(stages, made_up_round(plan), plan, cores=2).duration_s == step.duration_s


def test_what_cannot_be_trained_is_refused():
    for words, call in {
        "6 samples do not make 2 equal parts.*of 2 equal micro-batches": lambda: measure.TrainingRun(
            plan=Plan(data=2, num_microbatches=2), batch_size=6
        ),
        "tied=False": lambda: measure.TrainingRun(replace(SMALL, tied=True), Plan(pipeline=2, num_microbatches=2)),
        "stages with experts": lambda: measure.TrainingRun(SMALL, Plan(pipeline=2), num_experts=2).count(),
    }.items():
        with pytest.raises(ValueError, match=words):
            call()


class Chosen(torch.nn.Module):
    """Stands for a layer of experts of which a rank's tokens chose these."""

    def __init__(self, *kept):
        super().__init__()
        self.load = Load(sum(kept), kept, kept, 0)


LIMITS = {"num_updates": 2, "num_windows": 1, "steps_per_window": 2, "budget_s": 0.0}
TIMED = measure.TrainingRun(SMALL, Plan(tensor=2, sequence_parallel=True), batch_size=B, **LIMITS)
MIXED = replace(TIMED, plan=Plan(expert=2), num_experts=4, num_windows=0)
ZB_H1 = Plan(pipeline=2, num_microbatches=3, schedule="zb_h1")
PIPED = measure.TrainingRun(replace(SMALL, num_layers=3), ZB_H1, batch_size=6, **LIMITS)
TRAINED = {  # replicas, whatever they share, train the same model as one process
    "accumulated": Plan(data=2, num_microbatches=2),
    "stage 2": Plan(data=2, bucket_bytes=4000, num_microbatches=2, sharding=Sharding(2)),
    "stage 3": Plan(data=2, sharding=Sharding(3, reshard_after_forward=False, prefetch=0)),
}


def train_alone():
    overhead = measure.CalibrationOfRun(Plan(sharding=Sharding(3)), AXES, {}, device=CPU).measure().overhead
    return *(measure.time_training(replace(run, plan=Plan(), num_windows=0)) for run in (TIMED, MIXED)), overhead


def train_replicas():
    model = parallelize(gpt.make_gpt(SMALL, 0))
    parts = splits_of(model)
    divided = 2 * sum(p.numel() for name, p in model.named_parameters() if name in parts)
    rank = dist.get_rank()
    layers = torch.nn.Sequential(Chosen(8, 0, 2, 2), torch.nn.Identity(), Chosen(3, 3 * rank, 3, 3 - 3 * rank))
    loads = gpt.expert_loads([layers, Chosen(1, 0, 0, 9 * rank)], Plan(expert=2), CPU)
    trained = {name: measure.time_training(replace(TIMED, plan=plan, num_windows=0)) for name, plan in TRAINED.items()}
    coded = measure.CalibrationOfRun(QUANTIZED, AXES, {}, device=CPU).measure()
    return trained, measure.time_training(MIXED), divided, loads, coded


def test_whatever_ranks_share_they_train_what_one_process_trains(ranks):
    alone, mixed_alone, overhead = ranks(1).run(train_alone)[0]
    assert overhead == calibrate.Overhead(), "a rank that trains alone has none"
    for trained, mixed, divided, loads, coded in ranks(2).run(train_replicas):
        assert (coded.codec.num_ranks, len(coded.overhead.costs), coded.overhead.codec_slowdown >= 1) == (2, 2, True)
        assert loads == pytest.approx([16 / 12, 1.0, 9 / 5.5])
        assert mixed.losses == pytest.approx(mixed_alone.losses, rel=1e-5)
        assert divided == sum(layer.tensor_parameters for layer in TIMED.count().layers)
        for name, report in trained.items():
            assert report.losses == pytest.approx(alone.losses, rel=1e-5), name
            for key, weight in alone.weights.items():
                assert float((report.weights[key] - weight).abs().max()) <= 1e-5, (name, key)


def compute_spans(trace, rank):
    own = trace.select((trace.rank == rank) & trace.is_word("lane", "compute") & ~trace.is_word("kind", "wait"))
    return sorted((span.start_ns, span.kind, span.name) for span in own)


RUNS = {"tensor": TIMED, "pipeline": PIPED}


@pytest.mark.parametrize("name", RUNS)
def test_runs_on_two_ranks_are_timed_and_predicted(ranks, name):
    run = RUNS[name]
    first, second = reports = ranks(2).run(measure.time_training, run)
    assert first.rounds == second.rounds  # so that every rank predicts the same
    assert (first.losses, first.measured_s) == (second.losses, second.measured_s)
    assert [len(first.losses), len(first.rounds), len(first.step_ns)] == [3, 2, 2]  # and the window's last loss
    assert [len(each.overhead.costs) for each in first.rounds] == [2, 2]
    result = measure.RunResult(run, reports)
    (window,) = result.windows
    assert min(window.measured_s, window.predicted_s) > 0
    assert result.verdict(bar=0.1).holds is None
    measured, predicted = measure.overlay_of_run(result).measured, result.predicted
    assert ({span.rank for span in measured}, len(first.rounds[0].compute.all_reduce_s)) == ({0, 1}, 5)
    if name == "tensor":
        assert set(first.rounds[0].calls) == {"all_gather", "reduce_scatter", "all_reduce"}
        assert predicted.exposed_by_axis["tensor"] > 0
        for trace in (measured, predicted.trace):
            kinds = [kind for _, kind, _ in compute_spans(trace, 0)]
            assert list(dict.fromkeys(kinds)) == ["F", "B", "optimizer"]
    for rank in (0, 1) if name == "pipeline" else ():
        actions = make_schedule("zb_h1", 2, 3).actions(rank)
        expected = [str(action) for action in actions if action.kind in ("F", "B", "I", "W")]
        for trace in (measured, predicted.trace):
            assert [name for *_, name in compute_spans(trace, rank)] == [*expected, "optimizer"]


LINK = Link("l", (Protocol(1e-4, 1e9),))
MACHINE = Cluster("c", Device("d", 1e10, 1e10, 1e9), 2, 2, LINK, LINK)


def test_every_rank_gets_one_codec_from_the_calls_that_are_predicted(ranks):
    two, compression = ranks(2), Compression("powersgd", rank=2)
    first, second = two.run(lambda: measure.measure_codec(compression, MACHINE, device=CPU))
    assert first == second
    assert (first.compression, first.num_ranks) == (compression, 2)
    assert first.encode_s + first.encode_s_per_byte > 0
    sizes = [call.num_bytes for call in two.records().calls(0) if call.op in ("all_gather", "all_reduce")]
    columns = timed_calls.COLUMNS
    buckets = [exchanges(compression, ((rows - 1, columns), (columns,))) for rows in timed_calls.ROWS]
    each = (timed_calls.BUCKET_REPEATS + 1) * timed_calls.IN_A_ROW  # one warms up
    expected = Counter(call.num_bytes for calls in buckets for call in calls * each)
    assert {size: sizes.count(size) for size in expected} == expected

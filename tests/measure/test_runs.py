"""Runs by any plan, measured and predicted: what is counted of a model, which calls are timed, a run on real ranks."""

from dataclasses import replace

import pytest
import torch

from distlab.blocks.models import GPTConfig
from distlab.expert_parallel import Load
from distlab.measure import (
    CalibrationRound,
    RankReport,
    Round,
    RunResult,
    TrainingRun,
    count_gpt,
    overlay_of_run,
    predict_step,
    time_training,
)
from distlab.measure.count.expert_load import expert_loads, measure_alone_speedup, with_expert_loads
from distlab.measure.count.gpt import make_gpt, merge_stages
from distlab.measure.machine.speed import Observation
from distlab.measure.runs.calibrate import MESH_REFERENCES, PIPELINE_REFERENCES, reference_samples, reference_sizes
from distlab.measure.runs.calls import MESSAGE_BYTES, CallTimes, kinds_of_calls, links_of, steps_of
from distlab.measure.runs.predict import ByteCost, Overhead, fit_bytes, num_blocks
from distlab.measure.runs.programs import program_kind, schedule_of
from distlab.plan import Contention, Plan, Precision, Sharding, Work
from distlab.tensor_parallel import parallelize, splits_of
from simulator.hardware.cost import steps_s

SMALL = GPTConfig(context=16, num_layers=2, num_heads=4, hidden_size=32, tied=False)
B, S, H, V, L = 4, SMALL.context, SMALL.hidden_size, SMALL.vocab_size, SMALL.num_layers
WORKS = ("forward", "input_gradient", "weight_gradient")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Threads for models this small only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def total(parts, name):
    return sum((getattr(part, name) for part in parts), Work())


def made_up_round(plan):
    """A round as of a machine of 1e9 FLOP/s whose every call takes 1 ms and 1 ns per byte."""
    works = (Work(1e9, 0.0, 10), Work(0.0, 1e9, 20), Work(1e8, 1e8, 1000))
    seconds = [work.matmul_flops / 1e9 + work.memory_bytes / 1e10 + work.num_kernels * 1e-6 for work in works]
    seen = tuple(Observation("made up", work, each) for work, each in zip(works, seconds, strict=True))
    compute = Round(seen, (1e-3, 1.1e-3, 2e-3, 4e-3, 1.4e-2), Contention())
    each = tuple(1e-3 + 1e-9 * size for size in MESSAGE_BYTES)
    calls = {
        kind: CallTimes(steps_of(kind, getattr(plan, axes[0])), MESSAGE_BYTES, each)
        for kind, axes in kinds_of_calls(plan).items()
    }
    return CalibrationRound(compute, calls)


def test_regions_are_exactly_the_products_between_norms():
    counted = count_gpt(SMALL, B)
    blocks = [layer for layer in counted.layers if layer.name.startswith("blocks.")]
    assert len(blocks) == L
    for block in blocks:
        attention, feed_forward = block.regions
        products, scores = B * S * H * H, B * S * S * H
        found = [[getattr(region, name).matmul_flops for name in WORKS] for region in block.regions]
        assert found[0] == [8 * products + 4 * scores, 8 * products + 10 * scores, 8 * products]
        assert found[1] == [16 * products] * 3
        assert (
            attention.beside.matmul_flops == 6 * products
        )  # the first product's weights, while its input's sum travels
        assert feed_forward.beside.matmul_flops == 8 * products
        assert attention.attention.forward.matmul_flops == 4 * scores
        for name in WORKS:  # norms and sums are left, and no product
            rest = getattr(block, name).without(total(block.regions, name))
            assert rest.matmul_flops == 0
            assert rest.num_kernels > 0
        assert {region.input_bytes for region in block.regions} == {region.output_bytes for region in block.regions}
        assert attention.input_bytes == 4 * B * S * H


def test_stages_have_the_whole_model_between_them():
    counted = count_gpt(SMALL, B)
    stages = merge_stages(counted, 2)
    assert [num_blocks(stage) for stage in stages.layers] == [1, 1]
    assert stages.num_parameters == counted.num_parameters
    for name in WORKS:
        assert total(stages.layers, name) == total(counted.layers, name)
    assert stages.layers[0].output_bytes == 4 * B * S * H  # what one stage hands to the next
    assert merge_stages(counted, 1) is counted
    with pytest.raises(ValueError, match="stages with experts"):
        merge_stages(count_gpt(SMALL, B, num_experts=2), 2)


def test_experts_are_counted_apart_from_what_chooses_them():
    counted = count_gpt(SMALL, B, num_experts=4, top_k=2)
    for layer in counted.layers:
        assert (layer.experts is not None) == layer.name.startswith("blocks.")
        if layer.experts is not None:
            rows = 2 * B * S
            assert layer.experts.forward.matmul_flops == layer.experts.weight_gradient.matmul_flops == 16 * rows * H * H
            assert layer.experts.row_bytes == 4 * rows * H
            assert layer.expert_parameters == 4 * (8 * H * H + 5 * H)
            left = layer.forward.without(layer.experts.forward).without(layer.regions[0].forward)
            assert left.matmul_flops == 2 * B * S * H * 4  # the router


def test_calls_are_those_of_the_plan():
    everything = Plan(data=2, tensor=2, context=2, pipeline=2, expert=2, num_microbatches=2, context_kind="all_to_all")
    assert kinds_of_calls(Plan()) == {}
    assert kinds_of_calls(Plan(tensor=2, data=4)) == {"all_reduce": ("data",)}  # where most ranks are
    assert kinds_of_calls(everything) == {
        "all_reduce": ("tensor", "context", "expert", "data"),
        "all_to_all": ("context", "expert"),
        "send": ("pipeline",),
    }
    halves = {"all_gather", "reduce_scatter", "all_reduce"}
    assert (
        set(kinds_of_calls(Plan(tensor=2, sequence_parallel=True)))
        == set(kinds_of_calls(Plan(data=2, sharding=Sharding(1))))
        == halves
    )
    plan = Plan(tensor=4, sequence_parallel=True)
    for kind, link in links_of(made_up_round(plan).calls).items():
        assert steps_s(1e6, steps_of(kind, 4), link) == pytest.approx(1e-3 + 1e-3, rel=1e-6)  # as measured


@pytest.mark.parametrize("sequence", [False, True])
def test_predicted_bytes_are_those_that_ranks_send(sequence):
    plan = Plan(tensor=2, sequence_parallel=sequence)
    step = predict_step(count_gpt(SMALL, B), made_up_round(plan), plan)
    wanted = (
        8 * B * S * H * L + 4 * B * S * H + 6 * B * S
    )  # the Cost of parallelize, which its tests hold against ranks
    wanted += sequence * (2 * (4 * L + 2) * H + S * H)
    assert step.sent_bytes_by_axis["tensor"] == pytest.approx(4 * wanted * (2 - 1) / 2)


def test_a_pass_costs_what_was_measured_beside_its_work():
    for plan in (Plan(tensor=2), Plan(tensor=2, sequence_parallel=True), Plan(context=2)):
        counted, measured = count_gpt(SMALL, B), made_up_round(plan)
        plain, row = predict_step(counted, measured, plan), 4 * B * S * H
        for passes, cost in (
            ((ByteCost(row, 0.01), ByteCost(3 * row, 0.01)), 0.01),
            ((ByteCost(2 * row, 0.02), ByteCost(4 * row, 0.04)), 0.01),
            ((ByteCost(2 * row, 0.03), ByteCost(4 * row, 0.05)), 0.02),
        ):
            more = predict_step(counted, replace(measured, overhead=Overhead(passes)), plan)
            assert more.duration_s - plain.duration_s == pytest.approx(2 * L * cost, rel=1e-6), plan


def test_what_all_reduces_cost_a_backward_of_replicas_grows_with_its_gradients():
    plan = Plan(data=2)
    counted, measured = count_gpt(SMALL, B), made_up_round(plan)
    plain = predict_step(counted, measured, plan)
    block = 4 * sum(next(layer for layer in counted.layers if layer.name.startswith("blocks.")).parameter_sizes)
    for passes, cost in (
        ((ByteCost(block, 0.01), ByteCost(3 * block, 0.01)), 0.01),
        ((ByteCost(2 * block, 0.03), ByteCost(4 * block, 0.05)), 0.02),
    ):
        costly = predict_step(counted, replace(measured, overhead=Overhead(passes)), plan)
        assert costly.timing.end_ns[0] == plain.timing.end_ns[0], "a forward waits for nobody"
        assert costly.duration_s - plain.duration_s == pytest.approx(L * cost, abs=1e-6)


@pytest.mark.parametrize(
    ("seconds", "fitted"),
    [
        ((3.0, 5.0), (1.0, 2.0)),
        ((4.0, 2.0), (3.0, 0.0)),  # no fewer seconds for more bytes
        ((1.0, 4.0), (0.0, 1.8)),  # nothing below zero for no bytes: the line through zero that is closest
        ((-1.0, -2.0), (0.0, 0.0)),
    ],
)
def test_costs_are_fitted_with_no_negative_part(seconds, fitted):
    costs = tuple(ByteCost(*pair) for pair in zip((1.0, 2.0), seconds, strict=True))
    assert fit_bytes(costs) == pytest.approx(fitted)
    assert fit_bytes(()) == (0.0, 0.0)


def test_ranks_that_share_cores_fill_each_others_bubbles():
    plan = Plan(pipeline=2, num_microbatches=2)
    stages = merge_stages(count_gpt(SMALL, B), 2)
    step = predict_step(stages, made_up_round(plan), plan)
    assert step.bubble_fraction > 0.1
    busy = sum(span.end_ns - span.start_ns for span in step.trace if span.lane == "compute") / 2 / 1e9
    shared = predict_step(stages, made_up_round(plan), plan, cores=1)
    assert busy <= shared.duration_s < (busy + step.duration_s) / 2  # messages are waited for all the same
    assert predict_step(stages, made_up_round(plan), plan, cores=2).duration_s == step.duration_s


def test_experts_are_as_busy_as_on_the_busiest_rank():
    counted, plan = count_gpt(SMALL, B, num_experts=4), Plan(expert=2)
    busy = with_expert_loads(counted, (1.0, 2.0), plan)
    assert with_expert_loads(counted, (), plan) is with_expert_loads(counted, (1.0, 1.0), Plan()) is counted
    assert with_expert_loads(counted, (1.0, 1.5), plan, alone_speedup=4 / 3) == with_expert_loads(
        counted, (1.0, 1.25), plan
    )
    assert with_expert_loads(counted, (1.0, 2.0), plan, alone_speedup=2.0) == counted  # all ranks share one core
    first, second = ([layer for layer in each.layers if layer.experts] for each in (counted, busy))
    assert first[0] == second[0]
    for name in WORKS:  # the experts' work doubles, and the rest of the layer stays
        own, more = getattr(first[1].experts, name), getattr(second[1].experts, name)
        assert more == own.times(2)
        rest, still = (getattr(layer, name).without(part) for layer, part in ((first[1], own), (second[1], more)))
        assert (still.matmul_flops, still.num_kernels) == (rest.matmul_flops, rest.num_kernels)
        assert still.memory_bytes == pytest.approx(rest.memory_bytes)
    training = TrainingRun(SMALL, plan, batch_size=2 * B, num_experts=4)
    rounds = [made_up_round(plan)] * 2
    even, uneven = (
        RunResult(training, [RankReport(workload=counted, rounds=rounds, measured_s=[1.0], expert_loads=[loads])])
        for loads in ((1.0, 1.0), (1.0, 2.0))
    )
    found = uneven.windows[0].predicted_s - even.windows[0].predicted_s
    assert found == pytest.approx(uneven.predicted.duration_s - even.predicted.duration_s)
    works = sum((getattr(first[1].experts, name).times(0.5) for name in WORKS), Work())  # half of it on each rank
    assert found > works.matmul_flops / 1e9 + works.memory_bytes / 1e10


class Chosen(torch.nn.Module):
    """Stands for a layer of experts of which a rank's tokens chose these."""

    def __init__(self, *kept):
        super().__init__()
        self.load = Load(sum(kept), kept, kept, 0)


TIMED = TrainingRun(
    SMALL,
    Plan(tensor=2, sequence_parallel=True),
    batch_size=B,
    num_updates=2,
    num_windows=1,
    steps_per_window=2,
    budget_s=0.0,
)
MIXED = replace(TIMED, plan=Plan(expert=2), num_experts=4, num_windows=0)


def train_both():
    model = parallelize(make_gpt(SMALL, 0))
    parts = splits_of(model)
    divided = 2 * sum(p.numel() for name, p in model.named_parameters() if name in parts)
    rank = torch.distributed.get_rank()
    layers = torch.nn.Sequential(Chosen(8, 0, 2, 2), torch.nn.Identity(), Chosen(3, 3 * rank, 3, 3 - 3 * rank))
    loads = expert_loads([layers, Chosen(1, 0, 0, 9 * rank)], Plan(expert=2), torch.device("cpu"))
    faster = measure_alone_speedup(torch.device("cpu"))
    return time_training(TIMED), time_training(MIXED).losses, (divided, loads, faster)


def train_alone():
    return [time_training(replace(run, plan=Plan(), num_windows=0)).losses for run in (TIMED, MIXED)]


def test_runs_on_two_ranks_are_timed_and_predicted(ranks):
    alone = ranks(1).run(train_alone)[0]
    results = ranks(2).run(train_both)
    assert results[0][2][2] == results[1][2][2]
    for report, mixed, (divided, loads, faster) in results:
        assert 1.0 <= faster <= 2.0
        assert loads == pytest.approx([16 / 12, 1.0, 9 / 5.5])
        assert report.losses[:2] == pytest.approx(alone[0], rel=1e-5)  # whatever the plan
        assert mixed == pytest.approx(alone[1], rel=1e-5)
        assert divided == sum(layer.tensor_parameters for layer in TIMED.count().layers)
    first, second = reports = [report for report, _, _ in results]
    assert first.rounds == second.rounds  # so that every rank predicts the same
    assert len(first.rounds) == 2
    assert first.measured_s == second.measured_s
    assert set(first.rounds[0].calls) == {"all_gather", "reduce_scatter", "all_reduce"}
    result = RunResult(TIMED, reports)
    measured = overlay_of_run(result).measured
    (window,) = result.windows
    assert min(window.measured_s, window.predicted_s) > 0
    assert result.verdict(bar=0.1).holds is None
    assert result.predicted.exposed_by_axis["tensor"] > 0
    for trace in (measured, result.predicted.trace):
        kinds = [span.kind for span in sorted(trace, key=lambda span: span.start_ns) if span.lane == "compute"]
        assert list(dict.fromkeys(kinds)) == ["F", "B", "optimizer"]
    assert {span.rank for span in measured} == {0, 1}


def test_a_pipeline_on_two_ranks_is_timed_and_predicted(ranks):
    plan = Plan(pipeline=2, num_microbatches=3, schedule="zb_h1")
    model = replace(SMALL, num_layers=3, num_heads=2, hidden_size=24)
    limits = {"num_updates": 2, "num_windows": 1, "steps_per_window": 2, "budget_s": 0.0}
    training = TrainingRun(model, plan, batch_size=6, **limits)
    reports = ranks(2).run(time_training, training)
    result = RunResult(training, reports)
    assert reports[0].losses == reports[1].losses
    assert len(reports[0].losses) == 3  # two updates, and the last step of the window
    assert len(reports[0].rounds) == 2
    assert reports[0].rounds == reports[1].rounds  # so that every rank predicts the same
    assert reports[0].measured_s == reports[1].measured_s
    (window,) = result.windows
    assert window.measured_s > 0
    assert window.predicted_s > 0
    assert result.verdict(bar=0.1).holds is None
    assert len(reports[0].step_ns) == 2
    schedule, measured = schedule_of(plan), overlay_of_run(result).measured
    for rank in (0, 1):
        expected = [str(action) for action in schedule.actions(rank) if action.kind in ("F", "B", "I", "W")]
        for trace in (measured, result.predicted.trace):
            spans = sorted((span.start_ns, span.name) for span in trace if (span.rank, span.lane) == (rank, "compute"))
            assert [name for _, name in spans] == [*expected, "optimizer"]
    first = reports[0].rounds[0]
    costly = replace(first, overhead=Overhead((ByteCost(1.0, first.overhead.action_s + 0.01),)))
    cheap, slower = (RunResult(training, [replace(reports[0], rounds=[each])]) for each in (first, costly))
    assert slower.predicted.pipeline_s >= cheap.predicted.pipeline_s + 0.01  # an action's cost is on the way


def test_the_plan_chooses_the_program():
    for plan in (Plan(), Plan(data=4), Plan(data=2, sharding=Sharding(3))):
        assert program_kind(plan) == "replicas"
    assert program_kind(Plan(pipeline=2, num_microbatches=2)) == "pipeline"
    mixed = Plan(data=2, pipeline=2), Plan(tensor=2), Plan(context=2), Plan(expert=2)
    for plan in (*mixed, Plan(data=2, recompute="full"), Plan(pipeline=2, precision=Precision("bfloat16"))):
        assert program_kind(plan) == "hybrid"
    assert program_kind(Plan(data=2), num_experts=4) == "hybrid"


def test_what_cannot_be_trained_is_refused():
    with pytest.raises(ValueError, match="6 samples do not make 2 equal parts.*of 2 equal micro-batches"):
        TrainingRun(plan=Plan(data=2, num_microbatches=2), batch_size=6)
    with pytest.raises(ValueError, match="tied=False"):
        TrainingRun(replace(SMALL, tied=True), Plan(pipeline=2, num_microbatches=2))
    assert torch.equal(make_gpt(SMALL, 3).output.weight, make_gpt(SMALL, 3).output.weight)


@pytest.mark.parametrize(
    "plan",
    [Plan(tensor=3), Plan(tensor=6, context=5), Plan(data=3, tensor=4, context=3, pipeline=2, num_microbatches=4)],
)
def test_reference_models_can_be_split_by_any_plan(plan):
    for reference in MESH_REFERENCES:
        sizes = reference_sizes(reference, plan)
        assert sizes.num_heads % (plan.tensor * plan.context) == 0
        assert sizes.hidden_size % sizes.num_heads == 0
        assert sizes.context % (2 * plan.context * plan.tensor if plan.context > 1 else plan.tensor) == 0
        assert sizes.hidden_size >= reference.hidden_size
        assert sizes.context >= reference.context
        parts = plan.num_microbatches * plan.num_replicas
        assert reference.samples <= parts * reference_samples(reference, plan) < reference.samples + parts


def test_reference_models_of_a_mesh_have_as_many_blocks_per_stage_as_the_model_and_two_at_most():
    plan = Plan(tensor=2, pipeline=2, num_microbatches=2)
    assert [reference_sizes(MESH_REFERENCES[0], plan, layers).num_layers for layers in (2, 3, 4, 80)] == [2, 4, 4, 4]


def test_reference_models_of_a_pipeline_have_as_many_layers_as_stages_and_one():
    plan = Plan(pipeline=2, num_microbatches=4, schedule="interleaved", stages_per_rank=2)
    for reference in PIPELINE_REFERENCES:
        sizes = reference_sizes(reference, plan)
        assert (sizes.num_layers, sizes.hidden_size, sizes.context) == (5, reference.hidden_size, reference.context)
        assert reference_samples(reference, plan) == reference.samples

"""Pipelines measured and predicted: what is counted, what is timed, and a replay that notices a broken dependency."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from distlab.measure.count.module import workload_from_module
from distlab.measure.runs.pipeline import PipelineResult, PipelineTraining, train_pipeline
from distlab.measure.runs.pipeline_predict import build_stages, count_stages
from distlab.measure.runs.pipeline_replay import replay_errors
from distlab.models import GPT, GPTConfig
from distlab.plan import make_schedule, validate
from distlab.trace import Span, Trace
from simulator import CompiledSchedule, arrays_of
from simulator.pipeline.schedule_arrays import LETTERS

SMALL = GPTConfig(context=16, num_layers=3, num_heads=2, hidden_size=24, tied=False)
MESSAGE_NS = 2_000_000


def traces_of(schedule, *, early_ns=0):
    """Simulate a step with uneven actions, as its ranks would have marked it; the last rank may begin too early."""
    compiled = CompiledSchedule(arrays_of(schedule))
    order = compiled.order
    duration = np.random.default_rng(0).integers(5_000_000, 20_000_000, len(order.kind))
    end = compiled.run(duration, MESSAGE_NS)
    begin = end - duration
    traces = []
    for rank in range(order.num_ranks):
        spans, free = [], 0
        for action in range(order.offsets[rank], order.offsets[rank + 1]):
            kind, stage, microbatch = (
                LETTERS[order.kind[action]],
                int(order.stage[action]),
                int(order.microbatch[action]),
            )
            what = {"stage": stage, "microbatch": microbatch}
            times = int(begin[action]), int(end[action])
            if compiled.remote[action]:
                letter = "F" if kind == "F" else "B"
                name = f"{stage}RECV_{letter}{microbatch}"
                spans.append(Span(rank, "receive", name, f"RECV_{letter}", free, max(free, times[0]), **what))
            spans.append(Span(rank, "compute", f"{stage}{kind}{microbatch}", kind, *times, **what))
            free = times[1]
        spans.append(Span(rank, "compute", "optimizer", "optimizer", free, free + 3_000_000))
        trace = Trace.from_spans(spans)
        traces.append(trace.shifted(-early_ns) if rank == order.num_ranks - 1 else trace)
    return traces


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "zb_h1", "interleaved", "zb_v"])
def test_a_simulated_step_replays_to_its_own_end(name):
    schedule = make_schedule(name, 2, 4, stages_per_rank=2 if name in ("interleaved", "zb_v") else 1)
    (error,) = replay_errors(schedule, [traces_of(schedule)])
    assert abs(error) < 1e-6


def test_a_dependency_that_was_not_kept_shows():
    schedule = make_schedule("one_f_one_b", 2, 4)
    (error,) = replay_errors(schedule, [traces_of(schedule, early_ns=60_000_000)])  # before its input was made
    assert error > 0.03


def test_a_trace_without_one_of_the_actions_is_refused():
    schedule = make_schedule("gpipe", 2, 2)
    first, second = traces_of(schedule)
    with pytest.raises(ValueError, match="rank 1: its trace has no 1B1"):
        replay_errors(schedule, [[first, second.select(lambda span: span.name != "1B1")]])


def test_stages_are_counted_as_layers_and_add_up_to_the_model():
    tokens = torch.randint(256, (2, 16))
    counted = count_stages(build_stages(SMALL, 3, 0, torch.device("cpu")), tokens, tokens)
    model = GPT(SMALL, torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    whole = workload_from_module(model, lambda: model.loss(model(tokens), tokens), optimizer=optimizer, samples=2)
    assert len(counted.layers) == 3
    assert counted.num_parameters == whole.num_parameters
    assert counted.optimizer == whole.optimizer
    for part in ("forward", "input_gradient", "weight_gradient"):
        found, expected = (
            sum(getattr(layer, part).matmul_flops for layer in workload.layers) for workload in (counted, whole)
        )
        assert found == expected, part
    assert [layer.output_bytes for layer in counted.layers[:2]] == [2 * 16 * 24 * 4] * 2  # what ranks hand over


def test_a_run_on_two_ranks_is_timed_predicted_and_replayed(ranks):
    training = PipelineTraining(
        SMALL, "zb_h1", num_microbatches=3, batch_size=6, num_updates=2, num_windows=1, steps_a_window=2, budget_s=0.0
    )
    reports = ranks(2).run(train_pipeline, training)
    result = PipelineResult(training, reports)
    assert reports[0].losses == reports[1].losses
    assert len(reports[0].losses) == 2
    assert len(reports[0].rounds) == 2
    assert reports[0].rounds == reports[1].rounds  # so that every rank predicts the same
    assert reports[0].measured_s == reports[1].measured_s
    (window,) = result.windows
    assert window.measured_s > 0
    assert window.predicted_s > 0
    assert result.verdict(bar=0.1).holds is None
    assert len(result.replay_errors) == 2
    plan = training.layout(2).make()
    for rank, report in enumerate(reports):
        expected = [str(action) for action in plan.actions(rank) if action.kind in ("F", "B", "I", "W")]
        for trace in (result.measured, result.predicted.trace):
            spans = sorted((span.start_ns, span.name) for span in trace if (span.rank, span.lane) == (rank, "compute"))
            assert [name for _, name in spans] == [*expected, "optimizer"]
        assert report.peak_in_flight == validate(plan).peak_in_flight[rank]
    costly = replace(reports[0].rounds[0], action_s=reports[0].rounds[0].action_s + 0.01)
    slower = PipelineResult(training, [replace(reports[0], rounds=[costly]), reports[1]])
    assert slower.predicted.pipeline_s >= result.predicted.pipeline_s + 0.01  # an action's cost is on the way


def test_what_cannot_be_trained_is_refused():
    with pytest.raises(ValueError, match="5 samples do not make 2 equal micro-batches"):
        PipelineTraining(num_microbatches=2, batch_size=5)
    with pytest.raises(ValueError, match="tied=False"):
        PipelineTraining(replace(SMALL, tied=True))

"""The step visualizer says at every moment what each rank holds, and cuts communication into hidden and exposed."""

import numpy as np
import pytest
from viz_traces import MS, accumulated, by_hand, data_parallel

from distlab.plan import Plan
from distlab.plan.compression import METHODS, Compression
from distlab.trace import SpanWriter, Trace
from simulator import cluster, gpt_workload, simulate
from simulator.viz import draw_train_step, facts_of, step_of
from simulator.viz.data_parallel.step import ABSENT, FILLING, MEAN, SENT, best_moment, held_at, read_step


def simulated(compression=None, **options):
    sizes = {"hidden_size": 64, "num_layers": 3, "num_heads": 4, "sequence_length": 64, "vocab_size": 256}
    workload = gpt_workload(**sizes, microbatch_size=2, bytes_per_parameter=4)
    plan = Plan(data=4, bucket_bytes=100_000, first_bucket_bytes=30_000, compression=compression, **options)
    return simulate(workload, cluster("laptop", 4), plan)


def states(trace, at_ms):
    own = read_step(trace).ranks[0]
    return [state for state, _ in held_at(own, at_ms / 1e3).gradients]


@pytest.mark.parametrize(
    ("at_ms", "expected"),
    [
        (5, [ABSENT, ABSENT]),
        (20, [FILLING, ABSENT]),
        (35, [SENT, FILLING]),
        (45.5, [MEAN, FILLING]),
        (50, [MEAN, SENT]),
        (61, [MEAN, MEAN]),
    ],
)
def test_a_gradient_is_made_then_sent_then_the_mean(at_ms, expected):
    assert states(by_hand(), at_ms) == expected


def test_what_a_rank_does_and_holds():
    own = read_step(by_hand()).ranks[0]
    seen = [(held_at(own, at / 1e3).doing, round(held_at(own, at / 1e3).activations, 3)) for at in (5, 30, 55, 65, 70)]
    assert seen == [
        ("forward 50 %", 0.5),
        ("backward 50 %", 0.5),
        ("waits for bucket 1", 0.0),
        ("updates weights", 0.0),
        ("step done", 0.0),
    ]
    assert [held_at(own, at / 1e3).updated for at in (60, 65, 70)] == [False, False, True]


def test_communication_is_cut_into_hidden_and_exposed():
    own = read_step(by_hand()).ranks[0]
    assert own.hidden_s == pytest.approx(19e-3)
    assert own.exposed_s == pytest.approx(11e-3)
    assert own.exposed_share == pytest.approx(11 / 30)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_hidden_and_exposed_are_those_of_the_timeline(num_ranks):
    trace = data_parallel(num_ranks, jitter=0.05)
    step, facts = read_step(trace), facts_of(trace)
    assert np.mean([own.exposed_s for own in step.ranks]) == pytest.approx(facts.exposed_s)
    assert np.mean([own.hidden_s + own.exposed_s for own in step.ranks]) == pytest.approx(facts.communication_s)


@pytest.mark.parametrize("sync", ["per_parameter", "flat", "bucketed", "overlapped"])
def test_every_rung_of_the_ladder_is_read(sync):
    step = simulated(gradient_sync=sync)
    for trace in (step.trace, step.layer_trace):
        own = read_step(trace).ranks[0]
        assert len(own.reductions) == {"per_parameter": 38, "flat": 1}.get(sync, len(step.stages[0].buckets))
        for reduction in own.reductions:
            assert reduction.fill_s <= reduction.ready_s <= reduction.start_s + 1e-9 < reduction.end_s
        assert (own.hidden_s > 0) == (sync == "overlapped" or (sync == "bucketed" and trace is step.layer_trace))
    assert own.exposed_s == pytest.approx(step.exposed_communication_s, abs=1e-9)  # the detailed trace has the copies


def test_parameters_are_sent_first_to_last_but_made_last_to_first():
    own = read_step(simulated(gradient_sync="per_parameter").trace).ranks[0]
    ready = [reduction.ready_s for reduction in own.reductions]
    assert ready == sorted(ready, reverse=True)
    ready = [
        reduction.ready_s for reduction in read_step(simulated(gradient_sync="bucketed").trace).ranks[0].reductions
    ]
    assert ready == sorted(ready)


@pytest.mark.parametrize("numbered", [True, False])
def test_micro_batches_add_up_and_only_the_last_sends(numbered):
    spans = [span if numbered else span._replace(microbatch=-1) for span in accumulated()]  # as SpanWriter marks them
    trace = Trace.from_spans(spans)
    own = read_step(trace).ranks[0]
    shares = [[round(share, 3) for _, share in held_at(own, at / 1e3).gradients] for at in (5, 15, 20, 35, 45, 52)]
    assert shares == [[0, 0], [0.25, 0], [0.5, 0], [0.5, 0.5], [0.75, 0.5], [0.4, 0.6]]
    assert states(trace, 35) == [FILLING, FILLING]
    assert states(trace, 52) == [SENT, FILLING]
    kept = [round(held_at(own, at / 1e3).activations, 3) for at in (5, 10, 20, 35, 40, 60)]
    assert kept == [0.5, 1.0, 0.5, 0.5, 1.0, 0.0]  # of one micro-batch: the first one's are gone before the second's
    assert held_at(own, 0.045).doing == "backward 25 % of micro-batch 2"


def test_gpipe_keeps_the_activations_of_all_micro_batches():
    step = simulated(num_microbatches=3, schedule="gpipe")
    own = read_step(step.trace).ranks[0]
    forward = step.timing.end_ns[2] / 1e9
    assert held_at(own, forward).activations == pytest.approx(1.0)
    assert held_at(own, step.timing.end_ns[0] / 1e9).activations == pytest.approx(1 / 3)


@pytest.mark.parametrize("method", METHODS)
def test_compressed_buckets_are_averaged_when_they_are_decoded(method):
    step = simulated(Compression(method, rank=2))
    own = read_step(step.layer_trace).ranks[0]
    spans = [span for span in step.layer_trace if span.rank == 0]
    assert len(own.reductions) == len(step.stages[0].buckets)
    for index, reduction in enumerate(own.reductions):
        (encode,) = [span for span in spans if span.name == f"encode bucket {index}"]
        (decode,) = [span for span in spans if span.name == f"decode bucket {index}"]
        sent = [span for span in spans if span.lane == "communication" and f"bucket {index}" in span.name]
        assert reduction.name == f"bucket {index}"
        assert reduction.num_bytes == sum(span.num_bytes for span in sent)
        assert reduction.ready_s == encode.start_ns / 1e9
        assert (reduction.start_s, reduction.arrived_s) == (sent[0].start_ns / 1e9, sent[-1].end_ns / 1e9)
        assert reduction.end_s == decode.end_ns / 1e9
        assert held_at(own, (decode.start_ns + decode.end_ns) / 2e9).gradients[index][0] == SENT
        assert held_at(own, decode.end_ns / 1e9).gradients[index][0] == MEAN
    assert own.exposed_s == pytest.approx(step.exposed_communication_s, abs=1e-8)


def test_nothing_is_averaged_before_the_last_rank_has_come():
    late = by_hand().shifted(0)
    other = Trace.from_spans([span._replace(rank=1) for span in by_hand()])
    moved = [s._replace(start_ns=s.start_ns + 4 * MS) if s.kind == "all_reduce" else s for s in other]
    step = read_step(Trace.concatenate([late, Trace.from_spans(moved)]))
    own = step.ranks[0]
    assert own.reductions[1].met_s == pytest.approx(50e-3)
    assert own.reductions[1].missing(0.048) == (1,)
    assert held_at(own, 0.048).gradients[1] == (SENT, 0.0)
    assert held_at(own, 0.0555).gradients[1] == (SENT, pytest.approx(0.5))
    assert held_at(own, 0.055).doing == "waits for bucket 1"


def test_the_best_moment_is_under_an_all_reduce():
    for trace in (data_parallel(2), by_hand(), simulated(gradient_sync="flat").trace):
        step = read_step(trace)
        assert SENT in [state for state, _ in held_at(step.ranks[0], best_moment(step)).gradients]


def test_a_step_is_cut_out_of_several_each_rank_by_its_own_marks():
    parts = [data_parallel(2, jitter=0.05).shifted(number * 200 * MS) for number in range(3)]
    whole = Trace.concatenate(parts)
    assert sorted(step_of(whole, 1)) == sorted(parts[1].from_zero())
    assert sorted(step_of(whole)) == sorted(parts[2].from_zero())
    with pytest.raises(ValueError, match="rank 0: the trace has 3 steps .* no step 3"):
        step_of(whole, 3)
    with pytest.raises(ValueError, match="cut one out with step_of"):
        draw_train_step(whole)


def test_recorded_calls_and_marked_spans_make_one_step(ranks):
    def train():
        import torch
        import torch.distributed as dist

        writer = SpanWriter(dist.get_rank())
        layers = torch.nn.ModuleList([torch.nn.Linear(64, 64, bias=False) for _ in range(3)])
        for _ in range(2):
            with writer.span("forward", kind="F"):
                x = torch.randn(32, 64)
                for layer in layers:
                    x = layer(x).relu()
            with writer.span("backward", kind="B"):
                x.sum().backward()
            with writer.span("synchronize", kind="wait"):
                for layer in layers:
                    dist.all_reduce(layer.weight.grad)
            with writer.span("optimizer", kind="optimizer"):
                layers.zero_grad()
        return writer.trace()

    two = ranks(2)
    traces = two.run(train)
    step = step_of(Trace.concatenate([*traces, two.records().to_trace()]))
    own = read_step(step).ranks[0]
    assert [reduction.num_bytes for reduction in own.reductions] == [64 * 64 * 4] * 3
    assert own.hidden_s == 0
    assert own.exposed_s > 0
    assert "3 all-reduces" in draw_train_step(step).words

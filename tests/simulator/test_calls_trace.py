"""The calls inside of passes as spans: what one loop over stages, passes, layers, calls and micro-batches says."""

from distlab.plan import Plan
from distlab.trace import Span
from simulator import cluster, gpt_workload, simulate
from simulator.step.exposed import calls_trace
from simulator.step.trace import layer_rows

HUGE = gpt_workload(hidden_size=16384, num_layers=4, num_heads=4, sequence_length=4096, vocab_size=101)


def spans_one_by_one(step):
    """Return the spans in their order, in Python's whole numbers, which have no limit."""
    order, spans = step.timing.order, []
    rows = layer_rows(step.stages, step.timing).tolist()
    for number, stage in enumerate(step.stages):
        for kind, layers in enumerate(stage.calls):
            for layer, calls in enumerate(layers):
                nominal = max(stage.passes_ns[kind][layer], 1)
                for call in calls:
                    for action, place, start, end in rows:
                        if (order.stage[action], order.kind[action], place) != (number, kind, layer):
                            continue
                        pair = [start + (end - start) * at // nominal for at in (call.start_ns, call.end_ns)]
                        name = f"{call.name} of {stage.layers[layer].name}"
                        who = (number, int(order.microbatch[action]))
                        spans.append(Span(stage.rank, call.axis, name, call.kind, *pair, call.num_bytes, *who))
    return spans


def test_passes_of_many_seconds_are_cut_exactly():
    """A pass of 60 s, and a call that ends after as long: their product in nanoseconds has more than 63 bits."""
    step = simulate(HUGE, cluster("laptop", 8), Plan(tensor=2, pipeline=2, num_microbatches=2))
    longest = max(max(passes) for stage in step.stages for passes in stage.passes_ns)
    assert longest**2 > 2**63
    assert list(calls_trace(step.stages, step.timing, layer_rows(step.stages, step.timing))) == spans_one_by_one(step)

"""What a step marks is what a simulated step shows, in the same order, so that one can be laid over the other."""

import pytest
import torch.distributed as dist
from hybrid_gpt import BATCH, CONFIG, LENGTH, OPTIMIZERS, batch_of, make_model

from distlab.blocks.models import GPTConfig
from distlab.comm import recorded
from distlab.hybrid import Hybrid
from distlab.measure import TrainingRun
from distlab.plan import Plan, Sharding
from distlab.trace import SpanWriter
from simulator import cluster, simulate

PLANS = {
    "pipeline": (Plan(data=2, pipeline=2, num_microbatches=4, schedule="zb_h1"), 0),
    "experts": (Plan(data=2, expert=2, num_microbatches=2), 3),
    "ZeRO-1": (Plan(data=2, pipeline=2, num_microbatches=2, sharding=Sharding(stage=1)), 0),
    "FSDP": (Plan(data=2, tensor=2, num_microbatches=2, sharding=Sharding(stage=3)), 0),
}


def marked(plan, experts):
    """Return what the second of two steps marks, sums over copies that a recorder saw, and the stage."""
    spans, rank = SpanWriter(dist.get_rank()), dist.get_rank()
    hybrid = Hybrid(make_model(0, experts=experts), plan, OPTIMIZERS["sgd"], spans=spans)
    hybrid.train_step(*batch_of(0))
    spans.clear()
    with recorded() as seen:
        hybrid.train_step(*batch_of(1))
    copies = tuple(dist.get_process_group_ranks(hybrid.groups["data"])), tuple(range(4))
    calls = [call for call in seen.records.calls(rank) if call.op == "all_reduce" and call.group in copies]
    hybrid.close()
    return list(spans.trace()), calls, hybrid.coordinates["pipeline"]


def simulated(plan, experts):
    config = GPTConfig(**{**vars(CONFIG), "context": LENGTH})
    training = TrainingRun(config, plan, batch_size=BATCH, num_experts=experts)
    return simulate(training.count(), cluster("laptop", plan.world_size), plan).trace


def on(lane, spans):
    return sorted((span for span in spans if span.lane == lane), key=lambda span: (span.start_ns, span.end_ns))


def check_beside_a_simulated_step(spans, theirs):
    mine, same = ([(s.kind, s.microbatch) for s in on("compute", each)] for each in (spans, theirs))
    assert mine == same
    lanes = {"communication", "scatter", "gather"}
    assert {s.lane for s in spans} & lanes == {s.lane for s in theirs} & lanes
    ways = {(s.stage, s.microbatch, s.name) for s in spans if s.lane in ("send", "receive")}
    assert ways == {(s.stage, s.microbatch, s.name) for s in theirs if s.lane[:4] in ("send", "recv")}


def check_sums_are_marked_while_they_travel(spans, calls, stage):
    sums = on("communication", spans)
    assert sums
    for span in sums:
        travelling = [call.num_bytes for call in calls if span.start_ns <= call.start_ns <= span.end_ns]
        assert max(travelling) >= span.num_bytes, span.name
    (wait,) = (span for span in spans if span.name == "synchronize")
    assert max(span.end_ns for span in sums) <= wait.end_ns
    if stage is not None:  # but for tied weights, a stage's are on their way before the step waits for them
        begins = {span.name: span.start_ns < wait.start_ns for span in sums}
        assert begins == {f"all_reduce stage {stage}": True, "all_reduce tied weights": False}


@pytest.mark.on_ranks(4)
def test_a_measured_step_can_be_laid_over_a_simulated_one():
    for name, (plan, experts) in PLANS.items():
        spans, calls, stage = marked(plan, experts)
        assert {span.rank for span in spans} == {dist.get_rank()}
        check_beside_a_simulated_step(spans, [s for s in simulated(plan, experts) if s.rank == dist.get_rank()])
        if name in ("pipeline", "experts"):
            check_sums_are_marked_while_they_travel(spans, calls, stage if name == "pipeline" else None)

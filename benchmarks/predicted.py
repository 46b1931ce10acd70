"""How far the simulator's prediction of a step is from the measured one: data parallel in many forms, and all layouts.

The rule is that of distlab.measure.runs.windows. Each window of steps has a calibration before and after it. Windows in
which the machine drifted by more than 5 % are dropped. The median error over at least ten windows is held against the
bar or twice the repeat spread. Each round of a compressed run times encoding and decoding too: on buckets of other
sizes and shapes than the model's. Each round of a sharded run times gathers and scatters, each round of a pipeline
messages, and each round of any other layout its calls on the groups of its mesh. All time steps of two models of other
sizes by the same plan too. Experts count as busy as they were in the window. Eight ranks share two cores: who waits
lends its turn to the others. The plain step of the same model is in benchmarks/tour.py.

    python benchmarks/predicted.py              # all rows: about 25 minutes
    python benchmarks/predicted.py --layouts    # those of tensor, context, expert and hybrid parallelism alone
    python benchmarks/predicted.py --quick      # two windows each: shows that it runs
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median

from _replay import pipeline_replay_errors
from _rows import Row, judged, single

from distlab.blocks.models import GPTConfig
from distlab.cli.tour import prepare
from distlab.measure import TrainingRun, Window, time_on_new_ranks
from distlab.plan import Plan, Sharding, make_schedule
from distlab.plan.compression import Compression

BAR = 0.10
NUM_RANKS = 2
CASES = (
    ("4 micro-batches accumulated", {"num_microbatches": 4}),
    ("gradients quantized to 8 bits", {"compression": Compression("quantize", bits=8)}),
    ("gradients by PowerSGD of rank 4", {"compression": Compression("powersgd", rank=4)}),
    ("the 1 % largest gradients", {"compression": Compression("top_k", ratio=0.01)}),
    ("optimizer state sharded (ZeRO-1)", {"sharding": Sharding(1)}),
    ("gradients sharded too (ZeRO-2)", {"sharding": Sharding(2)}),
    ("all sharded by blocks (FSDP)", {"sharding": Sharding(3)}),
    ("FSDP, parameters kept after forward", {"sharding": Sharding(3, reshard_after_forward=False)}),
)
LONG = GPTConfig(context=256, num_layers=4, num_heads=4, hidden_size=128, tied=False)
PIPELINES = (("GPipe", "gpipe"), ("1F1B", "one_f_one_b"), ("ZB-H1", "zb_h1"))
LAYOUTS = (
    ("tensor parallel", TrainingRun(plan=Plan(tensor=2))),
    ("tensor and sequence parallel", TrainingRun(plan=Plan(tensor=2, sequence_parallel=True))),
    ("context parallel by a ring", TrainingRun(model=LONG, plan=Plan(context=2), batch_size=4)),
    ("context parallel by all-to-all", TrainingRun(LONG, Plan(context=2, context_kind="all_to_all"), batch_size=4)),
    ("4 experts a block, 2 on each rank", TrainingRun(plan=Plan(expert=2), num_experts=4)),
    (
        "data x tensor x pipeline, 2 of each",
        TrainingRun(
            plan=Plan(data=2, tensor=2, pipeline=2, num_microbatches=2), steps_per_window=2
        ),  # long steps drift
    ),
)
REPLAY_BAR = 0.03


def rows(quick: bool = False) -> Iterator[Row]:
    """Yield the error of the prediction in each case."""
    plain, data = prepare(Namespace(data=None, ranks=NUM_RANKS, device="cpu"))
    limits = {"num_windows": 2 if quick else 14, "budget_s": 10.0 if quick else 80.0}
    for words, change in CASES:
        plan = replace(plain.plan, **change)
        batch_size = max(plain.batch_size, 2 * NUM_RANKS * plan.num_microbatches)
        training = replace(plain, plan=plan, batch_size=batch_size, num_updates=1, **limits)
        yield _row(words, time_on_new_ranks(training, data).windows)
    for title, name in PIPELINES:
        plan = Plan(pipeline=NUM_RANKS, num_microbatches=4, schedule=name)
        result = time_on_new_ranks(TrainingRun(plan=plan, **limits), data)
        yield _row(f"as a pipeline by {title}, 4 micro-batches", result.windows)
        schedule = make_schedule(name, NUM_RANKS, plan.num_microbatches)
        steps = [
            [report.step_trace(step) for report in result.reports] for step in range(len(result.reports[0].step_ns))
        ]
        errors = [abs(error) for error in pipeline_replay_errors(schedule, steps)]
        claim = f"measured durations of a {title} step fed to the engine: error of its end (median over steps)"
        note = f"{len(errors)} steps on {NUM_RANKS} ranks, the worst off by {max(errors):.1%}"
        holds = median(errors) <= REPLAY_BAR
        yield single(claim, errors, "relative", bar=f"<= {REPLAY_BAR}", holds=holds, note=note)
    yield from layout_rows(quick)


def layout_rows(quick: bool = False) -> Iterator[Row]:
    """Yield the error of the prediction for each layout."""
    for words, layout in LAYOUTS:
        timed = replace(layout, num_windows=2 if quick else 14, budget_s=10.0 if quick else 80.0)
        yield _row(words, time_on_new_ranks(timed).windows, layout.plan.world_size)


def _row(words: str, windows: Sequence[Window], num_ranks: int = NUM_RANKS) -> Row:
    claim = f"step of the small GPT on {num_ranks} ranks, {words}: predicted against measured (median error)"
    return judged(claim, windows, BAR)


if __name__ == "__main__":
    chosen = layout_rows if "--layouts" in sys.argv else rows
    for row in chosen("--quick" in sys.argv):
        print(row, flush=True)

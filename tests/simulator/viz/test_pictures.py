"""Every picture: the words that it says, its texts and where it is how bright, and that its texts can be read.

What each picture says and shows stands in pictures.json. `PYTHONPATH=tests/simulator python
tests/simulator/viz/test_pictures.py` writes the file anew; read its diff.
"""

import json
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import viz_traces as t
from picture_facts import clashes, look_at, pale_texts, words
from sharding_cases import cluster_of, plan_of, workload_of

import simulator as sim
from distlab.plan import AXES, ActionTimes, Link, Mesh, Plan, Protocol, Sharding, zb_h2
from distlab.plan.compression import Compression
from distlab.trace import Span, Trace
from simulator import viz as v
from simulator.sweeps.compression import CompressionLine
from simulator.viz.collectives.ring import draw_ring_frame, ring_steps
from simulator.viz.mesh.degrees import draw_impossible
from simulator.viz.schedules import play

KEPT = Path(__file__).with_name("pictures.json")

SERIES = {"flat": {"predicted": 61.0, "measured": 66.0}, "overlapped": {"predicted": 40.0, "measured": 55.5}}
WIRES = ("ethernet-10g", "nvlink4", "infiniband-hdr")
RUNS = {"SGD": {1437: [0.70, 0.80], 32: [0.96, 0.98]}, "LAMB": {32: [0.97], 1437: [0.90]}}
SECTIONS = {
    0: {"data": 0.001, "forward": 0.02, "backward": 0.04, "sync": 0.01, "optimizer": 0.004, "idle": 0.02},
    1: {"data": 0.021, "forward": 0.02, "backward": 0.04, "sync": 0.01, "optimizer": 0.004, "idle": 0.0},
}
PREDICTED = {0: {"forward": 0.02, "backward": 0.04, "sync": 0.002, "optimizer": 0.004, "idle": 0.0}}
TINY = sim.gpt_workload(hidden_size=256, num_layers=6, num_heads=4, sequence_length=64, vocab_size=1000)
GPT = sim.gpt_workload(hidden_size=1024, num_layers=8, num_heads=16, sequence_length=1024, vocab_size=8192)
H100 = sim.cluster("dgx-h100", 32)
SMALL = replace(H100, device=replace(H100.device, memory_bytes=1e9))
CUBE = Mesh({"pipeline": 2, "data": 2, "tensor": 2})
PLACED = Plan(data=2, pipeline=2, tensor=8, num_microbatches=4)
FAILURES = sim.Failures("llama-3-all", restart_s=600)
WIRE = Link("plain", (Protocol(1e-5, 1e9),))
SIZES, TIMES = [10.0, 1e4, 1e6], [50e-6 + size / 2e9 for size in (10.0, 1e4, 1e6)]
BLOCKS = workload_of([3.0] * 6, [40_000] * 6, ends=1000)


def held(**options):
    return sim.memory_of(TINY, Plan(**options))


def measured_memory():
    times, rows = held().over_time()
    return v.draw_measured_memory((times, rows), (times * 3, (rows * 1.25).astype(np.int64)))


def sharded(**options):
    plan = plan_of(3, **options)
    return v.draw_sharding(sim.sweep_units(BLOCKS, cluster_of(4), plan), sim.simulate(BLOCKS, cluster_of(4), plan))


def step_of(plan, machine=H100):
    return sim.simulate(GPT, machine, plan)


def orders():
    moved = ("pipeline", "data", "tensor")
    rest = tuple(axis for axis in AXES if axis not in moved)
    return [(rest + order, sim.simulate(GPT, H100, PLACED, order=rest + order)) for order in permutations(moved)]


def bills(name="dgx-a100", counts=None, run=None):
    machine, plan = sim.cluster(name), Plan(2, 2, 8)
    steps = sim.spread(TINY, machine, plan, counts or sim.counts_of(plan)).steps
    return [sim.bill(step, run or sim.Run(1e12, 2.0, FAILURES)) for step in steps]


def sweep(*which, at):
    lines = (
        CompressionLine(Compression("sign"), (0.2, 0.1, 0.09), 2e8),
        CompressionLine(Compression("quantize", bits=1), (2.0, 0.9, 0.3), 0.0),
        CompressionLine(Compression("top_k"), (0.2, 0.1, 0.04), float("inf")),
    )
    found = sim.CompressionSweep((1e7, 1e8, 1e9), (1.0, 0.15, 0.05), tuple(lines[n] for n in which), 0.04)
    return v.draw_compression(found, at)


THREE = {"group": (0, 1, 2)}
CALLS = {
    "ping": t.ping(),
    "deadlock": [t.call(r, "recv", (r - 1) % 3, (r + 1, r + 1, 0), channel=r, **THREE) for r in range(3)],
    "all-reduce": [t.call(r, "all_reduce", -1, (r + 1, r + 1, 9 + r), channel=5, **THREE) for r in range(3)],
    "a rank too few": [t.call(r, "all_reduce", -1, (r + 1, r + 1, 0), channel=5, **THREE) for r in (0, 2)],
    "from anyone": [
        t.call(0, "send", 2, (1, 1, 3), channel=5, **THREE),
        *(t.call(2, "recv", -1, (at, at, end), channel=6, **THREE) for at, end in ((2, 4), (5, 0))),
    ],
    "nobody takes it": [t.call(0, "send", 1, (0, 1, 2)), t.call(1, "send", 0, (1, 1, 0), channel=9)],
}


def overlay():
    step = Trace.concatenate([t.by_hand(), t.by_hand(1)])
    early = replace(step, start_ns=step.start_ns * 38 // 39, end_ns=step.end_ns * 38 // 39)
    return v.Overlay(step, early, [0.069, 0.070, 0.071, 0.075], [0.0666, 0.0684, 0.0702], "The machine was busy.")


def scaled():
    def step(sync):
        return lambda n: sim.simulate(TINY, sim.cluster("dgx-a100", n), Plan(data=n, gradient_sync=sync))

    claims = {"8 give 6-7x": (8, 6.0, 7.0), "4 give 2x": (4, 2.0, 2.0)}
    return v.draw_scaling({"overlapped": step("overlapped"), "per parameter": step("per_parameter")}, claims=claims)


UNIT = ActionTimes(1.0, 1.0, 1.0)
PICTURES = {
    "bars: series": lambda: v.draw_bars(SERIES, unit="ms", title="The ladder", subtitle="four ranks"),
    "links": lambda: v.draw_link_times(375e6, WIRES, compute_s=0.12),
    "batches": lambda: v.draw_batch_sizes(RUNS, subtitle="digits"),
    "sections: predicted": lambda: v.draw_sections(SECTIONS, PREDICTED, title="Two ranks"),
    "memory: tight": lambda: v.draw_memory(held(), capacity_bytes=0.9 * held().max_bytes),
    "memory: stages": lambda: v.draw_memory(held(pipeline=2, num_microbatches=400), capacity_bytes=4e7),
    "plans: one fits": lambda: v.draw_memory_of_plans(
        {f"ZeRO-{stage}": held(data=8, sharding=Sharding(stage)) for stage in range(4)}, capacity_bytes=2.5e7
    ),
    "measured memory": measured_memory,
    **{f"sharding: {options}": lambda options=options: sharded(**options)
       for options in ({"replicas": 2}, {"offload": "all"})},
    **{f"mesh: {mesh}, nodes of {node}": lambda mesh=mesh, node=node: v.draw_mesh(mesh, devices_per_node=node)
       for mesh, node in (
           (Mesh({"pipeline": 6, "data": 2, "tensor": 8}), 8), (Mesh({"own name": 2, "expert": 2, "context": 2}), 2))},
    "mesh: one rank": lambda: v.draw_mesh(CUBE, devices_per_node=4, rank=5),
    "degrees: idle": lambda: v.draw_degrees(
        step_of(Plan(data=2, pipeline=4, tensor=4, num_microbatches=8)), num_devices=64),
    "degrees: too large": lambda: v.draw_degrees(step_of(Plan(data=4), SMALL)),
    "degrees: impossible": lambda: draw_impossible(Plan(data=64), "the product is 64, and there are 32 GPUs"),
    "placement": lambda: v.draw_placement(orders() + [(("context", "expert", *o[2:]), step) for o, step in orders()]),
    "planner: 16 ranks": lambda: v.draw_planner(
        sim.bill(step_of(Plan(2, 4, 8, tensor=2)), sim.Run(1e9, 2.0, sim.Failures("llama-3")))),
    "strategies": lambda: v.draw_strategy_map(
        sim.strategy_map(("llama-2-7b",), sim.cluster("dgx-h100", 32), (1, 32), batch_size=64)),
    "race": lambda: v.draw_race(WIRE, 8, ("tree", "ring"), measured={"ring": ([1e4, 1e6], [2e-4, 3e-3])}),
    "race: nodes": lambda: v.draw_race("nvlink4", 64, inter_node="infiniband-ndr"),
    "fit: off": lambda: v.draw_fit(SIZES, [*TIMES[:2], 2 * TIMES[2]], 50e-6, 2e9),
    "scaling: claims": scaled,
    "ring of 7, step 3": lambda: draw_ring_frame(ring_steps(t.ring(7)), 3),
    "ring of whole tensors": lambda: draw_ring_frame(ring_steps(t.ring(4, whole=True)), 1),
    **{f"messages: {name}": lambda calls=calls: v.draw_message_diagram(calls) for name, calls in CALLS.items()},
    "routing: 2 places, (3, 7, 2)": lambda: v.draw_routing(
        t.choices(), num_experts=6, capacity=2, kept=[t.within(one, 2) for one in t.choices()]),
    "context: 8": lambda: v.draw_context(8),
    "cost: two clusters": lambda: v.draw_cost_curve(
        sim.curve([*bills(), *bills("dgx-h100", [4, 8], sim.Run(1e12, 4.0, FAILURES))])),
    "cost: no price": lambda: v.draw_cost_curve(sim.curve(bills(counts=[4], run=sim.Run(1e12)))),
    "goodput": lambda: v.draw_goodput(FAILURES, 16_384, 30.0),
    "compression": lambda: sweep(0, 1, at=1e7),
    "compression: never and always": lambda: sweep(1, 2, at=1e8),
    **{f"schedule: {name}": lambda name=name: v.draw_schedules([play(name, 4, 8)])
       for name in ("interleaved", "zb_v")},
    "schedules: later": lambda: v.draw_schedules([play("zb_h1", 4, 8), play("one_f_one_b", 4, 8)]),
    "schedules: steps need not end together": lambda: v.draw_schedules([v.run_schedule("ZB-H2", zb_h2(4, 8), UNIT)]),
    "bubble": lambda: v.draw_schedule(sim.simulate(GPT, H100, Plan(2, 2, 4)).trace),
    "bubble: predicted": lambda: v.draw_schedule(play("gpipe", 2, 3).trace, play("one_f_one_b", 2, 3).trace),
    "bubble: of stages": lambda: v.draw_schedule(play("interleaved", 2, 4, stages_per_rank=3).trace),
    "bubble: none known": lambda: v.draw_schedule(t.data_parallel(1)),
    "shards: 4 ranks": lambda: v.draw_shards(t.cut(4), t.SPLITS, num_heads=4),
    "timeline: predicted": lambda: v.draw_timeline(t.data_parallel(2, jitter=0.05), t.data_parallel(2)),
    "timeline: 64 ranks": lambda: v.draw_timeline(t.data_parallel(64, jitter=0.05), t.data_parallel(64)),
    "timeline: columns": lambda: v.draw_timeline(t.grid(64, 100)),
    "timeline: near": lambda: v.draw_schedule(t.grid(64, 100), time_range_s=(0.1, 0.2)),
    "timeline: short": lambda: v.draw_timeline(
        Trace.from_spans(Span(rank, "compute", "F", "F", 0, t.MS * (rank + 1)) for rank in (0, 1))),
    "overlay: not calm": lambda: v.draw_timeline(overlay()),
    "train step": lambda: v.draw_train_step(t.data_parallel(4, jitter=0.05), 0.09),
    "train step: a late rank": lambda: v.draw_train_step(
        Trace.concatenate([t.by_hand(), t.by_hand(1, late=4)]), 0.048),
}  # fmt: skip


def blocks_of(look):
    """Return how bright a picture without its texts is in each of 16 x 12 blocks, 0 to 9999, as numbers in a line."""
    cells = [np.array_split(row, 16, axis=1) for row in np.array_split(look.pixels, 12, axis=0)]
    return " ".join(f"{9999 * cell.mean():.0f}" for row in cells for cell in row)


def said(picture, look):
    return {"words": picture.words.split("\n"), "texts": " | ".join(words(picture.figure)), "blocks": blocks_of(look)}


KNOWN = json.loads(KEPT.read_text("utf-8")) if KEPT.is_file() else {}


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_says_and_shows_what_it_did_and_can_be_read(name):
    picture, known = PICTURES[name](), KNOWN[name]
    look = look_at(picture.figure)
    found = said(picture, look)
    assert (found["words"], found["texts"]) == (known["words"], known["texts"])
    now, then = (np.array(one["blocks"].split(), int) for one in (found, known))
    assert np.abs(now - then).max() < 200, "brightness of a block, of 9999"
    assert [*clashes(look), *pale_texts(look)] == []  # small texts: tests/lessons/pictures_in_kernels.py


def test_no_picture_is_kept_that_is_not_drawn():
    assert KNOWN.keys() == PICTURES.keys()


if __name__ == "__main__":
    pictures = {name: make() for name, make in PICTURES.items()}
    everything = {name: said(picture, look_at(picture.figure)) for name, picture in pictures.items()}
    KEPT.write_text(json.dumps(everything, indent=1, ensure_ascii=False) + "\n", "utf-8")

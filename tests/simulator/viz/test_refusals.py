"""What cannot be drawn is refused, by every picture and every panel, with words that say what is wrong."""

import math
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from test_numbers import PLAIN
from viz_traces import SPLITS, data_parallel, grid, ring, split, weights

pytest.importorskip("anywidget", reason="panels need the notebooks extra")

from distlab.plan import Mesh, Plan  # noqa: E402
from distlab.trace import Span, Trace  # noqa: E402
from simulator import (  # noqa: E402
    Failures,
    cluster,
    gpt_workload,
    memory_of,
    strategy_map,
    viz as v,  # noqa: E402
)
from simulator.viz.collectives.ring import ring_steps  # noqa: E402
from simulator.viz.expert_parallel import routes_of  # noqa: E402

WORKLOAD = gpt_workload(hidden_size=64, num_layers=2, num_heads=4, sequence_length=32, vocab_size=100)
MEMORY, CUBE = memory_of(WORKLOAD, Plan()), Mesh({"pipeline": 2, "data": 2, "tensor": 2})
TIMES, ROWS = MEMORY.over_time()
BARS, WIRES, EMPTY = {"unit": "ms", "title": "none"}, ("ethernet-10g", "nvlink4"), Trace.from_spans([])
SEND = Span(0, "communication", "send #1", "send", 0, 5, 8)


def says(words, draw, *given, **options):
    return words, partial(draw, *given, **options)


REFUSED = [
    *(says("pass", v.draw_bars, wrong, **BARS) for wrong in ({}, {"a": {}}, {"a": -1.0}, {"a": math.nan})),
    says("pass", v.draw_bars, {"a": {"b": math.inf}}, **BARS),
    *(says("pass", v.draw_batch_sizes, wrong) for wrong in ({}, {"SGD": {}}, {"SGD": {32: []}}, {"SGD": {32: [97.0]}})),
    says("no links", v.draw_link_times, 1e6, []),
    says("0 bytes", v.draw_link_times, 0, WIRES),
    says("nan bytes", v.draw_link_times, math.nan, WIRES),
    says("wet-string", v.draw_link_times, 1e6, ["wet-string"]),
    says("compute_s is 0", v.draw_link_times, 1e6, WIRES, compute_s=0),
    *(says("profile at least one step", v.draw_sections, wrong) for wrong in ({}, {0: {"forward": 0.0}})),
    says("9 ranks; pass 1 to 8", v.draw_context, 9),
    says("order is 'random'; choose one of zigzag, straight", v.draw_context, 2, "random"),
    says("there is no order", v.draw_placement, []),
    says("at least one", v.draw_fit, [], [], 1e-6, 1e9),
    says("1 sizes and 2 times", v.draw_fit, [1.0], [1.0, 2.0], 1e-6, 1e9),
    says("not a positive number", v.draw_fit, [1.0, 0.0], [1.0, 1.0], 1e-6, 1e9),
    says("alpha_s is -1e-06", v.draw_fit, [1.0], [1.0], -1e-6, 1e9),
    says("bandwidth in bytes per second", v.draw_fit, [1.0], [1.0], 1e-6, 0.0),
    says("there is no line", v.draw_scaling, {}),
    says("a time above zero", v.draw_scaling, lambda n: 0.0),
    says("claim 'odd'", v.draw_scaling, lambda n: 1.0, claims={"odd": (2, 3, 1)}),
    says("above zero", v.draw_memory, MEMORY, capacity_bytes=0),
    says("above zero", v.draw_memory_of_plans, {"one": MEMORY}, capacity_bytes=-1),
    says("at least one Memory", v.draw_memory_of_plans, {}),
    says("measured has", v.draw_measured_memory, (TIMES, ROWS), (TIMES[1:], ROWS)),
    says("more than 256 ranks to draw", v.draw_mesh, Mesh({"data": 257})),
    says("rank 8 is outside the mesh", v.draw_mesh, CUBE, rank=8),
    says("devices_per_node is 0", v.draw_mesh, CUBE, devices_per_node=0),
    says("no call", v.draw_message_diagram, []),
    says("no field to draw", v.draw_strategy_map, ()),
    says("llama-2-8b", strategy_map, ("llama-2-8b",), cluster("dgx-h100"), (8,), batch_size=64),
    says("pass at least 2", v.draw_race, PLAIN, 1),
    says("'rope'; choose of naive", v.draw_race, PLAIN, 4, ("rope",)),
    says("choose of", v.draw_race, PLAIN, 4, ()),
    says("no preset 'string'", v.draw_race, "string", 4),
    says("whole nodes", v.draw_race, PLAIN, 16, ("hierarchical",)),
    says("a multiple of 8", v.draw_race, PLAIN, 12, ("hierarchical",), inter_node=PLAIN),
    says("'tree', which is not in the race", v.draw_race, PLAIN, 4, ("ring",), measured={"tree": ([1.0], [1.0])}),
    says("steps 1 to 4", v.draw_ring_frame, ring(3), 5),
    says("at most 8 ranks", v.draw_ring_frame, ring(9), 1),
    says("no send", ring_steps, data_parallel(2)),
    says("does not name the other rank", ring_steps, Trace.from_spans([SEND])),
    says("one neighbour", ring_steps,
     Trace.from_spans([SEND._replace(name=f"send to {to} #1", start_ns=to) for to in (1, 2)])),
    says("not one ring", ring_steps, ring(3).select(ring(3).rank != 2)),
    says("one call only", ring_steps, ring(4, num_steps=5)),
    says("different numbers", ring_steps, ring(3).select(np.arange(len(ring(3))) > 1)),
    says("3 experts on 2 ranks", v.draw_routing, [[[0]], [[1]]], num_experts=3),
    says("3 experts on 0 ranks", v.draw_routing, [], num_experts=3),
    says("rank 1: experts has shape [1, 2]", v.draw_routing, [[[0]], [[1, 0]]], num_experts=2),
    says("experts are 0 to 4; expected 0 to 3", v.draw_routing, [[[0], [4]]], num_experts=4),
    says("capacity is -1", v.draw_routing, [[[0]]], num_experts=2, capacity=-1),
    says("49 tokens, 2 experts and 1 ranks cannot be drawn apart", v.draw_routing, [[[0]] * 49], num_experts=2),
    says("kept has other shapes", routes_of, [np.array([[0]])], num_experts=2, kept=[np.array([True])]),
    says("nothing fails", v.draw_goodput, Failures("none"), 64, 30.0),
    says("no compute span of kind F, B, I or W", v.draw_schedule, Trace.from_spans([SEND])),
    says("there is no schedule to draw", v.draw_schedules, []),
    says("there is no rank", v.draw_shards, [], SPLITS),
    says("rank 1: holds other weights than rank 0: blocks.0.attention.output", v.draw_shards, [weights(), {}], SPLITS),
    says("rank 0: token_embedding.weight has shape [11, 4]; expected [6, 4]: pass each", v.draw_shards,
     [weights(), weights()], SPLITS),
    says("more than 8 ranks cannot be told apart", v.draw_shards, v.cut_weights(weights(), SPLITS, 16), SPLITS),
    says("no weight of two dims is cut", v.draw_shards, [weights()], {}),
    says("sections (3,) sum to 3; expected the 11 of dim 0", v.cut_weights, weights(),
     {"token_embedding.weight": split(0, 3)}, 2),
    says("no spans; record or simulate", v.draw_timeline, EMPTY),
    says("no spans", v.draw_timeline, data_parallel(1), EMPTY),
    says("start before end", v.draw_timeline, data_parallel(2), time_range_s=(2.0, 1.0)),
    says("Timeline got no trace; pass Timeline(measured)", v.Timeline),
    says("the trace has no spans", v.Timeline, EMPTY),
    says("no backward span", v.draw_train_step, grid(2, 3).select(grid(2, 3).is_word("kind", "F"))),
    says("several pipeline stages", v.draw_train_step, grid(2, 3)),
    says("different numbers of all-reduces", v.draw_train_step, data_parallel(2).select(np.arange(18) != 6)),
    says("there is no cluster", v.degrees_panel, WORKLOAD, cluster={}),
    says("the plan has data = 3; choose one of 1, 2, 4", v.degrees_panel, WORKLOAD, plan=Plan(data=3)),
    says("at least one name", v.memory_panel, devices=()),
    says("no trace", v.train_step_panel, {}),
    says("no send", v.ring_panel, data_parallel(2)),
    says("there is no model", v.planner_panel, ()),
    says("no number of GPUs", v.strategy_panel, ("gpt-2-1.5b",), ()),
    says("no model", v.compression_panel, {}, replace(cluster("laptop"), num_devices=2), Plan(data=2)),
    says("schedule is 'pipe'; choose one of naive", v.schedule_panel, "pipe"),
    says("schedule is 'x'", v.schedule_panel, compare="x"),
    says("ranks is 65; pass 2 to 64", v.schedule_panel, ranks=65),
    says("microbatches is 0; pass 1 to 1024", v.schedule_panel, microbatches=0),
    says("0B0", v.schedule_editor, "0F0"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "draw"), REFUSED)
def test_what_cannot_be_drawn_is_refused_in_words(words, draw):
    with pytest.raises(ValueError, match=re.escape(words)):
        draw()

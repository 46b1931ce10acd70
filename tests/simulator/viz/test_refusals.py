"""What cannot be drawn is refused, by every picture and every panel, with words that say what is wrong."""

import math
import re
from functools import partial

import numpy as np
import pytest
from viz_traces import SPLITS, cut, data_parallel, grid, ring, weights

pytest.importorskip("anywidget", reason="panels need the notebooks extra")

from distlab.plan import Mesh, Plan  # noqa: E402
from distlab.trace import Trace  # noqa: E402
from simulator import Failures, cluster, gpt_workload, memory_of, viz as v  # noqa: E402
from simulator.viz.collectives.ring import draw_ring_frame, ring_steps  # noqa: E402

WORKLOAD = gpt_workload(hidden_size=64, num_layers=2, num_heads=4, sequence_length=32, vocab_size=100)
MEMORY, CUBE = memory_of(WORKLOAD, Plan()), Mesh({"pipeline": 2, "data": 2, "tensor": 2})
NODE = {"devices_per_node": 4}
TIMES, ROWS = MEMORY.over_time()
BARS, WIRE, EMPTY = {"unit": "ms", "title": "none"}, "ethernet-10g", Trace.from_spans([])
ONE = {"num_experts": 2, "capacity": 1, "kept": [np.array([[True]])]}
HEADS = {"num_heads": 1}


def says(words, draw, *given, **options):
    return words, partial(draw, *given, **options)


REFUSED = [
    *(says("pass", v.draw_bars, wrong, **BARS) for wrong in ({}, {"a": -1.0}, {"a": math.nan})),
    *(says("pass", v.draw_batch_sizes, wrong) for wrong in ({}, {"SGD": {32: []}}, {"SGD": {32: [97.0]}})),
    says("num_bytes is nan", v.draw_link_times, math.nan, [WIRE], compute_s=1.0),
    says("1 sizes and 2 times", v.draw_fit, [1.0], [1.0, 2.0], 1e-6, 1e9),
    says("profile at least one step", v.draw_sections, {0: {"forward": 0.0}}),
    says("9 ranks; pass 1 to 8", v.draw_context, 9),
    says("capacity_bytes is 0", v.draw_memory, MEMORY, capacity_bytes=0),
    says("measured has", v.draw_measured_memory, (TIMES, ROWS), (TIMES[1:], ROWS)),
    says("more than 256 ranks to draw", v.draw_mesh, Mesh({"data": 257}), **NODE),
    says("rank 8 is outside the mesh", v.draw_mesh, CUBE, rank=8, **NODE),
    says("no call", v.draw_message_diagram, []),
    says("pass at least 2", v.draw_race, WIRE, 1),
    says("'rope'; choose one of naive", v.draw_race, WIRE, 4, ("rope",)),
    says("a multiple of 8", v.draw_race, WIRE, 12, ("hierarchical",), inter_node=WIRE),
    says("steps 1 to 4", draw_ring_frame, ring_steps(ring(3)), 5),
    says("at most 8 ranks", draw_ring_frame, ring_steps(ring(9)), 1),
    says("one neighbour", v.ring_panel, [*ring(3), ring(3)[0]._replace(peer=2)]),
    says("not one ring", v.ring_panel, [one for one in ring(3) if 2 not in (one.rank, one.peer)]),
    says("of one all-reduce only", v.ring_panel, ring(4, num_steps=5)),
    says("3 experts and 2 ranks cannot be drawn", v.draw_routing, [[[0]], [[1]]], num_experts=3, capacity=1,
         kept=[[[True]], [[True]]]),
    says("experts have shapes [(1, 2)]", v.draw_routing, [[[0, 1]]], **ONE),
    says("expected 0 to 1", v.draw_routing, [[[4]]], **ONE),
    says("nothing fails", v.draw_goodput, Failures("none"), 64, 30.0),
    says("no compute span of kind F, B, I or W", v.draw_schedule, EMPTY),
    says("pass what each of 1 to 8 ranks holds", v.draw_shards, cut(1) * 9, SPLITS, **HEADS),
    says("which 8 ranks do not divide; padding is not drawn", v.draw_shards, cut(1) * 8, SPLITS, **HEADS),
    says("rank 1: blocks.0.attention.output.bias has shape None", v.draw_shards, [*cut(2)[:1], {}], SPLITS, **HEADS),
    says("rank 1: token_embedding.weight has shape (12, 4); expected (6, 4): pass each", v.draw_shards,
         [cut(2)[0], cut(2)[1] | {"token_embedding.weight": weights()["token_embedding.weight"]}], SPLITS, **HEADS),
    says("no weight of two dims is cut", v.draw_shards, [weights()], {}, **HEADS),
    says("no spans; record or simulate", v.draw_timeline, EMPTY),
    says("start before end", v.draw_schedule, grid(2, 3), time_range_s=(2.0, 1.0)),
    says("the trace has passes 'FFF'", v.draw_train_step, grid(1, 3).select(grid(1, 3).is_word("kind", "F")), 0.0),
    says("of one micro-batch", v.draw_train_step, grid(1, 3), 0.0),
    says("several pipeline stages", v.draw_train_step, grid(2, 3), 0.0),
    says("different numbers of all-reduces", v.draw_train_step, data_parallel(2).select(np.arange(18) != 6), 0.0),
    says("there is no step 3", v.step_of, data_parallel(1), 3),
    says("the plan's data is '3'; choose one of 1, 2", v.degrees_panel, WORKLOAD, cluster("laptop"), plan=Plan(3)),
    says("schedule is 'pipe'; choose one of naive", v.schedule_panel, "pipe"),
    says("line 1, column 5: '0X0' is not an action", v.schedule_builder, "0F0 0X0"),
    says("ranks is 1000; pass 1 to 16", v.schedule_builder, ranks=1000),
    says("level is 13; pass 1 to 12", v.schedule_builder, level=13),
]  # fmt: skip


def test_what_cannot_be_drawn_is_refused_in_words():
    for words, draw in REFUSED:
        with pytest.raises(ValueError, match=re.escape(words)):
            draw()

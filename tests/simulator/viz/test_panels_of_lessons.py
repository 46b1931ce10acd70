"""The panels of the lessons draw at every position of their controls, and say what they draw."""

import math
from dataclasses import replace

import pytest
from picture_facts import clashes, look_at
from viz_traces import data_parallel, ring

pytest.importorskip("anywidget", reason="panels need the notebooks extra")

from distlab.plan import SCHEDULES, Plan, Sharding  # noqa: E402
from distlab.plan.compression import Compression  # noqa: E402
from simulator import (  # noqa: E402
    cluster,
    gpt_workload,
    viz as v,  # noqa: E402
    with_bandwidth,
)
from simulator.viz import schedule_editor, schedule_panel  # noqa: E402
from simulator.viz.panels.communication import LINKS  # noqa: E402
from simulator.viz.panels.planner import PRECISIONS  # noqa: E402
from simulator.viz.schedules import NAMES  # noqa: E402

GPT = gpt_workload(hidden_size=1024, num_layers=8, num_heads=16, sequence_length=1024, vocab_size=8192)
SMALL, MIDDLE, LARGE = (
    gpt_workload(hidden_size=hidden, num_layers=layers, num_heads=4, sequence_length=length, vocab_size=500)
    for hidden, layers, length in ((64, 2, 64), (512, 2, 256), (128, 4, 64))
)
H100 = cluster("dgx-h100", 32)
HALF = replace(H100, name="half", num_devices=16)
LAPTOP = with_bandwidth(cluster("laptop", 4), Plan(data=4), 5e8)
TWO = (Compression("sign"), Compression("top_k"))
MOST = object()  # a control's other end
PANELS = {  # how it is made, what it says first, and what it says when its controls move
    "ring": (
        lambda: v.ring_panel(ring(3)),
        "Before the first step",
        [("step", n, f"Step {n} of 4") for n in range(1, 5)],
    ),
    "step": (
        lambda: v.train_step_panel({"one": data_parallel(2)}),
        "",
        [("at_ms", 20.0, "At 20 ms: rank 0: forward 50 %"), ("at_ms", MOST, "the step is done")],
    ),
    "race": (
        lambda: v.race_panel(8, ("ring", "tree", "halving_doubling")),
        "",
        [
            move
            for link in LINKS
            for move in (("link", link, link), *(("num_ranks", n, f"among {n} ranks over {link}") for n in (2, 5, 64)))
        ],
    ),
    "race of two": (lambda: v.race_panel(4, ("naive", "ring")), "ring of whole tensors", []),
    "memory": (
        lambda: v.memory_panel(devices=("a100-sxm-80gb", "h200-sxm")),
        "Smallest change that fits",
        [("stage", 3, ""), ("recompute", "full", ""), ("precision", next(iter(PRECISIONS)), "")]
        + [("tensor", 2, "~Smallest change"), ("picture", "stages", "no sharding: ")],
    ),
    "degrees": (
        lambda: v.degrees_panel(GPT, H100, plan=Plan(data=2)),
        "",
        [("tensor", 8, ""), ("sequence_parallel", True, ""), ("num_microbatches", 4, ""), ("recompute", "full", "")]
        + [("stage", 1, ""), ("pipeline", 2, "Fits")]
        + [("context", 2, "has 32 GPUs: lower a degree until it is at most 32"), ("context", 1, "")]
        + [("data", 1, "Fits"), ("context", 32, "This plan cannot run")],
    ),
    "sharding": (
        lambda: v.sharding_panel(MIDDLE, cluster("dgx-h100", 16), Plan(sharding=Sharding(3), recompute="full"), num_devices=(8, 16)),
        "",
        [("unit_layers", 2, ""), ("gpus", 16, ""), ("sets", "inside each node", "in 2 sets of 8")]
        + [("keep", True, "parameters kept after forward")],
    ),
    "cost": (v.cost_panel, "", [("price", 5.0, "5 dollars"), ("failures", "none", ""), ("trillions", -1.0, "1e+11 ")]),
    "goodput": (
        v.goodput_panel,
        "",
        [("num_devices", 1024, "1,024 devices"), ("num_devices", 65_536, ""), ("restart_minutes", 30, "")]
        + [
            ("log_save_s", 2.0, ""),
            ("times_rate", 10.0, "does not get on"),
            ("restart_minutes", 120, "does not get on"),
        ],
    ),
    "planner": (
        lambda: v.planner_panel({"small": GPT}, H100, plan=Plan(2, tensor=2), tokens=1e9),
        "",
        [("price", 5.0, ""), ("pipeline", 2, ""), ("trillions", -1.0, ""), ("data", 32, "This plan cannot run")],
    ),
    "strategy": (lambda: v.strategy_panel(("gpt-2-1.5b",), (1, 8)), "on 8 GPUs: ", [("batch_size", 64, "")]),
    "compression": (
        lambda: v.compression_panel(
            SMALL, LAPTOP, Plan(data=4), compressions=TWO, bytes_per_s=(1e6, 1e8, 1e13)
        ),
        "",
        [("log_bytes_per_s", 6.0, "is best"), ("log_bytes_per_s", 13.0, "At 10 TB/s no compression pays")]
        + [("compressor", "sign", "~top-k")],
    ),
}


@pytest.mark.parametrize("name", PANELS)
def test_a_panel_follows_every_control(name):
    make, first, moves = PANELS[name]
    panel = make()
    assert panel.error is None
    assert first in panel.text
    for name, value, words in moves:
        control, before = panel.controls[name], (panel.png, panel.text)
        moved = control.max if value is MOST else value
        differs, control.value = control.value != moved, moved
        assert panel.error is None or (words and words in str(panel.error)), (name, value)
        assert ((panel.png, panel.text) != before) == differs, (name, value)
        assert (words.strip("~") in panel.text) != words.startswith("~"), (name, value, panel.text)
        assert panel.error or not clashes(look_at(panel.figure)), (name, value)


def test_panels_begin_where_their_inputs_say():
    steps = v.ring_panel(ring(3)).controls["step"]
    assert (steps.min, steps.max) == (0, 4)
    assert set(v.train_step_panel(data_parallel(2)).controls) == {"at_ms"}
    panel = PANELS["compression"][0]()
    assert panel.values["log_bytes_per_s"] == pytest.approx(math.log10(5e8), abs=0.1)


def test_the_step_switches_between_versions_each_to_its_own_end():
    short, long = data_parallel(2, num_buckets=1), data_parallel(2, num_buckets=6)
    panel = v.train_step_panel({"flat": short, "per_parameter": long})
    version, moment, ends_ms = panel.controls["version"], panel.controls["at_ms"], [short.duration_s, long.duration_s]
    assert ends_ms[0] != ends_ms[1]
    assert moment.max == pytest.approx(1e3 * ends_ms[0])
    before = panel.png
    version.value = "per_parameter"
    assert panel.png != before
    assert moment.max == pytest.approx(1e3 * ends_ms[1])
    moment.value = moment.max
    version.value = "flat"
    assert moment.value == pytest.approx(1e3 * min(ends_ms))
    version.value = "per_parameter"
    assert "6 all-reduces" in panel.text
    for at_ms in (0.0, 60.0, moment.max):
        moment.value = at_ms
        assert panel.error is None


def test_every_schedule_and_every_control_draws_and_is_said_in_words():
    panel = schedule_panel()
    assert panel.timeline.packed["form"] == "boxes"
    seen = {panel.timeline.packet}
    for name in NAMES:
        panel.controls["schedule"].value = name
        assert panel.error is None
        assert SCHEDULES[name].title.lower() in panel.text.lower()
        assert panel.controls["stages_per_rank"].disabled == (SCHEDULES[name].placement != "loop")
        assert panel.controls["memory_limit"].disabled == (name != "automatic")
        seen.add(panel.timeline.packet)
    assert len(seen) > len(NAMES) // 2
    panel.controls["schedule"].value = "dualpipe_v"
    moves = {"ranks": 7, "microbatches": 14, "forward": 0.5, "input_gradient": 2.0, "weight_gradient": 0.3}
    moves |= {"communication": 0.4, "compare": "zb_h1", "schedule": "interleaved", "stages_per_rank": 3}
    for control, value in moves.items():
        before = panel.timeline.packet
        panel.controls[control].value = value
        assert panel.error is None
        assert panel.timeline.packet != before, control
    assert [heading["text"].split(":")[0] for heading in panel.timeline.headings] == ["interleaved 1F1B", "ZB-H1"]
    assert len(panel.timeline.rows) == 14
    assert "than interleaved 1F1B" in panel.text


def test_a_large_schedule_is_sent_as_pixel_columns():
    panel = schedule_panel(ranks=64, microbatches=1024)
    assert panel.timeline.packed["form"] == "pixels"
    assert panel.timeline.packed["count"] == 131_072
    assert len(panel.timeline.packet) < 600_000
    panel.timeline.view = (0.5, 0.505)
    assert panel.timeline.packed["form"] == "boxes"


def test_the_clock_shows_what_has_happened_and_says_who_waits_for_whom():
    panel = schedule_panel(ranks=3, microbatches=4)
    clock, timeline = panel.controls["moment"], panel.timeline
    assert clock.value == clock.max == panel._play.max
    assert timeline.until_s is None
    clock.value = 2
    assert timeline.until_s == pytest.approx(2e-3)
    assert panel.text == "At 2 ms, 1F1B: rank 0 runs 0F2; rank 1 runs 1F1; rank 2 runs 2F0."
    panel.controls["microbatches"].value = 5
    assert clock.value == 2
    assert timeline.until_s == pytest.approx(2e-3)
    clock.value = clock.max
    assert timeline.until_s is None
    assert panel.text.startswith("1F1B on 3 ranks and 5 micro-batches takes 21 ms")
    panel.controls["microbatches"].value = 4
    assert clock.value == clock.max


def test_a_schedule_that_does_not_exist_keeps_the_picture_and_says_why():
    panel = schedule_panel("zb_v", ranks=4, microbatches=8)
    before = panel.timeline.packet
    panel.controls["forward"].min = 0.0
    for name in ("forward", "input_gradient", "weight_gradient"):
        panel.controls[name].min = -1.0
    panel.controls["forward"].value = -1.0
    assert isinstance(panel.error, ValueError)
    assert panel.timeline.problem
    assert panel.timeline.packet == before
    panel.controls["forward"].value = 1.0
    assert panel.error is None
    assert panel.timeline.problem == ""


def test_the_editor_starts_right_and_points_at_a_fault_under_the_last_good_picture():
    editor = schedule_editor()
    text = editor.controls["text"].value
    assert text.splitlines()[2] == "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"
    assert editor.timeline.title == "Your schedule leaves 33.3 % of 3 ranks' time idle"
    before = editor.timeline.packet
    editor.controls["text"].value = text.replace("2F0 2B0", "2B0 2F0")
    assert editor.timeline.problem.startswith("rank 2, step 0, 2B0: ")
    assert "<-- rank 2: 2B0" in editor.timeline.problem
    assert editor.timeline.packet == before
    editor.controls["text"].value = "0F0 0X0"
    assert editor.timeline.problem.startswith("line 1, column 5: '0X0' is not an action")
    editor.controls["text"].value = "0F0 0I0 0W0"
    assert editor.timeline.problem == ""
    assert editor.error is None
    assert editor.text.startswith("Your schedule on 1 rank and 1 micro-batch takes 3 ms")
    editor.controls["weight_gradient"].value = 2.0
    assert "takes 4 ms" in editor.text


def test_a_reader_without_a_kernel_gets_the_figure_and_its_text():
    panel = schedule_panel("gpipe", "one_f_one_b")
    data, metadata = panel._repr_mimebundle_()
    assert data["image/png"]
    assert data["text/plain"] == f"{panel.timeline.title}. {panel.text}"
    assert metadata["image/png"]["alt"] == panel.timeline.title

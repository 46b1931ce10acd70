"""A panel draws what its controls say, keeps picture and text for readers without a kernel, and loses no error."""

import base64

import ipywidgets
import pytest
from matplotlib.figure import Figure
from picture_facts import clashes, look_at
from viz_traces import data_parallel, ring

pytest.importorskip("anywidget", reason="panels need the notebooks extra")

from distlab.plan import SCHEDULES, Plan, Sharding  # noqa: E402
from distlab.plan.compression import Compression  # noqa: E402
from simulator import cluster, gpt_workload, viz as v, with_bandwidth  # noqa: E402
from simulator.viz.drawing.plot import put_title  # noqa: E402
from simulator.viz.panels.communication import LINKS  # noqa: E402
from simulator.viz.panels.planner import PRECISIONS  # noqa: E402

SIZES = {"num_layers": 2, "num_heads": 4, "vocab_size": 500}
SMALL, MIDDLE = (gpt_workload(hidden_size=size, sequence_length=64, **SIZES) for size in (64, 512))
GPT = gpt_workload(hidden_size=1024, num_layers=8, num_heads=16, sequence_length=1024, vocab_size=8192)
H100 = cluster("dgx-h100", 32)
LAPTOP = with_bandwidth(cluster("laptop", 4), Plan(data=4), 5e8)
TWO = {"compressions": (Compression("sign"), Compression("top_k")), "bytes_per_s": (1e6, 1e8, 1e13)}
STEPS = {"flat": data_parallel(2, num_buckets=1), "per_parameter": data_parallel(2, num_buckets=6)}
MOST = object()  # a control's other end
PANELS = {  # how it is made, and what it says once its controls move; ~ words that it no longer says
    "ring": (lambda: v.ring_panel(ring(3)), [("step", n, f"Step {n} of 4") for n in range(1, 5)]),
    "step": (lambda: v.train_step_panel(STEPS), [
        ("at_ms", 20.0, "At 20 ms: rank 0: forward 50 %"), ("version", "per_parameter", "6 all-reduces"),
        ("at_ms", MOST, "the step is done")]),
    "race": (lambda: v.race_panel(8, ("ring", "binomial_tree")), [
        move for link in LINKS[::3] for move in (("link", link, link), ("num_ranks", 5, f"5 ranks over {link}"))]),
    "memory": (lambda: v.memory_panel(devices=("a100-sxm-80gb", "h200-sxm")), [
        ("microbatch", 2, "Smallest change that fits"), ("stage", 3, ""), ("recompute", "full", ""),
        ("precision", next(iter(PRECISIONS)), ""), ("tensor", 4, "~Smallest change"),
        ("picture", "stages", "no sharding: ")]),
    "degrees": (lambda: v.degrees_panel(GPT, H100, plan=Plan(data=2)), [
        ("tensor", 8, ""), ("sequence_parallel", True, ""), ("num_microbatches", 4, ""), ("stage", 1, ""),
        ("pipeline", 2, "Fits"), ("context", 2, "has 32 GPUs: lower a degree until it is at most 32"),
        ("data", 1, "Fits"), ("context", 32, "This plan cannot run: pipeline (2) x data (1) x expert (1)")]),
    "sharding": (lambda: v.sharding_panel(
        MIDDLE, cluster("dgx-h100", 16), Plan(sharding=Sharding(3)), num_devices=(8, 16)), [
        ("unit_layers", 2, ""), ("gpus", 16, ""), ("sets", "inside each node", "in 2 sets of 8"),
        ("keep", True, "parameters kept after forward")]),
    "goodput": (v.goodput_panel, [
        ("num_devices", 1024, "1,024 devices"), ("restart_minutes", 30, ""), ("save_s", 1e3, ""),
        ("num_devices", 65_536, ""), ("times_rate", 10.0, "does not get on")]),
    "planner": (lambda: v.planner_panel({"small": GPT}, H100, plan=Plan(2, tensor=2), tokens=1e9), [
        ("price", 5.0, ""), ("pipeline", 2, ""), ("tokens", 1e11, ""), ("data", 32, "This plan cannot run")]),
    "strategy": (lambda: v.strategy_panel(("gpt-2-1.5b",), (1, 8)), [("batch_size", 64, "on 8 GPUs: ")]),
    "compression": (lambda: v.compression_panel(SMALL, LAPTOP, Plan(data=4), **TWO), [
        ("bytes_per_s", 1e6, "is best"), ("bytes_per_s", 1e13, "At 10 TB/s no compression pays"),
        ("compressor", "sign", "~top-k")]),
}  # fmt: skip


@pytest.mark.parametrize("name", PANELS)
def test_a_panel_follows_every_control(name):
    make, moves = PANELS[name]
    panel = make()
    assert panel.error is None
    for name, value, words in moves:
        control, before = panel.controls[name], (panel.png, panel.text)
        moved = control.max if value is MOST else value
        differs, control.value = control.value != moved, moved
        assert panel.error is None or (words and words in str(panel.error)), (name, value)
        assert ((panel.png, panel.text) != before) == differs, (name, value)
        assert (words.strip("~") in panel.text) != words.startswith("~"), (name, value, panel.text)
    assert panel.error or not clashes(look_at(panel.figure)), name


def picture(title):
    figure = Figure(figsize=(4.0, 2.0))
    put_title(figure, title)
    return v.Picture(figure, f"It shows {title}.")


def test_each_value_is_drawn_once_and_the_newest_of_those_that_come_while_a_picture_is_drawn():
    calls = []

    def draw(size, mode):
        calls.append((size, mode))
        for value in (5, 6, 7) if size == 4 else ():
            panel.controls["size"].value = value
        return picture(f"{size}{mode}")

    size, mode = ipywidgets.IntSlider(1, min=0, max=9), ipywidgets.Dropdown(options="ab", description="which one")
    panel = v.Panel(draw, size=size, mode=mode)
    first = panel.png
    assert first == v.to_png(draw(1, "a").figure), "the same values give the same bytes"
    assert (size.description, mode.description) == ("size", "which one")
    calls.clear()
    mode.value = "b"
    panel.controls["mode"].value = "b"
    assert (panel.text, panel.png != first) == ("It shows 1b.", True), "before the assignment returns"
    panel.controls["size"].value = 4
    assert (panel.text, calls) == ("It shows 7b.", [(1, "b"), (4, "b"), (7, "b")])


def test_an_error_is_one_line_and_the_next_value_draws_again():
    def draw(ranks):
        if ranks == 3:
            raise ValueError("12 layers cannot fill 3 stages;\n  use 2 or 4")
        return picture(f"{ranks} ranks")

    panel = v.Panel(draw, ranks=ipywidgets.IntSlider(2, min=1, max=4))
    panel.controls["ranks"].value = 3
    assert panel.text == "No picture for ranks = 3: ValueError: 12 layers cannot fill 3 stages; use 2 or 4"
    data, _ = panel._repr_mimebundle_()
    assert (type(panel.error), panel.png, "image/png" in data) == (ValueError, b"", False)
    panel.controls["ranks"].value = 4
    assert (panel.text, panel.error) == ("It shows 4 ranks.", None)
    data, metadata = panel._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in data
    assert base64.b64decode(data["image/png"]) == panel.png
    assert (data["text/plain"], metadata["image/png"]["alt"]) == (panel.text, "4 ranks")
    assert v.Panel(lambda: picture("one")).text == "It shows one.", "without controls"
    with pytest.raises(TypeError, match="control 'ranks' is .* pass an ipywidgets control such as IntSlider"):
        v.Panel(draw, ranks=ipywidgets.VBox())


def test_every_schedule_and_every_control_draws_and_is_said_in_words():
    panel = v.schedule_panel()
    seen, names = {panel.timeline.packet}, list(SCHEDULES)
    for name in names:
        panel.controls["schedule"].value = name
        assert SCHEDULES[name].title.lower() in panel.text.lower()
        assert panel.controls["stages_per_rank"].disabled == (SCHEDULES[name].placement != "loop")
        assert panel.controls["memory_limit"].disabled == (name != "automatic")
        seen.add(panel.timeline.packet)
    assert len(seen) > len(names) // 2
    panel.controls["schedule"].value = "dualpipe_v"
    moves = {"ranks": 7, "microbatches": 14, "forward": 0.5, "input_gradient": 2.0, "weight_gradient": 0.3}
    moves |= {"communication": 0.4, "compare": "zb_h1", "schedule": "interleaved", "stages_per_rank": 3}
    for control, value in moves.items():
        before, panel.controls[control].value = panel.timeline.packet, value
        assert panel.timeline.packet != before, control
    assert [heading["text"].split(":")[0] for heading in panel.timeline.headings] == ["interleaved 1F1B", "ZB-H1"]
    assert (len(panel.timeline.rows), "than interleaved 1F1B" in panel.text) == (14, True)
    data, metadata = panel._repr_mimebundle_()
    assert (data["text/plain"], bool(data["image/png"])) == (f"{panel.timeline.title}. {panel.text}", True)
    assert metadata["image/png"]["alt"] == panel.timeline.title
    large = v.schedule_panel(ranks=64, microbatches=1024).timeline
    assert (large.packed["form"], large.packed["count"], len(large.packet) < 600_000) == ("pixels", 131_072, True)


def test_the_clock_shows_what_has_happened_and_says_who_waits_for_whom():
    panel = v.schedule_panel(ranks=3, microbatches=4)
    clock, timeline = panel.controls["moment"], panel.timeline
    (play,) = (one for row in panel.children for one in getattr(row, "children", ()) if hasattr(one, "interval"))
    assert (clock.value, play.max, timeline.until_s) == (clock.max, clock.max, None)
    clock.value = 2
    assert timeline.until_s == pytest.approx(2e-3)
    assert panel.text == "At 2 ms, 1F1B: rank 0 runs 0F2; rank 1 runs 1F1; rank 2 runs 2F0."
    panel.controls["microbatches"].value = 5
    assert (clock.value, timeline.until_s) == (2, pytest.approx(2e-3))
    play.value = clock.max
    assert timeline.until_s is None
    assert panel.text.startswith("1F1B on 3 ranks and 5 micro-batches takes 21 ms")


def test_a_builder_holds_a_schedule_and_runs_it_and_says_in_a_line_what_went_wrong():
    ran, text = [], "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"
    builder = v.schedule_builder(text, on_ranks=lambda schedule: ran.append(schedule) or builder.picture)
    sent, builder.send = [], lambda content: sent.append(content)
    words = "Your schedule on 2 ranks and 2 micro-batches takes"
    assert builder.run().words.startswith(f"{words} 9 ms")
    builder.times = {"F": 1, "I": 1, "W": 1, "message": 0, "slow": [1, 2]}
    builder._asked(builder, {"run": builder.text.replace("1B0 1F1", "1F1 1B0")}, [])
    assert [list(one) for one in sent] == [["said", "title", "picture"], ["began"], ["said", "title", "picture"]]
    assert (sent[2]["said"].startswith(f"{words} 15 ms"), ran[1] == builder.schedule) == (True, True)
    data, metadata = builder._repr_mimebundle_()
    assert (data["text/plain"], metadata["image/png"]["alt"]) == (sent[2]["said"], sent[2]["title"])
    builder._asked(builder, {"run": "0F0 0F1\n1F0 1B0"}, [])
    assert sent[-1]["said"].startswith("rank 1, 1F1: expected every forward pass")
    assert builder._repr_mimebundle_()[0]["text/plain"].endswith("your own. 0F0 0F1\n1F0 1B0")
    with pytest.raises(ValueError, match="'1X0' is not an action"):
        builder.text = "0F0\n1X0"
    assert builder.text == "0F0 0F1\n1F0 1B0"

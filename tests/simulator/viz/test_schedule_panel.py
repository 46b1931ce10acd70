"""The panel of schedules draws wherever its controls stand; the editor keeps the last good picture beside the fault."""

import pytest

pytest.importorskip("anywidget", reason="panels need the notebooks extra")

from distlab.plan import SCHEDULES  # noqa: E402
from simulator.viz import (
    schedule_editor,  # noqa: E402
    schedule_panel,  # noqa: E402
)
from simulator.viz.schedules.run import NAMES  # noqa: E402


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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: schedule_panel("pipe"), "schedule is 'pipe'; choose one of naive"),
        (lambda: schedule_panel(compare="x"), "schedule is 'x'"),
        (lambda: schedule_panel(ranks=65), "ranks is 65; pass 2 to 64"),
        (lambda: schedule_panel(microbatches=0), "microbatches is 0; pass 1 to 1024"),
        (lambda: schedule_editor("0F0"), "0B0|backward"),
    ],
)
def test_what_cannot_be_a_panel_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()

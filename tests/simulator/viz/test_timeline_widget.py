"""A Timeline sends every span as a box, or time in pixel columns where there are many, and has the figure beside it."""

import base64

import numpy as np
import pytest
import traitlets
from viz_traces import MS, data_parallel, grid

from distlab.trace import Span, Trace
from simulator.viz import Timeline, draw_timeline, to_png
from simulator.viz.timeline.timeline import MAX_BOXES, MAX_RANKS
from simulator.viz.timeline.timeline_widget import FIELDS, MAX_LINES, SHORTEST_VIEW_S


def boxes(widget):
    assert widget.packed["form"] == "boxes"
    table = np.frombuffer(widget.packet, "<f8").reshape(-1, len(FIELDS))
    return dict(zip(FIELDS, table.T, strict=True))


def lines(widget):
    assert widget.packed["form"] == "pixels"
    return np.frombuffer(widget.packet, np.uint8).reshape(sum(widget.packed["lines"]), widget.packed["columns"])


def words_of(widget, index):
    box = {field: column[index] for field, column in boxes(widget).items()}
    row = widget.rows[int(box["row"])]
    name, kind = widget.packed["names"][int(box["name"])], widget.kinds[int(box["kind"])]["words"]
    start, end = round(box["start"] * 1e9), round(box["end"] * 1e9)
    return row["rank"], row["lane"], row["predicted"], name, kind, start, end, int(box["bytes"])


def test_every_span_of_both_traces_is_one_box_with_its_words():
    measured, predicted = data_parallel(4, jitter=0.05, origin_ns=10**15), data_parallel(4)
    widget = Timeline(measured, predicted)
    kinds = {"F": "forward", "B": "backward", "optimizer": "optimizer", "all_reduce": "all-reduce"}
    expected = [
        (span.rank, span.lane, which == 1, span.name, kinds[span.kind], span.start_ns, span.end_ns, span.num_bytes)
        for which, trace in enumerate((measured.from_zero(), predicted.from_zero()))
        for span in trace
    ]
    found = [words_of(widget, index) for index in range(len(boxes(widget)["start"]))]
    assert sorted(found) == sorted(expected)
    assert [box[5] for box in found] == sorted(box[5] for box in found)


@pytest.mark.parametrize("longer_is_predicted", [False, True])
def test_the_first_view_shows_the_shorter_of_two_traces_too(longer_is_predicted):
    def box(milliseconds):
        return Trace.from_spans([Span(0, "compute", "forward", "F", 0, milliseconds * MS)])

    pair = (box(100), box(10))[:: -1 if longer_is_predicted else 1]
    widget = Timeline(*pair)
    assert widget.view == pytest.approx((0.0, 0.030))
    assert "shown up to 30 ms of 101 ms: press 0 for everything" in widget.note
    assert widget.limit_s == pytest.approx(0.1012)
    alike = Timeline(box(25), box(10))
    assert alike.view == (0.0, alike.limit_s)
    assert alike.note == ""


def test_boxes_lie_in_their_rows_and_those_of_one_row_do_not_cover_each_other():
    widget = Timeline(data_parallel(3, jitter=0.1))
    found = boxes(widget)
    for index, row in enumerate(widget.rows):
        mine = np.flatnonzero(found["row"] == index)
        assert len(mine)
        assert (found["top"][mine] >= row["top"] - 1e-9).all()
        assert (found["top"][mine] + found["height"][mine] <= row["top"] + row["height"] + 1e-9).all()
        for one in mine:
            level = mine[(found["top"][mine] == found["top"][one]) & (mine > one)]
            assert (found["start"][level] >= found["end"][one] - 1e-12).all()


def test_labels_are_those_of_the_figure_longest_first():
    widget = Timeline(data_parallel(2))
    label = boxes(widget)["label"].astype(int)
    texts = {tuple(text for text, _ in widget.packed["labels"][code]) for code in label.tolist()}
    assert ("all-reduce #3", "A3", "A") in texts
    assert ("forward", "F") in texts


def test_one_trace_alone_is_drawn_in_full_colour_whichever_it_is():
    trace = data_parallel(2)
    first, second = Timeline(trace), Timeline(predicted=trace)
    assert first.packet == second.packet
    assert not any(row["predicted"] for row in second.rows)
    assert first.summary == second.summary == draw_timeline(trace).words


def test_many_spans_become_columns_that_keep_each_kinds_time():
    trace = grid(64, 242)
    widget = Timeline(trace)
    assert len(trace) > MAX_BOXES
    shown = lines(widget)
    assert len(widget.packet) < 400_000
    low, high = widget.packed["span"]
    for code, kind in enumerate(widget.kinds):
        letter = kind["letter"]
        mask = trace.is_word("kind", letter)
        spent_s = (trace.end_ns[mask] - trace.start_ns[mask]).sum() / 1e9
        count = widget.packed["lines"][0]
        seen_s = (shown == code).sum() / count * (high - low) / widget.packed["columns"]
        assert seen_s == pytest.approx(spent_s, rel=0.15)  # a column of 4 lines rounds to quarters
    assert max(widget.packed["lines"]) <= MAX_LINES


def test_a_narrow_view_of_many_spans_gets_exactly_its_boxes():
    trace = grid(64, 242)
    widget = Timeline(trace)
    rows_before = widget.rows
    widget.view = (1.0, 1.2)
    found, zero = boxes(widget), trace.from_zero()
    inside = (zero.end_ns >= 1.0e9) & (zero.start_ns <= 1.2e9)
    assert len(found["start"]) >= inside.sum()
    starts = set(np.round(found["start"] * 1e9).astype(np.int64).tolist())
    assert set(zero.start_ns[inside].tolist()) <= starts
    assert widget.packed["span"][0] <= 1.0
    assert widget.packed["span"][1] >= 1.2
    assert widget.rows == rows_before
    widget.view = (0.0, widget.limit_s)
    assert widget.packed["form"] == "pixels"


def test_few_spans_are_sent_once_for_every_view():
    widget = Timeline(data_parallel(4))
    before = widget.packet
    widget.view = (0.01, 0.02)
    assert widget.packet is before
    assert widget.packed["span"] == (0.0, widget.limit_s)


def test_a_view_beyond_the_spans_is_moved_onto_them_and_keeps_its_length():
    widget = Timeline(data_parallel(2))
    limit = widget.limit_s
    widget.view = (-0.02, 0.03)
    assert widget.view == pytest.approx((0.0, 0.05))
    widget.view = (1.0, 1.01)
    assert widget.view == pytest.approx((limit - 0.01, limit))
    widget.view = (-5.0, 5.0)
    assert widget.view == (0.0, limit)
    widget.view = (0.01, 0.01 + 1e-12)
    assert widget.view[1] - widget.view[0] == pytest.approx(SHORTEST_VIEW_S)
    widget.view = (0.01, 0.02)
    assert widget.view == (0.01, 0.02)


@pytest.mark.parametrize("view", [(0.02, 0.01), (0.01, 0.01), (float("nan"), 1.0)])
def test_a_view_without_time_is_refused(view):
    widget = Timeline(data_parallel(2))
    with pytest.raises(traitlets.TraitError, match="pass \\(start, end\\) in seconds with start before end"):
        widget.view = view


def test_show_replaces_everything():
    widget = Timeline(grid(64, 242), title="before")
    widget.show(data_parallel(2), data_parallel(2))
    assert widget.packed["form"] == "boxes"
    assert widget.view == (0.0, widget.limit_s)
    assert widget.limit_s == pytest.approx(0.134 * 1.012)
    assert widget.title == "The prediction is right to half a percent; 9 ms of communication is exposed"
    assert "an error of" in widget.summary
    again = Timeline(data_parallel(2), data_parallel(2))
    assert again.packet == widget.packet
    assert again.get_state().keys() == widget.get_state().keys()


def test_ranks_beyond_the_limit_are_said_not_to_be_drawn():
    widget = Timeline(grid(100, 4))
    drawn = {row["rank"] for row in widget.rows}
    assert len(drawn) == MAX_RANKS[0]
    assert widget.note == f"{MAX_RANKS[0]} of 100 ranks"
    assert Timeline(grid(4, 4)).note == ""


def test_a_reader_without_a_kernel_gets_the_figure_its_text_and_alt_text():
    widget = Timeline(data_parallel(2), title="Two ranks")
    data, metadata = widget._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in data
    whole = base64.b64decode(data["image/png"])
    assert whole.startswith(b"\x89PNG")
    assert data["text/plain"] == f"Two ranks. {draw_timeline(data_parallel(2)).words}"
    assert metadata["image/png"]["alt"] == "Two ranks"
    widget.view = (0.05, 0.06)
    assert to_png(widget.figure) != whole


def test_an_instant_and_a_span_without_length_have_a_view():
    widget = Timeline(Trace.from_spans([Span(0, "compute", "F", "F", 5 * MS, 5 * MS)]))
    assert widget.view == (0.0, 1e-6)
    assert len(boxes(widget)["start"]) == 1


def test_the_canvas_needs_nothing_from_the_network():
    script = str(Timeline._esm)
    assert "http" not in script
    assert "import" not in script.split()
    assert script.count("export default") == 1

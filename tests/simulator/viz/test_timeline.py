"""A timeline shows every span once and says what it shows; where words stand, and what a notebook gets of a picture."""

import base64
import re
from statistics import median_low

import numpy as np
import pytest
import traitlets
from matplotlib.figure import Figure
from picture_facts import clashes, colours, faults, look_at, pale_texts, plain, small_texts, with_gid
from viz_traces import MS, data_parallel, grid

from distlab.plan import ActionTimes, one_f_one_b
from distlab.trace import Span, Trace
from simulator import simulate_schedule
from simulator.viz import Overlay, Timeline, draw_timeline, facts_of, to_png
from simulator.viz.drawing.lanes import MAX_BOXES, MAX_LEVELS, MAX_RANKS, pack, pixel_columns, scene_of
from simulator.viz.drawing.paint import pack_png
from simulator.viz.drawing.pen import SHOWN_DPI, sheet
from simulator.viz.drawing.plot import width_in
from simulator.viz.drawing.theme import DPI
from simulator.viz.timeline.timeline_widget import FIELDS, MAX_LINES, SHORTEST_VIEW_S


def trace_of(*rows):
    """Return a trace of spans, each (rank, lane, kind, start and end in milliseconds)."""
    return Trace.from_spans(Span(rank, lane, kind, kind, start * MS, end * MS) for rank, lane, kind, start, end in rows)


def test_pixel_columns_keep_every_nanosecond():
    generator = np.random.default_rng(1)
    cell = generator.integers(0, 7, 5_000)
    start = generator.uniform(0, 9, 5_000)
    end = start + generator.exponential(0.01, 5_000) * generator.integers(0, 2, 5_000)  # half of them last no time
    end[0], start[0] = 10.0, 0.0
    for low, high in ((0.0, 10.0), (2.5, 3.5)):
        columns = pixel_columns(cell, start, end, 7, 333, (low, high))
        inside = np.clip(end, low, high) - np.clip(start, low, high)
        np.testing.assert_allclose(columns.sum(axis=1), np.bincount(cell, weights=inside, minlength=7), rtol=1e-9)
        assert columns.min() >= -1e-9


def test_spans_of_a_lane_that_overlap_stand_on_levels_and_predicted_rows_under_measured_ones():
    start, end = np.array([0, 5, 6, 20, 20]), np.array([10, 15, 20, 30, 20])
    assert pack(np.zeros(5, dtype=np.int64), start, end).tolist()[:4] == [0, 1, 2, 0]
    assert pack(np.zeros(9, dtype=np.int64), np.arange(9), np.arange(9) + 100).max() == MAX_LEVELS - 1
    rows = scene_of(data_parallel(3, jitter=0.1), data_parallel(3)).rows
    expected = [(0, lane, predicted) for lane in ("compute", "communication") for predicted in (False, True)]
    assert [(row.rank, row.lane, row.predicted) for row in rows[:4]] == expected
    assert all(below.top >= above.top + above.height - 1e-9 for above, below in zip(rows, rows[1:], strict=False))


def test_facts_count_what_is_hidden_once():
    rows = [(0, "compute", "F", 0, 60), (0, "compute", "B", 10, 50), (0, "compute", "wait", 60, 100)]
    rows += [(0, "communication", "all_reduce", 40, 80), (0, "communication", "all_reduce", 70, 90)]
    facts = facts_of(trace_of(*rows, (1, "compute", "F", 0, 100)))
    assert (facts.num_ranks, facts.duration_s) == (2, 0.1)
    assert (facts.compute_share, facts.communication_s, facts.exposed_s) == pytest.approx((0.8, 0.025, 0.015))


def boxes(widget):
    assert widget.packed["form"] == "boxes"
    table = np.frombuffer(widget.packet, "<f8").reshape(-1, len(FIELDS))
    return dict(zip(FIELDS, table.T, strict=True))


def test_every_span_of_both_traces_is_one_box_with_its_words():
    measured, predicted = data_parallel(4, jitter=0.05, origin_ns=10**15), data_parallel(4)
    widget = Timeline(measured, predicted)
    kinds = {"F": "forward", "B": "backward", "optimizer": "optimizer", "all_reduce": "all-reduce"}
    expected = [
        (span.rank, span.lane, which == 1, span.name, kinds[span.kind], span.start_ns, span.end_ns, span.num_bytes)
        for which, trace in enumerate((measured.from_zero(), predicted.from_zero()))
        for span in trace
    ]
    columns, found = boxes(widget), []
    for index in range(len(columns["start"])):
        box = {field: column[index] for field, column in columns.items()}
        row = widget.rows[int(box["row"])]
        name, kind = widget.packed["names"][int(box["name"])], widget.kinds[int(box["kind"])]["words"]
        times = round(box["start"] * 1e9), round(box["end"] * 1e9)
        found.append((row["rank"], row["lane"], row["predicted"], name, kind, *times, int(box["bytes"])))
        assert row["top"] - 1e-9 <= box["top"]
        assert box["top"] + box["height"] <= row["top"] + row["height"] + 1e-9
    assert sorted(found) == sorted(expected)
    assert [box[5] for box in found] == sorted(box[5] for box in found)
    texts = [tuple(text for text, _ in label) for label in widget.packed["labels"]]
    assert {("all-reduce #3", "A3", "A"), ("forward", "F")} <= set(texts), "as the figure's, longest first"


def test_the_first_view_shows_the_shorter_of_two_traces_too():
    long, short = (trace_of((0, "compute", "F", 0, end)) for end in (100, 10))
    for pair in ((long, short), (short, long)):
        widget = Timeline(*pair)
        assert (widget.view, widget.limit_s) == (pytest.approx((0.0, 0.030)), pytest.approx(0.1012))
        assert "shown up to 30 ms of 101 ms: press 0 for everything" in widget.note
    one = Timeline(long)
    assert (one.view, one.note) == ((0.0, one.limit_s), "")
    assert Timeline(trace_of((0, "compute", "F", 5, 5))).view == (0.0, 1e-6)


def test_many_spans_become_columns_that_keep_each_kinds_time_and_a_narrow_view_gets_its_boxes():
    trace = grid(64, 242)
    widget, zero = Timeline(trace), trace.from_zero()
    assert len(trace) > MAX_BOXES
    packed, rows = widget.packed, widget.rows
    shown = np.frombuffer(widget.packet, np.uint8).reshape(sum(packed["lines"]), packed["columns"])
    assert (packed["form"], len(widget.packet) < 400_000, max(packed["lines"]) <= MAX_LINES) == ("pixels", True, True)
    low, high = packed["span"]
    for code, kind in enumerate(widget.kinds):
        mask = trace.is_word("kind", kind["letter"])
        spent_s = (trace.end_ns[mask] - trace.start_ns[mask]).sum() / 1e9
        seen_s = (shown == code).sum() / packed["lines"][0] * (high - low) / packed["columns"]
        assert seen_s == pytest.approx(spent_s, rel=0.15)  # a column of 4 lines rounds to quarters
    widget.view = (1.0, 1.2)
    inside = (zero.end_ns >= 1.0e9) & (zero.start_ns <= 1.2e9)
    assert set(zero.start_ns[inside].tolist()) <= set(np.round(boxes(widget)["start"] * 1e9).astype(np.int64).tolist())
    assert widget.rows == rows
    widget.view = (0.0, widget.limit_s)
    assert widget.packed["form"] == "pixels"
    many = Timeline(grid(100, 4))
    assert len({row["rank"] for row in many.rows}) == MAX_RANKS[0]
    assert many.note == f"{MAX_RANKS[0]} of 100 ranks"


def test_a_view_beyond_the_spans_is_moved_onto_them_and_one_without_time_refused():
    widget = Timeline(data_parallel(2))
    before, limit = widget.packet, widget.limit_s
    for view, moved in (
        ((-0.02, 0.03), (0.0, 0.05)),
        ((1.0, 1.01), (limit - 0.01, limit)),
        ((-5.0, 5.0), (0.0, limit)),
        ((0.01, 0.01 + 1e-12), (0.01, 0.01 + SHORTEST_VIEW_S)),
        ((0.01, 0.02), (0.01, 0.02)),
    ):
        widget.view = view
        assert widget.view == pytest.approx(moved)
        assert widget.packet is before, "few spans are sent once"
    for view in ((0.02, 0.01), (0.01, 0.01), (float("nan"), 1.0)):
        with pytest.raises(traitlets.TraitError, match="pass \\(start, end\\) in seconds with start before end"):
            widget.view = view


def test_a_reader_without_a_kernel_gets_the_figure_its_text_and_alt_text():
    widget = Timeline(data_parallel(2), title="Two ranks")
    data, metadata = widget._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in data
    whole = base64.b64decode(data["image/png"])
    assert data["text/plain"] == f"Two ranks. {draw_timeline(data_parallel(2)).words}"
    assert (metadata["image/png"]["alt"], whole[:4]) == ("Two ranks", b"\x89PNG")
    widget.view = (0.05, 0.06)
    assert to_png(widget.figure) != whole


def test_the_critical_path_is_outlined_and_said_and_idle_time_says_what_it_waits_for():
    run = simulate_schedule(one_f_one_b(4, 8), ActionTimes(1, 1, 1)).trace
    widget = Timeline(run)
    usual = to_png(widget.figure)
    widget.critical = True
    assert widget.path_words == str(run.critical_path())
    (outlines,), rows = widget.paths, run.critical_path().rows
    assert [tuple(one[:2]) for one in outlines] == [(run[row].start_ns / 1e9, run[row].end_ns / 1e9) for row in rows]
    assert to_png(widget.figure) != usual
    first = "1F0 waits for 0F0 of rank 0"
    for rank, why in enumerate(("", first, "2F0 waits for 1F0 of rank 1, and so for 0F0 of rank 0")):
        widget.asked = [rank, 0.5e-3]
        assert widget.told == {"asked": [rank, 0.5e-3], "why": why}
    widget.critical = False
    assert (widget.paths, widget.path_words, to_png(widget.figure)) == ([], "", usual)
    picture = draw_timeline(run, critical=True)
    assert (len(with_gid(picture.figure, "critical")), str(run.critical_path()) in picture.words) == (1, True)


def step(compute, communication=0, waiting=0):
    """Two ranks compute, then communicate, then wait, and compute for the last millisecond; all in milliseconds."""
    last = compute + communication + waiting
    moves = [("communication", "all_reduce", compute, compute + communication)] if communication else []
    each = [("compute", "F", 0, compute), *moves, ("compute", "optimizer", last, last + 1)]
    return trace_of(*((rank, *row) for rank in range(2) for row in each))


def overlay(measured_ms=(39, 40, 41, 45), predicted_ms=(37, 38, 39), trouble="", steps=(None, None)):
    times = ([value / 1e3 for value in values] for values in (measured_ms, predicted_ms))
    first, second = (step(median_low(values) - 9, 9) for values in (measured_ms, predicted_ms))
    return Overlay(steps[0] or first, steps[1] or second, *times, trouble)


def test_the_verdict_has_both_medians_both_bands_and_says_inside_or_outside():
    said = "measured 40 ms (39.8 ms to 42 ms), predicted 38 ms (33.4 ms to 42.8 ms): inside the band"
    assert (overlay().verdict, overlay().inside) == (said, True)
    assert overlay().error == pytest.approx(38 / 40 - 1)
    measured_s, predicted_s = (line.get_xdata()[0] for line in draw_timeline(overlay()).figure.axes[0].lines[:2])
    assert overlay().title.endswith(f" {100 * (predicted_s / measured_s - 1):+.0f} %"), "what is drawn"
    for predicted_ms, said in (((20, 20, 20), "50 % early"), ((80, 81, 82), "102 % late")):
        found = overlay(predicted_ms=predicted_ms)
        assert f"outside the band, {said}" in found.verdict
        assert (found.inside, "outside the predicted band" in found.title) == (False, True)
    assert overlay(predicted_ms=(20, 20, 40)).inside, "a wider spread of calibrations makes a wider band"
    early = overlay(measured_ms=(98.8, 116, 116, 230), predicted_ms=(66.7, 74.1, 81.6))
    assert not faults(draw_timeline(early).figure), "whole where the step ends long before its band"
    for measured, difference in (
        (step(60, 10, 5), "compute: 30 ms more"),
        (step(30, 50, 5), "communication: 40 ms more"),
        (step(31, 9, 45), "waiting: 40 ms more"),
        (step(10, 10, 5), "compute: 20 ms less"),
    ):
        told = str(overlay(steps=(measured, step(30, 10, 5))))
        assert told.endswith(f"The largest difference is {difference} per rank than predicted.")


def test_a_widget_has_an_overlays_bands_and_words_and_dims_what_was_not_calm():
    busy = overlay(trouble="The machine was busy.")
    bands = [(band.get_x(), band.get_x() + band.get_width()) for band in with_gid(draw_timeline(busy).figure, "band")]
    assert bands == [pytest.approx((0.03975, 0.042)), pytest.approx((0.03339, 0.04279), rel=1e-3)]
    widget = Timeline(busy)
    assert (widget.title, widget.note, widget.ends["text"]) == (busy.title, busy.advice, busy.verdict)
    assert [list(band) for band in widget.ends["bands_s"]] == [list(band) for band in busy.bands_s]
    assert (widget.ends["dim"], Timeline(overlay()).ends["dim"]) == (True, False)
    assert widget.summary == draw_timeline(busy).words
    late = overlay(predicted_ms=(80, 80, 80))
    assert min(draw_timeline(late).figure.axes[0].get_xlim()[1], Timeline(late).limit_s) > 0.088, "the view holds them"


def test_words_stand_where_they_were_put():
    for side, share in (("left", 0.0), ("center", 0.5), ("right", 1.0)):
        figure, pen = sheet(4.0)
        pen.words((6.0, 2.0), "rank 0", size=20, colour="#FF0000", side=side)
        pen.flush()
        columns = np.flatnonzero((colours(plain(figure)) == (255, 0, 0)).all(axis=2).any(axis=0))
        wide = width_in("rank 0", 20) * DPI
        start = 6.0 * DPI - share * wide
        assert (columns.min(), columns.max()) == pytest.approx((start, start + wide), abs=4)


def texts(size=20.0, colour="black", angle=0.0, text="Rank 0 agqp"):
    figure = Figure(figsize=(4, 2), dpi=100, facecolor="#999999")
    for x, y in ((0.1, 0.25), (0.3, 0.5), (0.5, 0.75)):
        figure.text(x, y, text, fontsize=size, color=colour, rotation=angle)
    return figure


def test_text_is_stamped_as_it_is_drawn_and_clipped_where_axes_end():
    for look in ({}, {"colour": "white"}, {"size": 12}, {"angle": 90.0}, {"text": "$\\alpha + n / \\beta$"}):
        figure = texts(**look)
        assert np.abs(colours(to_png(figure)) - colours(plain(figure))).max() <= 2
        assert to_png(figure) == to_png(figure)
    figure = Figure(figsize=(4, 2), dpi=100)
    figure.add_axes((0.25, 0.25, 0.5, 0.5)).text(0.9, 0.5, "far beyond the axes", fontsize=20, clip_on=True)
    painted = colours(to_png(figure))
    assert (painted[60:140, 310:] == 255).all()
    assert (painted[60:140, 280:298] < 255).any()
    figure = draw_timeline(grid(4, 6)).figure
    differs = np.abs(colours(plain(figure)) - colours(to_png(figure))).max(axis=2)
    assert ((differs > 0).mean() < 0.05) & (differs.mean() < 1.0), "at the edges of letters only"


def test_opaque_pixels_are_packed_and_nothing_is_lost():
    for repeats in ([1], [9], [1, 4, 1, 1, 3]):  # rows that come again
        rows = np.random.default_rng(0).integers(0, 256, (len(repeats), 30, 4)).astype(np.uint8)
        image = rows.repeat(repeats, axis=0)
        assert (colours(pack_png(image)) == image[..., :3]).all()
    flat = np.full((400, 1000, 4), 255, np.uint8)
    assert len(pack_png(flat)) < flat.size / 100


def test_a_notebook_gets_one_picture_its_title_as_alt_text_and_the_words():
    picture = draw_timeline(data_parallel(2), title='Two "ranks"')
    data, metadata = picture._repr_mimebundle_()
    page = data["text/html"]
    assert metadata["image/png"]["alt"] == picture.title == 'Two "ranks"'
    assert data["text/plain"] == repr(picture) == picture.words
    assert 'alt="Two &quot;ranks&quot;"' in page
    assert ">Two &quot;ranks&quot;. Timeline of 2 ranks" in page
    assert re.findall(r"base64,([^\"]+)", page) == [data["image/png"]]
    shown = colours(base64.b64decode(data["image/png"]))
    assert (shown[0, 0] == 255).all(), "a white card, on a dark page too"
    assert (shown == colours(plain(picture.figure, dpi=SHOWN_DPI))).all()
    assert f"width:100%;max-width:{round(12.8 * SHOWN_DPI)}px" in page, "it shrinks with its page, and is never cut"
    data, metadata = one_f_one_b(4, 8)._repr_mimebundle_()
    assert "leaves 27.3 % of 4 ranks' time idle" in metadata["image/png"]["alt"], "a Schedule shows itself too"
    assert "(1 ms per F, I and W) on 4 ranks" in data["text/plain"]


def test_the_measure_finds_texts_that_touch_are_cut_pale_or_small():
    figure = Figure(figsize=(4, 3))
    for x in (0.4, 0.42, 0.9):
        figure.text(x, 0.5, "one text")
    assert [text.split()[-1] for text in clashes(look_at(figure))] == ["text'", "cut"]
    figure = Figure(figsize=(4, 3))
    for y, text, look in ((0.2, "pale", {"color": "#999999"}), (0.5, "small", {"fontsize": 7}), (0.8, "right", {})):
        figure.text(0.1, y, text, **({"fontsize": 12} | look))
    look = look_at(figure)
    assert [text.split()[0] for text in (*pale_texts(look), *small_texts(look))] == ["'pale'", "'small'"]

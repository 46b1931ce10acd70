"""A timeline shows every span once, keeps time when it aggregates, and says what it shows; overlays."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from picture_facts import faults, with_gid, words
from viz_traces import MS, data_parallel, grid

from distlab.trace import Span, Trace
from simulator.viz import Overlay, Timeline, draw_timeline, facts_of, to_png
from simulator.viz.drawing.lanes import MAX_LEVELS, Side, lanes_of, pack, pixel_columns, place
from simulator.viz.drawing.theme import kind_styles
from simulator.viz.timeline.timeline import legend_boxes


def test_error_of_the_end_is_written_and_the_clock_does_not_matter():
    measured, predicted = data_parallel(2), data_parallel(2)
    late = Trace.concatenate([measured, Trace.from_spans([Span(0, "compute", "late", "F", 134 * MS, 140 * MS)])])
    figure = draw_timeline(late.shifted(10**15), predicted).figure
    assert any("measured 140 ms, predicted 134 ms: -4.3 %" in text for text in words(figure))
    assert to_png(figure) == to_png(draw_timeline(late, predicted.shifted(-(10**15))).figure)


def test_pixel_columns_keep_every_nanosecond():
    generator = np.random.default_rng(1)
    cell = generator.integers(0, 7, 5_000)
    start = generator.uniform(0, 9, 5_000)
    end = start + generator.exponential(0.01, 5_000) * generator.integers(0, 2, 5_000)  # half of them last no time
    end[0], start[0] = 10.0, 0.0
    columns = pixel_columns(cell, start, end, 7, 333, (0.0, 10.0))
    whole = np.bincount(cell, weights=end - start, minlength=7)
    np.testing.assert_allclose(columns.sum(axis=1), whole, rtol=1e-9)
    assert columns.min() >= -1e-9
    part = pixel_columns(cell, start, end, 7, 333, (2.5, 3.5))
    clipped = np.clip(end, 2.5, 3.5) - np.clip(start, 2.5, 3.5)
    np.testing.assert_allclose(part.sum(axis=1), np.bincount(cell, weights=clipped, minlength=7), rtol=1e-9)


def test_pixels_are_coloured_where_a_rank_is_busy_and_only_there():
    trace = grid(2, 2_000)
    half_ns = int(trace.end_ns.max()) // 2
    figure = draw_timeline(trace.select((trace.rank == 1) | (trace.end_ns <= half_ns))).figure
    picture = np.asarray(with_gid(figure, "pixels")[0].get_array())
    height, width, _ = picture.shape
    empty = (picture == np.array([0xF1, 0xF1, 0xF1])).all(axis=2) | (picture == 255).all(axis=2)
    upper, lower = empty[: height * 2 // 5], empty[-(height * 2 // 5) :]  # two rows of 1 and a gap of 0.5
    busy = 1 - upper[:, 2 : width // 2 - 12].mean()
    assert busy == pytest.approx(25 / 30, abs=0.04)  # 25 of each 30 ms
    assert upper[:, width // 2 + 2 :].all()
    assert 1 - lower[:, 2 : int(width * 0.97)].mean() == pytest.approx(busy, abs=0.02)


def test_spans_of_a_lane_that_overlap_stand_on_levels():
    start, end = np.array([0, 5, 6, 20, 20]), np.array([10, 15, 20, 30, 20])
    row = np.zeros(5, dtype=np.int64)
    level = pack(row, start, end)
    assert level.tolist()[:4] == [0, 1, 2, 0]
    for a in range(4):
        for b in range(a):
            assert level[a] != level[b] or start[a] >= end[b] or start[b] >= end[a]
    assert pack(np.zeros(9, dtype=np.int64), np.arange(9), np.arange(9) + 100).max() == MAX_LEVELS - 1


def test_predicted_rows_stand_under_their_measured_ones():
    sides = [Side(data_parallel(3, jitter=0.1), False), Side(data_parallel(3), True)]
    seen = [np.ones(len(side.trace), bool) for side in sides]
    rows = place(sides, (0, 1, 2), lanes_of(sides), seen=seen, levels=True).rows
    assert [(row.rank, row.lane, row.predicted) for row in rows[:4]] == [
        (0, "compute", False),
        (0, "compute", True),
        (0, "communication", False),
        (0, "communication", True),
    ]
    for above, below in zip(rows, rows[1:], strict=False):
        assert below.top >= above.top + above.height - 1e-9


def test_facts_count_what_is_hidden_once():
    trace = Trace.from_spans(
        [
            Span(0, "compute", "f", "F", 0, 60 * MS),
            Span(0, "compute", "inner", "B", 10 * MS, 50 * MS),
            Span(0, "compute", "wait", "wait", 60 * MS, 100 * MS),
            Span(0, "communication", "a", "all_reduce", 40 * MS, 80 * MS),
            Span(0, "communication", "b", "all_reduce", 70 * MS, 90 * MS),
            Span(1, "compute", "f", "F", 0, 100 * MS),
        ]
    )
    facts = facts_of(trace)
    assert (facts.num_ranks, facts.duration_s) == (2, 0.1)
    assert facts.compute_share == pytest.approx(0.8)
    assert facts.communication_s == pytest.approx(0.025)
    assert facts.exposed_s == pytest.approx(0.015)


def test_pictures_import_neither_widgets_nor_pyplot_nor_torch():
    code = (
        "import sys; sys.modules['ipywidgets'] = None; sys.modules['IPython'] = None\n"
        "import simulator.viz\n"
        "assert not {'torch', 'matplotlib.pyplot', 'anywidget'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_kinds_that_share_their_words_have_one_entry_in_the_legend_and_are_no_stages():
    kinds = ["SEND_B", "SEND_F", "send"]
    assert [box.words for box in legend_boxes(kind_styles(kinds), False)] == ["send"]
    assert [box.words for box in legend_boxes(kind_styles(["F", "F~1"]), False)][1].startswith("lighter")


def step(compute, communication=0, waiting=0, num_ranks=2):
    """Ranks that compute, then communicate, then wait, and compute for the last millisecond; all in milliseconds."""
    spans = []
    for rank in range(num_ranks):
        first, second = compute * MS, (compute + communication) * MS
        spans.append(Span(rank, "compute", "forward", "F", 0, first))
        if communication:
            spans.append(Span(rank, "communication", "all_reduce #0", "all_reduce", first, second))
        last = second + waiting * MS
        spans.append(Span(rank, "compute", "optimizer", "optimizer", last, last + MS))
    return Trace.from_spans(spans)


def overlay(measured_ms=(39, 40, 41, 45), predicted_ms=(37, 38, 39), trouble="", measured=None, predicted=None):
    return Overlay(
        measured or step(30, 10),
        predicted or step(28, 9),
        [value / 1e3 for value in measured_ms],
        [value / 1e3 for value in predicted_ms],
        trouble,
    )


def test_the_verdict_has_both_medians_both_bands_and_says_inside():
    said = overlay().verdict
    assert said == "measured 40.5 ms (39.8 ms to 42 ms), predicted 38 ms (33.4 ms to 42.8 ms): inside the band"
    assert overlay().inside
    assert overlay().error == pytest.approx(38 / 40.5 - 1)


def test_a_verdict_is_whole_where_the_step_ends_long_before_its_band():
    early = overlay(measured_ms=(98.8, 116, 116, 230), predicted_ms=(66.7, 74.1, 81.6))
    assert "outside the band, 36 % early" in early.verdict
    assert not faults(draw_timeline(early).figure)


@pytest.mark.parametrize(("predicted_ms", "words"), [((20, 20, 20), "51 % early"), ((80, 81, 82), "100 % late")])
def test_a_step_outside_the_band_is_told_with_its_direction(predicted_ms, words):
    found = overlay(predicted_ms=predicted_ms)
    assert not found.inside
    assert f"outside the band, {words}" in found.verdict
    assert "outside the predicted band" in found.title


def test_a_wider_spread_of_calibrations_makes_a_wider_band():
    assert not overlay(predicted_ms=(20, 20, 20)).inside
    assert overlay(predicted_ms=(20, 20, 40)).inside


@pytest.mark.parametrize(
    ("measured", "kind", "way"),
    [
        (step(60, 10, 5), "compute: 30 ms", "more"),
        (step(30, 50, 5), "communication: 40 ms", "more"),
        (step(31, 9, 45), "waiting: 40 ms", "more"),
        (step(10, 10, 5), "compute: 20 ms", "less"),
    ],
)
def test_the_largest_difference_is_named_with_its_kind(measured, kind, way):
    found = overlay(measured=measured, predicted=step(30, 10, 5))
    assert found.difference == f"The largest difference is {kind} {way} per rank than predicted."
    assert str(found).endswith(found.difference)


def first_box(figure):
    boxes = [part for part in figure.axes[0].collections if len(part.get_facecolor()) > 1]
    return boxes[0].get_facecolor()[0].tolist()


def test_the_picture_has_both_bands_and_dims_what_was_not_calm():
    figure = draw_timeline(overlay()).figure
    ends = [(band.get_x() * 1e3, (band.get_x() + band.get_width()) * 1e3) for band in with_gid(figure, "band")]
    assert ends == [pytest.approx((39.75, 42.0)), pytest.approx((33.39, 42.79))]
    assert not with_gid(draw_timeline(overlay(), time_range_s=(0.0, 0.01)).figure, "band"), "outside the view"
    late = overlay(predicted_ms=(80, 80, 80))
    assert min(draw_timeline(late).figure.axes[0].get_xlim()[1], Timeline(late).limit_s) > 0.088, "the view holds them"
    dimmed = draw_timeline(overlay(trouble="The machine was busy.")).figure
    assert sum(first_box(dimmed)[:3]) > sum(first_box(figure)[:3]) + 0.5, "dimmed boxes are lighter"


def test_the_widget_shows_what_the_figure_shows():
    found = overlay(trouble="The machine was busy.")
    timeline = Timeline(found)
    assert timeline.title == found.title
    assert timeline.note == found.advice
    assert timeline.ends["text"] == found.verdict
    assert [list(band) for band in timeline.ends["bands_s"]] == [list(band) for band in found.bands_s]
    assert timeline.ends["dim"] is True
    assert Timeline(replace(found, trouble="")).ends["dim"] is False
    two = Timeline(step(30, 10), step(28, 9)).ends
    assert (two["dim"], len(two["bands_s"])) == (False, 0)
    assert timeline.summary == draw_timeline(found).words
    assert str(found) in timeline.summary

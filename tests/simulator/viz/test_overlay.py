"""An overlay says whether the measured step lies in the predicted band, what differs most, and what was not calm."""

from dataclasses import replace

import pytest
from viz_traces import MS

from distlab.trace import Span, Trace
from simulator.viz import Overlay, Timeline, describe_timeline, draw_timeline


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


def test_on_a_busy_machine_that_is_what_is_said_and_what_to_do():
    found = overlay(trouble="The machine was busy: other processes took 0.6 of its cores from the ranks.")
    assert "not calm" in found.title
    assert "The machine was busy: other processes took 0.6 of its cores from the ranks." in str(found)
    assert "Calibrate again: close other programs" in str(found)
    assert "largest difference" not in str(found)


def artists(figure, gid):
    return [artist for axes in figure.axes for artist in axes.get_children() if artist.get_gid() == gid]


def shades(figure):
    return [shade for shade in figure.axes[0].collections if shade.get_alpha() == 0.6]


def test_the_picture_has_both_bands_and_dims_what_was_not_calm():
    figure = draw_timeline(overlay())
    ends = [(band.get_x() * 1e3, (band.get_x() + band.get_width()) * 1e3) for band in artists(figure, "band")]
    assert ends == [pytest.approx((39.75, 42.0)), pytest.approx((33.39, 42.79))]
    assert not shades(figure)
    assert len(shades(draw_timeline(overlay(trouble="The machine was busy.")))) == 1


def test_a_band_outside_the_view_is_not_drawn():
    assert not artists(draw_timeline(overlay(), time_range_s=(0.0, 0.01)), "band")


def test_the_view_holds_the_bands():
    late = overlay(predicted_ms=(80, 80, 80))
    assert draw_timeline(late).axes[0].get_xlim()[1] > 0.088
    assert Timeline(late).limit_s > 0.088


def test_the_widget_shows_what_the_figure_shows():
    found = overlay(trouble="The machine was busy.")
    timeline = Timeline(found)
    assert timeline.title == found.title
    assert timeline.note == found.advice
    assert timeline.ends["text"] == found.verdict
    assert [list(band) for band in timeline.ends["bands_s"]] == [list(band) for band in found.bands_s]
    assert timeline.ends["dim"] is True
    assert Timeline(replace(found, trouble="")).ends["dim"] is False
    assert describe_timeline(found) in timeline.summary
    assert str(found) in describe_timeline(found)


def test_two_traces_have_neither_bands_nor_dimmed_boxes():
    timeline = Timeline(step(30, 10), step(28, 9))
    assert timeline.ends["dim"] is False
    assert not timeline.ends["bands_s"]

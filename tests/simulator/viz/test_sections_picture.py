"""The picture of sections: a bar per rank as long as its step, a prediction under it, and the same in words."""

import numpy as np
import pytest

from simulator.viz import describe_sections, draw_sections, to_png

MEASURED = {
    0: {"data": 0.001, "forward": 0.02, "backward": 0.04, "sync": 0.01, "optimizer": 0.004, "idle": 0.02},
    1: {"data": 0.021, "forward": 0.02, "backward": 0.04, "sync": 0.01, "optimizer": 0.004, "idle": 0.0},
}
PREDICTED = {0: {"forward": 0.02, "backward": 0.04, "sync": 0.002, "optimizer": 0.004, "idle": 0.0}}


def boxes(figure):
    """Left edge and width of each box, in inches, from top to bottom."""
    (shapes,) = (
        [artist for artist in figure.axes[0].collections if artist.get_gid() == "boxes"]
        if figure.axes
        else [next(artist for artist in figure.findobj() if artist.get_gid() == "boxes")]
    )
    corners = np.array([path.vertices[:4] for path in shapes.get_paths()])
    return [(float(c[:, 1].max()), float(c[:, 0].min()), float(np.ptp(c[:, 0]))) for c in corners]


def test_a_bar_has_a_box_for_each_section_as_wide_as_its_time():
    found = boxes(draw_sections(MEASURED))
    tops = sorted({round(top, 3) for top, _, _ in found}, reverse=True)
    for top, row in zip(tops, MEASURED.values(), strict=False):
        wide = [width for at, _, width in sorted(found, key=lambda box: box[1]) if round(at, 3) == top]
        times = [seconds for seconds in row.values() if seconds]
        np.testing.assert_allclose(np.array(wide) / wide[0], np.array(times) / times[0])


def test_a_prediction_of_one_rank_stands_under_every_rank():
    plain, both = boxes(draw_sections(MEASURED)), boxes(draw_sections(MEASURED, PREDICTED))
    assert len(both) == len(plain) + 2 * 4


def test_words_say_the_same():
    text = describe_sections(MEASURED, PREDICTED)
    assert text.startswith("2 ranks work 67 % of a step of 95 ms; most of the rest, 12 %, is data.")
    assert "Rank 1: 95 ms: data 21 ms, forward 20 ms, backward 40 ms" in text
    assert text.count("Predicted for rank") == 2


def test_what_cannot_be_drawn_is_refused():
    for wrong in ({}, {0: {"forward": 0.0}}):
        with pytest.raises(ValueError, match="profile at least one step"):
            draw_sections(wrong)


def test_it_renders_few_and_many():
    for seconds in (MEASURED, {rank: MEASURED[rank % 2] for rank in range(64)}, {3: {"forward": 1.0}}):
        assert to_png(draw_sections(seconds))[:4] == b"\x89PNG"

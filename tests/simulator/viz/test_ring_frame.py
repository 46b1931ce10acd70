"""A frame of a ring shows whose parts are in each chunk, and the panel walks through all frames."""

import numpy as np
import pytest
from pen_facts import shapes, words
from viz_traces import ring

from simulator.viz import describe_ring_frame, draw_ring_frame, to_png
from simulator.viz.collectives.ring_frame import provenance
from simulator.viz.collectives.ring_record import ring_steps


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 7])
def test_what_is_sent_has_one_part_more_at_each_step_until_it_is_the_sum(num_ranks):
    steps = ring_steps(ring(num_ranks))
    for number, sent in enumerate(steps.chunk):
        assert (steps.held[number][np.arange(num_ranks), sent] == min(number + 1, num_ranks)).all()
    assert provenance(steps)[-1].all()


def test_a_chunk_collects_the_ranks_it_passed():
    parts = provenance(ring_steps(ring(4)))
    assert np.flatnonzero(parts[2][2, 0]).tolist() == [0, 1, 2]  # chunk A, two steps after it left rank 0
    assert np.flatnonzero(parts[2][3, 0]).tolist() == [3]


def test_a_frame_has_an_arrow_a_rank_and_frames_what_arrived():
    start, second, last = (draw_ring_frame(ring(4), step) for step in (0, 2, 6))
    assert [shapes(figure, "arrows") for figure in (start, second, last)] == [0, 4, 4]
    assert [shapes(figure, "outlines") for figure in (start, second, last)] == [0, 4, 4]
    assert words(start).count("sum") == 0
    assert words(last).count("sum") == 16 + 4  # every chunk, and what the arrows bring
    title = "Step 2 of 6: every rank sends 4 MB, and its neighbour adds its own part"
    assert second.texts[0].get_text() == title
    assert "Sent so far: 8 MB of 24 MB per rank" in second.texts[1].get_text()
    assert "finished sums" in last.texts[0].get_text()
    assert to_png(second) != to_png(last)


def test_text_says_whose_parts_travel():
    text = describe_ring_frame(ring(3), 2)
    assert "rank 1 sends A (parts 0+1) to 2" in text
    assert "rank 1 sends B (the whole sum) to 2" in describe_ring_frame(ring(3), 4)
    assert describe_ring_frame(ring(3)).startswith("Before the first step: each of 3 ranks holds its own tensor")
    assert "Not a ring's chunks" in describe_ring_frame(ring(4, whole=True), 1)


@pytest.mark.parametrize(("num_ranks", "step", "message"), [(3, 5, "steps 1 to 4"), (9, 1, "at most 8 ranks")])
def test_what_cannot_be_shown_is_refused(num_ranks, step, message):
    with pytest.raises(ValueError, match=message):
        draw_ring_frame(ring(num_ranks), step)

"""A schedule's picture: the boxes of the pipeline alone, the bubble in the title."""

import pytest
from pen_facts import words_of as letters_of
from viz_traces import MS, data_parallel, grid

from distlab.trace import Span, Trace
from simulator.viz import describe_schedule, draw_schedule

FORWARD, BACKWARD = 10 * MS, 20 * MS


def two_stages():
    """Two stages, two micro-batches, 1F1B: 90 ms of which each rank works 60."""
    rows = [(0, "F", 0, 0), (0, "F", 1, 10), (0, "B", 0, 40), (0, "B", 1, 70)]
    rows += [(1, "F", 0, 10), (1, "B", 0, 20), (1, "F", 1, 40), (1, "B", 1, 50)]
    spans = [
        Span(rank, "compute", f"{rank}{kind}{microbatch}", kind, at * MS, at * MS + lasts, 0, rank, microbatch)
        for rank, kind, microbatch, at in rows
        for lasts in [FORWARD if kind == "F" else BACKWARD]
    ]
    spans.append(Span(0, "compute", "optimizer", "optimizer", 90 * MS, 99 * MS))
    spans.append(Span(0, "send forward", "0SEND_F0", "send", 10 * MS, 11 * MS, 64, 0, 0))
    return Trace.from_spans(spans)


def test_title_and_text_have_the_bubble():
    figure = draw_schedule(two_stages())
    title, note = (text.get_text() for text in figure.texts)
    assert title == "The bubble leaves 33.3 % of 2 ranks' time idle"
    assert note.endswith("(p-1)/(m+p-1) = 33.3 %")
    assert "2 ranks and 2 micro-batches over 90 ms" in describe_schedule(two_stages())
    assert "Predicted: 90 ms" in describe_schedule(two_stages(), two_stages())


def test_only_the_pipeline_is_drawn_and_labelled_by_micro_batch():
    axes = draw_schedule(two_stages()).axes[0]
    assert sum(len(artist.get_paths()) for artist in axes.collections if artist.get_gid() == "boxes") == 8
    labels = letters_of(axes)
    assert sorted(label for label in labels if label[0] in "FB") == ["B0", "B0", "B1", "B1", "F0", "F0", "F1", "F1"]


def test_large_schedules_are_drawn_too():
    assert "64 ranks" in draw_schedule(grid(64, 256)).texts[0].get_text()
    assert "(p-1)" not in describe_schedule(data_parallel(1))


def test_a_trace_without_pipeline_is_refused():
    with pytest.raises(ValueError, match="no compute span of kind F, B, I or W"):
        draw_schedule(Trace.from_spans([Span(0, "communication", "all_reduce", "all_reduce", 0, 5)]))

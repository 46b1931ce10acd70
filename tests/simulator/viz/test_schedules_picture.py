"""Schedules: boxes of the pipeline alone, bubbles in words, closed forms only where they hold, moments."""

import numpy as np
import pytest
from pen_facts import legend_of, shapes, words_of as letters_of
from viz_traces import MS, data_parallel, grid

from distlab.plan import ActionTimes, gpipe, interleaved, one_f_one_b, parse_schedule, zb_h1, zb_h2
from distlab.trace import Span, Trace
from simulator import simulate_schedule
from simulator.viz import describe_schedule, describe_schedules, draw_schedule, draw_schedules, run_schedule
from simulator.viz.drawing.lanes import shaded
from simulator.viz.drawing.style import KINDS, kind_styles
from simulator.viz.schedules.moment import MAX_MOMENTS, describe_moment, moments_of
from simulator.viz.schedules.run import NAMES, play
from simulator.viz.schedules.schedule import textbook_of

EQUAL = ActionTimes(1.0, 1.0, 1.0)


@pytest.fixture(scope="module")
def runs():
    return {name: play(name, 4, 8) for name in NAMES}


def test_a_pipeline_of_two_copies_holds_activations_of_one_and_says_that_there_are_two(runs):
    run = runs["dualpipe"]
    assert run.peak == 5  # p + 1: table 2 of the DeepSeek-V3 report
    assert "DualPipe (two copies of the model) on 4 ranks and 8 micro-batches" in describe_schedules([run])
    assert run.bubble_fraction < runs["dualpipe_v"].bubble_fraction


def test_every_schedule_is_drawn_with_all_its_actions_and_its_bubble_in_words(runs):
    for name, run in runs.items():
        figure = draw_schedules([run])
        assert shapes(figure, "boxes") == len(run.schedule), name
        idle = f"{run.bubble_fraction * 100:.1f} %"
        assert f"leaves {idle} of 4 ranks' time idle" in figure.texts[0].get_text()
        text = describe_schedules([run])
        assert f"idle for {idle}" in text
        assert f"holds {run.peak:.4g} micro-batch" in text
        assert f"{run.speedup:.2f} times as fast" in text
        assert run.bubble_fraction == pytest.approx(1 - run.speedup / 4)
        assert run.rank_span_s <= run.duration_s + 1e-12


def test_what_is_lost_where_steps_need_not_end_together_is_said_apart():
    early, late = run_schedule("ZB-H1", zb_h1(4, 8), EQUAL), run_schedule("ZB-H2", zb_h2(4, 8), EQUAL)
    assert early.duration_s == late.duration_s == pytest.approx(0.027)
    assert "need not end together" not in draw_schedules([early]).texts[0].get_text()
    assert draw_schedules([late]).texts[0].get_text().endswith("and 0.0 % where steps need not end together")
    assert "no rank takes longer than 24 ms" in describe_schedules([late])


def test_two_schedules_share_one_axis_and_the_title_says_what_sets_them_apart(runs):
    figure = draw_schedules([runs["gpipe"], runs["one_f_one_b"]])
    assert figure.texts[0].get_text() == "GPipe and 1F1B end together; 1F1B holds 4 instead of 8 micro-batches"
    assert shapes(figure, "boxes") == 2 * 64
    words = [text.get_text() for text in figure.axes[0].texts]
    assert "GPipe: 27.3 % idle, 8 micro-batches of activations" in words
    assert [word for word in words if word.startswith("rank")] == [f"rank {rank}" for rank in (0, 1, 2, 3)] * 2
    assert "50.0 % less memory" in describe_schedules([runs["gpipe"], runs["one_f_one_b"]])
    later = draw_schedules([runs["zb_h1"], runs["one_f_one_b"]]).texts[0].get_text()
    assert later == "1F1B ends 22.2 % later than ZB-H1; both hold 4 micro-batches"


def test_stages_of_a_rank_are_told_apart_by_lightness_in_every_picture():
    trace = simulate_schedule(interleaved(2, 4, stages_per_rank=3), EQUAL).trace
    kinds = shaded(trace)
    for rank in (0, 1):
        for stage, kind in ((rank, "F"), (rank + 2, "F~1"), (rank + 4, "F~2")):
            mask = (kinds.rank == rank) & (kinds.stage == stage) & kinds.is_word("kind", "F", "F~1", "F~2")
            assert mask.sum() == 4
            assert kinds.is_word("kind", kind)[mask].all()
    styles = kind_styles(["F", "F~1", "F~2", "W~1"])
    light = [sum(int(styles[kind].colour[at : at + 2], 16) for at in (1, 3, 5)) for kind in ("F", "F~1", "F~2")]
    assert light == sorted(set(light))
    assert (styles["F"], styles["W~1"].letter) == (KINDS["F"], "W")
    figure = draw_schedule(trace, trace)
    assert legend_of(figure) == ["forward", "backward", "lighter: a later stage of the rank", "measured", "predicted"]
    one = simulate_schedule(gpipe(3, 2), EQUAL).trace
    assert shaded(one) is one
    assert shaded(data_parallel(2)).words == data_parallel(2).words


def test_a_closed_form_stands_only_where_the_order_has_one(runs):
    for name, run in runs.items():
        known = textbook_of(run.trace)
        assert (known is not None) == (name in ("naive", "gpipe", "one_f_one_b", "interleaved", "looped_bfs")), name
        if known:
            assert known.name == run.name
            assert known.bubble_fraction == pytest.approx(run.bubble_fraction)
    assert textbook_of(play("interleaved", 2, 3).trace) is None  # micro-batches that the ranks do not divide
    own = parse_schedule("0F0 0F1 0B1 0B0\n1F0 1F1 1B1 1B0")
    assert textbook_of(run_schedule("own", own, EQUAL).trace) is None
    assert textbook_of(data_parallel(2)) is None


def test_a_moment_says_what_each_rank_does_and_for_whom_it_waits():
    run = run_schedule("1F1B", one_f_one_b(3, 4), EQUAL._replace(communication=0.5))
    assert describe_moment(run, 0.5e-3) == (
        "At 500 us, 1F1B: rank 0 runs 0F0; rank 1 waits for 0F0 of rank 0; rank 2 waits for 1F0 of rank 1."
    )
    assert "rank 1 waits for 0F0 of rank 0, which is on its way" in describe_moment(run, 1.25e-3)
    assert "rank 1 waits for 2B0 of rank 2" in describe_moment(run, 4.6e-3)
    assert describe_moment(run, run.duration_s).endswith("1F1B: ranks 0, 1 and 2 are done.")
    many = play("gpipe", 16, 4)
    assert "1 of 16 ranks work; rank 1 waits for 0F0 of rank 0" in describe_moment(many, 0.5e-3)
    assert "; 12 more wait" in describe_moment(many, 0.5e-3)


def test_moments_are_when_something_starts_or_ends_and_not_too_many():
    trace = run_schedule("1F1B", one_f_one_b(3, 4), EQUAL).trace
    assert set(moments_of(trace).tolist()) == set(trace.start_ns.tolist()) | set(trace.end_ns.tolist())
    for name, ranks, microbatches in (("gpipe", 8, 200), ("one_f_one_b", 32, 1024)):
        large = play(name, ranks, microbatches, times=ActionTimes(1.0, 1.1, 0.7)).trace
        moments = moments_of(large)
        assert len(moments) == MAX_MOMENTS + 1
        assert (moments[0], moments[-1]) == (0, large.end_ns.max())
        assert (np.diff(moments) > 0).all()


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
    figure = draw_schedule(two_stages())
    assert shapes(figure, "boxes") == 8
    labels = letters_of(figure.axes[0])
    assert sorted(label for label in labels if label[0] in "FB") == ["B0", "B0", "B1", "B1", "F0", "F0", "F1", "F1"]


def test_large_schedules_are_drawn_too():
    assert "64 ranks" in draw_schedule(grid(64, 256)).texts[0].get_text()
    assert "(p-1)" not in describe_schedule(data_parallel(1))

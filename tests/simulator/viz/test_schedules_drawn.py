"""Schedules: boxes of the pipeline alone, bubbles in words, closed forms only where they hold, moments."""

import numpy as np
import pytest
from picture_facts import shapes, words
from viz_traces import data_parallel

from distlab.plan import ActionTimes, gpipe, interleaved, one_f_one_b, parse_schedule
from simulator import simulate_schedule
from simulator.viz import draw_schedule, draw_schedules, run_schedule
from simulator.viz.drawing.lanes import shaded
from simulator.viz.drawing.theme import KINDS, kind_styles
from simulator.viz.panels.schedules import MAX_MOMENTS, describe_moment, moments_of
from simulator.viz.schedules import NAMES, play, textbook_of

EQUAL = ActionTimes(1.0, 1.0, 1.0)


@pytest.fixture(scope="module")
def runs():
    return {name: play(name, 4, 8) for name in NAMES}


def test_a_pipeline_of_two_copies_holds_activations_of_one_and_says_that_there_are_two(runs):
    run = runs["dualpipe"]
    assert run.peak == 5  # p + 1: table 2 of the DeepSeek-V3 report
    assert "DualPipe (two copies of the model) on 4 ranks and 8 micro-batches" in draw_schedules([run]).words
    assert run.bubble_fraction < runs["dualpipe_v"].bubble_fraction


def test_every_schedule_is_drawn_with_all_its_actions_and_its_bubble_in_words(runs):
    for name, run in runs.items():
        figure, text = draw_schedules([run])
        assert shapes(figure, "boxes") == len(run.schedule), name
        idle = f"{run.bubble_fraction * 100:.1f} %"
        assert f"leaves {idle} of 4 ranks' time idle" in figure.texts[0].get_text()
        assert f"idle for {idle}" in text
        assert f"holds {run.peak:.4g} micro-batch" in text
        assert f"{run.speedup:.2f} times as fast" in text
        assert run.bubble_fraction == pytest.approx(1 - run.speedup / 4)
        assert run.rank_span_s <= run.duration_s + 1e-12


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
    assert "lighter: a later stage of the rank" in words(draw_schedule(trace, trace).figure)
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

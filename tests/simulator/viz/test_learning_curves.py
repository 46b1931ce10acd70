"""The picture of batch sizes shows every mean and spread that it was given, and says them in words."""

import pytest

from simulator.viz import describe_batch_sizes, draw_batch_sizes, to_png
from simulator.viz.large_batch.learning_curves import points

RESULTS = {"SGD": {1437: [0.70, 0.80], 32: [0.96, 0.98]}, "LAMB": {32: [0.97], 1437: [0.90]}}


def test_lines_are_means_and_bars_reach_from_the_worst_to_the_best():
    assert points(RESULTS)["SGD"] == ((32, pytest.approx(0.97), 0.96, 0.98), (1437, pytest.approx(0.75), 0.70, 0.80))
    axes = draw_batch_sizes(RESULTS).axes[0]
    sgd = axes.lines[0]
    assert list(sgd.get_ydata()) == pytest.approx([0.97, 0.75])
    bars = [segment[:, 1].tolist() for segment in axes.collections[0].get_segments()]
    assert bars == [[0.96, 0.98], [0.70, 0.80]]
    low, high = axes.get_ylim()
    assert low < 0.70
    assert high == 1.0


def test_words_say_the_same():
    words = describe_batch_sizes(RESULTS)
    assert words.splitlines()[0] == "With 1,437 samples per batch LAMB is left with 90.0 %, SGD with 75.0 %."
    assert "SGD: 32: 97.0% (96.0% to 98.0%), 1,437: 75.0% (70.0% to 80.0%)." in words
    assert describe_batch_sizes({"SGD": {32: [0.5]}}).startswith("SGD: 50.0% with 32 samples per batch.")


@pytest.mark.parametrize("wrong", [{}, {"SGD": {}}, {"SGD": {32: []}}, {"SGD": {32: [97.0]}}])
def test_what_cannot_be_drawn_is_refused(wrong):
    with pytest.raises(ValueError, match="pass"):
        draw_batch_sizes(wrong)


def test_it_renders():
    assert to_png(draw_batch_sizes(RESULTS, subtitle="digits"))[:4] == b"\x89PNG"

"""Pictures of numbers as bars, and of batch sizes: every number is drawn, from zero, and said in words."""

import numpy as np
import pytest
from picture_facts import with_gid

from distlab.plan import Link, Protocol
from simulator import link, message_s
from simulator.viz import (
    describe_bars,
    describe_batch_sizes,
    describe_link_times,
    describe_sections,
    draw_bars,
    draw_batch_sizes,
    draw_link_times,
    draw_sections,
    to_png,
)
from simulator.viz.large_batch.learning_curves import points

PLAIN = {"ring": 24.0, "tree": 6.0}
SERIES = {"flat": {"predicted": 61.0, "measured": 66.0}, "overlapped": {"predicted": 40.0, "measured": 55.5}}
WIRES = ("ethernet-10g", "nvlink4", "infiniband-hdr")
RESULTS = {"SGD": {1437: [0.70, 0.80], 32: [0.96, 0.98]}, "LAMB": {32: [0.97], 1437: [0.90]}}
SECTIONS = {
    0: {"data": 0.001, "forward": 0.02, "backward": 0.04, "sync": 0.01, "optimizer": 0.004, "idle": 0.02},
    1: {"data": 0.021, "forward": 0.02, "backward": 0.04, "sync": 0.01, "optimizer": 0.004, "idle": 0.0},
}
PREDICTED = {0: {"forward": 0.02, "backward": 0.04, "sync": 0.002, "optimizer": 0.004, "idle": 0.0}}


def test_each_number_is_a_bar_from_zero_with_its_number_at_the_end():
    axes = draw_bars(PLAIN, unit="messages", title="A ring sends more messages").axes[0]
    assert [(bar.get_x(), bar.get_width()) for bar in axes.patches] == [(0.0, 24.0), (0.0, 6.0)]
    assert {"24 messages", "6 messages"} <= {text.get_text() for text in axes.texts}
    assert axes.get_xlim()[0] == 0.0
    axes = draw_bars(SERIES, unit="ms", title="The ladder").axes[0]
    colours = [bar.get_facecolor() for bar in axes.patches]
    assert [bar.get_width() for bar in axes.patches] == [61.0, 66.0, 40.0, 55.5], "in the order given"
    assert colours[0] == colours[2] != colours[1] == colours[3]
    middles = [bar.get_y() + bar.get_height() / 2 for bar in axes.patches]
    assert middles == sorted(middles)


def test_bars_of_links_are_in_the_order_of_their_times_and_what_is_mostly_latency_has_another_colour():
    axes = draw_link_times(375e6, WIRES, compute_s=0.12).axes[0]
    names = [label.get_text().splitlines()[0] for label in axes.get_yticklabels()]
    assert names == ["nvlink4", "infiniband-hdr", "ethernet-10g"]
    ends = [bar.get_x() + bar.get_width() for bar in axes.patches]
    assert ends == pytest.approx([message_s(375e6, link(name)) for name in names])
    wire = Link("wire", (Protocol(1e-3, 1e6),))  # 1,000 bytes take 1 ms of latency and 1 ms of bytes
    small, large = (draw_link_times(size, [wire]).axes[0].patches[0].get_facecolor() for size in (900, 1100))
    assert small != large


def test_lines_of_batch_sizes_are_means_and_bars_reach_from_the_worst_to_the_best():
    assert points(RESULTS)["SGD"] == ((32, pytest.approx(0.97), 0.96, 0.98), (1437, pytest.approx(0.75), 0.70, 0.80))
    axes = draw_batch_sizes(RESULTS).axes[0]
    assert list(axes.lines[0].get_ydata()) == pytest.approx([0.97, 0.75])
    assert [segment[:, 1].tolist() for segment in axes.collections[0].get_segments()] == [[0.96, 0.98], [0.70, 0.80]]
    low, high = axes.get_ylim()
    assert low < 0.70
    assert high == 1.0


def boxes(figure):
    """Return top edge, left edge and width of each box of sections, in inches."""
    (shapes,) = with_gid(figure, "boxes")
    corners = [path.vertices[:4] for path in shapes.get_paths()]
    return [(round(float(c[:, 1].max()), 3), float(c[:, 0].min()), float(np.ptp(c[:, 0]))) for c in corners]


def test_a_bar_has_a_box_for_each_section_as_wide_as_its_time_and_a_prediction_stands_under_every_rank():
    found = boxes(draw_sections(SECTIONS))
    for top, row in zip(sorted({top for top, _, _ in found}, reverse=True), SECTIONS.values(), strict=False):
        wide = [width for at, _, width in sorted(found, key=lambda box: box[1]) if at == top]
        times = [seconds for seconds in row.values() if seconds]
        np.testing.assert_allclose(np.array(wide) / wide[0], np.array(times) / times[0])
    assert len(boxes(draw_sections(SECTIONS, PREDICTED))) == len(found) + 2 * 4


LINKS = describe_link_times(375e6, WIRES, compute_s=0.12)
BATCHES, PARTS = describe_batch_sizes(RESULTS), describe_sections(SECTIONS, PREDICTED)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (describe_bars(PLAIN, unit="messages", title="Few"), "Few. ring: 24 messages; tree: 6"),
        (describe_bars({"a": 0.01234, "b": 1234.5}, unit="ms", title="T"), "T. a: 0.0123 ms; b: 1,234 ms."),
        (describe_bars(SERIES, unit="ms", title="The ladder"), "flat: predicted 61 ms, measured 66 ms"),
        (LINKS, "infiniband-hdr, 25 GB/s: 15 ms (13 % of the step's compute)"),
        (LINKS, "ethernet-10g, 1.25 GB/s: 300 ms (2.5 times the step's compute)"),
        (LINKS, "on 1 of 3 links longer than the compute"),
        (describe_link_times(100, WIRES, compute_s=0.12), "under 0.1 % of the step's compute"),
        (describe_link_times(2000, ["nvlink4"]), "nvlink4, 23.9 GB/s"),  # of two protocols the faster one
        (describe_link_times(375e6, ["nvlink4"]), "nvlink4, 367 GB/s"),
        (BATCHES, "With 1,437 samples per batch LAMB is left with 90.0 %, SGD with 75.0 %.\n"),
        (BATCHES, "SGD: 32: 97.0% (96.0% to 98.0%), 1,437: 75.0% (70.0% to 80.0%)."),
        (describe_batch_sizes({"SGD": {32: [0.5]}}), "SGD: 50.0% with 32 samples per batch."),
        (PARTS, "2 ranks work 67 % of a step of 95 ms; most of the rest, 12 %, is data."),
        (PARTS, "Rank 1: 95 ms: data 21 ms, forward 20 ms, backward 40 ms"),
    ],
)
def test_words_say_the_same(text, words):
    assert words in text
    assert PARTS.count("Predicted for rank") == 2


def test_few_and_many_are_rendered():
    many = {f"parameter {i}": float(i) for i in range(28)}
    figures = [draw_bars(each, unit="ms", title="B", subtitle="s") for each in (PLAIN, SERIES, many, {"nothing": 0.0})]
    ranks = {rank: SECTIONS[rank % 2] for rank in range(64)}
    figures += [draw_sections(each) for each in (SECTIONS, ranks, {3: {"forward": 1.0}})]
    for figure in (*figures, draw_link_times(1e6, WIRES), draw_batch_sizes(RESULTS, subtitle="digits")):
        assert to_png(figure)[:4] == b"\x89PNG"

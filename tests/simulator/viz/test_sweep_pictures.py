"""The pictures of sweeps mark the optimum and the break-even where the sweep has them, and say the same in words."""

import math
from dataclasses import replace

import numpy as np
import pytest
from picture_facts import with_gid

from distlab.plan import Plan
from distlab.plan.compression import METHODS, Compression
from simulator import (
    CompressionSweep,
    cluster,
    gpt_workload,
    simulate,
    sweep_compression,
    with_bandwidth,
)
from simulator.sweeps.compression import CompressionLine
from simulator.viz import describe_compression, draw_compression
from simulator.viz.compression.compression import compression_label, ranking, stops

WORKLOAD = gpt_workload(hidden_size=128, num_layers=4, num_heads=4, sequence_length=64, vocab_size=500)
MACHINE = with_bandwidth(cluster("laptop", 4), Plan(data=4), 5e8)
EACH = tuple(Compression(method) for method in METHODS)


def test_the_best_bucket_size_lies_between_too_small_and_too_large():
    each = WORKLOAD.gradient_bytes
    plans = [Plan(data=4, bucket_bytes=size, first_bucket_bytes=size) for size in (each // 1000, each // 10, each)]
    small, middle, large = (simulate(WORKLOAD, MACHINE, plan) for plan in plans)
    assert middle.duration_s < min(small.duration_s, large.duration_s)
    assert len(small.stages[0].buckets) > len(middle.stages[0].buckets) > len(large.stages[0].buckets)


def two_lines():
    speeds = (1e7, 1e8, 1e9)
    pays = CompressionLine(Compression("sign"), (0.2, 0.1, 0.09), 2e8)
    never = CompressionLine(Compression("quantize", bits=1), (2.0, 0.9, 0.3), 0.0)
    return CompressionSweep(speeds, (1.0, 0.15, 0.05), (pays, never), 0.04)


def test_a_ring_marks_each_break_even():
    figure = draw_compression(two_lines(), at_bytes_per_s=1e7)
    (ring,) = with_gid(figure, "break-even")
    assert ring.get_xdata()[0] == 2e8
    assert 0.05 < ring.get_ydata()[0] < 0.15
    assert [line.get_xdata()[0] for line in with_gid(figure, "chosen")] == [1e7]
    for gid, seconds in (("plain", (1.0, 0.15, 0.05)), ("sign", (0.2, 0.1, 0.09))):
        np.testing.assert_allclose(with_gid(figure, gid)[0].get_ydata(), seconds)
    assert figure.texts[0].get_text() == "At 10 MB/s sign is best: the step takes 20 % of the plain one"


def test_words_say_when_it_pays():
    text = describe_compression(two_lines(), at_bytes_per_s=1e9)
    assert text.startswith("At 1 GB/s no compression pays.")
    assert "sign: pays below 200 MB/s." in text
    assert "quantize 1 bit: never pays." in text
    assert [name for name, _ in ranking(two_lines(), 1e9)] == ["uncompressed", "sign", "quantize 1 bit"]
    sweep = two_lines()
    always = replace(sweep.lines[0], break_even_bytes_per_s=math.inf)
    assert stops(always) == "pays at any bandwidth"
    for lines, title in (
        (sweep.lines, "Above 200 MB/s no compression pays"),
        (sweep.lines[1:], "Compression never pays here"),
        ((always,), "sign pays at any bandwidth"),
    ):
        assert describe_compression(replace(sweep, lines=lines)).startswith(title)
        assert draw_compression(replace(sweep, lines=lines)).texts[0].get_text() == title


def test_every_method_has_a_name_and_a_line():
    sweep = sweep_compression(WORKLOAD, MACHINE, Plan(data=4), compressions=EACH, bytes_per_s=(1e7, 1e9))
    figure = draw_compression(sweep)
    labels = [compression_label(each) for each in EACH]
    assert len(set(labels)) == len(EACH)
    for label in labels:
        assert with_gid(figure, label)
        assert label in describe_compression(sweep)


class TestPanels:
    """Panels need the notebooks extra."""

    @pytest.fixture(autouse=True)
    def needs_widgets(self):
        pytest.importorskip("anywidget", reason="panels need the notebooks extra")

    def test_the_bandwidth_slider_changes_who_is_best(self):
        from simulator.viz import compression_panel

        other = gpt_workload(hidden_size=64, num_layers=2, num_heads=4, sequence_length=64, vocab_size=500)
        models = {"small": other, "large": WORKLOAD}
        two = (Compression("sign"), Compression("top_k"))
        panel = compression_panel(models, MACHINE, Plan(data=4), compressions=two, bytes_per_s=(1e6, 1e8, 1e13))
        assert panel.values["log_bytes_per_s"] == pytest.approx(math.log10(5e8), abs=0.1)
        panel.controls["log_bytes_per_s"].value = 6.0
        assert "is best" in panel.text
        panel.controls["log_bytes_per_s"].value = 13.0
        assert panel.text.startswith("At 10 TB/s no compression pays")
        panel.controls["compressor"].value = "sign"
        panel.controls["model"].value = "large"
        assert panel.error is None
        assert "top-k" not in panel.text

    def test_a_panel_of_nothing_is_refused(self):
        from simulator.viz import compression_panel

        with pytest.raises(ValueError, match="no model"):
            compression_panel({}, MACHINE, Plan(data=2))

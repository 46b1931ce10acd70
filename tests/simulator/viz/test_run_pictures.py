"""Pictures of runs and of sweeps: costs, where the time goes, when compression pays, with words that say the same."""

import math
from dataclasses import replace

import numpy as np
import pytest
from picture_facts import clashes, look_at, pale_texts, with_gid

from distlab.plan import Plan
from distlab.plan.compression import METHODS, Compression
from simulator import (
    CompressionSweep,
    Failures,
    Run,
    bill,
    cluster,
    counts_of,
    curve,
    gpt_workload,
    simulate,
    spread,
    sweep_compression,
    with_bandwidth,
)
from simulator.sweeps.compression import CompressionLine
from simulator.viz import (
    describe_compression,
    describe_cost_curve,
    describe_goodput,
    draw_compression,
    draw_cost_curve,
    draw_goodput,
    to_png,
)
from simulator.viz.compression.compression import compression_label, ranking, stops

GPT = gpt_workload(hidden_size=512, num_layers=4, num_heads=8, sequence_length=256, vocab_size=8000)
MACHINE, PLAN = cluster("dgx-a100"), Plan(2, 2, 8)
FAILURES = Failures("llama-3-all", restart_s=600)


@pytest.fixture(scope="module")
def costs():
    steps = spread(GPT, MACHINE, PLAN, counts_of(PLAN)).steps
    return curve([bill(step, Run(1e12, 2.0, FAILURES)) for step in steps])


def line(figure, gid):
    (found,) = with_gid(figure, gid)
    return found.get_xdata(), found.get_ydata()


def test_the_cost_curve_shows_each_bill_and_rings_three(costs):
    figure = draw_cost_curve(costs)
    counts, days = line(figure, "days")
    assert list(counts) == [each.num_devices for each in costs.bills]
    assert list(days) == [each.days for each in costs.bills]
    assert list(line(figure, "dollars")[1]) == [each.dollars for each in costs.bills]
    for name, own in (("shortest", costs.shortest), ("cheapest", costs.cheapest)):
        assert {ring.get_xdata()[0] for ring in with_gid(figure, name)} == {own.num_devices}
    assert to_png(figure).startswith(b"\x89PNG")


def test_several_clusters_have_a_line_each(costs):
    steps = spread(GPT, cluster("dgx-h100"), PLAN, [4, 8]).steps
    both = curve([*costs.bills, *(bill(step, Run(1e12, 4.0, FAILURES)) for step in steps)])
    figure = draw_cost_curve(both)
    assert list(line(figure, "days dgx-h100")[0]) == [4, 8]
    assert len(line(figure, "days dgx-a100")[0]) == len(costs.bills)
    assert "8 devices of dgx-h100: " in describe_cost_curve(both)


def test_every_text_can_be_read(costs):
    for figure in (draw_cost_curve(costs), draw_goodput(FAILURES, 16_384, 30.0), draw_goodput(FAILURES, 64, 3.0)):
        look = look_at(figure)
        assert not clashes(look)
        assert not pale_texts(look)


def test_its_words_name_the_same(costs):
    text = describe_cost_curve(costs)
    assert f"Fastest on {costs.shortest.num_devices} devices, cheapest on {costs.cheapest.num_devices}" in text
    for each in costs.bills:
        assert f"{each.num_devices} devices: " in text
    assert f"{costs.cheapest.dollars:,.0f} dollars: " in text


def test_without_prices_it_counts_device_hours():
    steps = spread(GPT, MACHINE, PLAN, [4]).steps
    one = curve([bill(step, Run(1e12)) for step in steps])
    assert "device-hours: shortest and cheapest and sweet spot." in describe_cost_curve(one)
    assert "are both fastest and cheapest" in describe_cost_curve(one)
    assert with_gid(draw_cost_curve(one), "device-hours")


def test_goodput_is_computed_drawn_and_split_into_parts():
    figure = draw_goodput(FAILURES, 16_384, 30.0)
    intervals, useful = line(figure, "computed")
    tried, drawn = line(figure, "drawn")
    assert np.interp(np.log(tried), np.log(intervals), useful) == pytest.approx(drawn, abs=0.02)
    best = FAILURES.goodput(16_384, 30.0)
    assert line(figure, "chosen")[0][0] == best.interval_s
    assert useful.max() == pytest.approx(best.useful, abs=1e-3)
    for part in ("useful", "saving", "lost", "restarting"):
        assert with_gid(figure, part)
    text = describe_goodput(FAILURES, 16_384, 30.0)
    assert f"useful {best.useful * 100:.1f} %" in text
    assert "by Young" in text
    assert "8,192 devices: " in text


WORKLOAD = gpt_workload(hidden_size=128, num_layers=4, num_heads=4, sequence_length=64, vocab_size=500)
LAPTOP = with_bandwidth(cluster("laptop", 4), Plan(data=4), 5e8)
EACH = tuple(Compression(method) for method in METHODS)


def test_the_best_bucket_size_lies_between_too_small_and_too_large():
    each = WORKLOAD.gradient_bytes
    plans = [Plan(data=4, bucket_bytes=size, first_bucket_bytes=size) for size in (each // 1000, each // 10, each)]
    small, middle, large = (simulate(WORKLOAD, LAPTOP, plan) for plan in plans)
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
    sweep = sweep_compression(WORKLOAD, LAPTOP, Plan(data=4), compressions=EACH, bytes_per_s=(1e7, 1e9))
    figure = draw_compression(sweep)
    labels = [compression_label(each) for each in EACH]
    assert len(set(labels)) == len(EACH)
    for label in labels:
        assert with_gid(figure, label)
        assert label in describe_compression(sweep)

"""Pictures of a whole run: the cost curve and where the time goes, with words that say the same; panels."""

import numpy as np
import pytest
from picture_facts import clashes, look_at, pale_texts, with_gid

from distlab.plan import Plan
from simulator import Failures, Run, bill, cluster, counts_of, curve, gpt_workload, spread
from simulator.viz import describe_cost_curve, describe_goodput, draw_cost_curve, draw_goodput, to_png

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


def test_a_run_in_which_nothing_fails_has_no_picture():
    with pytest.raises(ValueError, match="nothing fails"):
        draw_goodput(Failures("none"), 64, 30.0)
    with pytest.raises(ValueError, match="nothing fails"):
        describe_goodput(Failures("none"), 64, 30.0)


class TestPanels:
    """Panels need the notebooks extra."""

    @pytest.fixture(autouse=True)
    def needs_widgets(self):
        pytest.importorskip("anywidget", reason="panels need the notebooks extra")

    def test_price_and_failures_move_the_cost(self):
        from simulator.viz import cost_panel

        panel = cost_panel()
        assert panel.error is None
        before = panel.text
        panel.controls["price"].value = 5.0
        assert panel.error is None
        assert "5 dollars" in panel.text
        panel.controls["failures"].value = "none"
        panel.controls["trillions"].value = -1.0
        assert panel.error is None
        assert "1e+11 tokens" in panel.text != before
        mimes, _ = panel._repr_mimebundle_()
        assert "image/png" in mimes
        assert mimes["text/plain"]

    def test_devices_failures_and_saves_move_the_goodput(self):
        from simulator.viz import goodput_panel

        panel = goodput_panel()
        panel.controls["num_devices"].value = 1024
        assert panel.error is None
        assert "1,024 devices" in panel.text
        first = panel.text.split(" %")[0]
        panel.controls["num_devices"].value = 65_536
        panel.controls["restart_minutes"].value = 30
        panel.controls["log_save_s"].value = 2.0
        assert panel.error is None
        assert float(panel.text.split(" %")[0]) < float(first)
        panel.controls["times_rate"].value = 10.0
        panel.controls["restart_minutes"].value = 120
        assert "does not get on" in panel.text, "an impossible run is told in the picture's place"

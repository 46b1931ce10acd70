import pytest

from distlab.plan import Link, Protocol
from simulator import link, message_s
from simulator.viz import describe_link_times, draw_link_times, to_png

WIRES = ("ethernet-10g", "nvlink4", "infiniband-hdr")


def test_bars_are_in_the_order_of_their_times_and_as_long():
    axes = draw_link_times(375e6, WIRES, compute_s=0.12).axes[0]
    names = [label.get_text().splitlines()[0] for label in axes.get_yticklabels()]
    assert names == ["nvlink4", "infiniband-hdr", "ethernet-10g"]
    ends = [bar.get_x() + bar.get_width() for bar in axes.patches]
    assert ends == pytest.approx([message_s(375e6, link(name)) for name in names])


def test_words_name_every_link_its_time_and_its_share_of_the_step():
    words = describe_link_times(375e6, WIRES, compute_s=0.12)
    assert "infiniband-hdr, 25 GB/s: 15 ms (13 % of the step's compute)" in words
    assert "ethernet-10g, 1.25 GB/s: 300 ms (2.5 times the step's compute)" in words
    assert "on 1 of 3 links longer than the compute" in words
    assert "under 0.1 % of the step's compute" in describe_link_times(100, WIRES, compute_s=0.12)


def test_a_bar_that_is_mostly_latency_has_another_colour():
    wire = Link("wire", (Protocol(1e-3, 1e6),))  # 1,000 bytes take 1 ms of latency and 1 ms of bytes
    small, large = (draw_link_times(size, [wire]).axes[0].patches[0].get_facecolor() for size in (900, 1100))
    assert small != large


def test_of_two_protocols_the_faster_one_is_named():
    assert "nvlink4, 23.9 GB/s" in describe_link_times(2000, ["nvlink4"])
    assert "nvlink4, 367 GB/s" in describe_link_times(375e6, ["nvlink4"])


def test_it_renders():
    assert to_png(draw_link_times(1e6, WIRES))[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((1e6, []), "no links"),
        ((0, WIRES), "0 bytes"),
        ((float("nan"), WIRES), "nan bytes"),
        ((1e6, ["wet-string"]), "wet-string"),
    ],
)
def test_refusals(arguments, text):
    with pytest.raises(ValueError, match=text):
        draw_link_times(*arguments)


def test_a_step_that_computes_nothing_is_refused():
    with pytest.raises(ValueError, match="compute_s is 0"):
        describe_link_times(1e6, WIRES, compute_s=0)

import pytest
from _rows import absolute, compare, compare_counts, median_interval, noise, paired_ratio, ratio_holds

from distlab.measure import interleave


def test_ratio_of_blocks_not_of_medians():
    # the machine slowed down by 10x half way; each block still says that ours takes half as long
    ratio, interval = paired_ratio([1, 1, 10, 10], [2, 2, 20, 20])
    assert ratio == 0.5
    assert interval == (0.5, 0.5)


def test_unequal_blocks_are_refused():
    with pytest.raises(ValueError, match="2 blocks of ours and 3 of the peer"):
        paired_ratio([1, 2], [1, 2, 3])


@pytest.mark.parametrize(
    ("ratio", "interval", "bar", "holds"),
    [
        (1.04, (0.99, 1.09), 1.0, True),  # median within 1.05 and the interval reaches 1.00
        (1.04, (1.01, 1.09), 1.0, False),
        (1.06, (0.99, 1.09), 1.0, False),
        (0.75, (0.70, 0.79), 0.8, True),
        (0.75, (0.70, 0.81), 0.8, False),  # the upper end decides
    ],
)
def test_how_a_bar_is_judged(ratio, interval, bar, holds):
    assert ratio_holds(ratio, interval, bar) is holds


def test_interval_repeats_and_holds_the_median():
    values = [1.0, 1.2, 0.9, 1.1, 1.05, 5.0]
    low, high = median_interval(values)
    assert (low, high) == median_interval(values)
    assert low <= 1.075 <= high


def test_rows_say_what_was_measured():
    row = compare("ours as fast as theirs", [1.0] * 20, [1.0] * 20)
    assert row.holds is True
    assert row.bar == "<= 1x"
    counts = compare_counts("fewer bytes", 90, 100)
    assert (counts.ratio, counts.interval, counts.holds, counts.unit) == (0.9, (0.9, 0.9), True, "B")
    assert not compare_counts("more bytes", 101, 100).holds
    assert "smoke" in compare("too few", [1.0] * 3, [1.0] * 3).note
    assert noise("x", [1.0, 1.1], [1.0, 1.0]).holds is None
    assert absolute("start", [0.2, 0.1, 0.3], bar=0.15, unit="s").holds is False


def test_programs_take_turns():
    order = []
    interleave([lambda: order.append("a") or 1.0, lambda: order.append("b") or 2.0], blocks=3)
    assert order == ["a", "b", "b", "a", "a", "b"]

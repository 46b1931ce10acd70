import math

import pytest

from distlab.plan import Plan
from simulator import units, words_of


def test_seconds_become_whole_nanoseconds_and_back():
    assert units.to_ns(1.5e-6) == 1500
    assert units.to_ns(0) == 0
    assert units.to_s(1_500_000_000) == 1.5


@pytest.mark.parametrize("seconds", [-1e-9, math.nan, math.inf, 1e12])
def test_a_duration_that_is_no_duration_is_refused(seconds):
    with pytest.raises(ValueError, match="a duration is"):
        units.to_ns(seconds)


def test_text_has_three_digits_and_a_unit():
    assert units.format_bytes(25_000_000) == "25 MB"
    assert units.format_bytes(17) == "17 B"
    assert units.format_bytes_per_s(450e9) == "450 GB/s"
    assert units.format_flops_per_s(312e12) == "312 TFLOP/s"
    assert units.format_s(0.00132) == "1.32 ms"
    assert units.format_s(75) == "75 s"
    assert units.format_s(2e-10) == "0.2 ns"
    assert units.format_s(0) == "0 s"


def test_one_thing_is_written_as_one():
    found = [units.counted(number, "micro-batch") for number in (0, 1, 2)]
    assert found == ["0 micro-batches", "1 micro-batch", "2 micro-batches"]
    assert [units.counted(number, "rank") for number in (1, 1024)] == ["1 rank", "1,024 ranks"]
    assert words_of(Plan(data=2), 4) == "data 2, 1 micro-batch of 4"
    assert words_of(Plan(num_microbatches=8), 1) == "one device, 8 micro-batches of 1"

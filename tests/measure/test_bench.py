"""Rows of benchmarks: ratios of blocks, bars and intervals; and how a script prints them."""

import sys

import pytest
import torch
from _rows import absolute, compare, compare_counts, median_interval, noise, paired_ratio, ratio_holds
from _script import backend_of, run_script

from distlab.measure import interleave


def test_ratios_are_of_blocks_and_bars_are_judged_by_intervals():
    # the machine slowed down by 10x half way; each block still says that ours takes half as long
    assert paired_ratio([1, 1, 10, 10], [2, 2, 20, 20]) == (0.5, (0.5, 0.5))
    with pytest.raises(ValueError, match="2 blocks of ours and 3 of the peer"):
        paired_ratio([1, 2], [1, 2, 3])
    assert ratio_holds(1.04, (0.99, 1.09), 1.0)  # median within 1.05 and the interval reaches 1.00
    assert not ratio_holds(1.04, (1.01, 1.09), 1.0)
    assert not ratio_holds(1.06, (0.99, 1.09), 1.0)
    assert ratio_holds(0.75, (0.70, 0.79), 0.8)
    assert not ratio_holds(0.75, (0.70, 0.81), 0.8)  # the upper end decides
    low, high = median_interval([1.0, 1.2, 0.9, 1.1, 1.05, 5.0])
    assert low <= 1.075 <= high


def test_rows_say_what_was_measured():
    row = compare("ours as fast as theirs", [1.0] * 20, [1.0] * 20)
    assert (row.holds, row.bar) == (True, "<= 1x")
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


def test_rows_are_printed_as_they_come_and_a_device_is_asked_for_only_where_there_is_a_choice(capsys, monkeypatch):
    def rows(quick=False, device="cpu"):
        yield absolute(f"quick is {quick} on {device}", [1.0], bar=2.0, unit="s")
        assert "quick is True on cpu" in capsys.readouterr().out  # before the next one is measured
        raise ValueError("no such machine")

    monkeypatch.setattr(sys, "argv", ["bench", "--quick"])
    with pytest.raises(SystemExit, match="error: no such machine"):
        run_script("What it is.", rows, devices=True)
    monkeypatch.setattr(sys, "argv", ["bench", "--device", "cuda"])
    with pytest.raises(SystemExit, match="2"):
        run_script("What it is.", lambda quick: iter(()))
    assert "--device" in capsys.readouterr().err


def test_ranks_without_a_gpu_each_use_gloo(monkeypatch):
    assert backend_of("cpu", 2) == "gloo"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="torch sees no GPU here; leave --device out"):
        backend_of("cuda", 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [backend_of("cuda", ranks) for ranks in (1, 2, 3)] == ["nccl", "nccl", "gloo"]

"""Pictures of memory and of units: bars add up to the peaks, curves are the sweep's, the words say both."""

import numpy as np

from distlab.plan import Plan
from simulator import gpt_workload, memory_of
from simulator.memory.memory import KINDS
from simulator.viz import (
    draw_memory,
)
from simulator.viz.memory.memory import MEMORY_KINDS, fewer_moments

WORKLOAD = gpt_workload(hidden_size=256, num_layers=6, num_heads=4, sequence_length=64, vocab_size=1000)


def memory(**options):
    return memory_of(WORKLOAD, Plan(**options))


def test_every_kind_has_its_own_colour_and_letter():
    assert tuple(MEMORY_KINDS) == KINDS
    assert len({style.colour for style in MEMORY_KINDS.values()}) == len(KINDS)
    assert len({style.letter for style in MEMORY_KINDS.values()}) == len(KINDS)


def bar_widths(axes):
    (bars,) = (artist for artist in axes.collections if artist.get_gid() == "bars")
    return np.array([np.ptp(path.vertices[:4, 0]) for path in bars.get_paths()])


def test_bars_add_up_to_the_peaks():
    held = memory(pipeline=2, num_microbatches=4)
    bars, _ = draw_memory(held).figure.axes
    widths = bar_widths(bars).reshape(-1, 2)
    np.testing.assert_allclose(widths.sum(axis=0), held.total_bytes)


def test_a_long_step_is_drawn_by_pixels_and_keeps_its_peak():
    times, rows = memory(num_microbatches=400).over_time()
    fewer, kept = fewer_moments(times, rows, 500)
    assert len(times) > 5000
    assert len(fewer) <= 502
    assert kept.max() == rows.max()
    assert (np.diff(fewer) > 0).all()

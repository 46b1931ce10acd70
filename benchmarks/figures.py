"""How long pictures take: drawn and rendered to PNG, for a slider that should not stutter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from _blocks import seconds_of
from _rows import Row, absolute, compare, noise
from _script import run_script
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from distlab.measure import interleave
from distlab.trace import Trace
from simulator.viz import Picture, draw_schedule, draw_timeline, to_png

BLOCKS, QUICK_BLOCKS = 20, 3


def pipeline_trace(num_ranks: int, num_microbatches: int) -> Trace:
    """Forward and backward in turn on every rank, each rank a little later than the one above it."""
    rank, index = np.divmod(np.arange(num_ranks * 2 * num_microbatches), 2 * num_microbatches)
    start = (index // 2 * 30 + index % 2 * 10 + rank * 10) * 1_000_000
    return Trace.from_columns(
        rank=rank,
        lane="compute",
        name=["F", "B"] * (len(rank) // 2),
        kind=["F", "B"] * (len(rank) // 2),
        start_ns=start,
        end_ns=start + np.where(index % 2, 20, 10) * 1_000_000,
        stage=rank,
        microbatch=index // 2,
    )


def draw_every_box(trace: Trace) -> Picture:
    """Draw each span as a box of one PolyCollection, on a figure of the same size: the plain way."""
    figure = Figure(figsize=(12.8, 9.37), dpi=100)
    axes = figure.subplots()
    corners = np.empty((len(trace), 4, 2))
    corners[:, (0, 3), 0], corners[:, (1, 2), 0] = trace.start_ns[:, None] / 1e9, trace.end_ns[:, None] / 1e9
    corners[:, (0, 1), 1], corners[:, (2, 3), 1] = trace.rank[:, None], trace.rank[:, None] + 0.9
    colours = np.array([[0.34, 0.71, 0.91], [0.9, 0.62, 0.0]])[trace.is_word("kind", "B").astype(int)]
    axes.add_collection(PolyCollection(corners, facecolors=colours))
    axes.autoscale()
    return Picture(figure, "every box")


def seconds(make: Callable[[], Picture]) -> float:
    """Time a picture from its trace to its PNG."""
    return seconds_of(lambda: to_png(make().figure))


def rows(quick: bool = False) -> Iterator[Row]:
    """Measure the pictures one after the other; each is drawn once before it is timed."""
    blocks = QUICK_BLOCKS if quick else BLOCKS
    some, many, most = pipeline_trace(16, 60), pipeline_trace(64, 256), pipeline_trace(64, 1024)
    cases: list[tuple[str, Callable[[], Picture], float]] = [
        (
            "timeline of 1,920 spans over 1,920 predicted, exact boxes, to PNG",
            lambda: draw_timeline(some, some).figure,
            0.5,
        ),
        ("timeline of 32,768 spans to PNG", lambda: draw_timeline(many), 0.15),
        ("timeline of 131,072 spans to PNG", lambda: draw_timeline(most), 0.5),
        (
            "0.4 s of 131,072 spans, exact boxes, to PNG",
            lambda: draw_schedule(most, time_range_s=(5.0, 5.4)).figure,
            0.5,
        ),
    ]
    for claim, make, bar in cases:
        seconds(make)
        yield absolute(
            claim, [seconds(make) for _ in range(blocks)], bar=bar, unit="s", note="figure and PNG, one core"
        )

    ours, peer = (partial(seconds, partial(draw, many)) for draw in (draw_timeline, draw_every_box))
    own, every, again = interleave([ours, peer, peer], blocks)
    claim = "32,768 spans against one PolyCollection of every box"
    yield compare(claim, own, every, bar=1.0)
    yield noise(claim, every, again)


if __name__ == "__main__":
    run_script(__doc__, rows)

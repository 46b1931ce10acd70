"""Draw one rank's step as a timeline: its compute, and its communication cut into hidden and exposed, with a cursor."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from simulator.units import format_s
from simulator.viz.data_parallel.step_state import RankStep, TrainStep, passes
from simulator.viz.drawing.pen import Pen
from simulator.viz.drawing.plot import draw_time_scale, frame
from simulator.viz.drawing.style import FAINT, INK, LEAST_PT, SMALL_PT, TEXT_PT, WIDTH_IN, kind_styles, text_colour
from simulator.viz.drawing.words import width_in

TIMELINE_IN, FOOT_IN, LEFT_IN, RIGHT_IN = 1.3, 1.32, 2.35, 0.35
HIDDEN, EXPOSED = "#0072B2", "#D55E00"
NAME_PT = LEAST_PT


def draw_step_timeline(figure: Figure, pen: Pen, step: TrainStep, own: RankStep, moment: float) -> None:
    """Draw the rank's compute, and its communication cut into hidden and exposed, with a cursor at the moment."""
    height = figure.get_size_inches()[1]
    axes = frame(figure, left=LEFT_IN, right=RIGHT_IN, top=height - TIMELINE_IN - FOOT_IN, bottom=FOOT_IN, bare=True)
    end = step.duration_s * 1.004 or 1e-6
    axes.set_xlim(0, end)
    axes.set_ylim(2.0, -0.2)
    bars, inch = Pen(axes), end / (WIDTH_IN - LEFT_IN - RIGHT_IN)
    styles = kind_styles([span.kind for span in own.spans])
    several = len(passes(own.spans, "B")) > 1
    for span in own.spans:
        style = styles[span.kind]
        texts: tuple[str, ...] = (span.name if len(span.name) < 14 else style.words, style.letter)
        if several and span.microbatch >= 0:
            texts = tuple(f"{text}{span.microbatch + 1}" for text in (f"{style.words} ", style.letter))
        _bar(bars, (span.start_ns / 1e9, span.end_ns / 1e9), 0.0, style.colour, texts, inch=inch)
    for intervals, colour, words in ((own.hidden, HIDDEN, "hidden"), (own.exposed, EXPOSED, "exposed")):
        for start, stop in intervals:
            longest = f"{words} {format_s(stop - start)}"
            _bar(bars, (start, stop), 1.0, colour, (longest, words, words[0].upper()), inch=inch)
    bars.flush()
    axes.plot([moment, moment], [-0.2, 2.0], color=INK, linewidth=2.2, zorder=7, clip_on=False, gid="cursor")
    axes.plot([moment], [-0.2], marker="v", markersize=9, color=INK, zorder=7, clip_on=False)
    row = TIMELINE_IN / 2.2
    for number, words in enumerate(("compute", "communication")):
        y = FOOT_IN + TIMELINE_IN - (0.63 + number) * row
        pen.words((LEFT_IN - 0.12, y), words, colour=FAINT, side="right")
    pen.words((0.16, FOOT_IN + TIMELINE_IN - 1.13 * row), f"rank {own.rank}", size=TEXT_PT, bold=True, side="left")
    draw_time_scale(axes, label_pt=SMALL_PT)


def _bar(pen: Pen, ends: tuple[float, float], row: float, colour: str, texts: Sequence[str], *, inch: float) -> None:
    """Draw one bar with the longest of its texts that fits."""
    wide = ends[1] - ends[0]
    pen.box((ends[0], row), wide, 0.86, colour, line=0.8 if wide > 0.04 * inch else 0.0)
    words = fitting(wide / inch, *texts)
    pen.words(((ends[0] + ends[1]) / 2, row + 0.43), words, size=NAME_PT, colour=text_colour(colour))


def fitting(room_in: float, *texts: str) -> str:
    """Return the first text that fits into the room, or none."""
    return next((text for text in texts if width_in(text, NAME_PT) + 0.06 <= room_in), "")

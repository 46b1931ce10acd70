"""Draw one data-parallel step at one moment: what each rank holds, what is being averaged, and what of it is hidden.

A column is one all-reduce, a row one rank. A rank's own gradient has the rank's colour; the mean has the same colour
everywhere, because it is the same everywhere. Under it stands one rank's timeline.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from distlab.trace import Trace
from simulator.units import counted, format_bytes, format_s, name_ranks, percent
from simulator.viz.data_parallel.step import (
    ABSENT,
    FILLING,
    MEAN,
    OWN,
    SENT,
    RankMoment,
    RankStep,
    TrainStep,
    held_at,
    read_step,
)
from simulator.viz.drawing import theme
from simulator.viz.drawing.pen import Pen, Picture, sheet
from simulator.viz.drawing.plot import draw_time_scale, frame, width_in

TIMELINE_IN, FOOT_IN, LEFT_IN, RIGHT_IN = 1.3, 1.32, 2.35, 0.35
HIDDEN, EXPOSED = "#0072B2", "#D55E00"
NAME_PT = theme.LEAST_PT


def draw_step_timeline(figure: Figure, pen: Pen, step: TrainStep, own: RankStep, moment: float) -> None:
    """Draw the rank's compute, and its communication cut into hidden and exposed, with a cursor at the moment."""
    height = figure.get_size_inches()[1]
    axes = frame(figure, left=LEFT_IN, right=RIGHT_IN, top=height - TIMELINE_IN - FOOT_IN, bottom=FOOT_IN, bare=True)
    end = step.duration_s * 1.004 or 1e-6
    axes.set_xlim(0, end)
    axes.set_ylim(2.0, -0.2)
    bars, inch = Pen(axes), end / (theme.WIDTH_IN - LEFT_IN - RIGHT_IN)
    styles = theme.kind_styles([span.kind for span in own.spans])
    for span in own.spans:
        style = styles[span.kind]
        texts: tuple[str, ...] = (span.name if len(span.name) < 14 else style.words, style.letter)
        _bar(bars, (span.start_ns / 1e9, span.end_ns / 1e9), 0.0, style.colour, texts, inch=inch)
    for intervals, colour, words in ((own.hidden, HIDDEN, "hidden"), (own.exposed, EXPOSED, "exposed")):
        for start, stop in intervals:
            longest = f"{words} {format_s(stop - start)}"
            _bar(bars, (start, stop), 1.0, colour, (longest, words, words[0].upper()), inch=inch)
    bars.flush()
    axes.plot([moment, moment], [-0.2, 2.0], color=theme.INK, linewidth=2.2, zorder=7, clip_on=False, gid="cursor")
    axes.plot([moment], [-0.2], marker="v", markersize=9, color=theme.INK, zorder=7, clip_on=False)
    row = TIMELINE_IN / 2.2
    for number, words in enumerate(("compute", "communication")):
        y = FOOT_IN + TIMELINE_IN - (0.63 + number) * row
        pen.words((LEFT_IN - 0.12, y), words, colour=theme.FAINT, side="right")
    pen.heading((0.16, FOOT_IN + TIMELINE_IN - 1.13 * row), f"rank {own.rank}")
    draw_time_scale(axes, label_pt=theme.SMALL_PT)


def _bar(pen: Pen, ends: tuple[float, float], row: float, colour: str, texts: Sequence[str], *, inch: float) -> None:
    """Draw one bar with the longest of its texts that fits."""
    wide = ends[1] - ends[0]
    pen.box((ends[0], row), wide, 0.86, colour, line=0.8 if wide > 0.04 * inch else 0.0)
    words = fitting(wide / inch, *texts)
    pen.words(((ends[0] + ends[1]) / 2, row + 0.43), words, size=NAME_PT, colour=theme.text_colour(colour))


def fitting(room_in: float, *texts: str) -> str:
    """Return the first text that fits into the room, or none."""
    return next((text for text in texts if width_in(text, NAME_PT) + 0.06 <= room_in), "")


MAX_RANKS = 8
ROW_IN, GAP_IN, TOP_IN, HEADER_IN, NAMES_IN = 0.6, 0.23, 0.95, 0.36, 0.5
ACTIVATIONS_IN, GRADIENTS_IN = 3.25, 4.75
MAX_NAMED = 24

Cells = Sequence[tuple[float, float]]


def draw_train_step(trace: Trace, at_s: float, *, title: str | None = None) -> Picture:
    """Draw what each rank of a data-parallel step holds at one moment, and the step's timeline under it.

    Args:
        trace: one step, predicted (`Step.trace`, or `Step.layer_trace` with each layer) or measured: "forward",
            "backward", "optimizer" on the compute lane (kinds F, B, optimizer) and all-reduces on a different lane.
            `step_of` cuts one step out of a measured trace.
        at_s: the moment, in seconds since the step began.
        title: replaces the takeaway, and begins the words.

    Raises:
        ValueError: the trace is not a data-parallel step (the text says why).
    """
    step = read_step(trace)
    moment = min(max(float(at_s), 0.0), step.duration_s)
    own, shown = step.ranks[0], step.ranks[:MAX_RANKS]
    held = [held_at(each, moment) for each in shown]
    rows_in = len(shown) * ROW_IN
    height = TOP_IN + HEADER_IN + rows_in + NAMES_IN + TIMELINE_IN + FOOT_IN
    figure, pen = sheet(height)
    top = height - TOP_IN - HEADER_IN
    rows, cells = [top - (index + 1) * ROW_IN for index in range(len(shown))], _cells(own)
    gradients = f"gradients, in the order in which they are sent: {counted(len(cells), 'all-reduce')}"
    sent = gradients if cells else "nothing is sent"
    for x, words in ((LEFT_IN, "weights"), (ACTIVATIONS_IN, "activations"), (GRADIENTS_IN, sent)):
        pen.words((x, top + 0.16), words, colour=theme.FAINT, side="left")
    for low, each, state in zip(rows, shown, held, strict=True):
        _draw_rank(pen, low + GAP_IN / 2, cells, each, state)
    _draw_all_reduces(pen, rows, cells, held)
    _draw_names(pen, rows[-1], cells, own)
    draw_step_timeline(figure, pen, step, own, moment)
    pen.legend(_legend(own))
    note = f"Moment {format_s(moment)} of {format_s(step.duration_s)}"
    note += f"; ranks 0-{MAX_RANKS - 1} of {len(step.ranks)}" if len(shown) < len(step.ranks) else ""
    note += f"; rank {own.rank}'s communication: {_shares(own)}."
    takeaway = _takeaway(own, held[0], moment)
    first = f"{f'{title}. ' if title else ''}{takeaway}. Step {format_s(step.duration_s)}, {_shares(own)}."
    said = "\n".join([first, *_say(step, held)])
    return pen.finish(title or takeaway, note)._replace(words=said)


def _cells(own: RankStep) -> Cells:
    """Return left end and width of each column: wider for more bytes, wide enough for a letter where there is room."""
    count = len(own.reductions)
    if not count:
        return ()
    room = theme.WIDTH_IN - RIGHT_IN - GRADIENTS_IN
    sizes = np.array([max(1, reduction.num_bytes) for reduction in own.reductions], dtype=float)
    least = min(0.62, 0.6 * room / count)
    widths = least + (room - least * count) * sizes / sizes.sum()
    lefts = GRADIENTS_IN + np.concatenate([[0.0], np.cumsum(widths)[:-1]])
    return tuple(zip(lefts.tolist(), widths.tolist(), strict=True))


def _draw_rank(pen: Pen, low: float, cells: Cells, own: RankStep, held: RankMoment) -> None:
    """Draw one rank's row: what it does, its weights, its activations and each gradient."""
    tall = ROW_IN - GAP_IN
    middle = low + tall / 2
    pen.heading((0.16, middle + 0.1), f"rank {own.rank}")
    doing = fitting(LEFT_IN - 0.3, held.doing, held.doing.split()[0])
    pen.words((0.16, middle - 0.13), doing, size=NAME_PT, colour=theme.FAINT, side="left")
    fill = theme.SHARED if held.updated else "#D9D2C5"
    pen.box((LEFT_IN, low), 0.72, tall, fill)
    pen.words((LEFT_IN + 0.36, middle), "new" if held.updated else "old", colour=theme.text_colour(fill))
    pen.box((ACTIVATIONS_IN, low), 1.2, tall, theme.IDLE)
    if held.activations > 0.005:
        pen.box((ACTIVATIONS_IN, low), 1.2 * held.activations, tall, theme.KINDS["F"].colour)
        pen.words((ACTIVATIONS_IN + 0.6, middle), percent(held.activations))
    colour = theme.RANK_COLOURS[own.rank % len(theme.RANK_COLOURS)]
    for (left, wide), (state, share) in zip(cells, held.gradients, strict=True):
        fill = {OWN: colour, SENT: colour, MEAN: theme.SHARED}.get(state, theme.IDLE)
        line = 0.8 if wide > 0.04 else 0.0
        pen.box((left, low), wide, tall, fill, line=line)
        if state == FILLING:
            pen.box((left, low), wide * share, tall, theme.pale(colour, 0.55), line=0)
        elif state == SENT:
            pen.box((left, low), wide * share, tall, theme.SHARED, line=0)
        label = {OWN: f"g{own.rank}", SENT: f"g{own.rank}", MEAN: "mean"}.get(state, "")
        place, room = left + wide / 2, wide
        if state == SENT and share < 0.6:  # the label stands on what is not done yet, else on what is
            place, room = left + wide * (1 + share) / 2, wide * (1 - share)
        elif state == SENT:
            place, room, fill = left + wide * share / 2, wide * share, theme.SHARED
        pen.words((place, middle), fitting(room, label), size=NAME_PT, colour=theme.text_colour(fill))


def _draw_all_reduces(pen: Pen, rows: Sequence[float], cells: Cells, held: Sequence[RankMoment]) -> None:
    """Frame each column that is being averaged now, with arrows between the rows once every rank has come to it."""
    bottom, top = rows[-1], rows[0] + ROW_IN
    for column, (left, wide) in enumerate(cells):
        found = [each.gradients[column] for each in held]
        if not any(state == SENT and share < 1 for state, share in found):
            continue
        met = all(state in (SENT, MEAN) for state, _ in found)
        look = (HIDDEN, 2.8) if met else (theme.FAINT, 1.6)
        pen.outline((left, bottom + 0.05), wide, top - bottom - 0.1, look[0], line=look[1])
        if len(held) > 1 and met:
            middle = left + wide / 2
            for low in rows[:-1]:
                for reach in (GAP_IN / 2, -GAP_IN / 2):
                    pen.arrow((middle, low), (middle, low + reach), HIDDEN, line=1.7)


def _draw_names(pen: Pen, low: float, cells: Cells, own: RankStep) -> None:
    """Write under each column what it carries and how many bytes, where there is room."""
    named = False
    for (left, wide), reduction in zip(cells, own.reductions, strict=True):
        name = fitting(wide, reduction.name, reduction.name.split(".")[-1])
        if name and len(own.reductions) <= MAX_NAMED:
            named = True
            for line, words in enumerate((name, format_bytes(float(reduction.num_bytes)))):
                pen.words((left + wide / 2, low - 0.09 - 0.18 * line), words, size=NAME_PT, colour=theme.FAINT)
    if own.reductions and not named:
        total = format_bytes(float(sum(reduction.num_bytes for reduction in own.reductions)))
        words = f"each column is one all-reduce; {len(own.reductions)} of them carry {total} together"
        pen.words((GRADIENTS_IN, low - 0.09), words, size=NAME_PT, colour=theme.FAINT, side="left")


def _legend(own: RankStep) -> list[theme.LegendBox]:
    """Return what the colours mean; passes are named in their bars."""
    colour = theme.RANK_COLOURS[own.rank % len(theme.RANK_COLOURS)]
    boxes = [
        theme.LegendBox(theme.IDLE, "white", "", "not there yet"),
        theme.LegendBox(theme.pale(colour, 0.55), "white", "", "being made"),
        theme.LegendBox(colour, "white", f"g{own.rank}", "a rank's own"),
        theme.LegendBox("white", theme.FAINT, "", "sent, not by all"),
        theme.LegendBox("white", HIDDEN, "", "being averaged"),
        theme.LegendBox(theme.SHARED, "white", "m", "mean, the same everywhere"),
        theme.LegendBox(HIDDEN, "white", "H", "communication, hidden"),
        theme.LegendBox(EXPOSED, "white", "E", "communication, exposed"),
    ]
    styles = theme.kind_styles([span.kind for span in own.spans if span.kind not in ("F", "B")])
    return boxes + [theme.LegendBox(style.colour, "white", style.letter, style.words) for style in styles.values()]


def _say(step: TrainStep, shown: Sequence[RankMoment]) -> list[str]:
    """Say what each rank does and holds in a line."""
    lines = []
    for each, held in zip(step.ranks, shown, strict=False):
        states = [state for state, _ in held.gradients]
        words = {MEAN: "averaged", SENT: "being averaged", OWN: "its own, ready", FILLING: "being made"}
        words[ABSENT] = "not there yet"
        parts = [f"{states.count(state)} {said}" for state, said in words.items() if state in states]
        weights = "new weights" if held.updated else "old weights"
        of = f"gradients of {counted(len(states), 'all-reduce')}"
        gradients = f"{of}: {', '.join(parts)}" if parts else "no all-reduce"
        lines.append(f"rank {each.rank}: {held.doing}; {weights}, {percent(held.activations)} activations, {gradients}")
    if len(step.ranks) > MAX_RANKS:
        lines.append(f"and {len(step.ranks) - MAX_RANKS} more ranks")
    return lines


def _shares(own: RankStep) -> str:
    """Say how much of a rank's communication is hidden and how much exposed."""
    total_s = own.hidden_s + own.exposed_s
    share = percent(own.exposed_s / total_s) if total_s else ""
    text = f"{format_s(own.hidden_s)} hidden, {format_s(own.exposed_s)} exposed ({share})"
    return text if total_s else "no communication"


def _takeaway(own: RankStep, held: RankMoment, moment: float) -> str:
    """Return the title: what is being averaged now and what the rank does meanwhile."""
    sent = [r for r, (state, _) in zip(own.reductions, held.gradients, strict=True) if state == SENT]
    when = f"At {format_s(moment)}"
    if not sent:
        done = sum(state == MEAN for state, _ in held.gradients)
        now = {"step done": "the step is done"}.get(held.doing, f"rank {own.rank}: {held.doing}")
        return f"{when}: {now}, {done} of {len(held.gradients)} all-reduces done"
    what = sent[0].name if len(sent) == 1 else f"{sent[0].name} and {len(sent) - 1} more"
    late = sent[0].missing(moment)
    waits = held.doing.startswith(("waits", "step"))
    if late:
        others = f"{name_ranks(late)} {'has' if len(late) == 1 else 'have'} come"
        hidden = "exposed" if waits else f"hidden behind {held.doing.split()[0]}"
        return f"{when}: {what} cannot be averaged before {others}; {hidden}"
    if waits:
        return f"{when}: averaging {what} while rank {own.rank} waits, exposed"
    return f"{when}: averaging {what}, hidden behind rank {own.rank}'s {held.doing.split()[0]}"

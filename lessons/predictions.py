"""How near predictions that came before their answers were to what came true; `START.ipynb` shows it by lesson."""

from __future__ import annotations

import math
from statistics import median
from typing import NamedTuple

from distlab.course.grading.lesson import lessons_folder
from distlab.course.grading.progress import record_of
from distlab.course.notebook.stuck import Note
from simulator.units import counted
from simulator.viz import Picture
from simulator.viz.drawing import plot, theme

KINDS = {"times": "ms s min hours", "bytes": "bytes kB MB GB", "percent": "%", "factors": "x times Psi"}
TICKS = {0.5: "1/2", 1.0: "1 = right", 2.0: "2"} | {10.0**p: f"{10**p:,}" for p in range(1, 13)}
TICKS |= {10.0**-p: f"1/{10**p:,}" for p in range(1, 13)}


class Guess(NamedTuple):
    """One prediction: its lesson, what kind of quantity it is, and predicted over true."""

    lesson: str
    kind: str
    ratio: float


def guesses() -> list[Guess]:
    """Return each prediction with what came true, where both have a unit and are above zero, or both below."""
    record, found = record_of(), []
    texts = {path.parent.name[:2]: path.read_text("utf-8") for path in lessons_folder().glob("*/lesson.ipynb")}
    for key, given in record.predictions.items():
        question, _, unit = key.removesuffix(")").rpartition(" (")
        if question and given * (true := record.measured.get(key, 0.0)) > 0:
            lesson = next((number for number, text in texts.items() if question in text), "guides")
            kind = next((kind for kind, units in KINDS.items() if unit in units.split()), "counts")
            found.append(Guess(lesson, kind, given / true))
    return sorted(found)


def misjudged(found: list[Guess]) -> str:
    """Say in a sentence which kind of quantity is misjudged most, by how much and in which direction."""
    logs = {one.kind: [math.log(each.ratio) for each in found if each.kind == one.kind] for one in found}
    off = {kind: math.exp(median(map(abs, own))) for kind, own in logs.items()}
    most, least = max(off, key=off.__getitem__), min(off, key=off.__getitem__)
    low, count = sum(log < 0 for log in logs[most]), len(logs[most])
    way = f"{low} of {count} too low" if 2 * low >= count else f"{count - low} of {count} too high"
    better = f"; you judge {least} best, typically within {off[least]:.2g}x" if len(off) > 1 else ""
    return f"You misjudge {most} most: typically by {off[most]:.2g}x, {way}{better}."


def my_predictions() -> Picture | Note:
    """Draw predicted over true by lesson, on an axis where 1 is right; say so where there is nothing yet."""
    if not (found := guesses()):
        return Note("Nothing yet: commit to a number in a lesson, see what comes true, and run this cell again.")
    figure = plot.new_figure(5.2)
    axes = plot.frame(figure, left=1.35, right=1.5, top=1.1, bottom=0.8)
    lessons = sorted({one.lesson for one in found})
    reach = 1.5 * max(2.0, *(max(one.ratio, 1 / one.ratio) for one in found))
    axes.set(yscale="log", ylim=(1 / reach, reach), xlim=(-0.6, len(lessons) - 0.4))
    axes.axhspan(0.5, 2, color=theme.IDLE, zorder=0)
    axes.axhline(1, color=theme.INK, linewidth=1.4, zorder=1)
    for which, kind in enumerate((*KINDS, "counts")):
        own = [(lessons.index(one.lesson), one.ratio) for one in found if one.kind == kind]
        x, y = [place + 0.12 * (which - 2) for place, _ in own], [ratio for _, ratio in own]
        look = {"linestyle": "none", "markersize": 9, "alpha": 0.85, **theme.line_look(which)}
        axes.plot(x, y, label=kind if own else None, **look)
    plot.mark_ticks(axes.xaxis, range(len(lessons)), lambda place: lessons[int(place)])
    plot.mark_ticks(axes.yaxis, [tick for tick in TICKS if 1 / reach < tick < reach], TICKS.__getitem__)
    plot.name_axes(axes, "lesson", "predicted over true")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=theme.SMALL_PT)
    typical = math.exp(median(abs(math.log(one.ratio)) for one in found))
    title = f"{counted(len(found), 'prediction')}: typically within {typical:.2g}x of what came true"
    plot.put_title(figure, title, misjudged(found))
    middle = {name: median(one.ratio for one in found if one.lesson == name) for name in lessons}
    listed = ", ".join(f"{name} {ratio:.2g}" for name, ratio in middle.items())
    return Picture(figure, f"{title}. {misjudged(found)} Predicted over true, the middle one of each lesson: {listed}.")

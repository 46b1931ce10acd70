"""Write a schedule as text, one line a rank, and watch it be checked, run and drawn with every key."""

from __future__ import annotations

from collections.abc import Sequence

import ipywidgets as widgets

from distlab.plan import ActionTimes, one_f_one_b, parse_schedule, validate
from simulator.viz.schedules.run import ScheduleRun, run_schedule
from simulator.viz.schedules.schedule_timeline import ScheduleTimeline

NAME = "your schedule"


def schedule_editor(text: str = "") -> ScheduleTimeline:
    """Return an editor of schedules; it starts with `text`, or with 1F1B of three ranks and four micro-batches.

    A schedule with a fault keeps the last good picture, and under it stands what is wrong and where. In code:
    `editor.controls["text"].value = "0F0,0B0"`.

    Raises:
        ValueError: `text` is no valid schedule.
    """
    first = text or _spaced(str(one_f_one_b(3, 4)))
    lines = first.count("\n") + 1

    def length(value: float, description: str) -> widgets.FloatSlider:
        return widgets.FloatSlider(value=value, min=0.0, max=4.0, step=0.1, description=description)

    area = widgets.Textarea(first, description="one line a rank", rows=max(4, lines + 1), layout={"width": "100%"})
    area.add_class("distlab-schedule-text")  # of one width for all letters, so that columns line up
    return ScheduleTimeline(
        make_run,
        text=area,
        forward=length(1.0, "F: forward (ms)"),
        input_gradient=length(1.0, "I: input gradient (ms)"),
        weight_gradient=length(1.0, "W: weight gradient (ms)"),
        communication=length(0.0, "communication (ms)"),
    )


def make_run(*, text: str, **times: float) -> Sequence[ScheduleRun]:
    """Parse, validate and run a schedule.

    Raises:
        ValueError: the text is no schedule, or a schedule with a fault (a ScheduleError, which shows where).
    """
    plan = parse_schedule(text)
    validate(plan)
    return [run_schedule(NAME, plan, ActionTimes(**times))]


def _spaced(text: str) -> str:
    """Line the actions up in columns, to be read and written more easily."""
    rows = [line.split(",") for line in text.splitlines()]
    width = max(len(action) for row in rows for action in row)
    return "\n".join(" ".join(action.ljust(width) for action in row).rstrip() for row in rows)

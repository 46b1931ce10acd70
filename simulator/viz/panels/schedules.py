"""Choose schedules or write one: see the pipeline at once, compare two, and step through them."""

from __future__ import annotations

from collections.abc import Sequence

import ipywidgets as widgets

from distlab.plan import SCHEDULES, ActionTimes, one_f_one_b, parse_schedule, validate
from simulator.viz.panels.schedule_timeline import ScheduleTimeline
from simulator.viz.schedules.run import ScheduleRun, run_schedule
from simulator.viz.schedules.sweep import NAMES, play

MAX_RANKS, MAX_MICROBATCHES = 64, 1024
NOTHING = ""
AUTOMATIC = ("automatic",)  # those that look for an order within a memory limit


def schedule_panel(
    schedule: str = "one_f_one_b", compare: str = NOTHING, *, ranks: int = 4, microbatches: int = 8
) -> ScheduleTimeline:
    """Return a panel of schedules: which one, how many ranks and micro-batches, how long each action takes.

    In code: `panel.controls["schedule"].value = "zb_h1"`, `panel.controls["compare"].value = "one_f_one_b"`,
    `panel.controls["moment"].value = 12`.

    Args:
        schedule: a name in SCHEDULES.
        compare: a second one, drawn under it on the same time axis; empty for none.
        ranks: 2 to 64.
        microbatches: 1 to 1,024.

    Raises:
        ValueError: a name that is not known or cannot be drawn, or a number out of range.
    """
    _check((schedule, compare) if compare else (schedule,), ranks, microbatches)
    options = [(SCHEDULES[name].title, name) for name in NAMES]

    chosen = widgets.Dropdown(options=options, value=schedule, description="schedule")
    beside = widgets.Dropdown(options=[("nothing", NOTHING), *options], value=compare, description="compare with")
    stages = widgets.IntSlider(2, min=1, max=8, description="stages per rank")
    limit = widgets.FloatSlider(
        value=1.0, min=0.25, max=3.0, step=0.05, description="memory limit (1F1B: 1)", readout_format=".2f"
    )

    def enable(_change: object = None) -> None:
        families = [SCHEDULES[name] for name in (chosen.value, beside.value) if name]
        stages.disabled = all(family.placement != "loop" for family in families)
        limit.disabled = all(family.name not in AUTOMATIC for family in families)

    for control in (chosen, beside):
        control.observe(enable, "value")
    enable()
    return ScheduleTimeline(
        make_runs,
        schedule=chosen,
        compare=beside,
        ranks=widgets.IntSlider(ranks, min=2, max=MAX_RANKS, description="ranks"),
        microbatches=widgets.IntSlider(microbatches, min=1, max=MAX_MICROBATCHES, description="micro-batches"),
        stages_per_rank=stages,
        forward=_length(1.0, "F: forward (ms)"),
        input_gradient=_length(1.0, "I: input gradient (ms)"),
        weight_gradient=_length(1.0, "W: weight gradient (ms)"),
        communication=_length(0.0, "communication (ms)", 0.0),
        memory_limit=limit,
    )


def _check(names: Sequence[str], ranks: int, microbatches: int) -> None:
    for name in names:
        if name not in NAMES:
            raise ValueError(f"schedule is {name!r}; choose one of {', '.join(NAMES)}")
    for what, number, least, most in (
        ("ranks", ranks, 2, MAX_RANKS),
        ("microbatches", microbatches, 1, MAX_MICROBATCHES),
    ):
        if not least <= number <= most:
            raise ValueError(f"{what} is {number}; pass {least} to {most}")


def _length(value: float, description: str, least: float = 0.1) -> widgets.FloatSlider:
    return widgets.FloatSlider(value=value, min=least, max=4.0, step=0.1, description=description, readout_format=".1f")


def make_runs(
    *,
    schedule: str,
    compare: str,
    ranks: int,
    microbatches: int,
    stages_per_rank: int,
    memory_limit: float,
    **times: float,
) -> Sequence[ScheduleRun]:
    """Plan and run what the controls ask for; times are of a rank's whole share of the model, in milliseconds."""
    return [
        play(
            name,
            ranks,
            microbatches,
            stages_per_rank=stages_per_rank,
            times=ActionTimes(**times),
            memory_limit=max(1.0, memory_limit * ranks),
        )
        for name in (schedule, *([compare] if compare else []))
    ]


NAME = "your schedule"


def schedule_editor(text: str = "") -> ScheduleTimeline:
    """Return an editor of schedules; it starts with `text`, or with 1F1B of three ranks and four micro-batches.

    A schedule with a fault keeps the last good picture, and under it stands what is wrong and where. In code:
    `editor.controls["text"].value = "0F0,0B0"`.

    Raises:
        ValueError: `text` is not a valid schedule.
    """
    first = text or _spaced(str(one_f_one_b(3, 4)))
    lines = first.count("\n") + 1

    area = widgets.Textarea(first, description="one line per rank", rows=max(4, lines + 1), layout={"width": "100%"})
    area.add_class("distlab-schedule-text")  # of one width for all letters, so that columns line up
    return ScheduleTimeline(
        make_run,
        text=area,
        forward=_length(1.0, "F: forward (ms)", 0.0),
        input_gradient=_length(1.0, "I: input gradient (ms)", 0.0),
        weight_gradient=_length(1.0, "W: weight gradient (ms)", 0.0),
        communication=_length(0.0, "communication (ms)", 0.0),
    )


def make_run(*, text: str, **times: float) -> Sequence[ScheduleRun]:
    """Parse, validate and run a schedule.

    Raises:
        ValueError: the text is not a schedule, or it is a schedule with a fault (a ScheduleError, which shows where).
    """
    plan = parse_schedule(text)
    validate(plan)
    return [run_schedule(NAME, plan, ActionTimes(**times))]


def _spaced(text: str) -> str:
    """Line the actions up in columns, to be read and written more easily."""
    rows = [line.split(",") for line in text.splitlines()]
    width = max(len(action) for row in rows for action in row)
    return "\n".join(" ".join(action.ljust(width) for action in row).rstrip() for row in rows)

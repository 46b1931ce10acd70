"""Choose schedules: see the pipeline at once, compare two, and step through them by a clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets as widgets
import numpy as np
from numpy.typing import NDArray

from distlab.plan import SCHEDULES, ActionTimes
from distlab.plan.require import chosen
from distlab.trace import Trace
from simulator.units import format_s, name_ranks
from simulator.viz.drawing.paint import to_png
from simulator.viz.drawing.pen import with_picture
from simulator.viz.panels.panel import Redrawn, choice, dress, row_of, slider
from simulator.viz.schedules import NAMES, ScheduleRun, play, say_schedules, stack, words_of
from simulator.viz.timeline.timeline_widget import Timeline

MAX_MOMENTS = 200  # few enough to step through, and from 1,000 actions on always as many: the clock keeps its range
ALL_RANKS = 8  # up to this many ranks, each is described by itself
SOME_RANKS = 3


def moments_of(trace: Trace) -> NDArray[np.int64]:
    """Return the times in ns at which something starts or ends, at most MAX_MOMENTS of them, spread evenly."""
    if len(trace) > 100 * MAX_MOMENTS:
        return np.linspace(0, trace.end_ns.max(), MAX_MOMENTS + 1).astype(np.int64)
    times = np.unique(np.concatenate([trace.start_ns, trace.end_ns]))
    if len(times) > MAX_MOMENTS + 1:
        times = times[np.linspace(0, len(times) - 1, MAX_MOMENTS + 1).round().astype(np.int64)]
    return times


def tell_moment(runs: Sequence[ScheduleRun], at_s: float) -> str:
    """Say what each rank of each schedule does at a time."""
    return " ".join(_tell_moment(run, at_s) for run in runs)


def _tell_moment(run: ScheduleRun, at_s: float) -> str:
    """Say what each rank does at a time, and for whom an idle one waits; of many ranks only some."""
    trace, at_ns = run.trace, round(at_s * 1e9)
    offsets = np.searchsorted(trace.rank, np.arange(run.schedule.num_ranks + 1))
    busy, idle, done = [], [], []
    for rank in range(run.schedule.num_ranks):
        first, stop = int(offsets[rank]), int(offsets[rank + 1])
        after = first + int(np.searchsorted(trace.start_ns[first:stop], at_ns, side="right"))
        if after > first and trace.end_ns[after - 1] > at_ns:
            busy.append((rank, f"runs {_name(trace, after - 1)}"))
        elif after < stop:
            idle.append((rank, after))
        else:
            done.append(rank)
    many = run.schedule.num_ranks > ALL_RANKS
    told = idle[:SOME_RANKS] if many else idle
    waits = [(rank, _wait(run, row, at_ns)) for rank, row in told]
    parts = [f"{len(busy)} of {run.schedule.num_ranks} ranks work"] if many else []
    parts += [f"rank {rank} {what}" for rank, what in sorted(waits + ([] if many else busy))]
    if len(told) < len(idle):
        parts.append(f"{len(idle) - len(told)} more wait")
    if done:
        who = name_ranks(done) if len(done) <= ALL_RANKS else f"{len(done)} ranks"
        parts.append(f"{who} {'is' if len(done) == 1 else 'are'} done")
    return f"At {format_s(at_s)}, {run.name}: {'; '.join(parts)}."


def _wait(run: ScheduleRun, row: int, at_ns: int) -> str:
    """Say what the idle rank's next action needs, and where that is."""
    trace, name = run.trace, _name(run.trace, row)
    forward = trace.words[trace.kind[row]] == "F"
    stage = int(trace.stage[row]) + (-1 if forward else 1)
    kinds = ("F",) if forward else ("B", "I")
    maker = np.flatnonzero(
        (trace.stage == stage) & (trace.microbatch == trace.microbatch[row]) & trace.is_word("kind", *kinds)
    )
    if not maker.size:  # the first stage's forward pass, the last one's backward pass: they need no message
        return f"is about to run {name}"
    needed = int(maker[0])
    source = f"{_name(trace, needed)} of rank {trace.rank[needed]}"
    return f"waits for {source}" + (", which is on its way" if trace.end_ns[needed] <= at_ns else "")


def _name(trace: Trace, row: int) -> str:
    return f"{trace.stage[row]}{trace.words[trace.kind[row]]}{trace.microbatch[row]}"


Make = Callable[..., Sequence[ScheduleRun]]
MAX_RANKS, MAX_MICROBATCHES = 64, 1024
NOTHING = ""


def schedule_panel(
    schedule: str = "one_f_one_b", compare: str = NOTHING, *, ranks: int = 4, microbatches: int = 8
) -> ScheduleTimeline:
    """Return a panel of schedules: which one, how many ranks and micro-batches, how long each action takes.

    In code: `panel.controls["schedule"].value = "zb_h1"`, `panel.controls["compare"].value = "one_f_one_b"`,
    `panel.controls["moment"].value = 12`.

    Args:
        schedule: a name in SCHEDULES.
        compare: a second one, drawn under it on the same time axis; empty for none.
        ranks: 2 to 64, where the slider ends.
        microbatches: 1 to 1,024, where the slider ends.

    Raises:
        ValueError: a name that is not known.
    """
    chosen("schedule", schedule, NAMES)
    chosen("schedule", compare, (NOTHING, *NAMES))
    options = [(SCHEDULES[name].title, name) for name in NAMES]
    first = choice("schedule", options, schedule)
    second = choice("compare with", [("nothing", NOTHING), *options], compare)
    stages = widgets.IntSlider(2, min=1, max=8, description="stages per rank")
    limit = slider("memory limit (1F1B: 1)", 1.0, 0.25, 3.0, 0.05)

    letters = {"forward": "F", "input_gradient": "I", "weight_gradient": "W"}
    words = {name: f"{letter}: {name.replace('_', ' ')} (ms)" for name, letter in letters.items()}
    lengths = {name: slider(text, 1.0, 0.1, 4.0, 0.1, readout_format=".1f") for name, text in words.items()}
    lengths["communication"] = slider("communication (ms)", 0.0, 0.0, 4.0, 0.1, readout_format=".1f")

    def enable(_change: object = None) -> None:
        families = [SCHEDULES[name] for name in (first.value, second.value) if name]
        stages.disabled = all(family.placement != "loop" for family in families)
        limit.disabled = all(family.name != "automatic" for family in families)  # it alone looks for an order within it

    for control in (first, second):
        control.observe(enable, "value")
    enable()

    def make(schedule: str, compare: str, stages_per_rank: int, memory_limit: float, **plan: Any) -> list[ScheduleRun]:
        size = plan.pop("ranks"), plan.pop("microbatches")
        rest = {"times": ActionTimes(**plan), "memory_limit": max(1.0, memory_limit * size[0])}
        return [play(name, *size, stages_per_rank=stages_per_rank, **rest) for name in (schedule, compare) if name]

    return ScheduleTimeline(
        make,
        schedule=first,
        compare=second,
        ranks=widgets.IntSlider(ranks, min=2, max=MAX_RANKS, description="ranks"),
        microbatches=widgets.IntSlider(microbatches, min=1, max=MAX_MICROBATCHES, description="micro-batches"),
        stages_per_rank=stages,
        **lengths,
        memory_limit=limit,
    )


class ScheduleTimeline(Redrawn):
    """Controls over the timeline of what they ask for: `make` gets their values and returns one run, or two to compare.

    The last control, `moment`, is a clock: it shows what had happened by then and says what each rank does and whom it
    waits for; at its end everything is shown. Set `controls["name"].value` to move a control in code.

    Attributes:
        controls: the controls by name.
        timeline: the picture.
        runs: what is shown.
    """

    def __init__(self, make: Make, **controls: Any) -> None:
        self._make = make
        self._moving = False
        self.controls = {name: dress(name, control) for name, control in controls.items()}
        self.runs = tuple(make(**self.values))
        self.timeline = Timeline(self.runs[0].trace, height=420)
        self._times = np.zeros(2, np.int64)
        clock = widgets.IntSlider(value=1, min=0, max=1, readout=False, description="step through")
        self.controls["moment"] = dress("moment", clock)
        self._play = widgets.Play(value=1, min=0, max=1, interval=400, layout={"width": "9em"})
        self._show()
        for name, control in self.controls.items():
            control.observe(self._clock if name == "moment" else self.redraw, "value")
        self._play.observe(self._tick, "value")
        super().__init__([self.timeline, widgets.HBox([self._play, clock]), row_of(controls.values())])

    @property
    def text(self) -> str:
        """The text under the picture."""
        return str(self.timeline.summary)

    @property
    def png(self) -> bytes:
        """The picture as a figure, in PNG."""
        return to_png(self.timeline.figure)

    def _draw_once(self) -> None:
        self.runs = tuple(self._make(**self.values))
        self._show()

    def _show(self) -> None:
        runs, clock = self.runs, self.controls["moment"]
        self._times = moments_of(max((run.trace for run in runs), key=lambda trace: int(trace.end_ns.max())))
        everything = clock.value == clock.max

        with self.timeline.hold_sync():
            self.timeline.put(stack(runs), words_of(runs), say_schedules(runs))
            if not everything:
                self._clock()
        last = len(self._times) - 1
        now = last if everything else min(clock.value, last - 1)
        self._wind(last, now)  # after the picture, which waits for nothing

    def _wind(self, last: int, value: int) -> None:
        """Let the clock and its play buttons run to `last`, and set them to `value`."""
        was_moving = self._moving
        self._moving = True
        try:
            for control in (self.controls["moment"], self._play):
                with control.hold_sync():  # in one message, so that the page never sees a value beyond the end
                    control.max = max(last, control.max)
                    control.value = value
                    control.max = last
        finally:
            self._moving = was_moving

    def _tick(self, change: Any) -> None:
        """Follow the play buttons."""
        if not self._moving:
            self.controls["moment"].value = change["new"]

    def _clock(self, _change: object = None) -> None:
        """Show what had happened by the clock's time, and say it; at the clock's end, all of it."""
        if self._moving:
            return
        clock, timeline = self.controls["moment"], self.timeline
        self._play.value = clock.value
        at_s = float(self._times[min(clock.value, len(self._times) - 1)]) / 1e9
        everything = clock.value == clock.max
        text = say_schedules(self.runs) if everything else tell_moment(self.runs, at_s)
        with timeline.hold_sync():
            timeline.until_s = None if everything else at_s
            timeline.summary = text

    def _repr_mimebundle_(self, **_options: object) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the widget, and also the figure and its text for readers without a kernel."""
        title = self.timeline.title
        return with_picture(super()._repr_mimebundle_(), self.png, title=title, words=f"{title}. {self.text}")
